"""The real world: wall-clock time, and one worker per instance."""

import heapq
import queue
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.transfer import Landed, Route
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.transfer import Transfer
from jaxinfer.serving.world import Arrival, Batch, Event, StepDone, Tick, TransferDone


class RealWorld:
    """Time by the clock, steps by workers. One run long; the workers outlive it.

    Args:
        workers: by instance name.
        routes: by names of source and destination.
        requests: each arrives at its ``arrival``, in seconds from the world's creation.

    Attributes:
        waited_s: seconds spent waiting for devices and arrivals.
        launching_s: seconds spent on building and launching steps.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        requests: Iterable[RequestState],
        routes: Mapping[tuple[str, str], Route] | None = None,
    ) -> None:
        self.waited_s = 0.0
        self.launching_s = 0.0
        self._workers = workers
        self._routes = routes or {}
        self._origin = time.perf_counter()
        self._arrivals: deque[RequestState] = deque()
        self.add(requests)
        self._ticks: list[float] = []
        self._posted: queue.SimpleQueue[StepDone | Landed | Exception] = queue.SimpleQueue()
        # Of each transfer under way, the slabs still to land and when the first one left.
        self._slabs_left: dict[int, int] = {}
        self._left_at: dict[int, float] = {}
        self._in_flight = 0

    def now(self) -> float:
        """Seconds since the world's creation."""
        return time.perf_counter() - self._origin

    def add(self, requests: Iterable[RequestState]) -> None:
        """Let more requests arrive, each at its time or, where that is past, at once."""
        if requests := list(requests):
            # Stable: of those that arrive together, the first comes first.
            self._arrivals = deque(sorted([*self._arrivals, *requests], key=lambda r: r.arrival))

    def arrivals_left(self) -> bool:
        """Whether a request is still to arrive."""
        return bool(self._arrivals)

    def can_launch(self, instance: str) -> bool:
        """Always: a device queues what it is given."""
        return True

    def launch(self, batch: Batch) -> None:
        """Start a step on the instance's worker."""
        start = time.perf_counter()
        self._workers[batch.instance].launch(batch, self._origin, self._posted.put)
        self._in_flight += 1
        self.launching_s += time.perf_counter() - start

    def start_transfer(self, transfer: Transfer) -> None:
        """Start moving KV entries between two instances."""
        if transfer.slice_move:
            raise JaxinferError("the real world has all KV heads of a stage in one pool")
        start = time.perf_counter()
        route = self._routes[transfer.source, transfer.dest]
        self._slabs_left[id(transfer)] = route.send(transfer, self._posted.put)
        self._in_flight += 1
        self.launching_s += time.perf_counter() - start

    def wake_at(self, time: float) -> None:
        """Ask for a Tick."""
        heapq.heappush(self._ticks, time)

    def due_events(self) -> Sequence[Event]:
        """What has happened since the last call; waits for the first event.

        Raises:
            Exception: what a step has failed with.
        """
        start = time.perf_counter()
        events = self._due_by_clock()
        while not events and (self._in_flight or self._next_by_clock() is not None):
            due = self._next_by_clock()
            timeout = None if due is None else max(due - self.now(), 0)
            try:
                events += self._take(self._posted.get(timeout=timeout))
            except queue.Empty:
                events = self._due_by_clock()
        while not self._posted.empty():
            events += self._take(self._posted.get())
        self.waited_s += time.perf_counter() - start
        return events

    def _next_by_clock(self) -> float | None:
        times = self._ticks[:1]
        if self._arrivals:
            times = [*times, self._arrivals[0].arrival]
        return min(times, default=None)

    def _due_by_clock(self) -> list[Event]:
        now = self.now()
        events: list[Event] = []
        while self._arrivals and self._arrivals[0].arrival <= now:
            events.append(Arrival(self._arrivals.popleft()))
        while self._ticks and self._ticks[0] <= now:
            heapq.heappop(self._ticks)
            events.append(Tick())
        return events

    def _take(self, posted: StepDone | Landed | Exception) -> list[Event]:
        match posted:
            case Exception():
                raise posted
            case StepDone():
                self._in_flight -= 1
                return [posted]
        return self._place(posted)

    def _place(self, landed: Landed) -> list[Event]:
        """Write a slab to its pages; steps launched from here on read them."""
        transfer, lane = landed.slab.transfer, landed.slab.lane
        lane.place(landed.slab, landed.array)
        key = id(transfer)
        left_at = self._left_at.setdefault(key, landed.start)
        self._slabs_left[key] -= 1
        if self._slabs_left[key]:
            return []
        del self._slabs_left[key], self._left_at[key]
        self._in_flight -= 1
        route = self._routes[transfer.source, transfer.dest]
        num_bytes = (transfer.stop - transfer.start) * route.token_bytes
        start, end = left_at - self._origin, landed.end - self._origin
        return [TransferDone(transfer, start, end, num_bytes)]
