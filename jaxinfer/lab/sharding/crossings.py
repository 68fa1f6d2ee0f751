"""Finds the numbers of tokens at which one layout becomes faster than another."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

# Returns the seconds of a step with a number of tokens.
SecondsOf = Callable[[int], float]


@dataclass(frozen=True)
class Crossing:
    """The number of tokens from which on ``faster`` takes less time than ``slower``."""

    tokens: int
    faster: str
    slower: str


def token_counts(most: int) -> list[int]:
    """Return numbers of tokens to examine: two per doubling, from 1 on."""
    found, power = [1, 2], 2
    while power < most:
        found += [power * 3 // 2, power * 2]
        power *= 2
    return [count for count in dict.fromkeys(found) if count <= most]


def crossings(seconds: Mapping[str, SecondsOf], counts: Sequence[int]) -> list[Crossing]:
    """Return where each pair of layouts crosses within these counts, sorted by tokens.

    Equal layouts never cross. If seconds rise in steps and two layouts cross several times between
    neighbouring counts, one of the crossings is found.
    """
    found = []
    for one, two in combinations(seconds, 2):
        before = 0
        points = [(count, _sign(seconds[one](count), seconds[two](count))) for count in counts]
        for (low, at_low), (high, at_high) in pairwise(points):
            before = at_low or before
            if at_high and before and at_high != before:
                low = _first(seconds[one], seconds[two], low, high, before)
                faster, slower = (one, two) if at_high < 0 else (two, one)
                found.append(Crossing(low, faster, slower))
    return sorted(found, key=lambda each: each.tokens)


def fastest(seconds: Mapping[str, SecondsOf], counts: Sequence[int]) -> list[tuple[int, str]]:
    """Return the fastest layouts, each with the number of tokens from which on it is the fastest.

    Of layouts that are equally fast, the first counts. Seconds may be infinite.
    """
    found: list[tuple[int, str]] = []
    marks = sorted({*counts, *(each.tokens for each in crossings(seconds, counts))})
    for count in marks:
        best = min(seconds, key=lambda name: seconds[name](count))
        # If no time is finite, no layout is the fastest.
        last = seconds[found[-1][1]](count) if found else math.inf
        if _sign(seconds[best](count), last) < 0:
            found.append((count, best))
    return found


def _sign(one: float, two: float) -> int:
    """Return -1 if the first is less, 1 if it is more, and 0 if they are equal up to rounding."""
    if math.isclose(one, two, rel_tol=1e-9):
        return 0
    return -1 if one < two else 1


def _first(one: SecondsOf, two: SecondsOf, low: int, high: int, before: int) -> int:
    """Return the least count above ``low`` at which the comparison is no longer ``before``."""
    while high - low > 1:
        middle = (low + high) // 2
        if _sign(one(middle), two(middle)) in (before, 0):
            low = middle
        else:
            high = middle
    return high
