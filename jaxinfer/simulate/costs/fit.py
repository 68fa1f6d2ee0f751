"""Fits a modelled instance: Cronus' eqs. 2 and 3 to its steps, Aladdin's eq. 3 to its decodes."""

from collections.abc import Sequence

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.batch import Work
from jaxinfer.serving.step_fit import (
    DecodeFit,
    MixedFit,
    PrefillFit,
    StepFit,
    least_squares,
)
from jaxinfer.simulate.costs.model import CostModel

_LENGTHS, _CONTEXTS, _BATCHES = 64, 8, 8


def fit_costs(
    cost: CostModel, budget: int, max_num_seqs: int, longest: int, pool: int, relative: bool
) -> StepFit:
    """Fit costs by least squares, over evenly spread lengths and contexts.

    Args:
        budget: largest number of tokens in one step.
        longest: largest number of tokens of one request.
        pool: largest number of tokens of all requests together.
        relative: whether to minimise squared relative errors; otherwise errors in seconds.
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
    prefill, chunked = _decided(prefills, relative), _decided(mixed, relative)
    alone = _decodes(cost, min(max_num_seqs, budget), longest, pool)
    decode = least_squares(alone, relative)
    return StepFit(PrefillFit(*prefill), MixedFit(*chunked), DecodeFit(*decode) if decode else None)


def _decodes(
    cost: CostModel, most: int, longest: int, pool: int
) -> list[tuple[Sequence[float], float]]:
    """Return batches of up to ``most`` decodes, with contexts that fit into the pool."""
    points: list[tuple[Sequence[float], float]] = []
    for n in sorted({max(most * i // _BATCHES, 1) for i in range(_BATCHES + 1)}):
        reach = min(longest, pool // n)
        for context in sorted({max(reach // part, 1) for part in (32, 8, 4, 2, 1)}):
            work = Work(n, n, n, n, n * context, [], n)
            points.append(((n * context, n, 1.0), _seconds(cost, work)))
    return points


def _prefill(cost: CostModel, length: int, budget: int) -> float:
    return sum(
        _seconds(cost, Work(count, 0, 1, start + count == length, 0, [(start, count)]))
        for start in range(0, length, budget)
        for count in [min(budget, length - start)]
    )


def _seconds(cost: CostModel, work: Work) -> float:
    return sum(cost.stages(work)) + sum(cost.hops(work))


def _decided(points: Sequence[tuple[Sequence[float], float]], relative: bool) -> list[float]:
    found = least_squares(points, relative)
    if not found:
        raise JaxinferError("the instance is too small to fit step times to: give it more tokens")
    return found
