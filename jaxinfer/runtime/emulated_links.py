"""Slabs held back for as long as they would take over emulated links."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from jaxinfer.runtime.lane import Lane, RemoteLane
from jaxinfer.runtime.transfer import Landed
from jaxinfer.serving.batch import Transfer
from jaxinfer.steps.network import Link, Network

# The slabs of one transfer that take one lane follow one another.
Flow = tuple[Transfer, Lane | RemoteLane]


class EmulatedLinks:
    """As in a simulation: flows share a link's rate, and each pays its latency once.

    All times are those of ``time.perf_counter``.

    Args:
        lanes: of all routes.
    """

    def __init__(self, lanes: Iterable[Lane | RemoteLane]) -> None:
        # Each way between two groups has the link's rate to itself.
        rates: dict[Link, float] = {
            lane.groups: lane.link.gb_s * 1e9 for lane in lanes if lane.link
        }
        self._network: Network[Flow] = Network(rates)
        self._queues: dict[Flow, deque[Landed]] = {}
        self._landing: list[tuple[float, int, Landed]] = []
        self._order = itertools.count()
        self._now = 0.0

    def hold_back(self, landed: Landed) -> None:
        """Let a slab leave at its start, behind those before it; the machine has moved it."""
        self._advance(landed.start)
        flow = landed.slab.transfer, landed.slab.lane
        queue = self._queues.setdefault(flow, deque())
        queue.append(landed)
        if len(queue) == 1:
            self._start(flow, landed.start)

    @property
    def next_time(self) -> float | None:
        """When the next slab has been sent or lands."""
        times = (self._network.next_end, self._landing[0][0] if self._landing else None)
        return min((time for time in times if time is not None), default=None)

    def take_landed(self, now: float) -> list[Landed]:
        """What has landed by now; each slab's end is when it did."""
        self._advance(now)
        taken = []
        while self._landing and self._landing[0][0] <= now:
            time, _, landed = heapq.heappop(self._landing)
            taken.append(replace(landed, end=max(landed.end, time)))
        return taken

    def _advance(self, now: float) -> None:
        while (end := self._network.next_end) is not None and end <= now:
            self._now = end
            for flow in self._network.take_ended(end):
                queue = self._queues[flow]
                landed = queue.popleft()
                assert landed.slab.lane.link
                lands = end + landed.slab.lane.link.latency_s
                heapq.heappush(self._landing, (lands, next(self._order), landed))
                if queue:
                    self._start(flow, end)
                else:
                    del self._queues[flow]

    def _start(self, flow: Flow, time: float) -> None:
        # Reports of several routes may come in another order than what they tell of.
        self._now = max(self._now, time)
        slab, (_, lane) = self._queues[flow][0].slab, flow
        num_bytes = (slab.stop - slab.start) * lane.token_bytes
        self._network.start(flow, [lane.groups], num_bytes, self._now)
