"""Hetis' pictures: heads over time, KV that fits, and where heads begin to leave."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from jaxinfer.report.records import read_lines
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.hetis.cases import THIRTEEN, TWO, cluster, hetis, modelled
from scripts.reproduce.hetis.offload import Course
from scripts.reproduce.recorded import recorded

# Fig. 14's load: requests/s, and seconds.
RATES = ((5.0, 40.0), (0.0, 30.0), (2.5, 40.0), (0.0, 20.0))


def draw_heads(rows: Sequence[Mapping[str, float]], names: Mapping[str, str], title: str) -> Figure:
    """Draw the KV heads of a step's requests on each device, over time.

    Args:
        rows: for each step, its ``seconds`` and the heads by device.
        names: names of the devices to show.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    ax = figure.subplots()
    x = [row["seconds"] for row in rows]
    ends, most = {}, {}
    for colour, (device, name) in zip(COLOURS, names.items(), strict=False):
        y = [row[device] for row in rows]
        ax.plot(x, y, drawstyle="steps-post", color=colour, linewidth=1.2)
        ends[name], most[name] = (x[-1], y[-1], colour), max(y)
    ax.set(xlabel="time (s)", ylabel="KV heads in a step")
    said = ", ".join(f"{name} {number:,.0f}" for name, number in most.items())
    ax.set_title(f"{title}\nmost heads: {said}", loc="left", fontsize=10)
    ax.set_ylim(bottom=0)
    name_lines(ax, ends, 0.09)
    return figure


def draw_burst() -> Figure:
    """Draw 13B on one A100, with two 3090 for heads: the load comes, goes, and comes again."""
    draw, work, now = random.Random(0), list[BenchRequest](), 0.0
    config = cluster(THIRTEEN, (("one", None),), TWO, hetis(), count=1000)
    lengths = iter(config.requests())
    for rate, seconds in RATES:
        end = now + seconds
        while rate and (now := now + draw.expovariate(rate)) < end:
            one = next(lengths)
            work.append(BenchRequest(None, one.prompt_len, one.max_tokens, now))
        now = end
    groups = [shard.group for shard in modelled(config).shards]
    _, run = recorded(config, work, read_lines)
    rows = [
        {"seconds": step["start"]} | dict(zip(groups, step["heads"], strict=True))
        for step in run.steps
    ]
    names = {"one": "A100 with the layers", "near": "3090", "far": "3090 on another host"}
    title = "13B, simulated: 5 requests/s until 40 s, 2.5 from 70 to 110 s"
    return draw_heads(rows, names, title)


def draw_capacities(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the tokens that fit, by model; a way that a model was not tried with has no bar."""
    models = ("70B", "13B", "OPT-30B")
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    found: dict[str, dict[str, Mapping[str, Any]]] = {model: {} for model in models}
    for row in rows:
        model, _, way = row["cluster"].partition(", ")
        if "one A100" not in way:
            found[model][way.replace("'s decodes on 3090 and P100", "")] = row
    ways = list(dict.fromkeys(way for here in found.values() for way in here))
    for ax, (model, here) in zip(figure.subplots(1, 3, sharey=True), found.items(), strict=True):
        y = [ways.index(way) for way in here]
        tokens = [row["by host"] / 1e3 for row in here.values()]
        sums = [row["sum of memories"] / 1e3 for row in here.values()]
        ax.barh(y, tokens, 0.6, color=COLOURS[0], label="fits, with stages of whole layers")
        mark = {"color": COLOURS[1], "markersize": 16, "markeredgewidth": 2}
        ax.plot(sums, y, "|", **mark, label="90 % of all memory, less weights")
        ax.set_title(model, fontsize=10)
        ax.set_xlabel("KV of 1,000 tokens")
    most = {max(here, key=lambda way: here[way]["by host"]) for here in found.values()}
    first = all(way.startswith("Hetis") for way in most)
    title = "Hetis has room for the KV of most tokens" if first else "Tokens whose KV fits"
    figure.suptitle(title, fontsize=10)
    figure.axes[0].set_yticks(range(len(ways)), ways, fontsize=8)
    figure.axes[0].invert_yaxis()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, markerscale=0.6, fontsize=8)
    return figure


def draw_offload(found: Sequence[Course]) -> Figure:
    """Draw the own devices' share of heads by tokens in flight; dashed lines are closed forms."""
    cases = list(dict.fromkeys(course.case for course in found))
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for ax, case in zip(figure.subplots(1, len(cases)), cases, strict=True):
        for colour, course in zip(
            COLOURS, (each for each in found if each.case == case), strict=False
        ):
            # While requests arrive; afterwards, they end one by one.
            peak = max(range(len(course.steps)), key=lambda i: course.steps[i][0])
            steps = course.steps[: peak + 1]
            own = [sum(stage[0] for stage in stages) / sum(map(sum, stages)) for _, stages in steps]
            us = f"{1e6 * course.exchange_s:.0f} us"
            tokens, shares = _medians([t / 1e3 for t, _ in steps], own)
            ax.plot(tokens, shares, color=colour, label=us)
            ax.axvline(course.expected / 1e3, color=colour, linestyle="dashed", linewidth=1)
        ax.set_title(case, fontsize=10)
        ax.set_xlabel("thousands of tokens in flight")
        ax.set_ylim(0, 1.05)
        ax.set_xlim(0, 1.05 * max(tokens for tokens, _ in steps) / 1e3)
    figure.axes[0].set_ylabel("share of heads on the devices with layers")
    figure.axes[0].legend(frameon=False, title="an exchange takes")
    title = (
        "Heads leave for other GPUs once that is faster: simulated (lines), closed form (dashes)"
    )
    figure.suptitle(title, fontsize=10)
    return figure


def _medians(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the medians of y in sixty equal intervals of x, for a line that can be read."""
    bins: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for pair in zip(x, y, strict=True):
        bins[int(60 * pair[0] / max(x))].append(pair)
    found = [tuple(median(column) for column in zip(*bins[i], strict=True)) for i in sorted(bins)]
    return [each[0] for each in found], [each[1] for each in found]
