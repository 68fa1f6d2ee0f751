"""The real world: wall-clock time, and one worker per instance."""

import heapq
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jaxinfer.errors import JaxinferError, OnlyInstanceLost, one_line
from jaxinfer.runtime.kv.channel import Channel, Landed
from jaxinfer.runtime.kv.emulated_links import EmulatedLinks
from jaxinfer.runtime.kv.outcome import End, Failed, ProcessLost, SlabLost
from jaxinfer.runtime.losses import LossEvents
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote
from jaxinfer.runtime.processes.remote_worker import RemoteWorker
from jaxinfer.runtime.processes.restart_groups import Restarted
from jaxinfer.runtime.processes.restarts import Restarts
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import (
    Arrival,
    Event,
    StepDone,
    Tick,
    TransferDone,
)


@dataclass(frozen=True)
class _Quiet:
    """An instance that the run waits for has reported nothing for too long."""

    instance: str


News = Failed | Restarted | _Quiet
Posted = StepDone | TransferDone | Landed | News


class RealWorld:
    """Keeps wall-clock time, and lets workers run steps. It lasts for one run, unlike the workers.

    Args:
        workers: workers by instance name.
        channels: channels by names of source and destination.
        watchdog_s: seconds after which an instance is given up if the run waits for its steps or
            transfers and it reports nothing; None waits for ever.
        requests: each arrives at its ``arrival``, in seconds from the world's creation.
        more_to_come: whether more requests will be added with ``add``.
        restarts: restarts lost processes.

    Attributes:
        waited_s: seconds spent waiting for devices and arrivals.
        launching_s: seconds spent on building and launching steps.
        lost: see Losses.
        returning: see Losses.
        restarted: see Losses.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker | AnyRemote],
        requests: Iterable[RequestState],
        channels: Mapping[tuple[str, str], Channel] | None = None,
        watchdog_s: float | None = None,
        more_to_come: Callable[[], bool] = lambda: False,
        restarts: Restarts | None = None,
    ) -> None:
        self.waited_s = 0.0
        self.launching_s = 0.0
        self._workers = workers
        self._channels = channels or {}
        pairs = [pair for channel in self._channels.values() for pair in channel.pairs]
        self._links = EmulatedLinks(pairs)
        self._sides = {side for channel in self._channels.values() for side in channel.sides}
        self._origin = time.perf_counter()
        self._arrivals: deque[RequestState] = deque()
        self.add(requests)
        self._more_to_come = more_to_come
        self._ticks: list[float] = []
        self._watchdog_s = watchdog_s
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        # Events that were taken from the queue and are not reported yet.
        self._heard: deque[Posted] = deque()
        # Instances that have not taken a message, of which the loop has not heard.
        self._refused: set[str] = set()
        # For each transfer in flight, the slabs that have not landed, and the time at which the
        # first one left.
        self._slabs_left: dict[Transfer, int] = {}
        self._left_at: dict[Transfer, float] = {}
        # For each instance, its steps and moves of KV heads in flight, and the time at which it
        # received the first or reported one.
        self._steps: dict[str, int] = {}
        self._heard_at: dict[str, float] = {}
        self._losses = losses = LossEvents(restarts, workers, self._forget)
        self.lost, self.returning, self.restarted = losses.lost, losses.returning, losses.restarted
        losses.listen(self._posted.put)

    def now(self) -> float:
        """Return the seconds since the world's creation."""
        return time.perf_counter() - self._origin

    def add(self, requests: Iterable[RequestState]) -> None:
        """Let more requests arrive, each at its own time, or at once if that time has passed."""
        if requests := list(requests):
            # The sort is stable: of requests with equal arrivals, the first stays first.
            self._arrivals = deque(sorted([*self._arrivals, *requests], key=lambda r: r.arrival))

    def arrivals_left(self) -> bool:
        """Tell whether a request is yet to arrive."""
        return bool(self._arrivals) or self._more_to_come()

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight, nothing will return, and no known request is to arrive."""
        return not (self._steps or self._slabs_left or self._losses.awaits or self._arrivals)

    def drain(self) -> None:
        """Wait for steps and transfers to end, without further arrivals or ticks.

        Raises:
            Exception: see ``due_events``.
        """
        self._arrivals.clear()
        self._ticks.clear()
        while self._steps or self._slabs_left:
            self.due_events()

    def kv_token_s(self, source: str, dest: str) -> float:
        """Return the seconds that one KV token takes over emulated links; 0 if none is emulated."""
        channel = self._channels.get((source, dest))
        return self._links.least_seconds(channel.pairs) if channel else 0.0

    def launch(self, batch: Batch) -> None:
        """Start a step on the instance's worker, unless it has failed to start an earlier step."""
        if batch.instance in self._refused:
            return  # A part that the other lacks would make this one fail for another reason.
        start = time.perf_counter()
        self._begin(batch.instance, start)
        try:
            channels = [self._prepare(transfer) for transfer in batch.transfers]

            def launched(stage: int, ended: End) -> None:
                for transfer, channel in zip(batch.transfers, channels, strict=True):
                    channel.send(transfer, self._posted.put, stage, ended)

            self._workers[batch.instance].launch(batch, self._origin, self._posted.put, launched)
            if self._steps[batch.instance] == 1:
                # Launching may have compiled for a long time.
                self._heard_at[batch.instance] = time.perf_counter()
        except JaxinferError:
            raise
        except Exception as error:
            self._refuse(batch.instance, error)
        self.launching_s += time.perf_counter() - start

    def _refuse(self, instance: str, error: Exception) -> None:
        """Record that an instance has not accepted something.

        This comes before all news, since news may let another process take the instance's place. If
        there are several failures, the first one causes the others.
        """
        if instance not in self._refused:
            self._refused.add(instance)
            self._heard.appendleft(Failed(instance, error))

    def _begin(self, instance: str, now: float) -> None:
        """Count one more step, or move of KV heads, that must be reported."""
        self._steps[instance] = self._steps.get(instance, 0) + 1
        if self._steps[instance] == 1:
            self._heard_at[instance] = now

    def _end(self, instance: str) -> bool:
        """Count one that was reported, unless its instance is lost."""
        if instance in self.lost:
            return False
        self._heard_at[instance] = time.perf_counter()
        self._steps[instance] -= 1
        if not self._steps[instance]:
            del self._steps[instance]
        return True

    def start_transfer(self, transfer: Transfer) -> None:
        """Start to move KV entries between two instances, or between the devices of one."""
        start = time.perf_counter()
        if transfer.slice_move:
            self._move_slices(transfer)
            self.launching_s += time.perf_counter() - start
            return
        channel = self._prepare(transfer)
        try:
            channel.send(transfer, self._posted.put)
        except Exception as error:
            self._refuse(transfer.source, error)
        self.launching_s += time.perf_counter() - start

    def _prepare(self, transfer: Transfer) -> Channel:
        """Count the slabs that will land, and return the channel."""
        channel = self._channels.get((transfer.source, transfer.dest))
        if channel is None:
            raise JaxinferError(
                f"system hands KV from {transfer.source} to {transfer.dest}, "
                "which its routes do not name"
            )
        self._slabs_left[transfer] = channel.num_slabs(transfer)
        return channel

    def _move_slices(self, transfer: Transfer) -> None:
        worker = self._workers[transfer.source]
        assert not isinstance(worker, RemoteWorker), "the KV heads of a stage there lie together"
        self._begin(transfer.source, time.perf_counter())
        try:
            worker.move(transfer, self._origin, self._posted.put)
        except Exception as error:
            self._refuse(transfer.source, error)

    def wake_at(self, time: float) -> None:
        """Ask for a Tick."""
        heapq.heappush(self._ticks, time)

    def due_events(self) -> Sequence[Event]:
        """Return the events since the last call; if there are none, wait for the first one.

        Losses and returns come first, and other events in the next call. If the loop starts work on
        an instance before it learns that the instance is lost, that work is also given up.

        Raises:
            Exception: the error of a failed step, if there is only one instance.
        """
        start = time.perf_counter()
        events = self._due_now()
        while not events and (self._heard or self._ticks or not self.is_idle):
            with suppress(queue.Empty):
                if not self._heard:
                    self._heard.append(self._posted.get(timeout=self._patience()))
            events = self._due_now()
        self.waited_s += time.perf_counter() - start
        return events

    def _due_now(self) -> list[Event]:
        while not self._posted.empty():
            self._heard.append(self._posted.get())
        events: list[Event] = []
        while self._heard and isinstance(self._heard[0], News):
            events += self._take(self._heard.popleft())
        events += self._due_by_clock()
        while self._heard and not isinstance(self._heard[0], News):
            events += self._take(self._heard.popleft())
        for landed in self._links.take_landed(time.perf_counter()):
            events += self._place(landed)
        self._heard.extendleft(self._quiet())
        return events

    def _patience(self) -> float | None:
        """Return the seconds until the next timed event, or until an instance is quiet for too
        long.
        """
        ends = [] if (lands := self._links.next_time) is None else [lands]
        if (due := self._next_by_clock()) is not None:
            ends.append(self._origin + due)
        if self._watchdog_s:
            # A channel that nothing waits for yet may come to be waited for.
            quiet_since = [time.perf_counter(), *self._quiet_since().values()]
            ends.append(min(quiet_since) + self._watchdog_s)
        return max(min(ends) - time.perf_counter(), 0) if ends else None

    def _quiet_since(self) -> dict[str, float]:
        """Return the instances that the run waits for, and since when they have been quiet."""
        found = {name: self._heard_at[name] for name in self._steps}
        for name, start in [
            waited for side in self._sides for waited in [*side.waits_for.values()]
        ]:
            if name not in self.lost:
                start = max(start, self._heard_at.get(name, start))
                found[name] = min(start, found.get(name, start))
        return found

    def _quiet(self) -> list[_Quiet]:
        """Return the instances that have been quiet for too long."""
        if not self._watchdog_s:
            return []
        before = time.perf_counter() - self._watchdog_s
        return [_Quiet(name) for name, since in self._quiet_since().items() if since <= before]

    def _forget(self, instance: str) -> None:
        """Expect nothing more of a lost instance."""
        self._steps.pop(instance, None)
        for transfer in list(self._slabs_left):
            if instance in (transfer.source, transfer.dest):
                del self._slabs_left[transfer]
                self._left_at.pop(transfer, None)

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

    def _take(self, posted: Posted) -> list[Event]:
        match posted:
            case Failed():
                return self._fail(posted)
            case Restarted(group):
                return list(self._losses.learn(group))
            case _Quiet(name):
                why = f"it has not reported for {self._watchdog_s:g} s"
                return [] if name in self.lost else [self._losses.lose(name, why)]
            case TransferDone(transfer):
                return [posted] if self._end(transfer.source) else []
            case StepDone(batch):
                return [posted] if self._end(batch.instance) else []
        if posted.slab.pair.link:
            self._links.hold_back(posted)
            return []
        return self._place(posted)

    def _fail(self, failed: Failed) -> list[Event]:
        """Raise an error if it is the user's mistake, or if no instance could continue."""
        error = failed.error
        self._refused.discard(failed.instance)
        if isinstance(error, JaxinferError):
            raise error
        is_old = failed.transfer is not None and failed.transfer not in self._slabs_left
        if failed.instance in self.lost or is_old:
            return []
        kind = "" if isinstance(error, SlabLost) else f"{type(error).__name__}: "
        lost = self._losses.lose(failed.instance, kind + one_line(error))
        if len(self._workers) == 1 and not lost.returns:
            raise OnlyInstanceLost(str(error)) if isinstance(error, ProcessLost) else error
        return [lost]

    def _place(self, landed: Landed) -> list[Event]:
        """Write a slab to its pages; steps launched later read them."""
        transfer = landed.slab.transfer
        channel = self._channels[transfer.source, transfer.dest]
        if transfer not in self._slabs_left:
            channel.drop(landed)  # It was given up with one of its instances.
            return []
        try:
            channel.place(landed)
        except Exception as error:
            self._refuse(transfer.dest, error)
            return []
        self._left_at[transfer] = min(self._left_at.get(transfer, landed.start), landed.start)
        self._slabs_left[transfer] -= 1
        if self._slabs_left[transfer]:
            return []
        del self._slabs_left[transfer]
        num_bytes = (transfer.stop - transfer.start) * channel.token_bytes
        start, end = self._left_at.pop(transfer) - self._origin, landed.end - self._origin
        return [TransferDone(transfer, start, end, num_bytes)]
