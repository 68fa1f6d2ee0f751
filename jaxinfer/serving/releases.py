"""Requests that arrive when others have ended, for closed loops in both worlds."""

import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class Releases(Generic[T]):
    """Items that are each held until a number of requests have ended; true while any is held."""

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
        """Count one more end, and return the items that waited for it, in the order they were
        added.
        """
        self._num_ended += 1
        return self.due()

    def due(self) -> list[T]:
        """Remove and return the items that need not wait any longer."""
        found = []
        while self._held and self._held[0][0] <= self._num_ended:
            found.append(heapq.heappop(self._held)[2])
        return found
