"""A pool of KV heads that this process lends to a stage in another process."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxinfer.runtime.spread.head_pools import lent_pool
from jaxinfer.runtime.spread.lender import Lender
from jaxinfer.runtime.spread.lender_client import padded
from jaxinfer.runtime.spread.pool_client import MOST_BEGUN, Attend, Begin, Put, Take
from jaxinfer.runtime.spread.slice_move import CHUNK, compile_put, compile_take
from jaxinfer.runtime.spread.spread_inputs import empty_spread_inputs, pair_shapes
from jaxinfer.runtime.spread.spread_step import HeadSplit, compile_attend
from jaxinfer.runtime.stage.kv_cache import allocate
from jaxinfer.runtime.stage.stage_plan import StageFacts
from jaxinfer.steps.shapes import StepShape

# On a CPU, JAX takes an array without a copy only if its address is a multiple of this.
ALIGNMENT = 64


class PoolServer(Lender):
    """Computes attention and moves pages for the stage's process.

    Args:
        plan: plan of the stage.
        number: number of the pool's attention group in the stage.
        host: address of this process.
    """

    part = "attention"

    def __init__(self, plan: StageFacts, number: int, host: str) -> None:
        self._plan, self._pool = plan, lent_pool(plan, number)
        self._windows = plan.config.windows[plan.layers.start : plan.layers.stop]
        self._attend: dict[tuple[StepShape, int | None], jax.stages.Compiled] = {}
        self._places: dict[int, np.ndarray] = {}
        self._begun: dict[int, tuple[StepShape, jax.Array] | Exception] = {}
        # Allocated before this returns, so that the next user of this host's memory does not get
        # it, too.
        self._kv = jax.block_until_ready(allocate(self._pool.pages))
        super().__init__(host)

    def compile_ahead(self) -> Iterator[int]:
        """Compile and try all programs, then begin to serve; yield the number of programs left."""
        shapes = [
            pairs
            for shape in self._plan.limits.shapes()
            for pairs in pair_shapes(shape, self._plan.num_kv_heads)
        ]
        todo = dict.fromkeys((pairs, window) for pairs in shapes for window in self._windows)
        for left, key in zip(range(len(todo), 0, -1), todo, strict=True):
            yield left
            self._attend[key] = compile_attend(self._plan, self._pool, *key)
            self._try(*key)
        self._take, self._put = compile_take(self._pool), compile_put(self._pool)
        nothing_C = np.zeros(CHUNK, np.int32)
        self._do(Put(self._do(Take(nothing_C)), nothing_C))
        self.open()
        yield 0

    def _try(self, pairs: StepShape, window: int | None) -> None:
        """Attend to padding once, because a first run allocates memory."""
        (tables,) = empty_spread_inputs(pairs, pairs, self._plan.limits, 1, 1).tables
        assert tables is not None
        self._do(Begin(0, pairs, tables))
        nothing_RXH = self._place(pairs.tokens)[:0]
        self._do(Attend(0, self._windows.index(window), nothing_RXH))

    def _place(self, pairs: int) -> np.ndarray:
        """Return the buffer that collects ``pairs`` pairs, [R, X, H], zeros at first.

        It is aligned so that a CPU uses it without a copy; computations with it are waited for.
        """
        if pairs not in self._places:
            cut = HeadSplit(self._plan, 1, pairs)
            shape = pairs, cut.G + 2, cut.H
            size = math.prod(shape) * cut.dtype.itemsize
            room = np.zeros(size + ALIGNMENT, np.uint8)
            begin = -room.ctypes.data % ALIGNMENT
            self._places[pairs] = room[begin : begin + size].view(cut.dtype).reshape(shape)
        return self._places[pairs]

    def _do(self, message: Any) -> Any:
        match message:
            case Begin(step, pairs, tables):
                self._begun.pop(step - MOST_BEGUN, None)
                try:
                    self._begun[step] = pairs, jax.device_put(tables, self._pool.sharding)
                except Exception as error:
                    self._begun[step] = error  # It is for its layers; no answer is expected here.
                return None
            case Attend(step, layer, piece_RXH):
                if isinstance(begun := self._begun[step], Exception):
                    raise begun
                pairs, tables_there = begun
                run = self._attend[pairs, self._windows[layer]]
                place_RXH, count = self._place(pairs.tokens), len(piece_RXH)
                place_RXH[:count] = piece_RXH
                self._kv[layer], out = run(self._kv[layer], place_RXH, tables_there)
                return np.asarray(out)[:count]
            case Take(page_C):
                pages = self._take(
                    self._kv, jax.device_put(padded(page_C, CHUNK), self._pool.sharding)
                )
                return jax.tree.map(lambda x: np.asarray(x)[: len(page_C)], pages)
            case Put(pages, page_C):
                some = jax.tree.map(lambda x: padded(x, CHUNK), (pages, page_C))
                there = jax.device_put(some, self._pool.sharding)
                self._kv, mark = self._put(self._kv, *there)
                mark.block_until_ready()
                return 0
        raise AssertionError(message)
