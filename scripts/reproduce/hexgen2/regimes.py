"""Settings 1 and 5 compared with eight H100s, in three regimes."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from jaxinfer.report.plots import COLOURS
from scripts.reproduce.claims import Target, agrees, by_share
from scripts.reproduce.hexgen2.runs import (
    CLASSES,
    FREE,
    LIMITED,
    MANY,
    SLOW,
    WORKLOADS,
    Clusters,
    HexGen2Cluster,
    both,
    draw,
    fixed,
    planned,
    throughput,
)
from scripts.reproduce.hexgen2.tables import DISTSERVE_3, EIGHT, TABLE_3
from scripts.reproduce.reproduction import Inputs, Part, Work
from scripts.tables import Row

SETTINGS = {"8 H100": "homogeneous", "setting 1": "heterogeneous_1", "setting 5": "heterogeneous_5"}
BASE, OTHER = "8 H100", "2 x prefill TP2, decode TP4"
# What a ratio compares: planned flows or simulated tokens, with the engine's limits and without.
REGIMES = ("planner's model", "simulated", "model, no limits", "simulated, no limits")
PAPER = [ours / theirs for ours, theirs in zip(TABLE_3, DISTSERVE_3, strict=True)]


def regimes(inputs: Inputs) -> Part:
    """Each cluster, simulated with the planner's own plan for each workload."""
    trace, clusters = both(inputs)
    rows = []
    for name in WORKLOADS:
        work = draw(trace, name, MANY)
        for setting, file in SETTINGS.items():
            for words, engine in (("limits", LIMITED), ("no limits", FREE)):
                rows.append(_row(name, setting, words, clusters.setting(file, engine=engine), work))
        slow = clusters.setting("heterogeneous_1", nic_gb_s=SLOW)
        rows.append(_row(name, "setting 1", "limits, 10 Gb/s", slow, work))
    return Part(rows)


def _row(name: str, setting: str, engine: str, cluster: HexGen2Cluster, work: Work) -> Row:
    plan = planned(cluster, work)
    ours = throughput(plan, name)
    assert plan.bound
    return {
        "workload": name,
        "cluster": setting,
        "engine": engine,
        "requests/s": round(plan.flow, 3),
        "gap (%)": round(100 * (1 - plan.flow / plan.bound), 2),
        "planned (tokens/s)": round(plan.tokens_s),
        "simulated (tokens/s)": round(ours),
        "plan": plan.words,
    }


def ratios(trace: Work, clusters: Clusters, rows: Sequence[Row]) -> list[Row]:
    """Return ratios to eight H100s in each regime, and to those with another plan."""
    known = {(row["workload"], row["cluster"], row["engine"]): row for row in rows}
    found = []
    for name, paper in zip(WORKLOADS, PAPER, strict=True):
        work = draw(trace, name, MANY)
        other = throughput(fixed(clusters.setting("homogeneous"), work, EIGHT[OTHER]), name)
        for setting in ("setting 1", "setting 5"):
            row: Row = {
                "workload": name,
                "cluster": setting,
                "paper": round(paper, 2) if setting == "setting 1" else "",
            }
            for number, regime in enumerate(REGIMES):
                engine = "limits" if number < 2 else "no limits"
                column = ("planned (tokens/s)", "simulated (tokens/s)")[number % 2]
                both = [known[name, cluster, engine][column] for cluster in (setting, BASE)]
                row[regime] = round(both[0] / both[1], 2)
            against = known[name, setting, "limits"]["simulated (tokens/s)"]
            row["by their other plan"] = round(against / other, 2)
            if setting == "setting 1":
                slow = known[name, setting, "limits, 10 Gb/s"]["simulated (tokens/s)"]
                row["10 Gb/s"] = round(
                    slow / known[name, BASE, "limits"]["simulated (tokens/s)"], 2
                )
            else:
                row["10 Gb/s"] = ""
            found.append(row)
    return found


def regime_targets(rows: Sequence[Row], found: Sequence[Row]) -> list[Target]:
    """Return targets for means over five workloads, gaps, and planned and real flows."""
    targets = []
    for regime in (*REGIMES, "by their other plan"):
        for setting, paper in (("setting 1", fmean(PAPER)), ("setting 5", 1.0)):
            ours = fmean(row[regime] for row in found if row["cluster"] == setting)
            claim = f"{setting} by 8 H100, mean of five workloads: {regime}"
            targets.append(by_share(claim, round(paper, 2), ours, 0.15))
    gap = max(row["gap (%)"] for row in rows)
    targets.append(
        agrees("our plans by the bound: largest gap", f"{gap:g} %", gap <= 1, "at most 1 %")
    )
    # For classes only, because "online" is served at less than the planned rate.
    ways = dict.fromkeys((row["cluster"], row["engine"]) for row in rows)
    for setting, engine in ways:
        shares = [
            row["simulated (tokens/s)"] / row["planned (tokens/s)"] - 1
            for row in rows
            if (row["cluster"], row["engine"]) == (setting, engine) and row["workload"] in CLASSES
        ]
        most = max(shares, key=abs)
        words = "" if engine == "limits" else f", {engine}"
        claim = f"{setting}{words}: simulated by planned, the class that is furthest off"
        targets.append(by_share(claim, 1, 1 + most, 0.1, "consistency"))
    return targets


# Columns of a picture, and their labels in it.
_DRAWN = {
    "paper": "paper (eight H100 with DistServe)",
    "simulated": "simulated, with the engine's limits",
    "simulated, no limits": "simulated, without these limits",
    "by their other plan": "relative to the authors' other plan for H100",
}


def draw_ratios(found: Sequence[Row]) -> Figure:
    """Draw a bar for each workload and way to compare, with its value."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    prices = {"setting 1": "at equal price", "setting 5": "at 70 % of the price"}
    for ax, (setting, price) in zip(figure.subplots(2, 1), prices.items(), strict=True):
        rows = [row for row in found if row["cluster"] == setting]
        for number, (what, label) in enumerate(_DRAWN.items()):
            if rows[0][what] == "":
                continue
            places = [place + 0.2 * (number - 1.5) for place in range(len(rows))]
            colour = "black" if what == "paper" else COLOURS[number - 1]
            bars = ax.bar(places, [row[what] for row in rows], 0.19, color=colour, label=label)
            ax.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
        ax.axhline(1, color="grey", lw=0.8)
        ax.set_xticks(range(len(rows)), [row["workload"] for row in rows])
        ax.set_ylabel("tokens/s relative to 8 H100")
        ax.spines[["top", "right"]].set_visible(False)
        within, without = (
            fmean(row[what] for row in rows) for what in ("simulated", "simulated, no limits")
        )
        ax.set_title(
            f"{setting}, {price}: {within:.2f} times the tokens/s of eight H100 with the engine's "
            f"limits, {without:.2f} times without (means)",
            loc="left",
            fontsize=10,
        )
        ax.margins(y=0.1)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="outside upper center")
    return figure
