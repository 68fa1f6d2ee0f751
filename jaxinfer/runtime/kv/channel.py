"""Moves slabs of KV entries from one instance to another."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import jax

from jaxinfer.runtime.kv.outcome import End, Failed, StepEnd, join
from jaxinfer.runtime.kv.slab import SLAB_TOKENS
from jaxinfer.runtime.kv.stage_pair import Lane, RemoteSlab, Slab
from jaxinfer.serving.batch import Transfer


@dataclass(frozen=True)
class Landed:
    """A slab is on the destination's mesh; times are those of ``time.perf_counter``.

    Attributes:
        array: None where another process has it.
    """

    slab: Slab | RemoteSlab
    array: jax.Array | None
    start: float
    end: float


Post = Callable[[Landed | Failed], None]


class Channel:
    """The way from one instance to another: a thread that moves one slab after the other.

    Args:
        lanes: lanes of all stages that have layers in common.

    Attributes:
        waits_for: the instance whose devices the thread waits for, and since when, by
            ``time.perf_counter``; None where it has nothing to do.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self.token_bytes = sum(lane.token_bytes for lane in lanes)
        self.waits_for: tuple[str, float] | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def probe(self, names: str) -> float:
        """10^9 bytes per second of the slowest lane.

        Raises:
            JaxinferError: a known slab does not arrive.
        """
        return min(lane.probe(names) for lane in self.lanes)

    def num_slabs(self, transfer: Transfer) -> int:
        """Return how many slabs of a transfer will land."""
        return len(starts_of(transfer)) * len(self.lanes)

    def send(
        self,
        transfer: Transfer,
        post: Post,
        stage: int | None = None,
        after: End | None = None,
    ) -> None:
        """Start moving; ``post`` gets each slab as it lands. Returns at once.

        Args:
            stage: of the source, whose layers alone go; by default all.
            after: done when they have been computed, where a step is to do that.
        """
        assert not isinstance(after, StepEnd), "the source is in this process"
        for start in starts_of(transfer):
            for lane in self.lanes:
                if stage is None or lane.source_shard == stage:
                    stop = min(start + SLAB_TOKENS, transfer.stop)
                    slab = lane.take(transfer, start, stop, after)
                    self._queue.put(partial(self._attempt, self._move, slab, post))

    def place(self, landed: Landed, post: Post) -> None:
        """Write a slab to its pages; ``post`` hears of it if it is not what was sent."""
        slab, array = landed.slab, landed.array
        assert isinstance(slab, Slab)
        assert array is not None
        arrived = slab.lane.place(slab, array)
        if arrived is not None:
            check = partial(self._check, arrived)
            self._queue.put(partial(self._attempt, check, slab, post))

    def drop(self, landed: Landed) -> None:
        """Forget a slab that is not to be placed; it goes with ``landed``."""

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        join([self._thread])

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _attempt(self, job: Callable[[Slab, Post], None], slab: Slab, post: Post) -> None:
        # Whatever fails here would otherwise leave the loop waiting for ever.
        try:
            job(slab, post)
        except Exception as error:
            assert self.waits_for
            post(Failed(self.waits_for[0], error))
        finally:
            self.waits_for = None

    def _move(self, slab: Slab, post: Post) -> None:
        self._wait_for(slab.transfer.source)
        slab.array.block_until_ready()
        if slab.checksum is not None:
            slab.checksum.block_until_ready()
        if slab.after:
            slab.after.result()
        start = self._wait_for(slab.transfer.dest)
        array = jax.device_put(slab.array, slab.lane.dest_sharding)
        array.block_until_ready()
        post(Landed(slab, array, start, time.perf_counter()))

    def _check(self, arrived: jax.Array, slab: Slab, post: Post) -> None:
        self._wait_for(slab.transfer.dest)
        slab.lane.compare(slab, arrived)

    def _wait_for(self, instance: str) -> float:
        start = time.perf_counter()
        self.waits_for = instance, start
        return start


def starts_of(transfer: Transfer) -> range:
    """Return the positions at which the slabs of a transfer begin."""
    return range(transfer.start, transfer.stop, SLAB_TOKENS)
