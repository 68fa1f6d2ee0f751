"""Effect of each option of ``engine: {like: vllm-0.32}``: our side with and without it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.serving.request_state import RequestState
from scripts.validate.vllm_scheduler.our_side import Decision, Workload, decide

# By name: the setting that takes an option's place.
WITHOUT: dict[str, dict[str, Any]] = {
    "paging.take: step": {"take": "known"},
    "paging.cache: launched": {"cache": "computed"},
    "paging.twins": {"twins": False},
    "paging.free: at_once": {"free": "unused"},
    "late_tokens: kept": {"late_tokens": "dropped"},
    "empty_waits": {"empty_waits": False},
    "admit_after_preemption: false": {"policies": {"batching": "mixed"}},
    "max_in_flight: 2": {"max_in_flight": 3},
}


def without(name: str) -> dict[str, Any]:
    """Return the changes that leave an option out."""
    changed = WITHOUT[name]
    return {"paging": changed} if name.startswith("paging.") else changed


def option_rows(workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    """Return a row for each option: on how many workloads it decides, and what it costs.

    ``ttft`` and ``tpot`` are the largest changes of a workload's means, in percent, without
    the option, over requests that end with and without.
    """
    with_all = [_served(each, {}) for each in workloads]
    rows = []
    for name in WITHOUT:
        differs, apart = 0, {"ttft": 0.0, "tpot": 0.0}
        for each, (decisions, ended) in zip(workloads, with_all, strict=True):
            if name == "max_in_flight: 2" and not each["ahead"]:
                continue
            others, other_ended = _served(each, without(name))
            differs += decisions != others
            both = [key for key in ended if key in other_ended]
            for figure, change in _changes(both, ended, other_ended).items():
                if abs(change) > abs(apart[figure]):
                    apart[figure] = change
        shown = {figure: f"{100 * change:+.1f}" for figure, change in apart.items()}
        rows.append({"option": name, "workloads": differs, "of": len(workloads), **shown})
    return rows


def _served(
    workload: Workload, changes: Mapping[str, Any]
) -> tuple[list[Decision], dict[str, RequestState]]:
    ended: dict[str, RequestState] = {}
    return list(decide(workload, changes, ended)), ended


def _changes(
    names: Sequence[str], ours: Mapping[str, RequestState], others: Mapping[str, RequestState]
) -> dict[str, float]:
    found = {}
    for figure, seconds in (("ttft", _ttft), ("tpot", _tpot)):
        pairs = [(seconds(ours[name]), seconds(others[name])) for name in names]
        kept = [(one, two) for one, two in pairs if one and two]
        if kept:
            one, two = (statistics.fmean(each) for each in zip(*kept, strict=True))
            found[figure] = two / one - 1
    return found


def _ttft(request: RequestState) -> float | None:
    times = request.metrics.token_times
    return times[0] - request.arrival if times else None


def _tpot(request: RequestState) -> float | None:
    times = request.metrics.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
