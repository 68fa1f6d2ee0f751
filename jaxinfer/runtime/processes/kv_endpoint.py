"""One process's end of the ways that KV slabs take between processes."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.runtime.kv.checksums import known_slab
from jaxinfer.runtime.kv.slab import SlabDest, SlabFormat, SlabSource
from jaxinfer.runtime.processes.messages import (
    CarrierName,
    Checked,
    Drop,
    Offer,
    Offered,
    OpenLane,
    Place,
    Pull,
    Pulled,
    SlabFailed,
)
from jaxinfer.runtime.processes.transports import Carrier, HostCarrier, ServerCarrier
from jaxinfer.runtime.stage.stage import Stage

LaneMessage = OpenLane | Offer | Pull | Place | Drop
LaneAnswer = Offered | Pulled | Checked | SlabFailed
# A slab that has not come after so many seconds, and those that it takes at so slow a rate, is
# given up.
PATIENCE_S, SLOWEST_GB_S = 10.0, 0.05


@dataclass
class _End:
    """One end of a lane: it sends, or takes in. A thread does, in order, all that has to wait."""

    form: SlabFormat
    sharding: NamedSharding
    source: SlabSource | None
    dest: SlabDest | None
    arrived: dict[int, jax.Array] = field(default_factory=dict)
    jobs: "SimpleQueue[Callable[[], None] | None]" = field(default_factory=SimpleQueue)


class Port:
    """Sends and takes in the slabs of the stages that this process has.

    Args:
        stages: of each instance.
        post: gets the answers, in threads of the port.
        host: the address by which this process is reached.
    """

    def __init__(
        self, stages: Mapping[str, Sequence[Stage]], post: Callable[[LaneAnswer], None], host: str
    ) -> None:
        self._stages, self._post, self._host = stages, post, host
        self._carriers: dict[CarrierName, Carrier] = {}
        self._ends: dict[int, _End] = {}
        self._lock = threading.Lock()

    def do(self, message: LaneMessage, after: "Future[None] | None" = None) -> None:
        """Carry out a message; what it launches is launched before this returns.

        Args:
            after: done when the slab of an Offer has been computed.
        """
        if isinstance(message, OpenLane):
            self._open(message)
            return
        try:
            self._do(message, after)
        except Exception as error:
            self._post(_failed(message.lane, message.slab, self._ends[message.lane], error))

    def _do(self, message: Offer | Pull | Place | Drop, after: "Future[None] | None") -> None:
        match message:
            case Offer(lane, slab, table, start, stop):
                end = self._ends[lane]
                assert end.source
                if table is None:
                    array, checksum = jax.device_put(_known(end.form), end.sharding), None
                else:
                    array, checksum = end.source.take(table, start, stop)
                self._later(lane, slab, partial(self._offer, message, array, checksum, after))
            case Pull(lane, slab):
                self._later(lane, slab, partial(self._pull, message))
            case Place(lane, slab, table, start, stop):
                end = self._ends[lane]
                assert end.dest
                checksum = end.dest.place(end.arrived.pop(slab), table, start, stop)
                if checksum is not None:
                    self._later(lane, slab, partial(self._check, message, checksum))
            case Drop(lane, slab):
                self._later(lane, slab, partial(self._drop, message))

    def close(self) -> None:
        """End the threads, without waiting for one whose peer hangs."""
        for end in self._ends.values():
            end.jobs.put(None)
        for carrier in self._carriers.values():
            carrier.close()

    def _open(self, message: OpenLane) -> None:
        _, instance, number, form, sends, verify = message
        stage = self._stages[instance][number]
        source = SlabSource(stage, form, verify) if sends else None
        dest = None if sends else SlabDest(stage, form, verify)
        end = _End(form, form.sharding(stage.plan), source, dest)
        self._ends[message.lane] = end
        thread = threading.Thread(target=_work, args=(end.jobs,), daemon=True)
        thread.start()

    def _carrier(self, name: CarrierName) -> Carrier:
        """Opened when it is first asked for."""
        with self._lock:
            if name not in self._carriers:
                kind = HostCarrier if name == "host" else ServerCarrier
                self._carriers[name] = kind(self._host)
            return self._carriers[name]

    def _later(self, lane: int, slab: int, job: Callable[[_End], LaneAnswer | None]) -> None:
        end = self._ends[lane]

        def attempt() -> None:
            try:
                answer = job(end)
            except Exception as error:
                answer = _failed(lane, slab, end, error)
            if answer:
                self._post(answer)

        end.jobs.put(attempt)

    def _offer(
        self,
        message: Offer,
        array: jax.Array,
        checksum: jax.Array | None,
        after: "Future[None] | None",
        end: _End,
    ) -> Offered:
        array.block_until_ready()
        if after:
            after.result()
        carrier = self._carrier(message.by)
        carrier.offer(message.slab, array, end.form)
        sent = None if checksum is None else np.asarray(checksum)
        return Offered(message.lane, message.slab, carrier.address, sent)

    def _pull(self, message: Pull, end: _End) -> Pulled:
        assert end.dest
        start = time.perf_counter()
        num_bytes = int(np.prod(end.form.shape)) * end.form.dtype.itemsize
        patience = PATIENCE_S + num_bytes / (SLOWEST_GB_S * 1e9)
        array = self._carrier(message.by).pull(
            message.slab, message.address, end.form, end.sharding, patience
        )
        array.block_until_ready()
        pulled = Pulled(message.lane, message.slab, start, time.perf_counter())
        if not message.known:
            end.arrived[message.slab] = array
        elif not np.array_equal(np.asarray(array), _known(end.form)):
            raise JaxinferError("a known array arrives changed")
        return pulled

    def _check(self, message: Place, checksum: jax.Array, end: _End) -> Checked:
        return Checked(message.lane, message.slab, np.asarray(checksum))

    def _drop(self, message: Drop, end: _End) -> None:
        end.arrived.pop(message.slab, None)
        self._carrier(message.by).drop(message.slab)


def _failed(lane: int, slab: int, end: _End, error: Exception) -> SlabFailed:
    # What does not come, or is not what it should be, is the sender's fault.
    by_source = end.source is not None or isinstance(error, OSError | EOFError | JaxinferError)
    return SlabFailed(lane, slab, by_source, f"{type(error).__name__}: {one_line(error)}")


def _known(form: SlabFormat) -> np.ndarray:
    return known_slab(form.shape, form.dtype)


def _work(jobs: "SimpleQueue[Callable[[], Any] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # Its slab is not to wait here for the next one.
