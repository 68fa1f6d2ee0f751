"""Flows of bytes that share links: each gets its fair share (max-min) of the fullest on its way."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Tag = TypeVar("Tag")
Link = Hashable


@dataclass(eq=False)
class _Flow(Generic[Tag]):
    tag: Tag
    path: Sequence[Link]
    left: float
    rate: float = 0.0
    end: float = 0.0


class Network(Generic[Tag]):
    """Links with capacities in bytes per second, and what is on them."""

    def __init__(self, capacities: Mapping[Link, float]) -> None:
        self._capacities = capacities
        self._flows: list[_Flow[Tag]] = []
        self._now = 0.0
        # Whether rates are to be found anew: flows have come or gone since they were.
        self._changed = False

    def start(self, tag: Tag, path: Sequence[Link], num_bytes: float, now: float) -> None:
        """Send bytes over all links of a path at once."""
        self._advance(now)
        self._flows.append(_Flow(tag, path, num_bytes))
        self._changed = True

    def least_seconds(self, flows: Iterable[tuple[Sequence[Link], float]]) -> float:
        """Seconds that the fullest link needs for flows of so many bytes over so many links."""
        through: dict[Link, float] = {}
        for path, num_bytes in flows:
            for link in path:
                through[link] = through.get(link, 0.0) + num_bytes
        return max((each / self._capacities[link] for link, each in through.items()), default=0.0)

    @property
    def next_end(self) -> float | None:
        """Time at which the first flow ends, if nothing else starts; None without flows."""
        self._share()
        return min(flow.end for flow in self._flows) if self._flows else None

    def take_ended(self, now: float) -> list[Tag]:
        """Tags of the flows that have ended by now, in the order of their start."""
        self._share()
        ended = [flow for flow in self._flows if flow.end <= now]
        if ended:
            self._advance(now)
            self._flows = [flow for flow in self._flows if flow.end > now]
            self._changed = True
        return [flow.tag for flow in ended]

    def _advance(self, now: float) -> None:
        if now == self._now:
            return
        self._share()
        for flow in self._flows:
            flow.left = max(flow.left - flow.rate * (now - self._now), 0.0)
        self._now = now

    def _share(self) -> None:
        """Progressive filling: the link with the least per flow decides its flows' rates."""
        if not self._changed:
            return
        self._changed = False
        spare = {link: self._capacities[link] for flow in self._flows for link in flow.path}
        waiting = list(self._flows)
        while waiting:
            counts = {link: sum(link in flow.path for flow in waiting) for link in spare}
            rate, tightest = min(
                (spare[link] / count, number)
                for number, (link, count) in enumerate(counts.items())
                if count
            )
            full = list(counts)[tightest]
            for flow in [flow for flow in waiting if full in flow.path]:
                waiting.remove(flow)
                flow.rate = rate
                flow.end = self._now + flow.left / rate
                for link in flow.path:
                    spare[link] -= rate
