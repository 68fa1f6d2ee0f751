"""Changes an instance's role if it was idle while all instances of the other role were busy."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import permutations


class Flips:
    """Counts in how many reports each instance was busy.

    Args:
        after: length of the observed window in seconds; None: no instance ever flips.
        below: share of the reports in that time at which an instance that flips may have been busy,
            and each of the other role idle.
    """

    def __init__(self, after: float | None, below: float) -> None:
        self._after, self._below = after, below
        # For each instance, since it has had its role: when it reported, and whether it was busy.
        self._reports: dict[str, deque[tuple[float, bool]]] = {}

    def watch(self, names: Collection[str], idle: Collection[str], now: float) -> None:
        """Record which instances are idle, in a report of all of them."""
        if self._after is None:
            return
        self._reports = {name: self._reports.get(name, deque()) for name in names}
        for name, reports in self._reports.items():
            reports.append((now, name not in idle))
            # One entry is kept that is as old as the time to look back.
            while len(reports) > 1 and reports[1][0] <= now - self._after:
                reports.popleft()

    def next(self, roles: Mapping[str, Sequence[str]], now: float) -> tuple[str, str] | None:
        """Return an instance and its new role: among several, the one that was busy the least.

        The last instance of a role keeps that role. An instance changes only to a role that needs
        it; otherwise a constant load would make instances change back and forth.

        Args:
            roles: the two roles, and the instances in each.
        """
        for role, other in permutations(roles, 2):
            shares = {name: self._share(name, now) for name in roles[role]}
            idle = {name: s for name, s in shares.items() if s is not None and s <= self._below}
            needed = all(
                (share := self._share(name, now)) is not None and share >= 1 - self._below
                for name in roles[other]
            )
            if idle and needed and len(roles[role]) > 1:
                name = min(idle, key=idle.__getitem__)
                del self._reports[name]
                return name, other
        return None

    def _share(self, name: str, now: float) -> float | None:
        """Return the share of reports at which it was busy; None if its role is too new."""
        reports = self._reports.get(name)
        if self._after is None or not reports or reports[0][0] > now - self._after:
            return None
        return sum(busy for _, busy in reports) / len(reports)
