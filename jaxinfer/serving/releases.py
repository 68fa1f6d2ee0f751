"""Requests that arrive after others have ended: closed loops and sessions, in both worlds."""

import heapq
import itertools
from collections import defaultdict
from typing import Generic, TypeVar

T = TypeVar("T")


class Releases(Generic[T]):
    """Items that are each held until other requests have ended; true while any is held."""

    def __init__(self) -> None:
        self._num_ended = 0
        self._order = itertools.count()
        self._held: list[tuple[int, int, T]] = []
        self._followers: dict[str, list[T]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._held or self._followers)

    def hold(self, after_ends: int, item: T) -> None:
        """Hold an item until ``after_ends`` requests have ended."""
        heapq.heappush(self._held, (after_ends, next(self._order), item))

    def hold_for(self, request_id: str, item: T) -> None:
        """Hold an item until the request with this id has ended."""
        self._followers[request_id].append(item)

    def ended(self, request_id: str = "") -> list[T]:
        """Count one more end, and return the items that waited for it, in the order they were
        added.
        """
        self._num_ended += 1
        return [*self.due(), *self._followers.pop(request_id, ())]

    def due(self) -> list[T]:
        """Remove and return the items that need not wait any longer."""
        found = []
        while self._held and self._held[0][0] <= self._num_ended:
            found.append(heapq.heappop(self._held)[2])
        return found
