"""Writes a run as a Chrome trace, for ui.perfetto.dev."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.report.records import RequestRecord, RunRecord, StepRecord, TransferRecord

Event = dict[str, Any]


def step_kind(step: StepRecord) -> str:
    """Return ``prefill``, ``mixed`` (a chunk together with decodes) or ``decode``."""
    if not step.prefill_tokens:
        return "decode"
    return "mixed" if step.decode_tokens else "prefill"


def transfer_lanes(run: RunRecord) -> dict[tuple[str, str], list[list[TransferRecord]]]:
    """Divide the transfers of each source and destination into few lanes without overlaps."""
    routes: dict[tuple[str, str], list[list[TransferRecord]]] = {}
    for transfer in sorted(run.transfers, key=lambda t: (t.start, t.end, t.request)):
        lanes = routes.setdefault((transfer.source, transfer.dest), [])
        free = (lane for lane in lanes if lane[-1].end <= transfer.start)
        if (lane := next(free, None)) is None:
            lanes.append(lane := [])
        lane.append(transfer)
    return routes


def write_trace(run: RunRecord, path: str | Path) -> None:
    """Write a run as a Chrome trace.

    Each instance is a process with a thread per stage, which shows its steps. If a stage's KV heads
    lie on several groups, counters show the numbers on each group for each step's requests. The
    process ``transfers`` has a thread per route (several if its transfers overlap). The process
    ``requests`` has a row per request, from its arrival over its first token to its last. Times are
    in microseconds.
    """
    processes = [(name, _instance(run, name)) for name in run.groups]
    if run.transfers:
        processes.append(("transfers", _transfers(run)))
    processes.append(("requests", _requests(run)))
    names: list[Event] = []
    timed: list[Event] = []
    for pid, (name, events) in enumerate(processes, 1):
        names.append({"pid": pid} | _label("process_name", 0, name=name))
        names.append({"pid": pid} | _label("process_sort_index", 0, sort_index=pid))
        for event in events:
            # Each thread's id differs from those of other threads and of processes, because a
            # process's id would make it the main thread.
            event |= {"pid": pid, "tid": event["tid"] + pid * 1000}
            (names if event["ph"] == "M" else timed).append(event)
    # The sort is stable, so that slices with equal times stay nested.
    timed.sort(key=lambda event: event["ts"])
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"system": run.name, "emulated": "; ".join(run.emulated)},
        "traceEvents": names + timed,
    }
    Path(path).write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")


def part_names(run: RunRecord, name: str) -> list[str]:
    """Return names of an instance's stages or, in a real run, segments.

    The name of a single stage or segment is empty.
    """
    parts = len(run.groups[name])
    described = run.run.get("run_file", {}).get("instances", {}).get(name)
    stages = parts if described is None else len(described.get("stages") or [name])
    each = parts // stages
    found = []
    for number in range(parts):
        stage = [f"stage {number // each + 1}"] if stages > 1 else []
        segment = [f"segment {number % each + 1}"] if each > 1 else []
        found.append(", ".join(stage + segment))
    return found


def _instance(run: RunRecord, name: str) -> Iterator[Event]:
    for number, part in enumerate(part_names(run, name)):
        yield from _thread(number + 1, f"{part} on {run.groups[name][number]}".lstrip())
    for step in run.steps:
        if step.instance == name:
            args = {"prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens}
            for stage, (start, end) in enumerate(step.stages, 1):
                yield _slice(step_kind(step), stage, start, end, args)
            if step.heads:
                yield from _heads(run, step)


def _heads(run: RunRecord, step: StepRecord) -> Iterator[Event]:
    """Yield the number of KV heads on each group, for each stage that has attention groups."""
    heads = iter(step.heads)
    described = run.run["instances"][step.instance]["stages"]
    for stage, ((start, _), place) in enumerate(zip(step.stages, described, strict=True), 1):
        groups = [place["group"], *(other["group"] for other in place.get("attention", ()))]
        args = {group: next(heads) for group in groups}
        if len(groups) > 1:
            name = f"KV heads of stage {stage}" if len(described) > 1 else "KV heads"
            yield {"ph": "C", "name": name, "tid": stage, "ts": _us(start), "args": args}


def _transfers(run: RunRecord) -> Iterator[Event]:
    tid = 0
    for (source, dest), lanes in transfer_lanes(run).items():
        for number, lane in enumerate(lanes, 1):
            tid += 1
            yield from _thread(tid, f"{source} -> {dest}" + (f" ({number})" * (number > 1)))
            for t in lane:
                args = {
                    "request": t.request,
                    "tokens": t.num_tokens,
                    "bytes": t.num_bytes,
                    "waited_us": _us(t.start - t.requested),
                    "hidden_us": _us(t.hidden_s),
                }
                yield _slice(f"KV of {t.request}", tid, t.start, t.end, args)


def _requests(run: RunRecord) -> Iterator[Event]:
    for number, request in enumerate(run.requests):
        yield from _request(number, request)


def _request(number: int, request: RequestRecord) -> Iterator[Event]:
    """Yield a slice for the whole request, and inside it slices before and after the first token.

    The viewer groups rows by name, so all outer slices have the same name.
    """
    times = request.token_times
    arrival, end = _us(request.arrival), _us(max(times, default=request.arrival))

    def event(phase: str, name: str, time: int, **args: object) -> Event:
        return {
            "ph": phase,
            "name": name,
            "cat": "request",
            "id": str(number),
            "tid": 0,
            "ts": time,
            "args": args,
        }

    yield event(
        "b",
        "request",
        arrival,
        request=request.id,
        prompt_tokens=request.prompt_len,
        cut_tokens=request.cut,
        output_tokens=len(times),
        preemptions=request.preemptions,
        error=request.error,
    )
    if times:
        first = _us(times[0])
        for name, start, stop in (("to first token", arrival, first), ("output", first, end)):
            yield event("b", f"{request.id}: {name}", start)
            yield event("e", f"{request.id}: {name}", stop)
    yield event("e", "request", end)


def _slice(name: str, tid: int, start: float, end: float, args: Event) -> Event:
    # Both ends are rounded, because a rounded duration could reach into the next slice, which the
    # viewer would drop.
    ts = _us(start)
    return {"ph": "X", "name": name, "tid": tid, "ts": ts, "dur": _us(end) - ts, "args": args}


def _thread(tid: int, name: str) -> Iterator[Event]:
    yield _label("thread_name", tid, name=name)
    yield _label("thread_sort_index", tid, sort_index=tid)


def _label(event: str, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": event, "tid": tid, "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
