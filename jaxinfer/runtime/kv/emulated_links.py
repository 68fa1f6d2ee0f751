"""Holds back slabs for as long as emulated links would take."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxinfer.hardware.network import Link, Network
from jaxinfer.runtime.kv.channel import Landed
from jaxinfer.runtime.kv.stage_pair import StagePair
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.kv_shards import HeldPages

# Slabs of one transfer between the same pair are sent one after another.
Flow = tuple[Transfer, StagePair]
# Slabs of several transfers may overtake each other, but not on their way to the same pages.
Way = tuple[HeldPages, StagePair]


@dataclass(eq=False)
class _Slab:
    """A slab on its way; with ``has_come``, it only waits for earlier ones."""

    landed: Landed
    has_come: bool = False


class EmulatedLinks:
    """Links emulated as in a simulation: flows share a link's rate, and each pays its latency once.

    A slab lands no earlier than earlier slabs to the same pages, because writing pages of 8 bits
    erases the entries behind. All times are those of ``time.perf_counter``.

    Args:
        pairs: pairs of stages of all channels.
    """

    def __init__(self, pairs: Iterable[StagePair]) -> None:
        # Each direction between two groups has the link's whole rate.
        rates: dict[Link, float] = {
            pair.groups: pair.link.gb_s * 1e9 for pair in pairs if pair.link
        }
        self._network: Network[Flow] = Network(rates)
        self._queues: dict[Flow, deque[_Slab]] = {}
        self._ways: dict[Way, deque[_Slab]] = {}
        self._landing: list[tuple[float, int, _Slab]] = []
        self._order = itertools.count()
        self._now = 0.0

    def least_seconds(self, pairs: Iterable[StagePair]) -> float:
        """Return the seconds that a KV token takes on idle links, counting only emulated links."""
        return self._network.least_seconds(
            ([pair.groups], pair.token_bytes) for pair in pairs if pair.link
        )

    def hold_back(self, landed: Landed) -> None:
        """Queue a slab, whose data is already there, behind earlier slabs on its emulated link."""
        self._advance(landed.start)
        flow, slab = (landed.slab.transfer, landed.slab.pair), _Slab(landed)
        self._ways.setdefault(_way(landed), deque()).append(slab)
        queue = self._queues.setdefault(flow, deque())
        queue.append(slab)
        if len(queue) == 1:
            self._start(flow, landed.start)

    @property
    def next_time(self) -> float | None:
        """Time at which the next slab is sent or lands; None if no slab is on its way."""
        times = (self._network.next_end, self._landing[0][0] if self._landing else None)
        return min((time for time in times if time is not None), default=None)

    def take_landed(self, now: float) -> list[Landed]:
        """Return the slabs that have landed by now, each with the time of its landing."""
        self._advance(now)
        taken = []
        while self._landing and self._landing[0][0] <= now:
            time, _, slab = heapq.heappop(self._landing)
            slab.has_come = True
            way = _way(slab.landed)
            behind = self._ways[way]
            while behind and behind[0].has_come:
                landed = behind.popleft().landed
                taken.append(replace(landed, end=max(landed.end, time)))
            if not behind:
                del self._ways[way]
        return taken

    def _advance(self, now: float) -> None:
        while (end := self._network.next_end) is not None and end <= now:
            self._now = end
            for flow in self._network.take_ended(end):
                queue = self._queues[flow]
                slab = queue.popleft()
                link = slab.landed.slab.pair.link
                assert link
                heapq.heappush(self._landing, (end + link.latency_s, next(self._order), slab))
                if queue:
                    self._start(flow, end)
                else:
                    del self._queues[flow]

    def _start(self, flow: Flow, time: float) -> None:
        # Reports of several routes may arrive in another order than the events.
        self._now = max(self._now, time)
        slab, (_, pair) = self._queues[flow][0].landed.slab, flow
        num_bytes = (slab.stop - slab.start) * pair.token_bytes
        self._network.start(flow, [pair.groups], num_bytes, self._now)


def _way(landed: Landed) -> Way:
    return landed.slab.transfer.dest_hold, landed.slab.pair
