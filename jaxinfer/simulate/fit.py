"""What a profile of a modelled instance would find: Cronus' eqs. 2 and 3 fitted to its costs."""

from collections.abc import Sequence

from jaxinfer.serving.step_fit import LeastSquares, MixedFit, PrefillFit, StepFit
from jaxinfer.simulate.costs import CostModel, Work


def fit_costs(cost: CostModel, budget: int, max_num_seqs: int, longest: int) -> StepFit:
    """By least squares of the relative error, over lengths and contexts as a profile has them.

    Args:
        budget: tokens of one step at most.
        longest: tokens of one request at most.
    """
    lengths = [max(longest * i // 8, 1) for i in range(1, 9)]
    prefills = [((length, 1.0), _prefill(cost, length, budget)) for length in lengths]
    decodes = max(min(max_num_seqs, budget) // 2, 1)
    mixed = []
    for start in (0, longest // 4, longest // 2, 3 * longest // 4):
        mixed.append(
            ((start, 0.0, 1.0), _seconds(cost, Work(budget, 0, 1, 0, 0, [(start, budget)])))
        )
        for context in (longest // 8, longest // 4, longest // 2):
            chunk = start, budget - decodes
            work = Work(budget, decodes, decodes + 1, decodes, decodes * context, [chunk])
            mixed.append(((start, decodes * context, 1.0), _seconds(cost, work)))
    return StepFit(PrefillFit(*_relative(prefills)), MixedFit(*_relative(mixed)))


def _prefill(cost: CostModel, length: int, budget: int) -> float:
    return sum(
        _seconds(cost, Work(count, 0, 1, start + count == length, 0, [(start, count)]))
        for start in range(0, length, budget)
        for count in [min(budget, length - start)]
    )


def _seconds(cost: CostModel, work: Work) -> float:
    return sum(cost.stages(work)) + sum(cost.hops(work))


def _relative(points: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    squares = LeastSquares(len(points[0][0]))
    for x, seconds in points:
        squares.add([value / seconds for value in x], 1.0)
    found = squares.solve()
    assert found, "the points decide all coefficients"
    return found
