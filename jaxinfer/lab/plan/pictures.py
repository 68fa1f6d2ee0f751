"""Pictures of a search: costs over rates, and times to first tokens over times between tokens."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from jaxinfer.lab.plan.candidate import Candidate, Score
from jaxinfer.lab.plan.problem import Cost
from jaxinfer.lab.plan.result import COSTS, PER, cost_of, front_of, frontier, in_full
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.report.pictures import save_picture
from jaxinfer.simulate.targets import PercentileTargets

BLUE, GREY = "#0072B2", "0.6"
# The frame around the chosen one.
RING: dict[str, Any] = {
    "s": 110,
    "facecolors": "none",
    "edgecolors": "#D55E00",
    "linewidths": 1.6,
    "label": "chosen",
    "zorder": 3,
}
GIVEN_UP: dict[str, Any] = {
    "marker": "v",
    "s": 22,
    "c": GREY,
    "label": "misses the targets at this rate",
}
# More names than this would be unreadable.
MOST_NAMES = 16
# Up to this many points are all named.
FEW = 10


def names_of(candidates: Sequence[Candidate], longest: int = 60) -> dict[tuple[object, ...], str]:
    """Return short names of candidates by their keys, made from the axes in which they differ.

    A word stands alone; a number follows the last part of its axis's name.
    """
    axes = dict.fromkeys(name for candidate in candidates for name in candidate.axes)
    differ = [n for n in axes if len({str(c.axes.get(n)) for c in candidates}) > 1] or list(axes)
    found = {}
    for candidate in candidates:
        words = [
            str(value) if isinstance(value, str) else f"{name.rsplit('.', 1)[-1]} {value:.4g}"
            for name in differ
            if (value := candidate.axes.get(name)) is not None
        ]
        found[candidate.key] = shorten(", ".join(words), longest, placeholder=" ...")
    return found


def draw_rates(path: Path, search: DrivenSearch, chosen: Candidate) -> None:
    """Draw cost over rate, with the Pareto front of candidates for whole requests.

    If all candidates cost the same, draw the best ones by name.
    """
    of = cost_of(search)
    scored = [
        (c, s)
        for c, s in search.tried.values()
        if c.whole and s.costs and s.rate and math.isfinite(s.rate)
    ]
    costs = {s.costs.amount(of) for _, s in scored if s.costs}
    if len(costs) > 1:
        _draw_costs(path, search, chosen, scored, of)
    else:
        _draw_names(path, search, chosen, scored, f"{min(costs):g} {COSTS[of]} each")


def _draw_costs(
    path: Path,
    search: DrivenSearch,
    chosen: Candidate,
    scored: Sequence[tuple[Candidate, Score]],
    of: Cost,
) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure((7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    at = {c.key: (s.costs.amount(of), s.rate) for c, s in scored if s.costs}
    full = [at[c.key] for c, s in scored if not s.given_up]
    if full:
        xs, ys = zip(*full, strict=True)
        axes.scatter(xs, ys, s=18, c=BLUE, label="largest rate", zorder=2)
    if given_up := [at[c.key] for c, s in scored if s.given_up]:
        axes.scatter(*zip(*given_up, strict=True), **GIVEN_UP)
    front = front_of(search)
    _draw_front(axes, [at[c.key] for c in front], "Pareto front of rate and cost")
    axes.scatter(*zip(at[chosen.key], strict=True), **RING)
    axes.xaxis.set_major_locator(MaxNLocator(integer=of == "gpus"))
    most = [1.1 * max(values) for values in zip(*at.values(), strict=True)]
    axes.set(xlabel=COSTS[of], ylabel="requests/s that keep the targets")
    axes.set(xlim=(0, most[0]), ylim=(0, most[1]))
    _explain(figure, axes, _label(axes, [c for c, s in scored if not s.given_up], front, at))
    save_picture(figure, path)


def _draw_names(
    path: Path,
    search: DrivenSearch,
    chosen: Candidate,
    scored: Sequence[tuple[Candidate, Score]],
    cost: str,
) -> None:
    from matplotlib.figure import Figure

    # The largest rates, and then candidates that are known to be below another.
    best = sorted(scored, key=lambda each: (bool(each[1].given_up), -each[1].rate))
    shown = best[:MOST_NAMES]
    figure = Figure((7.5, 1.7 + 0.27 * len(shown)), layout="constrained")
    axes = figure.subplots()
    row = {c.key: number for number, (c, _) in enumerate(shown)}
    for given_up, style in (
        (False, {"s": 26, "c": BLUE, "label": "largest rate"}),
        (True, GIVEN_UP | {"marker": "<"}),
    ):
        here = [(s.rate, row[c.key]) for c, s in shown if bool(s.given_up) == given_up]
        if here:
            axes.scatter(*zip(*here, strict=True), zorder=2, **style)
    if chosen.key in row:
        axes.scatter([search.tried[chosen.key][1].rate], [row[chosen.key]], **RING)
    for c, s in shown:
        sign = "< " if s.given_up else ""
        axes.annotate(
            f"{sign}{s.rate:.3g}",
            (s.rate, row[c.key]),
            xytext=(9, 0),
            va="center",
            textcoords="offset points",
            fontsize="small",
        )
    names = names_of([c for c, _ in scored])
    axes.set_yticks(range(len(shown)), [names[c.key] for c, _ in shown], fontsize="small")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(s.rate for _, s in shown))
    left = f"; the best {len(shown)} of {len(scored)}" if len(shown) < len(scored) else ""
    axes.set_xlabel(f"requests/s that keep the targets ({cost}{left})")
    axes.grid(axis="y", color="0.92", zorder=0)
    _explain(figure, axes, [])
    save_picture(figure, path)


def draw_latencies(path: Path, search: DrivenSearch, chosen: Candidate) -> None:
    """Draw TTFT over TBT of fully searched candidates at their largest rates, with the limits.

    Draws nothing unless the targets are percentiles of both, because the search has no other
    figures.
    """
    from matplotlib.figure import Figure

    targets = search.problem.targets
    if not isinstance(targets, PercentileTargets):
        return
    found = {metric: (percent, limit) for metric, percent, limit in reversed(targets.limits)}
    gap = next((metric for metric in ("tbt", "tpot") if metric in found), None)
    if gap is None or "ttft" not in found:
        return
    names = [f"{metric} p{found[metric][0]:g}" for metric in (gap, "ttft")]
    at, values = {}, []
    for candidate, score in in_full(search):
        x, y = (score.figures.get(name) for name in names)
        if x is not None and y is not None:
            at[candidate.key] = x, y
            values.append(search.value(score) * (-1 if search.problem.goal.minimise else 1))
    figure = Figure((7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    limits = found[gap][1], found["ttft"][1]
    ends, labelled = list(limits), []
    if at:
        gaps, firsts = zip(*at.values(), strict=True)
        dots = axes.scatter(gaps, firsts, c=values, s=26, zorder=2)
        figure.colorbar(dots, label=_unit(search))
        front = frontier(at.values())
        _draw_front(axes, front, "Pareto front: none is below in both")
        drawn = [c for c, _ in in_full(search) if c.key in at]
        best = [c for c in drawn if at[c.key] in front or c.key == chosen.key]
        labelled = _label(axes, drawn, best, at)
        ends = [max(ends[0], *gaps), max(ends[1], *firsts)]
        # At its largest rate, each candidate is close to one of its limits.
        by_ttft = sum(y / limits[1] > x / limits[0] for x, y in at.values())
        by, many = ("TTFT", by_ttft) if 2 * by_ttft >= len(at) else (gap.upper(), len(at) - by_ttft)
        axes.set_title(f"{by} limits {many} of {len(at)} candidates at their largest rate")
    if chosen.key in at:
        axes.scatter(*zip(at[chosen.key], strict=True), **RING)
    unit = "times alone" if targets.reference else "s"
    axes.axvline(limits[0], c="0.3", lw=1, ls="--", label="limits of the targets")
    axes.axhline(limits[1], c="0.3", lw=1, ls="--")
    xlabel, ylabel = (f"{m.upper()} p{found[m][0]:g} ({unit})" for m in (gap, "ttft"))
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 1.12 * ends[0]), ylim=(0, 1.12 * ends[1]))
    _explain(figure, axes, labelled)
    save_picture(figure, path)


def _draw_front(axes: Any, points: Sequence[tuple[float, float]], label: str) -> None:
    if len(points) > 1:
        axes.step(*zip(*points, strict=True), where="post", c=BLUE, lw=1.2, zorder=1, label=label)


def _label(
    axes: Any,
    drawn: Sequence[Candidate],
    best: Sequence[Candidate],
    at: Mapping[tuple[object, ...], tuple[float, float]],
) -> list[str]:
    """Number all points, or only the best ones of many; return lines that explain the numbers."""
    from matplotlib.patheffects import withStroke

    named = sorted(drawn if len(drawn) <= FEW else best[:MOST_NAMES], key=lambda c: at[c.key])
    names = names_of(drawn, 48)
    for number, candidate in enumerate(named, 1):
        # Neighbours may be close to each other: their numbers stand around them.
        offset = ((7, 5), (-13, -12), (7, -12), (-13, 5))[number % 4]
        axes.annotate(
            str(number),
            at[candidate.key],
            xytext=offset,
            textcoords="offset points",
            fontsize="small",
            zorder=4,
            path_effects=[withStroke(linewidth=2.5, foreground="w")],
        )
    return [f"{number}: {names[c.key]}" for number, c in enumerate(named, 1)]


def _explain(figure: Any, axes: Any, lines: Sequence[str]) -> None:
    """Add a legend below the axes, and the lines that explain the numbers."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    handles += [Line2D([], [], ls="none") for _ in lines]
    figure.legend(
        handles,
        [*labels, *lines],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize="small",
    )


def _unit(search: DrivenSearch) -> str:
    """Return the unit of the goal's figure."""
    goal = search.problem.goal
    return COSTS[goal.minimise] if goal.minimise else f"requests/s{PER[goal.maximise or 'cluster']}"
