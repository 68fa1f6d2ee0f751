"""Figures of runs: of one run, or the medians of several rounds."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.report.latencies import Latencies, LatencyTotals
from jaxinfer.report.records import RequestRecord, RunRecord

# The runs of each system, one per round.
Runs = Mapping[str, Sequence[RunRecord]]


# Figures of a run that its metrics have, but that its requests and steps do not give.
_GIVEN = (
    "steady_requests_s",
    "steady_output_tok_s",
    "mfu",
    "usd_per_request",
    "usd_per_million_output_tokens",
    "wh_per_request",
    "wh_per_million_output_tokens",
)


@dataclass(kw_only=True)
class Figures(Latencies):
    """The figures of a run, or the median of several. A median's counts may be halves.

    As in ``RunMetrics``, a request is a prompt with all its continuations, and has failed if one of
    them has; latencies are those of each continuation.

    Attributes:
        wall_s: seconds of the run.
        requests_s: finished requests per second.
        output_tok_s: output tokens of finished requests per second.
        steady_requests_s, steady_output_tok_s, mfu, usd_per_request, wh_per_request,
        usd_per_million_output_tokens, wh_per_million_output_tokens: as in ``RunMetrics``.
        utilisation: device group -> share of the run, 0 to 1, in which a stage on it was busy.
        num_bytes: KV bytes moved between instances.
        hidden_s: seconds of transfers in which their destination was computing, or their source was
            computing the same prompt.
        visible_s: the other seconds of transfers.
        mean_cut: mean of cut / prompt length over finished requests, 0 to 1; None if none was cut.
        preemptions: number of preemptions of all requests.
        failed: number of failed requests.
    """

    wall_s: float
    requests_s: float
    output_tok_s: float
    steady_requests_s: float | None
    steady_output_tok_s: float | None
    mfu: float | None
    usd_per_request: float | None
    usd_per_million_output_tokens: float | None
    wh_per_request: float | None
    wh_per_million_output_tokens: float | None
    utilisation: Mapping[str, float]
    num_bytes: float
    hidden_s: float
    visible_s: float
    mean_cut: float | None
    preemptions: float
    failed: float


def figures(run: RunRecord) -> Figures:
    """Return the figures of one run."""
    done = finished(run)
    cuts = [request.cut / request.prompt_len for request in done]
    hidden_s = sum(t.hidden_s for t in run.transfers)
    transfer_s = sum(t.end - t.start for t in run.transfers)
    return Figures(
        wall_s=run.wall_s,
        requests_s=requests_per_s(run),
        output_tok_s=sum(len(request.token_times) for request in done) / run.wall_s,
        utilisation=_utilisation(run),
        num_bytes=sum(t.num_bytes for t in run.transfers),
        hidden_s=hidden_s,
        # Times in files are rounded, so their sum may be lower by some microseconds.
        visible_s=max(transfer_s - hidden_s, 0.0),
        mean_cut=statistics.fmean(cuts) if any(cuts) else None,
        preemptions=sum(request.preemptions for request in run.requests),
        failed=_num_prompts(run.requests) - _num_prompts(done),
        **_latencies(done),
        **{name: run.run.get("metrics", {}).get(name) for name in _GIVEN},
    )


def _latencies(requests: Iterable[RequestRecord]) -> dict[str, Any]:
    totals = LatencyTotals()
    for request in requests:
        if request.token_times:
            totals.add(request.arrival, request.first_scheduled, request.token_times)
    return totals.figures()


def medians(runs: Runs) -> dict[str, Figures]:
    """Return the figures of each system; each figure is the median over the rounds that have it."""
    return {name: _median([figures(run) for run in rounds]) for name, rounds in runs.items()}


def median_round(rounds: Sequence[RunRecord]) -> RunRecord:
    """Return the round with the median requests/s; of two in the middle, the slower one."""
    return rounds[median_index(rounds)]


def emulation(runs: Runs) -> list[str]:
    """Return what was emulated or simulated, in one line for all systems that share it."""
    words = {
        name: "; ".join(dict.fromkeys(word for run in rounds for word in run.emulated))
        for name, rounds in runs.items()
    }
    if len(set(words.values())) == 1:
        return [_emulated(said) for said in set(words.values()) if said]
    alike: dict[str, list[str]] = {}
    for name, said in words.items():
        alike.setdefault(said, []).append(name)
    return [f"{', '.join(names)}, {_emulated(said)}" for said, names in alike.items() if said]


def _emulated(said: str) -> str:
    return said if said.startswith("simulated on ") else f"emulated: {said}"


def number_text(value: float) -> str:
    """Return a number with three significant digits, and all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def finished(run: RunRecord) -> list[RequestRecord]:
    """Return the continuations of prompts none of whose continuations has failed."""
    failed = {request.prompt for request in run.requests if request.error is not None}
    return [request for request in run.requests if request.prompt not in failed]


def requests_per_s(run: RunRecord) -> float:
    """Return the finished requests per second of the run."""
    return _num_prompts(finished(run)) / run.wall_s


def _num_prompts(requests: Iterable[RequestRecord]) -> int:
    return len({request.prompt for request in requests})


def median_index(rounds: Sequence[RunRecord]) -> int:
    """Return the index of the round that ``median_round`` returns."""
    order = sorted(range(len(rounds)), key=lambda i: requests_per_s(rounds[i]))
    return order[(len(rounds) - 1) // 2]


def _utilisation(run: RunRecord) -> dict[str, float]:
    busy: dict[str, list[tuple[float, float]]] = {
        group: [] for groups in run.groups.values() for group in groups
    }
    for step in run.steps:
        for group, interval in zip(run.groups[step.instance], step.stages, strict=True):
            busy[group].append(interval)
    return {group: _covered(intervals) / run.wall_s for group, intervals in busy.items()}


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union; intervals of instances that share a group may overlap."""
    covered, at = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(end - max(start, at), 0.0)
        at = max(at, end)
    return covered


def _median(rounds: Sequence[Figures]) -> Figures:
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(Figures)):
        found = [value for f in rounds if (value := getattr(f, name)) is not None]
        if name == "utilisation":
            values[name] = {g: statistics.median(u[g] for u in found) for g in found[0]}
        else:
            values[name] = statistics.median(found) if found else None
    return Figures(**values)
