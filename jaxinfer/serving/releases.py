"""Requests that come once others have ended: what makes a closed loop, in either world."""

import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class Releases(Generic[T]):
    """Items, each held until a number of requests have ended; true while it holds any."""

    def __init__(self) -> None:
        self._num_ended = 0
        self._order = itertools.count()
        self._held: list[tuple[int, int, T]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, after_ends: int, item: T) -> None:
        """Hold an item until ``after_ends`` requests have ended."""
        heapq.heappush(self._held, (after_ends, next(self._order), item))

    def ended(self) -> list[T]:
        """Count one more end; what has waited for it, in the order in which it was held."""
        self._num_ended += 1
        return self.due()

    def due(self) -> list[T]:
        """Take out the items that need not wait any more."""
        found = []
        while self._held and self._held[0][0] <= self._num_ended:
            found.append(heapq.heappop(self._held)[2])
        return found
