"""Finds sizes and numbers of workers by Aladdin's eqs. 6 and 7, and by search."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import ge, le, mul

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.step_fit import DecodeFit, LeastSquares
from jaxinfer.workload.lengths import BenchRequest


@dataclass(frozen=True)
class MeanRequest:
    """The mean decode over all iterations.

    Attributes:
        context: KV entries that a decode sees; a request counts once for each of its output tokens.
        output: number of output tokens of a request.
    """

    context: float
    output: float

    @classmethod
    def of(cls, work: Sequence[BenchRequest]) -> "MeanRequest":
        """Return the mean request of a workload."""
        tokens = sum(item.max_tokens for item in work)
        seen = sum(item.max_tokens * (item.prompt_len + item.max_tokens / 2) for item in work)
        return cls(seen / tokens, tokens / len(work))


@dataclass(frozen=True)
class MostTokens:
    """Eq. 6: the largest number of output tokens per second and GPU for workers of a given size.

    Attributes:
        by_memory: number if an iteration has as many requests as the pool holds.
        by_target: number if an iteration has as many requests as the target allows.
    """

    by_memory: float
    by_target: float

    @property
    def least(self) -> float:
        """The smaller of the two numbers, which applies."""
        return min(self.by_memory, self.by_target)


def most_tokens(
    decode: DecodeFit, gpus: int, room: int, mean: MeanRequest, atgt_s: float
) -> MostTokens:
    """Apply eq. 6 to workers of one size.

    Args:
        room: KV entries of a worker's pool.
        atgt_s: target of the mean time between tokens, in seconds.
    """
    held = room / mean.context
    by_memory = held / (gpus * decode.seconds(room, held))
    each = decode.per_context * mean.context + decode.per_sequence
    left = max(atgt_s - decode.constant, 0.0)
    batch = left / each if each > 0 else math.inf if left else 0.0
    return MostTokens(by_memory, batch / (gpus * atgt_s))


@dataclass(frozen=True)
class WorkerCount:
    """Eq. 7, which gives the number of workers as a function of the request rate."""

    per_rate: float
    constant: float

    def workers(self, rate: float) -> int:
        """Return the number of workers that ``rate`` requests per second need."""
        # A sum that is whole except for rounding counts as whole.
        return max(math.ceil(self.per_rate * rate + self.constant - 1e-9), 1)


def fit_workers(found: Sequence[tuple[float, int]]) -> WorkerCount:
    """Fit a line to rates and the smallest numbers of workers for them, by least squares.

    The smallest number is rounded up; on average, it exceeds the line by half a worker.

    Raises:
        JaxinferError: there are fewer than two rates.
    """
    squares = LeastSquares(2)
    for rate, workers in found:
        squares.add((rate, 1.0), workers - 0.5)
    solved = squares.solve()
    if solved is None:
        raise JaxinferError("eq. 7: needs the workers of two rates or more")
    return WorkerCount(*solved)


def fewest(keeps: Callable[[int], bool], guess: float, most: int) -> int | None:
    """Return the smallest number of workers that meets the targets; None if ``most`` is too few.

    The search moves away from the guess in growing steps, then bisects. The result is exact if an
    additional worker never does harm. No number is tried twice.

    Args:
        keeps: returns whether a number of workers meets the targets.
    """
    low, high, step = 0, most + 1, 1  # The former are too few, and the latter would be enough.
    count = int(min(max(guess, 1), most))
    while high - low > 1:
        if keeps(count):
            high = count
        else:
            low = count
        if low and high <= most:
            count = (low + high) // 2
        else:
            count = min(low + step, most) if low else max(high - step, 1)
            step *= 2
    return high if high <= most else None


Counts = tuple[int, ...]


def cheapest_mix(
    keeps: Callable[[Counts], bool],
    costs: Sequence[float],
    rates: Sequence[float],
    rate: float,
    most: int,
) -> Counts | None:
    """Return the cheapest mix of workers that meets the targets; None if ``most`` are too few.

    The result is exact if an additional worker of any kind never does harm. For each number of the
    other kinds, the smallest number of the last kind is searched among mixes cheaper than the best
    so far.

    Args:
        keeps: returns whether numbers of workers of each kind meet the targets; not called if an
            earlier answer decides.
        costs: cost of a worker of each kind.
        rates: approximate rate that a worker of each kind can serve.
        most: largest number of workers of each kind.
    """
    kept: list[Counts] = []
    missed: list[Counts] = [(0,) * len(costs)]

    def known(counts: Counts) -> bool:
        if any(all(map(ge, counts, each)) for each in kept):
            return True
        if any(all(map(le, counts, each)) for each in missed):
            return False
        found = keeps(counts)
        (kept if found else missed).append(counts)
        return found

    def cost(counts: Counts) -> float:
        return math.fsum(map(mul, counts, costs))

    def guess(others: Counts) -> int:
        """Estimate how many workers of the last kind are needed in addition to these."""
        left = max(rate - math.fsum(map(mul, others, rates)), 0.0)
        return math.ceil(min(left / rates[-1], most)) if rates[-1] else most * bool(left)

    best: Counts | None = None
    rows = list(product(range(most + 1), repeat=len(costs) - 1))
    for others in sorted(rows, key=lambda row: cost((*row, guess(row)))):
        last = most
        if best:
            left = (cost(best) - cost((*others, 0))) / costs[-1]
            last = min(most, math.ceil(left - 1e-9) - 1)  # It is cheaper than the best.
        if last < 0 or (best and not known((*others, last))):
            continue

        def enough(number: int, row: Counts = others) -> bool:
            return known((*row, number - 1))  # ``fewest`` starts at one.

        found = fewest(enough, guess(others) + 1, last + 1)
        if found:
            best = *others, found - 1
    return best
