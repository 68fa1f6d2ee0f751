"""Explains why no candidate meets the targets: how far the nearest one misses them."""

import math
from collections.abc import Sequence

from jaxinfer.lab.plan.candidate import Candidate, Score
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.simulate.targets import PercentileTargets, RequestTargets, Targets


def why_nothing(tried: Sequence[tuple[Candidate, Score]], problem: Problem) -> str:
    """Return a line with the candidate that comes nearest, its figures and the required ones."""
    if not tried:
        return "the planner finds no candidates: no placement fits on the GPUs given"
    missed = [(c, s) for c, s in tried if s.figures]
    if not missed:
        first = next((s.refused for _, s in tried if s.refused), None)
        if first is None:
            rate = problem.goal.rate
            return f"none of {len(tried)} candidates can serve {rate} requests/s, by their bounds"
        return f"none of {len(tried)} candidates is valid; for example: {first}"
    targets = problem.targets
    nearest, score = min(missed, key=lambda each: _lack(each[1], targets))
    figures = ", ".join(
        f"{name} {'-' if value is None else f'{value:.3g}'} ({must})"
        for (name, value), must in zip(score.figures.items(), _asked_for(targets), strict=True)
    )
    return (
        f"none of {len(tried)} candidates meets the targets; nearest is {nearest}, with "
        f"{figures} at {score.rate:.3g} requests/s"
    )


def more_requests(enough: int | None) -> str:
    """Advise to use more requests if targets are met at any rate; give their number if known."""
    count = "more requests" if enough is None else f"{enough} requests or more"
    return f"give {count}, or tighter targets"


def _lack(score: Score, targets: Targets) -> tuple[int, float]:
    """Return the number of targets without a figure, and the distance from the worst
    other target.
    """
    if isinstance(targets, PercentileTargets):
        pairs = zip(score.figures.values(), targets.limits, strict=True)
        lacks = [None if value is None else value / limit for value, (_, _, limit) in pairs]
    else:
        lacks = [None if share is None else -share for share in score.figures.values()]
    known = [lack for lack in lacks if lack is not None]
    return len(lacks) - len(known), max(known, default=math.inf)


def _asked_for(targets: Targets) -> list[str]:
    """Return the limit of each figure, in words."""
    if isinstance(targets, PercentileTargets):
        return [f"at most {limit:g}" for _, _, limit in targets.limits]
    assert isinstance(targets, RequestTargets)
    return [f"at least {targets.attainment:g}" for _ in targets.limits]
