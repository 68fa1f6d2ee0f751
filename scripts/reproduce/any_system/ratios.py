"""Rates of ``pd_ratio``, and of closed forms alone, compared with brute force over all ratios."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.planners.pd_ratio import PDRatio, PDRatioOptions
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.options.validation import read_yaml
from scripts.reproduce.claims import Target, by_share
from scripts.tables import CONFIGS, Row, write_csv

FILE = CONFIGS / "multivendor" / "disaggregated.yaml"
SLO = "ttft:p90=2,tpot:p90=0.05"
PREFILLS, DECODES = 2, 5
SHORT = 600
LONG = {"512+1024": 2500, "chats": 2500}

Lengths = Sequence[tuple[int, int]]
# For each ratio of prefill and decode instances, requests per second per card, simulated and by the
# closed form.
Rates = Mapping[tuple[int, int], tuple[float, float]]


def problem(trace: Path) -> Problem:
    """Return the problem: the multi-vendor paper's cards and model, most requests/s per card."""
    run = {name: read_yaml(FILE)[name] for name in ("model", "engine", "gpus")}
    planner = {
        "name": "pd_ratio",
        "prefill": {"kind": "vendor-b", "most": PREFILLS},
        "decode": {"kind": "vendor-a", "most": DECODES},
        "link_gb_s": 25.0,
    }
    # Only a few at a time, so that ratios with low bounds are given up early.
    goal = {"maximise": "gpu", "slo": SLO, "at_once": 2}
    workload = {"trace": str(trace)}
    return Problem.model_validate(
        {"planner": planner, "goal": goal, "run": {**run, "workload": workload}}
    )


def searched(
    asked: Problem, pool: ProcessPoolExecutor, prune: bool
) -> tuple[Candidate, DrivenSearch]:
    """Return the choice, with as few simulations as possible or with all of them."""
    search = DrivenSearch(asked, pool.map, prune=prune)
    options = {name: value for name, value in asked.planner.items() if name != "name"}
    return PDRatio(PDRatioOptions.model_validate(options)).plan(search.problem, search), search


def ratio_row(name: str, lengths: Lengths, out: Path, pool: ProcessPoolExecutor) -> Row:
    """Return the row of a workload, for short traces and long ones."""
    rates = []
    for count in (SHORT, LONG[name]):
        trace = out / f"{name}-{count}.csv"
        _write(trace, [lengths[i % len(lengths)] for i in range(count)])
        asked = problem(trace)
        rates.append(_all_rates(asked, pool))
    choice, search = searched(asked, pool, prune=True)
    return {"lengths": name, "requests": count, **_row(choice, search, *rates)}


def _all_rates(asked: Problem, pool: ProcessPoolExecutor) -> Rates:
    _, search = searched(asked, pool, prune=False)
    found = {}
    for candidate, score in search.tried.values():
        p, d, closed = (candidate.axes[name] for name in ("prefills", "decodes", "closed_form"))
        ratio = int(p or 0), int(d or 0)
        found[ratio] = (score.rate / sum(ratio), float(closed or 0) / sum(ratio))
    return found


def _row(choice: Candidate, search: DrivenSearch, short: Rates, long: Rates) -> Row:
    best = max(long, key=lambda ratio: long[ratio][0])
    closed = max(long, key=lambda ratio: long[ratio][1])
    of_short = max(short, key=lambda ratio: short[ratio][0])
    ours = int(choice.axes["prefills"] or 0), int(choice.axes["decodes"] or 0)
    most = long[best][0]
    return {
        "brute_force": _words(best),
        "requests_s_per_card": round(most, 3),
        "pd_ratio": _words(ours),
        "pd_ratio_by_best": round(long[ours][0] / most, 4),
        "in_full": sum(bool(s.figures) and not s.given_up for _, s in search.tried.values()),
        "of": len(long),
        "closed_form": _words(closed),
        "closed_form_by_best": round(long[closed][0] / most, 4),
        "of_short_trace": _words(of_short),
        "of_short_trace_by_best": round(long[of_short][0] / most, 4),
    }


def _words(ratio: tuple[int, int]) -> str:
    return f"{ratio[0]}P{ratio[1]}D"


def _write(path: Path, lengths: Lengths) -> None:
    write_csv(path, [{"num_prefill_tokens": p, "num_decode_tokens": o} for p, o in lengths])


def ratios(chats: Lengths, folder: Path, pool: ProcessPoolExecutor) -> list[Row]:
    """Return a row for each workload.

    Args:
        folder: folder for the traces that are simulated.
    """
    rows = []
    for name in LONG:
        prompt, _, output = name.partition("+")
        lengths = [(int(prompt), int(output))] if output else chats
        rows.append(ratio_row(name, lengths, folder, pool))
    return rows


def ratio_targets(rows: Sequence[Row]) -> list[Target]:
    """Return targets that compare the rate of a planner's choice with the best rate."""
    return [
        by_share(
            f"pd_ratio: capacity per card of its choice by that of brute force's, {row['lengths']}",
            1,
            row["pd_ratio_by_best"],
            0.02,
            "consistency",
        )
        for row in rows
    ]
