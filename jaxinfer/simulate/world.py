"""The simulated world: virtual time, steps by cost models, transfers as flows over links."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.network import Network
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import Arrival, Event, StepDone, Tick, TransferDone
from jaxinfer.simulate.cluster import ModelledCluster
from jaxinfer.simulate.costs.joint import JointRounds
from jaxinfer.simulate.costs.model import CostModel
from jaxinfer.simulate.shared_device import SharedDevice
from jaxinfer.simulate.stage_path import StagePath


@dataclass
class _Moving:
    """A transfer under way: how many pieces must still arrive, and when the first byte left."""

    transfer: Transfer
    lanes: Sequence[StagePath]
    left: int
    start: float


class SimulatedWorld:
    """Implements ``jaxinfer.serving.world.World``.

    Args:
        cluster: step times of its instances, and the links between them.
        requests: requests by time of arrival.
        start: time at which the cluster is ready; earlier requests wait for it.
    """

    def __init__(
        self, cluster: ModelledCluster, requests: Iterable[RequestState], start: float = 0.0
    ) -> None:
        self._instances = cluster.instances
        self._lanes, self._slice_lanes = cluster.lanes, cluster.slice_lanes
        visits = {name: each.visits for name, each in self._instances.items()}
        # Only those that have any, because this is read in each step.
        self._visits = {name: each for name, each in visits.items() if any(each)}
        self._turns: defaultdict[tuple[str, int], SharedDevice] = defaultdict(SharedDevice)
        self._network: Network[tuple[_Moving, StagePath]] = Network(cluster.capacities)
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        self._num_added = 0
        self.time = start
        self.order = itertools.count()
        # Steps that end at one time follow each other by their launch, then by their instance. Each
        # entry has its time, when it was put here, its instance's number, its own number, and an
        # event, or what is called for it with the rest.
        self.heap: list[tuple[Any, ...]] = []
        self.numbers = {name: number for number, name in enumerate(self._instances)}
        self._joint = cluster.joint.own if cluster.joint else {}
        self._rounds = JointRounds(cluster.joint) if cluster.joint else None
        # The times at which each device of an instance has done its work.
        self._free = {n: dict.fromkeys(each.devices, 0.0) for n, each in self._instances.items()}

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.time

    def arrivals_left(self) -> bool:
        """Tell whether a request is still to arrive."""
        return self._next is not None or self._num_added > 0

    def add(self, request: RequestState) -> None:
        """Let one more request arrive at its time."""
        self._num_added += 1
        self._at(request.arrival, partial(self._arrive, request))

    def _arrive(self, request: RequestState) -> Event:
        self._num_added -= 1
        return Arrival(request)

    def wake_at(self, time: float) -> None:
        """Ask for a Tick."""
        self._at(time, Tick())

    def kv_token_s(self, source: str, dest: str) -> float:
        """Return the seconds to send one KV token, all layers at once, over idle links."""
        lanes = self._lanes.get((source, dest), ())
        return self._network.least_seconds((lane.path, lane.token_bytes) for lane in lanes)

    def launch(self, batch: Batch) -> None:
        """Start a step after those already given to its stages."""
        if self._rounds and batch.instance in self._joint:
            assert not batch.transfers
            self._rounds.add(batch)
            return
        work, instance = batch.work, self._instances[batch.instance]
        seconds, hops = instance.cost.stages(work), instance.cost.hops(work)
        devices = instance.devices
        free, visits = self._free[batch.instance], self._visits.get(batch.instance)
        ready = self.time
        stages: list[tuple[float, float]] = []
        for number, duration in enumerate(seconds):
            if number:
                ready = stages[-1][1] + hops[number - 1]
            start = max(ready, free[devices[number]])
            end = start + duration
            if visits:
                for visit in visits[number]:
                    turns, busy = self._turns[visit.device], visit.seconds(work)
                    end = max(end, turns.take(start, busy, self.time))
            free[devices[number]] = end
            stages.append((start, end))
        tokens = [0] * work.sampled
        done = StepDone(batch, tokens, stages[0][0], stages[-1][1], stages=stages)
        self._at(done.end, done, self.numbers[batch.instance])
        for transfer in batch.transfers:
            self._send(transfer, stages, instance.segments)

    def start_transfer(self, transfer: Transfer) -> None:
        """Send existing KV entries."""
        lanes = self._lanes_of(transfer)
        moving = _Moving(transfer, lanes, len(lanes), self.time)
        for lane in lanes:
            self._start_lane(moving, lane, 1)

    def _send(
        self, transfer: Transfer, stages: Sequence[tuple[float, float]], segments: int
    ) -> None:
        """Send KV that a step computes: each piece of a stage's layers when it ends."""
        lanes = self._lanes_of(transfer)
        moving = _Moving(transfer, lanes, len(lanes) * segments, math.inf)
        for lane in lanes:
            start, end = stages[lane.stage]
            for piece in range(1, segments + 1):
                leaves = start + (end - start) * piece / segments
                here = self.numbers[transfer.source]
                self._at(leaves, partial(self._start_lane, moving, lane, segments), here)

    def _lanes_of(self, transfer: Transfer) -> Sequence[StagePath]:
        if move := transfer.slice_move:
            between = self._slice_lanes[transfer.source]
            each = [(between[source, dest], len(slices)) for source, dest, slices in move.moves]
            return [replace(lane, token_bytes=lane.token_bytes * n) for lane, n in each]
        spread = {transfer.source, transfer.dest} & self._slice_lanes.keys()
        if spread:
            raise JaxinferError(
                f"system hands KV from {transfer.source} to {transfer.dest}: {min(spread)} has "
                "attention groups, from and to which no hand-off is modelled"
            )
        lanes = self._lanes.get((transfer.source, transfer.dest))
        if lanes is None:
            raise JaxinferError(
                f"system hands KV from {transfer.source} to {transfer.dest}, "
                "which its routes do not name"
            )
        return lanes

    def _start_lane(self, moving: _Moving, lane: StagePath, pieces: int) -> None:
        moving.start = min(moving.start, self.time)
        tokens = moving.transfer.stop - moving.transfer.start
        num_bytes = tokens * lane.token_bytes / pieces
        self._network.start((moving, lane), lane.path, num_bytes, self.time)

    def _land(self, moving: _Moving) -> TransferDone | None:
        moving.left -= 1
        if moving.left:
            return None
        t = moving.transfer
        token_bytes = sum(lane.token_bytes for lane in moving.lanes)
        return TransferDone(t, moving.start, self.time, (t.stop - t.start) * token_bytes)

    def due_events(self) -> Sequence[Event]:
        """Return the next event in virtual time, and all other events at the same moment."""
        events: list[Event] = []
        if self._rounds:  # Everything that can be launched at this time has been launched.
            for done in self._rounds.begin(self.time):
                self._at(done.end, done, self.numbers[done.batch.instance])
        while not events and (time := self._next_time()) < math.inf:
            assert time >= self.time, "time runs back"
            self.time = time
            while self._next is not None and self._next.arrival <= time:
                events.append(Arrival(self._next))
                self._next = next(self._requests, None)
            for moving, lane in self._network.take_ended(time):
                self._at(time + lane.latency_s, partial(self._land, moving))
            while self.heap and self.heap[0][0] <= time:
                _, _, _, _, happens, *rest = heapq.heappop(self.heap)
                event = happens(*rest) if callable(happens) else happens
                if event is not None:
                    events.append(event)
        return events

    def _next_time(self) -> float:
        time = self.heap[0][0] if self.heap else math.inf
        if self._next is not None:
            time = min(time, max(self._next.arrival, self.time))
        end = self._network.next_end
        return time if end is None else min(time, end)

    def next_other(self) -> float:
        """Return the time before which only events in the heap happen."""
        if self._rounds:
            return self.time  # They begin when all has been launched.
        arrival = self._next.arrival if self._next else math.inf
        end = self._network.next_end
        return arrival if end is None else min(arrival, end)

    def single_device(self, name: str) -> tuple[CostModel, dict[int, float]] | None:
        """Return an instance's cost model, and when its only device will be free.

        Returns None if the instance has several devices, or shares one.
        """
        free = self._free[name]
        if name in self._joint or name in self._visits or len(free) != 1:
            return None
        return self._instances[name].cost, free

    def _at(
        self, time: float, happens: Event | Callable[[], Event | None], number: int = -1
    ) -> None:
        heapq.heappush(self.heap, (time, self.time, number, next(self.order), happens))
