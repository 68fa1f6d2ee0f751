"""A process's ends of stage pairs, which carry out a channel's messages; see ``channel``."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.runtime.kv.checksums import known_slab
from jaxinfer.runtime.kv.kv_messages import (
    Checked,
    Drop,
    Offer,
    Offered,
    OpenEnd,
    Place,
    Pull,
    Pulled,
    SlabAnswer,
    SlabFailed,
    SlabMessage,
    TransportName,
)
from jaxinfer.runtime.kv.outcome import join
from jaxinfer.runtime.kv.slab import SlabDest, SlabFormat, SlabSource
from jaxinfer.runtime.kv.sockets import LOOPBACK
from jaxinfer.runtime.kv.transports import TRANSPORTS, Transport
from jaxinfer.runtime.stage.stage import Stage

T = TypeVar("T")
Hear = Callable[[SlabAnswer], None]
# A slab is given up after this many seconds without arrival, or if it is slower than this rate.
PATIENCE_S, SLOWEST_GB_S = 10.0, 0.05


@dataclass
class _End:
    """An end of a stage pair, which sends or receives slabs.

    A thread does all jobs that have to wait, in order.

    Attributes:
        patience: seconds to wait for a slab.
    """

    instance: str
    form: SlabFormat
    sharding: NamedSharding
    patience: float
    source: SlabSource | None
    dest: SlabDest | None
    jobs: "SimpleQueue[Callable[[], None] | None]"
    thread: threading.Thread
    arrived: dict[int, jax.Array] = field(default_factory=dict)


_Job = Callable[[_End], SlabAnswer | None]
_OfSlab = Offer | Pull | Place | Drop


class KVEndpoint:
    """Sends and receives the slabs of the stages in this process.

    Args:
        stages: stages of each instance.
        post: receives the answers, in threads of the endpoint.
        host: address of this process.

    Attributes:
        waits_for: for each thread that waits for devices now, the instance that has the devices,
            and the time at which the wait began.
    """

    def __init__(self, stages: Mapping[str, Sequence[Stage]], post: Hear, host: str) -> None:
        self._stages, self._post, self._host = stages, post, host
        self.waits_for: dict[int, tuple[str, float]] = {}
        self._transports: dict[TransportName, Transport] = {}
        self._ends: dict[int, _End] = {}
        self._lock = threading.Lock()

    def do(self, message: SlabMessage) -> None:
        """Carry out a message; when this returns, all work that the message asks for is launched.

        Raises:
            Exception: something cannot be launched. Later failures are reported to ``post``.
        """
        match message:
            case Offer():
                self._gather(message, self._ends[message.end])
            case Pull():
                job = partial(self._pull, message)
                if TRANSPORTS[message.transport].in_place:
                    self._attempt(message, job)
                else:
                    self._later(message, job)
            case Place():
                self._scatter(message, self._ends[message.end])
            case Drop():
                self._later(message, partial(self._drop, message))
            case OpenEnd():
                self._open(message)

    def close(self) -> None:
        """End the threads, without waiting for a thread that hangs."""
        for end in self._ends.values():
            end.jobs.put(None)
        for transport in self._transports.values():
            transport.close()
        join(end.thread for end in self._ends.values())

    def _open(self, message: OpenEnd) -> None:
        _, instance, number, form, sends, verify = message
        stage = self._stages[instance][number]
        source = SlabSource(stage, form, verify) if sends else None
        dest = None if sends else SlabDest(stage, form, verify)
        jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(jobs,), daemon=True)
        self._ends[message.end] = _End(
            instance, form, form.sharding(stage.plan), _patience(form), source, dest, jobs, thread
        )
        thread.start()

    def _transport(self, name: TransportName) -> Transport:
        """Return a transport, which is opened on first use."""
        if name not in self._transports:
            with self._lock:
                if name not in self._transports:
                    self._transports[name] = TRANSPORTS[name](self._host)
        return self._transports[name]

    def _gather(self, offer: Offer, end: _End) -> None:
        assert end.source
        if offer.table is None:
            array, checksum = jax.device_put(_known(end.form), end.sharding), None
        else:
            array, checksum = end.source.take(offer.table, offer.start, offer.stop)
        self._later(offer, partial(self._offer, offer, array, checksum))

    def _scatter(self, place: Place, end: _End) -> None:
        assert end.dest
        array = end.arrived.pop(place.slab)
        checksum = end.dest.place(array, place.table, place.start, place.stop)
        if checksum is not None:
            self._later(place, partial(self._check, place, checksum))

    def _later(self, message: _OfSlab, job: _Job) -> None:
        self._ends[message.end].jobs.put(partial(self._attempt, message, job))

    def _attempt(self, message: _OfSlab, job: _Job) -> None:
        # Without this, any failure would leave the loop waiting forever.
        end = self._ends[message.end]
        try:
            answer = job(end)
        except Exception as error:
            answer = _failed(message.end, message.slab, end, error)
        if answer:
            self._post(answer)

    def _wait(self, end: _End, job: Callable[[], T]) -> T:
        """Run a job that waits for an instance's devices."""
        thread = threading.get_ident()
        self.waits_for[thread] = end.instance, time.perf_counter()
        try:
            return job()
        finally:
            del self.waits_for[thread]

    def _offer(
        self, message: Offer, array: jax.Array, checksum: jax.Array | None, end: _End
    ) -> Offered:
        transport = self._transport(message.transport)
        sent = self._wait(end, partial(_hand_over, transport, message, array, checksum, end.form))
        return Offered(message.end, message.slab, transport.address, sent)

    def _pull(self, message: Pull, end: _End) -> Pulled:
        transport = self._transport(message.transport)
        start = time.perf_counter()
        found = transport.fetch(message.slab, message.address, end.form, end.sharding, end.patience)
        array = self._wait(end, lambda: jax.device_put(found, end.sharding).block_until_ready())
        pulled = Pulled(message.end, message.slab, start, time.perf_counter())
        if not message.known:
            end.arrived[message.slab] = array
        elif not np.array_equal(np.asarray(array), _known(end.form)):
            raise JaxinferError(f"a known array arrives changed{transport.advice}")
        return pulled

    def _check(self, message: Place, checksum: jax.Array, end: _End) -> Checked:
        found = self._wait(end, partial(np.asarray, checksum))
        return Checked(message.end, message.slab, found)

    def _drop(self, message: Drop, end: _End) -> None:
        end.arrived.pop(message.slab, None)
        self._transport(message.transport).drop(message.slab)


class KVProcess(Protocol):
    """A process that slabs come from or go to.

    Attributes:
        waits_for: see KVEndpoint; empty for another process, which watches its own threads.
    """

    waits_for: Mapping[int, tuple[str, float]]

    def open(self, message: OpenEnd, hear: Hear) -> None:
        """Prepare an end of a stage pair; ``hear`` receives its answers, in some thread."""

    def do(self, message: SlabMessage) -> None:
        """Carry out a message.

        Raises:
            ProcessLost: the process has ended.
            Exception: this process cannot launch it.
        """

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """Call ``hear`` when the process has ended."""

    def why_lost(self, seconds: float) -> str | None:
        """Wait at most ``seconds`` for the process to end; return the reason, or None."""


class ThisProcess:
    """The loop's own process as a side of channels; see ``KVProcess``.

    Args:
        stages: stages of each instance whose slabs come from here or go here.
        host: address at which others reach it.
    """

    def __init__(self, stages: Mapping[str, Sequence[Stage]], host: str = LOOPBACK) -> None:
        self._hear: dict[int, Hear] = {}
        self.endpoint = KVEndpoint(stages, lambda answer: self._hear[answer.end](answer), host)
        self.waits_for: Mapping[int, tuple[str, float]] = self.endpoint.waits_for

    def open(self, message: OpenEnd, hear: Hear) -> None:
        """See KVProcess."""
        self._hear[message.end] = hear
        self.endpoint.do(message)

    def do(self, message: SlabMessage) -> None:
        """See KVProcess."""
        self.endpoint.do(message)

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """See KVProcess; this process is never lost."""

    def why_lost(self, seconds: float) -> str | None:
        """See KVProcess."""
        return None

    def close(self) -> None:
        """End the endpoint's threads."""
        self.endpoint.close()


def _hand_over(
    transport: Transport,
    offer: Offer,
    array: jax.Array,
    checksum: jax.Array | None,
    form: SlabFormat,
) -> np.ndarray | None:
    """Offer a slab once it has been computed; return its checksum, if there is one."""
    array.block_until_ready()
    if offer.after:
        assert isinstance(offer.after, Future), "a step of another process"
        offer.after.result()
    transport.offer(offer.slab, array, form)
    return None if checksum is None else np.asarray(checksum)


def _failed(number: int, slab: int, end: _End, error: Exception) -> SlabFailed:
    # If a slab does not arrive, or is wrong, the sender is to blame.
    by_source = end.source is not None or isinstance(error, OSError | EOFError | JaxinferError)
    line = one_line(error)
    if not isinstance(error, JaxinferError):
        line = f"{type(error).__name__}: {line}"
    return SlabFailed(number, slab, by_source, line)


def _patience(form: SlabFormat) -> float:
    num_bytes = math.prod(form.shape) * form.dtype.itemsize
    return PATIENCE_S + num_bytes / (SLOWEST_GB_S * 1e9)


def _known(form: SlabFormat) -> np.ndarray:
    return known_slab(form.shape, form.dtype)


def _work(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # Do not keep its slab here while waiting for the next one.
