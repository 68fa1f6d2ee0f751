"""What a profile of a modelled instance would find: Cronus' eqs. 2 and 3 fitted to its costs."""

from collections.abc import Sequence

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.step_fit import LeastSquares, MixedFit, PrefillFit, StepFit
from jaxinfer.serving.work import Work
from jaxinfer.simulate.costs import CostModel

_LENGTHS, _CONTEXTS = 64, 8


def fit_costs(
    cost: CostModel, budget: int, max_num_seqs: int, longest: int, relative: bool
) -> StepFit:
    """By least squares, over lengths and contexts that are evenly spread.

    Args:
        budget: tokens of one step at most.
        longest: tokens of one request at most.
        relative: of the relative error, or of that in seconds.
    """
    lengths = sorted({max(longest * i // _LENGTHS, 1) for i in range(1, _LENGTHS + 1)})
    prefills = [((length, 1.0), _prefill(cost, length, budget)) for length in lengths]
    mixed = []
    most = max(min(max_num_seqs, budget) // 2, 1)
    for start in (longest * i // _CONTEXTS for i in range(_CONTEXTS)):
        for decodes in (0, most // 8, most // 4, most // 2, most):
            for context in (longest // 32, longest // 8, longest // 4):
                chunk = start, budget - decodes
                work = Work(budget, decodes, decodes + 1, decodes, decodes * context, [chunk])
                mixed.append(((start, decodes * context, 1.0), _seconds(cost, work)))
    return StepFit(
        PrefillFit(*_least_squares(prefills, relative)), MixedFit(*_least_squares(mixed, relative))
    )


def _prefill(cost: CostModel, length: int, budget: int) -> float:
    return sum(
        _seconds(cost, Work(count, 0, 1, start + count == length, 0, [(start, count)]))
        for start in range(0, length, budget)
        for count in [min(budget, length - start)]
    )


def _seconds(cost: CostModel, work: Work) -> float:
    return sum(cost.stages(work)) + sum(cost.hops(work))


def _least_squares(points: Sequence[tuple[Sequence[float], float]], relative: bool) -> list[float]:
    squares = LeastSquares(len(points[0][0]))
    for x, seconds in points:
        weight = 1 / seconds if relative else 1.0
        squares.add([value * weight for value in x], seconds * weight)
    found = squares.solve()
    if not found:
        raise JaxinferError("the instance is too small to fit step times to: give it more tokens")
    return found
