"""Cronus' Tables 2 and 3 and Figure 4, simulated."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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
    """Draw TTFT above and TBT below, with a column for each setup, as in the paper."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    axes = figure.subplots(2, len(SETUPS), sharex=True, sharey="row")
    for row, what in enumerate(LATENCIES):
        for column, setup in enumerate(SETUPS):
            ax = axes[row][column]
            for colour, approach in zip(COLOURS, APPROACHES, strict=False):
                here = [p for p in points if (p["setup"], p["approach"]) == (setup, approach)]
                x = [p["interval_s"] for p in here]
                ax.plot(x, [p[what] for p in here], "o-", ms=3, color=colour, label=approach)
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if row else (1.0,)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.grid(alpha=0.3)
            if row == 0:
                ax.set_title(setup, fontsize=10)
            else:
                ax.set_xlabel("interval between requests (s)")
        axes[row][0].set_ylabel(f"{what[:4].upper().strip('_')} p99 (s)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


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
