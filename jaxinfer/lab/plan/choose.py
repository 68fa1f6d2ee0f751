"""A complete search: a planner's search, then a second simulation of the chosen candidate."""

import math
from concurrent.futures import BrokenExecutor

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.lab.plan.candidate import Candidate, Planner, Score
from jaxinfer.lab.plan.lacking import more_requests
from jaxinfer.lab.plan.result import Choice
from jaxinfer.lab.plan.search import DrivenSearch


class PlannerFailed(JaxinferError):
    """A mistake of the planner itself, which would also happen with other requests."""


def choose(planner: Planner, search: DrivenSearch) -> Choice:
    """Return the best candidate, simulated again with fresh seeds.

    Raises:
        JaxinferError: see ``find``; or the candidate meets the targets at any rate.
    """
    candidate, score = find(planner, search)
    if math.isinf(score.rate):
        raise JaxinferError(
            f"the targets hold at any rate of the chosen {candidate}: {more_requests(score.enough)}"
        )
    return Choice(candidate, score, search.fresh_rates(candidate))


def find(planner: Planner, search: DrivenSearch) -> tuple[Candidate, Score]:
    """Return the best candidate and its score, simulated as a whole with the goal's seeds.

    Raises:
        PlannerFailed: the planner raises an unexpected exception, or returns no candidate.
        JaxinferError: there is no best candidate.
    """
    try:
        candidate = planner.plan(search.problem, search)
        if not isinstance(candidate, Candidate):
            raise PlannerFailed(f"planner {type(planner).__name__}: plan returns no Candidate")
        (score,) = search.scores([candidate])
    except (JaxinferError, BrokenExecutor):  # The latter is no mistake of the planner's.
        raise
    except FAILURES as error:
        name = type(planner).__name__
        raise PlannerFailed(f"planner {name}: plan raises {raised(error)}") from error
    if score.refused:
        raise JaxinferError(f"the chosen {candidate} cannot be: {score.refused}")
    if not score.rate or score.given_up:
        at = f" at {score.rate:g} requests/s" if score.rate else ""
        raise JaxinferError(f"the chosen {candidate} misses the targets{at}")
    return candidate, score
