"""Results of HexGen-2's searches, and the time of ours."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from jaxinfer.papers.hexgen2.baselines import genetic, guided, most_gpus, random_swaps, starts
from jaxinfer.papers.hexgen2.flow import KVNetwork, shared_flow
from jaxinfer.papers.hexgen2.moves import MemberPlan
from jaxinfer.papers.hexgen2.refine import Effort, Scorer, refine, score
from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from scripts.reproduce.claims import Target, agrees, holds
from scripts.reproduce.hexgen2.runs import CLASSES, SLOW, HexGen2Cluster, both, draw, planner_of
from scripts.reproduce.reproduction import Inputs, Part, Work
from scripts.tables import Row

SIZES = (64, 128, 192, 256, 320)
# Table 5, in minutes.
PAPER_MINUTES = dict(zip(SIZES, (4.03, 7.93, 21.66, 28.44, 47.77), strict=True))
SEEDS = range(3)
# How much each method may examine, the planner's defaults: sums of capacities, and flows.
SCORED, FLOWS = 100_000, 500


def one(
    cluster: HexGen2Cluster, work: Work, method: Callable[[Scorer, list[MemberPlan], int], float]
) -> float:
    """Return the flow that a method finds in a fresh search from the paper's partitions."""
    problem = cluster.problem(work)
    planner = planner_of(problem)
    capacity = planner.capacity(problem)
    network = KVNetwork(capacity.site, capacity.layer_bytes)
    scorer = Scorer(capacity, network, shared_flow, Effort(SCORED, FLOWS))
    plans = starts(scorer, capacity.model, capacity.lengths)
    return method(scorer, plans, most_gpus(plans, 8))


def _start(scorer: Scorer, plans: list[MemberPlan], most: int) -> float:
    return max(score(scorer, plan).flow for plan in plans)


def _guided(scorer: Scorer, plans: list[MemberPlan], most: int) -> float:
    return guided(scorer, plans, most).flow


def _random(scorer: Scorer, plans: list[MemberPlan], most: int, seed: int) -> float:
    return random_swaps(scorer, plans, most, seed).flow


def _genetic(scorer: Scorer, plans: list[MemberPlan], most: int, seed: int) -> float:
    return genetic(scorer, plans, most, seed).flow


def _restarts(scorer: Scorer, plans: list[MemberPlan], most: int, seed: int) -> float:
    return refine(scorer, plans, most, 10, seed).flow


def methods(inputs: Inputs) -> Part:
    """Setting 1: requests per second by method; all but ours start from the same partitions."""
    trace, clusters = both(inputs)
    cluster, rows, ratios = clusters.setting("heterogeneous_1"), list[Row](), []
    for name in CLASSES:
        work = draw(trace, name)
        by_guide = one(cluster, work, _guided)
        drawn: dict[str, list[float]] = {"random": [], "genetic": [], "restarts": []}
        for seed in SEEDS:
            for method in (_random, _genetic, _restarts):
                flow = one(cluster, work, partial(method, seed=seed))
                drawn[method.__name__.removeprefix("_")].append(flow)
        problem = cluster.problem(work)
        ours = planner_of(problem).certified(problem)
        mean = {what: fmean(flows) for what, flows in drawn.items()}
        ratios.append(by_guide / mean["random"])
        rows.append(
            {
                "class": name,
                "start": round(one(cluster, work, _start), 3),
                "guided": round(by_guide, 3),
                "random, mean of 3": round(mean["random"], 3),
                "random, best": round(max(drawn["random"]), 3),
                "genetic, mean of 3": round(mean["genetic"], 3),
                "all changes, restarts": round(mean["restarts"], 3),
                "programs": round(ours.flow.total, 3),
                "bound": round(ours.bound, 3),
                "guided by random": round(ratios[-1], 2),
            }
        )
    ordered = all(row["guided"] > row["random, mean of 3"] > row["start"] for row in rows)
    words = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    targets = [
        holds("setting 1: guided swaps > random ones > the partition, each class",
              "in this order", words, ordered, "in each class"),
        holds("setting 1: guided swaps by random ones, mean", "1.8",
              f"{fmean(ratios):.2f}", fmean(ratios) >= 1.8, "1.8 or more"),
    ]  # fmt: skip
    return Part(rows, targets, {"search": draw_methods(rows)})


def _by_paper(cluster: HexGen2Cluster, work: Work) -> float:
    """Return the flow that the paper's own path finds: partition, largest cut, guided swaps."""
    problem = cluster.problem(work, ["planner.method=hexgen2"])
    return planner_of(problem).certified(problem).flow.total


def sizes(inputs: Inputs) -> Part:
    """Seconds of one process, and the gap, for Llama-2-70B and chats."""
    trace, clusters = both(inputs)
    rows, targets = list[Row](), list[Target]()
    work = draw(trace, "online")
    for nic, words, some in ((None, "100 Gb/s", SIZES), (SLOW, "10 Gb/s", SIZES[::4])):
        for gpus in some:
            cluster = clusters.of_size(gpus) if nic is None else clusters.of_size(gpus, nic)
            problem = cluster.problem(work)
            started = time.process_time()
            found = planner_of(problem).certified(problem)
            seconds = time.process_time() - started
            gap = 100 * found.gap
            theirs: float | str = ""
            if nic is None and gpus in (SIZES[0], SIZES[-1]):
                theirs = round(_by_paper(cluster, work), 2)
            rows.append(
                {
                    "GPUs": gpus,
                    "network": words,
                    "paper (s)": round(60 * PAPER_MINUTES[gpus]),
                    "ours (s)": round(seconds, 1),
                    "requests/s": round(found.flow.total, 2),
                    "by the paper's path": theirs,
                    "bound": round(found.bound, 2),
                    "gap (%)": round(gap, 2),
                }
            )
            if nic is None and gpus in (64, 320):
                most = 10 if gpus == 64 else 60
                claim = f"{gpus} GPUs: seconds to plan (paper: {60 * PAPER_MINUTES[gpus]:.0f})"
                targets.append(agrees(claim, f"{seconds:.1f}", seconds <= most, f"at most {most}"))
    pairs = [(row["requests/s"], row["by the paper's path"]) for row in rows]
    compared = [(ours, theirs) for ours, theirs in pairs if theirs != ""]
    words = ", ".join(f"{ours / theirs:.2f}" for ours, theirs in compared)
    claim = "64 and 320 GPUs: our flow by that of the paper's path"
    least = all(ours >= theirs for ours, theirs in compared)
    targets.append(agrees(claim, words, least, "at least 1"))
    gap = max(row["gap (%)"] for row in rows)
    claim = "64 to 320 GPUs: largest gap to the bound"
    targets.append(agrees(claim, f"{gap:g} %", gap <= 1, "at most 1 %"))
    return Part(rows, targets, {"sizes": draw_sizes(rows)})


def draw_methods(rows: Sequence[Row]) -> Figure:
    """Draw flows relative to the bound."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    ax = figure.subplots()
    names = {
        "genetic, mean of 3": "genetic search",
        "random, mean of 3": "random swaps",
        "guided": "guided swaps",
        "programs": "our search",
    }
    least = {}
    for number, (name, words) in enumerate(names.items()):
        places = [place + 0.21 * (number - 1.5) for place in range(len(rows))]
        shares = [row[name] / row["bound"] for row in rows]
        ax.bar(places, shares, 0.2, color=COLOURS[number])
        # The names are in the first class's bars.
        ax.text(places[0], 0.02, words, rotation=90, color="white", ha="center", va="bottom")
        least[words] = f"{min(shares):.2f}"
    ax.set_xticks(range(len(rows)), [row["class"] for row in rows])
    ax.set(xlabel="class of requests", ylabel="requests/s relative to the upper bound")
    ax.set_title(
        f"Our search reaches at least {least['our search']} of the bound, guided swaps "
        f"{least['guided swaps']}, random ones {least['random swaps']}",
        loc="left",
        fontsize=10,
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.3)
    return figure


def draw_sizes(rows: Sequence[Row]) -> Figure:
    """Draw seconds by number of GPUs."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    ends: dict[str, tuple[float, float, str]] = {}
    for colour, words in zip(COLOURS, ("100 Gb/s", "10 Gb/s"), strict=False):
        some = [(row["GPUs"], row["ours (s)"]) for row in rows if row["network"] == words]
        ax.plot(*zip(*some, strict=True), "o-", color=colour)
        ends[f"ours, {words}"] = (*some[-1], colour)
    paper = [60 * PAPER_MINUTES[gpus] for gpus in SIZES]
    ax.plot(SIZES, paper, "s--", color="black")
    ends["paper (Table 5)"] = (SIZES[-1], paper[-1], "black")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set(xlabel="GPUs", ylabel="time to plan (s)", xticks=SIZES)
    ours = " and ".join(f"{end[1]:g}" for name, end in ends.items() if name.startswith("ours"))
    ax.set_title(
        f"{SIZES[-1]} GPUs: {ours} s here, {paper[-1]:,.0f} s in the paper", loc="left", fontsize=10
    )
    ax.grid(axis="y", alpha=0.3)
    name_lines(ax, ends)
    return figure
