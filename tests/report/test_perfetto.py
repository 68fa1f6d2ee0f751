"""The trace's events: which there are, when, and that the viewer can nest them."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.report.perfetto import step_kind, transfer_lanes, write_trace
from jaxinfer.report.records import RunRecord, StepRecord

Event = dict[str, Any]


@pytest.fixture
def trace(small_run: RunRecord, tmp_path: Path) -> dict[str, Any]:
    write_trace(small_run, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))


def names(events: list[Event], kind: str) -> dict[int, str]:
    """Names of processes by their ids, or of threads by theirs."""
    key = "pid" if kind == "process_name" else "tid"
    return {event[key]: event["args"]["name"] for event in events if event["name"] == kind}


def slices(events: list[Event]) -> list[tuple[str, str, str, int, int]]:
    """Process, thread, name, start and duration of all complete events."""
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    return [
        (processes[e["pid"]], threads[e["tid"]], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]


def test_steps_and_transfers_are_slices_in_microseconds(trace: dict[str, Any]) -> None:
    assert slices(trace["traceEvents"]) == [
        ("a", "on low", "prefill", 0, 2_000_000),
        ("b", "stage 1 on low", "mixed", 1_000_000, 2_000_000),
        ("transfers", "a -> b", "KV of r0", 2_250_000, 500_000),
        ("transfers", "a -> b (2)", "KV of r3", 2_500_000, 1_000_000),
        ("b", "stage 2 on high", "mixed", 3_000_000, 3_000_000),
        ("b", "stage 1 on low", "decode", 3_000_000, 1_500_000),
        ("a", "on low", "prefill", 4_000_000, 1_000_000),
        ("b", "stage 2 on high", "decode", 6_000_000, 1_000_000),
    ]
    args = [event["args"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert args[1] == {"prefill_tokens": 50, "decode_tokens": 2}
    assert args[2] == {
        "request": "r0",
        "tokens": 50,
        "bytes": 1000,
        "waited_us": 250_000,
        "hidden_us": 500_000,
    }


def test_requests_go_from_arrival_over_the_first_token_to_the_end(trace: dict[str, Any]) -> None:
    events = [event for event in trace["traceEvents"] if event["ph"] in "be"]
    found = defaultdict(list)
    for event in events:
        found[event["id"]].append((event["ph"], event["name"], event["ts"]))
    assert found["0"] == [
        ("b", "request", 0),
        ("b", "r0: to first token", 0),
        ("e", "r0: to first token", 1_000_000),
        ("b", "r0: output", 1_000_000),
        ("e", "r0: output", 4_000_000),
        ("e", "request", 4_000_000),
    ]
    assert found["2"] == [("b", "request", 1_500_000), ("e", "request", 1_500_000)]
    assert len(found) == 4
    (args,) = (e["args"] for e in events if e["args"].get("request") == "r3")
    assert args == {
        "request": "r3",
        "prompt_tokens": 80,
        "cut_tokens": 20,
        "output_tokens": 1,
        "preemptions": 2,
        "error": None,
    }
    failed = next(e for e in events if e["id"] == "2")
    assert failed["args"]["error"] == "the prompt is too long"


def test_the_viewer_can_nest_everything(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    assert events[len(events) - len(timed) :] == timed
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    threads: dict[int, list[Event]] = defaultdict(list)
    rows: dict[str, list[str]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["tid"]].append(event)
        elif event["ph"] == "b":
            rows[event["id"]].append(event["name"])
        else:
            assert rows[event["id"]].pop() == event["name"]
    assert not any(rows.values())
    for thread in threads.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(thread))


def test_processes_and_threads_are_named_once_and_apart(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    processes = names(events, "process_name")
    assert list(processes.values()) == ["a", "b", "transfers", "requests"]
    assert sum(event["name"] == "process_name" for event in events) == 4
    threads = names(events, "thread_name")
    assert sum(event["name"] == "thread_name" for event in events) == len(threads) == 5
    assert not threads.keys() & processes.keys()
    order = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert order == sorted(set(order))


def test_rounding_does_not_make_neighbours_overlap(small_run: RunRecord, tmp_path: Path) -> None:
    # Rounded by itself, the first duration would be 2 microseconds, from 0 to 2.
    ends = [0.4e-6, 1.9e-6, 3.4e-6, 4.9e-6]
    steps = tuple(StepRecord("a", (span,), 1, 0) for span in pairwise(ends))
    write_trace(replace(small_run, steps=steps), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "prefill"]
    assert spans == [(0, 2), (2, 3), (3, 5)]


def test_kv_heads_on_several_groups_are_counters(small_run: RunRecord, tmp_path: Path) -> None:
    """The second stage of instance b, which has two more groups, has a counter of KV heads."""
    others = [{"group": "near"}, {"group": "far"}]
    described = {"b": {"stages": [{"group": "low"}, {"group": "high", "attention": others}]}}
    spans = ((1.0, 2.0), (2.5, 3.0))
    steps = (StepRecord("a", spans[:1], 1, 0), StepRecord("b", spans, 1, 0, (3, 4, 5, 6)))
    run = replace(small_run, steps=steps, run=small_run.run | {"instances": described})
    write_trace(run, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    (counter,) = (event for event in events if event["ph"] == "C")
    assert (counter["name"], counter["ts"]) == ("KV heads of stage 2", 2_500_000)
    assert counter["args"] == {"high": 4, "near": 5, "far": 6}
    assert names(events, "process_name")[counter["pid"]] == "b"
    one = {"b": {"stages": [{"group": "high", "attention": others}]}}
    step = StepRecord("b", spans[:1], 1, 0, (4, 5, 6))
    write_trace(replace(run, steps=(step,), run={"instances": one}), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "C"] == ["KV heads"]


def test_the_same_run_gives_the_same_bytes(small_run: RunRecord, tmp_path: Path) -> None:
    turned = replace(small_run, transfers=small_run.transfers[::-1])
    for number, run in enumerate((small_run, small_run, turned)):
        write_trace(run, tmp_path / str(number))
    first = (tmp_path / "0").read_bytes()
    assert first == (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_without_transfers_there_is_no_process_for_them(
    small_run: RunRecord, tmp_path: Path
) -> None:
    run = replace(small_run, transfers=(), emulated=("low: slower", "link"))
    write_trace(run, tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    processes = names(trace["traceEvents"], "process_name")
    assert list(processes.values()) == ["a", "b", "requests"]
    assert trace["otherData"] == {"system": "small", "emulated": "low: slower; link"}


def test_lanes_are_as_few_as_transfers_overlap(small_run: RunRecord) -> None:
    one = small_run.transfers[0]
    spans = [(0.0, 2.0), (2.0, 3.0), (1.0, 2.5), (2.5, 4.0), (1.5, 1.6)]
    moves = [replace(one, request=str(i), start=a, end=b) for i, (a, b) in enumerate(spans)]
    back = replace(one, source="b", dest="a")
    routes = transfer_lanes(replace(small_run, transfers=(*moves, back)))
    found = {
        route: [[t.request for t in lane] for lane in lanes] for route, lanes in routes.items()
    }
    assert found == {("a", "b"): [["0", "1"], ["2", "3"], ["4"]], ("b", "a"): [["r0"]]}


def test_lanes_of_transfers_that_start_together(small_run: RunRecord) -> None:
    """The one that ends first has the first lane, and of those alike, the one named first."""
    one = small_run.transfers[0]
    spans = [("c", 0.0, 5.0), ("b", 0.0, 1.0), ("a", 0.0, 5.0), ("d", 1.0, 2.0)]
    moves = [replace(one, request=name, start=a, end=b) for name, a, b in spans]
    ((_, lanes),) = transfer_lanes(replace(small_run, transfers=tuple(moves))).items()
    assert [[t.request for t in lane] for lane in lanes] == [["b", "d"], ["a"], ["c"]]


def test_kinds_of_steps() -> None:
    kinds = [step_kind(StepRecord("a", ((0, 1),), p, d)) for p, d in ((5, 0), (5, 2), (0, 2))]
    assert kinds == ["prefill", "mixed", "decode"]
