"""Splitwise's pictures: capacities, steps of decodes, pools over time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from jaxinfer.report.records import read_lines
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.recorded import recorded
from scripts.reproduce.splitwise.public import BLOOM, Public, PublicDesign, drawn

READINGS = {"public": "public reading", "measured": "measured"}


def draw_capacities(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the rates at equal power, under both readings."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    titles = {"conv": "conversations", "code": "coding"}
    for ax, (trace, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        lowered = 0
        found: list[float] = []
        for number, decodes in enumerate(("public", "measured")):
            here = [
                r
                for r in rows
                if (r["trace"], r["equal"], r["decodes"]) == (trace, "power", decodes)
            ]
            x, rates = [i + 0.4 * number for i in range(len(here))], [r["rps"] for r in here]
            bars = ax.bar(x, rates, 0.38, color=COLOURS[number])
            ax.bar_label(bars, fontsize=8)
            # The names of both readings are in the second cluster's bars.
            words = f" {READINGS[decodes]}"
            ax.text(x[1], 0, words, rotation=90, color="white", ha="center", va="bottom")
            lowered = sum(before > rate for before, rate in zip(found, rates, strict=False))
            found = rates
        ax.set_xticks(
            [i + 0.2 for i in range(len(here))], [f"{r['cluster']}\n{r['machines']}" for r in here]
        )
        ax.set_xlabel("cluster, and its prompt + token machines")
        ax.set_title(
            f"{title}: measured times lower the rate of {lowered} of {len(here)} clusters",
            loc="left",
            fontsize=10,
        )
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("requests/s within the targets")
    figure.supxlabel("Each cluster has the power of 40 DGX-H100", fontsize=9)
    return figure


def draw_decodes(public: Public) -> Figure:
    """Draw steps of decodes as measured, and as the public simulator reads them."""
    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    ax = figure.subplots()
    ends: dict[str, tuple[float, float, str]] = {}
    shares: list[str] = []
    most = 0.0
    for colour, kind in zip(COLOURS, ("a100", "h100"), strict=False):
        curve = PiecewiseLinear(public.points(BLOOM, kind, "token_time"))
        measured = public.decodes(BLOOM, kind)
        x = [batch for batch, context in measured if context == 576]
        times, read = [1e3 * measured[b, 576.0] for b in x], [1e3 * curve(b) for b in x]
        ax.plot(x, times, "o-", color=colour)
        ax.plot(x, read, "--", color=colour)
        ends[f"{kind.upper()}, measured"] = (x[-1], times[-1], colour)
        ends[f"{kind.upper()}, public reading"] = (x[-1], read[-1], colour)
        shares.append(f"{read[-1] / times[-1]:.2f}")
        most = x[-1]
    ax.set(
        xlabel="decodes in the step, with 512 tokens of prompt each",
        ylabel="time of a step (ms)",
        ylim=(0, None),
    )
    ax.set_title(
        f"At {most:.0f} decodes, the public reading is\n"
        f"{' and '.join(shares)} of the measured times",
        loc="left",
        fontsize=10,
    )
    name_lines(ax, ends)
    return figure


def draw_pools(public: Public, design: PublicDesign, trace: Sequence[BenchRequest]) -> Figure:
    """Draw the machines in each pool as the load grows."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    ax = figure.subplots()
    rates = (40, 70, 100, 130, 40)
    work: list[BenchRequest] = []
    for number, rate in enumerate(rates):
        part = with_arrivals(drawn(trace, rate, 60, number), Arrivals(kind="poisson", rate=rate))
        work += [replace(item, arrival=item.arrival + 60 * number) for item in part]
    _, run = recorded(public.run_file(design), work, read_lines)
    pools = run.run["system_report"]["pools"]
    changes = sorted((time, name, where) for name, moves in pools.items() for time, where in moves)
    now: dict[str, str] = {}
    x: list[float] = []
    y: dict[str, list[int]] = {"prompt": [], "mixed": [], "token": []}
    for time, name, where in changes:
        now[name] = where
        x.append(time)
        for pool, counts in y.items():
            counts.append(sum(place == pool for place in now.values()))
    last = 60 * len(rates)
    for colour, counts in zip(COLOURS, y.values(), strict=False):
        ax.step([*x, last], [*counts, counts[-1]], where="post", color=colour)
    for number, rate in enumerate(rates):
        unit = " requests/s" if not number else ""
        ax.text(60 * number + 2, len(now) + 2, f"{rate}{unit}", fontsize=9, color="0.4")
        ax.axvline(60 * number, color="0.8", lw=0.8, ls="--", zorder=0)
    ax.set(xlabel="time (s)", ylabel="machines", xlim=(0, last), ylim=(0, len(now) + 6))
    ends = zip(y.items(), COLOURS, strict=False)
    name_lines(ax, {f"{pool} pool": (last, n[-1], colour) for (pool, n), colour in ends})
    ax.set_title(
        f"{max(y['mixed'])} of {len(now)} machines join the mixed pool at {max(rates)} requests/s,"
        f"\nof which {y['mixed'][-1] or 'none'} remain at the end",
        loc="left",
        fontsize=10,
    )
    return figure
