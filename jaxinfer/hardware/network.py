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
        self._next_end: float | None = None
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
        return self._next_end

    def take_ended(self, now: float) -> list[Tag]:
        """Tags of the flows that have ended by now, in the order of their start."""
        end = self.next_end
        if end is None or end > now:
            return []
        self._advance(now)
        ended = [flow.tag for flow in self._flows if flow.end <= now]
        self._flows = [flow for flow in self._flows if flow.end > now]
        self._changed = True
        return ended

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
        through: dict[Link, list[_Flow[Tag]]] = {}
        for flow in self._flows:
            flow.rate = 0.0
            for link in flow.path:
                through.setdefault(link, []).append(flow)
        spare = {link: self._capacities[link] for link in through}
        counts = {link: len(flows) for link, flows in through.items()}
        while counts:
            full = min(counts, key=lambda link: spare[link] / counts[link])
            rate = spare[full] / counts[full]
            for flow in through[full]:
                if flow.rate:
                    continue
                flow.rate = rate
                flow.end = self._now + flow.left / rate
                for link in flow.path:
                    spare[link] -= rate
                    counts[link] -= 1
            counts = {link: count for link, count in counts.items() if count}
        self._next_end = min((flow.end for flow in self._flows), default=None)
