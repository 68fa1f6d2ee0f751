"""Flows of bytes that share links; each gets its max-min fair share of its fullest link."""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

Tag = TypeVar("Tag")
Link = Hashable


@dataclass(eq=False)
class _Way(Generic[Tag]):
    """The flows over one path, which are always equally fast.

    Attributes:
        flows: flows by number, in the order of their start.
        left: remaining bytes of each flow, the smallest first.
        numbers: numbers of the flows, in the same order.
    """

    path: tuple[Link, ...]
    flows: dict[int, Tag] = field(default_factory=dict)
    left: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    rate: float = 0.0

    @property
    def oldest(self) -> int:
        """Number of the flow that started first."""
        return next(iter(self.flows))


class Network(Generic[Tag]):
    """Links with capacities in bytes per second, and the flows on them."""

    def __init__(self, capacities: Mapping[Link, float]) -> None:
        self._capacities = capacities
        self._ways: dict[tuple[Link, ...], _Way[Tag]] = {}
        self._numbers = count()
        self._now = 0.0
        self._next_end: float | None = None
        # Whether rates must be computed again, because flows have started or ended.
        self._changed = False

    def start(self, tag: Tag, path: Sequence[Link], num_bytes: float, now: float) -> None:
        """Start a flow of bytes that uses all links of a path simultaneously."""
        self._advance(now)
        links, number = tuple(path), next(self._numbers)
        way = self._ways.setdefault(links, _Way(links))
        way.flows[number] = tag
        place = bisect_right(way.left, num_bytes)
        way.left.insert(place, num_bytes)
        way.numbers.insert(place, number)
        self._changed = True

    def least_seconds(self, flows: Iterable[tuple[Sequence[Link], float]]) -> float:
        """Return the seconds for which the busiest link must send, given each flow's links and
        bytes.
        """
        through: dict[Link, float] = {}
        for path, num_bytes in flows:
            for link in path:
                through[link] = through.get(link, 0.0) + num_bytes
        return max((each / self._capacities[link] for link, each in through.items()), default=0.0)

    @property
    def next_end(self) -> float | None:
        """Time at which the next flow ends if no other starts before; None without flows."""
        if self._changed:
            self._share()
        return self._next_end

    def take_ended(self, now: float) -> list[Tag]:
        """Return the tags of the flows that have ended by now, in the order of their start."""
        if not self._ways or (end := self.next_end) is None or end > now:
            return []
        ended: list[tuple[int, Tag]] = []
        for way in self._ways.values():
            # Rates are those of this time: no flow has started or ended since.
            num = bisect_right(way.left, now, key=lambda left: self._now + left / way.rate)
            ended += [(number, way.flows.pop(number)) for number in way.numbers[:num]]
            del way.left[:num], way.numbers[:num]
        self._advance(now)
        self._ways = {path: way for path, way in self._ways.items() if way.flows}
        self._changed = True
        return [tag for _, tag in sorted(ended, key=itemgetter(0))]

    def _advance(self, now: float) -> None:
        if now == self._now:
            return
        if self._changed:
            self._share()
        for way in self._ways.values():
            sent = way.rate * (now - self._now)
            way.left = [left - sent if left > sent else 0.0 for left in way.left]
        self._now = now

    def _share(self) -> None:
        """Share by progressive filling: the link with the least per flow sets its flows' rates."""
        self._changed = False
        ways = sorted(self._ways.values(), key=attrgetter("oldest"))
        through: dict[Link, list[_Way[Tag]]] = {}
        for way in ways:
            way.rate = 0.0
            for link in way.path:
                through.setdefault(link, []).append(way)
        spare = {link: self._capacities[link] for link in through}
        counts = {link: sum(len(way.flows) for way in over) for link, over in through.items()}
        while counts:
            full = min(counts, key=lambda link: spare[link] / counts[link])
            rate = spare[full] / counts[full]
            for way in through[full]:
                if way.rate:
                    continue
                way.rate = rate
                for link in way.path:
                    counts[link] -= len(way.flows)
                    if counts[link]:
                        # One sum differs from single additions in its last bits.
                        for _ in way.flows:
                            spare[link] -= rate
            counts = {link: left for link, left in counts.items() if left}
        ends = (self._now + way.left[0] / way.rate for way in ways)
        self._next_end = min(ends, default=None)
