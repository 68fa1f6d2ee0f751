"""Moves KV heads of a request between devices of a spread stage, in whole pages per layer."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels.choice import keys_by_token
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.spread.head_pools import HeadPool
from jaxinfer.runtime.spread.lender_client import padded
from jaxinfer.runtime.spread.spread_stage import SpreadStage
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.serving.batch import Transfer

# Pages of one head that are copied at once, so that each device needs one executable. Fewer pages
# are filled up with page 0, which no request uses.
CHUNK = 16

Layers = list[KVPages]
# Arrays that exist when a copy has ended.
Mark = jax.Array | Future[int]


class Copy(NamedTuple):
    """Pages of one head that move between two pools of an instance, as page numbers."""

    source: int
    dest: int
    here: Sequence[int]
    there: Sequence[int]


class Copies(NamedTuple):
    """A move of KV heads: the number of entries per head, and the pages that hold them."""

    entries: int
    pieces: Sequence[Copy]

    @classmethod
    def of(cls, transfer: Transfer) -> "Copies":
        """Return the copies that a transfer needs, from the current places of its pages."""
        assert transfer.slice_move
        size = transfer.source_hold.kv.page_size
        # Pages that start in the middle have not been sent.
        pages = slice(transfer.start // size, -(-transfer.stop // size))
        pieces = [
            Copy(
                source,
                dest,
                transfer.source_hold.tables[source][piece][pages],
                transfer.dest_hold.copies[dest][piece][pages],
            )
            for source, dest, slices in transfer.slice_move.moves
            for piece in slices
        ]
        return cls(transfer.stop - transfer.start, pieces)


def take(by_token: bool, kv: Layers, page_C: jax.Array) -> Layers:
    """Read pages of all layers, with keys in the layout of values [C, 1, B, H].

    Args:
        by_token: whether keys are stored in this layout, too; see ``choice.keys_by_token``.
    """
    return [_turned(by_token, layer.page(page_C)) for layer in kv]


def put(by_token: bool, kv: Layers, pages: Layers, page_C: jax.Array) -> tuple[Layers, jax.Array]:
    """Write pages of all layers into ``kv``, to be donated; also return a number to wait for."""
    pages = [_turned(by_token, layer) for layer in pages]
    new = [
        jax.tree.map(lambda there, some: there.at[page_C].set(some), *both)
        for both in zip(kv, pages, strict=True)
    ]
    return new, page_C[0]


def _turned(by_token: bool, pages: KVPages) -> KVPages:
    """Convert keys between the stored and the sent layout, since devices may use other kernels."""
    return pages if by_token else pages._replace(keys=jnp.swapaxes(pages.keys, 2, 3))


def compile_take(pool: HeadPool) -> jax.stages.Compiled:
    """Compile ``take`` of one pool's pages."""
    jitted = jax.jit(partial(take, keys_by_token(pool.kernels)), out_shardings=pool.sharding)
    return jitted.lower(pool.pages, _numbers(pool)).compile()


def compile_put(pool: HeadPool) -> jax.stages.Compiled:
    """Compile ``put`` into one pool's pages."""
    by_token = keys_by_token(pool.kernels)
    pages = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pool.sharding),
        jax.eval_shape(partial(take, by_token), pool.pages, _numbers(pool)),
    )
    same = jax.tree.map(lambda x: x.sharding, pool.pages)
    jitted = jax.jit(partial(put, by_token), donate_argnums=0, out_shardings=(same, pool.sharding))
    return jitted.lower(pool.pages, pages, _numbers(pool)).compile()


def _numbers(pool: HeadPool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((CHUNK,), np.int32, sharding=pool.sharding)


class SliceCopies:
    """Launches copies between the pools of an instance's stages, and reports when they are done.

    Later steps find the pages in their new places. A thread waits for the copies, so that launching
    never waits.

    Args:
        stages: stages of one instance, in order; stages that are not spread move nothing.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        # For each shard of a spread stage, by its number in the instance: the stage, and its number
        # there.
        self._pools: dict[int, tuple[SpreadStage, int]] = {}
        shard = 0
        for stage in stages:
            for number in range(len(stage.plan.pool_pages)):
                if isinstance(stage, SpreadStage):
                    self._pools[shard] = stage, number
                shard += 1
        self._take: dict[int, jax.stages.Compiled] = {}
        self._put: dict[int, jax.stages.Compiled] = {}
        self._queue: SimpleQueue[tuple[list[Mark], Callable[[Exception | None], None]] | None]
        self._queue = SimpleQueue()
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def compile_ahead(self) -> None:
        """Compile all copies, and run each once on padding."""
        nothing_C = np.zeros(CHUNK, np.int32)
        for shard, (stage, number) in self._pools.items():
            pool = stage.pools[number]
            if shard in self._put or pool.is_lent:
                continue
            self._take[shard], self._put[shard] = compile_take(pool), compile_put(pool)
            _wait_for(self._copy(shard, shard, nothing_C, nothing_C))

    def start(self, copies: Copies, done: Callable[[float, Exception | None], None]) -> None:
        """Launch a move; when it has ended, call ``done`` with the time at which it started.

        This waits for pages that come from another process.
        """
        start = time.perf_counter()
        marks = [
            self._copy(
                source, dest, *(np.array(each[n : n + CHUNK], np.int32) for each in (here, there))
            )
            for source, dest, here, there in copies.pieces
            for n in range(0, len(here), CHUNK)
        ]
        self._queue.put((marks, partial(done, start)))

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when all copies launched so far have ended or failed."""
        self._queue.put(([], lambda error: tell()))

    def num_bytes(self, copies: Copies) -> int:
        """Return the bytes that a move sends, in all layers of the stage."""
        total = 0
        for source, *_ in copies.pieces:
            stage, number = self._pools[source]
            pages = jax.tree.leaves(stage.pools[number].pages)
            page = sum(x.dtype.itemsize * int(np.prod(x.shape[1:])) for x in pages)
            total += page * copies.entries // stage.plan.limits.page_size
        return total

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _copy(self, source: int, dest: int, here_C: np.ndarray, there_C: np.ndarray) -> Mark:
        """Launch a copy of at most one chunk; the returned array exists when the copy has ended."""
        stage, number = self._pools[source]
        if number in stage.elsewhere:
            pages = stage.elsewhere[number].take(here_C).result()
        else:
            page_C = jax.device_put(padded(here_C, CHUNK), stage.pools[number].sharding)
            pages = self._take[source](stage.kv[number], page_C)
        other, place = self._pools[dest]
        if place in other.elsewhere:
            return other.elsewhere[place].put(pages, there_C)
        pool = other.pools[place]
        if number in stage.elsewhere:
            pages = jax.tree.map(lambda x: padded(x, CHUNK), pages)
        arguments = jax.device_put((pages, padded(there_C, CHUNK)), pool.sharding)
        other.kv[place], mark = self._put[dest](other.kv[place], *arguments)
        there: jax.Array = mark
        return there

    def _wait(self) -> None:
        while item := self._queue.get():
            marks, done = item
            try:
                for mark in marks:
                    _wait_for(mark)
            except Exception as error:
                done(error)
            else:
                done(None)
            del item, marks, done


def _wait_for(mark: Mark) -> None:
    if isinstance(mark, Future):
        mark.result()
    else:
        mark.block_until_ready()
