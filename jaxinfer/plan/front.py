"""The Pareto front: candidates that no other one beats in both cost and rate."""

import math
from collections.abc import Iterable

from jaxinfer.plan.candidate import Candidate, Score
from jaxinfer.plan.problem import Cost
from jaxinfer.plan.search import DrivenSearch

FrontPoint = tuple[float, float]


def frontier(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Points that no other one is below in one number and not above in the other, in order."""
    found: list[FrontPoint] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def in_full(search: DrivenSearch) -> list[tuple[Candidate, Score]]:
    """Candidates for whole requests whose largest rate is known."""
    return [
        (candidate, score)
        for candidate, score in search.tried.values()
        if candidate.whole and score.costs and not score.given_up and 0 < score.rate < math.inf
    ]


def cost_of(search: DrivenSearch) -> Cost:
    """Dollars where all candidates have a price, else GPUs."""
    costs = [score.costs for _, score in search.tried.values() if score.costs]
    return "usd" if costs and all(each.usd is not None for each in costs) else "gpus"


def front_of(search: DrivenSearch) -> list[Candidate]:
    """Candidates of ``in_full`` that no other one beats in cost and rate, the cheapest first.

    Of equals the first that was looked at.
    """
    of, found = cost_of(search), in_full(search)
    points = [(s.costs.amount(of), -s.rate) for _, s in found if s.costs]
    best = frontier(points)
    return [found[points.index(point)][0] for point in best]
