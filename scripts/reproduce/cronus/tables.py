"""Cronus' Tables 2 and 3 and Figure 4, simulated."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from jaxinfer.simulate.run import simulate
from scripts.reproduce.cronus.cases import (
    APPROACHES,
    SETUPS,
    TABLE_3,
    CronusCase,
    numbers,
    paper,
    throughput,
)
from scripts.reproduce.cronus.targets import LATENCIES
from scripts.reproduce.reproduction import Work
from scripts.tables import Row

Costs = Mapping[str, Any]
CALIBRATED_ON = {
    "Disagg. H-L": "reserve_gb of the low GPU",
    "Disagg. L-H": "flops of the low GPU",
}


def table_2(costs: Costs, work: Work, pool: ProcessPoolExecutor) -> list[Row]:
    """Return the cells of Table 2, with calibration and without."""
    cells = [(setup, approach) for setup in SETUPS for approach in APPROACHES]
    calibrated = [CronusCase(s, APPROACHES[a], numbers(costs, s)) for s, a in cells]
    plain = [CronusCase(s, APPROACHES[a]) for s, a in cells]
    ours, uncalibrated = (
        list(pool.map(partial(throughput, work=work), cases)) for cases in (calibrated, plain)
    )
    rows = []
    for (setup, approach), value, without in zip(cells, ours, uncalibrated, strict=True):
        on = CALIBRATED_ON.get(approach, "")
        if approach == "PP+Chunked" and setup == next(iter(SETUPS)):
            on = "hop_s"
        rows.append(
            {
                "setup": setup,
                "approach": approach,
                "paper": paper(approach, setup),
                "ours": round(value, 3),
                "uncalibrated": round(without, 3),
                "calibrated_on": on,
            }
        )
    return rows


# Figure 4: one request after each interval, in seconds.
INTERVALS = (0.1, 0.11, 0.12, 0.13, 0.14, 0.16, 0.18, 0.2, 0.25, 0.3, 0.4, 0.5)

# The approaches with which the paper compares each latency of Cronus, and names in the picture.
DRAWN = {
    "ttft_p99": ("DP+Chunked", "PP+Chunked", "Disagg. L-H"),
    "tbt_p99": ("DP+Chunked", "PP+Chunked", "Disagg. H-L"),
}
NAMES = {
    "DP+Chunked": "data parallelism",
    "PP+Chunked": "pipeline",
    "Disagg. H-L": "high-low disagg.",
    "Disagg. L-H": "low-high disagg.",
    "Cronus": "Cronus",
}


def latency(case: CronusCase, work: Work, interval: float) -> tuple[float, float]:
    """Return TTFT p99 and TBT p99 in seconds, with requests at a fixed interval."""
    spaced = [replace(item, arrival=i * interval) for i, item in enumerate(work)]
    metrics = simulate(case.config(), spaced)
    assert metrics.ttft_p99 is not None
    assert metrics.tbt_p99 is not None
    return metrics.ttft_p99, metrics.tbt_p99


def figure_4(costs: Costs, work: Work, pool: ProcessPoolExecutor) -> list[Row]:
    """Return the latencies of every setup and approach at every interval."""
    points = [(s, a, interval) for s in SETUPS for a in APPROACHES for interval in INTERVALS]
    cases = [CronusCase(s, APPROACHES[a], numbers(costs, s)) for s, a, _ in points]
    found = pool.map(latency, cases, [work] * len(cases), [p[2] for p in points])
    return [
        {"setup": s, "approach": a, "interval_s": i, "ttft_p99": ttft, "tbt_p99": tbt}
        for (s, a, i), (ttft, tbt) in zip(points, found, strict=True)
    ]


def draw_figure_4(points: Sequence[Row]) -> Figure:
    """Draw TTFT above and TBT below, with a column for each setup, as in the paper.

    Cronus is drawn next to the three approaches with which the paper compares its latency.
    """
    figure = Figure(figsize=(13, 7), layout="constrained")
    parts: Any = figure.subfigures(2)
    for part, what in zip(parts, LATENCIES, strict=True):
        drawn = [name for name in APPROACHES if name in ("Cronus", *DRAWN[what])]
        panels = part.subplots(1, len(SETUPS), sharex=True, sharey=True)
        for ax, setup in zip(panels, SETUPS, strict=True):
            ends = {}
            for approach in drawn:
                here = [p for p in points if (p["setup"], p["approach"]) == (setup, approach)]
                x, y = ([p[key] for p in here] for key in ("interval_s", what))
                colour = COLOURS[list(APPROACHES).index(approach)]
                ax.plot(x, y, "o-", ms=3, color=colour)
                ends[NAMES[approach]] = (x[-1], y[-1], colour)
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.grid(alpha=0.3)
            ax.set_title(setup, fontsize=10)
            ax.set_xlabel("time between requests (s)")
        name_lines(panels[-1], ends)
        name = what.partition("_")[0].upper()
        panels[0].set_ylabel(f"{name} p99 (s)")
        best, all_ = _best(points, what, drawn)
        title = f"Cronus has the lowest {name} p99 of these approaches at {best} of {all_} points"
        part.suptitle(title, x=0.01, ha="left")
    return figure


def _best(points: Sequence[Row], what: str, drawn: Sequence[str]) -> tuple[int, int]:
    """Return at how many setups and intervals Cronus has the lowest value, and their number."""
    least: dict[tuple[str, float], str] = {}
    for p in sorted((p for p in points if p["approach"] in drawn), key=lambda p: p[what]):
        least.setdefault((p["setup"], p["interval_s"]), p["approach"])
    return sum(name == "Cronus" for name in least.values()), len(least)


def table_3(costs: Costs, work: Work) -> list[Row]:
    """Return the throughput of High-Low and Low-High relative to each stage alone, in percent."""
    prompts = [replace(item, max_tokens=1) for item in work]
    rows = []
    for setup in SETUPS:
        known = numbers(costs, setup)
        found = []
        for system, here in (
            ("disaggregated_high_low", "high"),
            ("disaggregated_low_high", "low"),
        ):
            whole = throughput(CronusCase(setup, system, known), work)
            prefill = throughput(CronusCase(setup, system, known), prompts)
            # The other GPU is so fast that it is never the limit.
            fast = (f"groups.{here}.kind=H200", f"simulate.groups.{here}={{flops: 1.0}}")
            decode = throughput(CronusCase(setup, system, known, fast), work)
            found += [100 * whole / prefill, 100 * whole / decode]
        for number, (stage, value) in enumerate(
            zip(("H-L prefill", "H-L decode", "L-H prefill", "L-H decode"), found, strict=True)
        ):
            theirs = TABLE_3[setup][number]
            rows.append({"setup": setup, "stage": stage, "paper": theirs, "ours": round(value, 1)})
    return rows
