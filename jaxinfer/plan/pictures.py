"""Pictures of a search: costs against rates, and times to first tokens against those between."""

from pathlib import Path
from typing import Any

from jaxinfer.plan.candidate import Candidate
from jaxinfer.plan.front import frontier
from jaxinfer.plan.result import COSTS, PER
from jaxinfer.plan.search import DrivenSearch
from jaxinfer.report.pictures import save_picture
from jaxinfer.simulate.targets import PercentileTargets

SIZE = (5.2, 3.6)
# Around the chosen one.
RING: dict[str, Any] = {"s": 70, "facecolors": "none", "edgecolors": "tab:red", "label": "chosen"}


def draw_rates(path: Path, search: DrivenSearch, chosen: Candidate) -> None:
    """Cost against rate, and what no other candidate for whole requests beats in both."""
    from matplotlib.figure import Figure

    scored = [(c, s) for c, s in search.tried.values() if c.whole and s.costs and s.rate]
    of = "usd" if all(s.costs.usd is not None for _, s in scored if s.costs) else "gpus"
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    for up, label in ((False, "largest rate"), (True, "given up at this rate")):
        here = [(getattr(s.costs, of), s.rate) for _, s in scored if (s.given_up is not None) == up]
        if here:
            costs, rates = zip(*here, strict=True)
            axes.scatter(costs, rates, s=14, c="0.7" if up else "tab:blue", label=label)
    front = frontier((getattr(s.costs, of), -s.rate) for _, s in scored if not s.given_up)
    if front:
        axes.step([x for x, _ in front], [-y for _, y in front], where="post", c="tab:blue", lw=1)
    score = search.tried[chosen.key][1]
    axes.scatter([getattr(score.costs, of)], [score.rate], **RING)
    axes.set(
        xlabel=COSTS[of], ylabel="requests/s that keep the targets", ylim=(0, None), xlim=(0, None)
    )
    axes.legend(frameon=False, fontsize="small")
    save_picture(figure, path)


def draw_latencies(path: Path, search: DrivenSearch, chosen: Candidate) -> None:
    """TTFT against TBT of what was found in full, each at its own largest rate, with the limits.

    None where the targets are no percentiles of both: then nobody has found them.
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
    points, values = [], []
    for candidate, score in search.tried.values():
        x, y = (score.figures.get(name) for name in names)
        if candidate.whole and not score.given_up and x is not None and y is not None:
            points.append((x, y))
            values.append(search.value(score) * (-1 if search.problem.goal.minimise else 1))
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    if points:
        gaps, firsts = zip(*points, strict=True)
        dots = axes.scatter(gaps, firsts, c=values, s=18, zorder=2)
        figure.colorbar(dots, label=_unit(search))
        axes.step(*zip(*frontier(points), strict=True), where="post", c="tab:blue", lw=1, zorder=1)
    x, y = (search.tried[chosen.key][1].figures.get(name) for name in names)
    if x is not None and y is not None:
        axes.scatter([x], [y], **RING)
    axes.axvline(found[gap][1], c="0.6", lw=0.8, ls="--")
    axes.axhline(found["ttft"][1], c="0.6", lw=0.8, ls="--", label="limits")
    unit = "times alone" if targets.reference else "s"
    xlabel, ylabel = (f"{m.upper()} p{found[m][0]:g}, {unit}" for m in (gap, "ttft"))
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    save_picture(figure, path)


def _unit(search: DrivenSearch) -> str:
    """Of what the goal is about."""
    goal = search.problem.goal
    return COSTS[goal.minimise] if goal.minimise else f"requests/s{PER[goal.maximise or 'cluster']}"
