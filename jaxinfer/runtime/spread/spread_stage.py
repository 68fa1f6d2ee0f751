"""A pipeline stage whose attention is spread over several devices, by KV heads of requests."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.spread.head_pools import head_pools
from jaxinfer.runtime.spread.lender_client import padded
from jaxinfer.runtime.spread.pool_client import BegunStep, PoolClient
from jaxinfer.runtime.spread.spread_inputs import (
    PageTables,
    SpreadInputs,
    build_spread_inputs,
    empty_spread_inputs,
)
from jaxinfer.runtime.spread.spread_step import SpreadStep
from jaxinfer.runtime.stage.kv_cache import allocate
from jaxinfer.runtime.stage.parts import PartInputs, build_parts, split_parameters
from jaxinfer.runtime.stage.stage import Stage, put_whole
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import Key, Parameters
from jaxinfer.serving.batch import Batch
from jaxinfer.steps.shapes import StepShape


class SpreadStage(Stage):
    """Computes dense layers on the stage's mesh, and attention on the devices that store KV heads.

    The stage's own heads are on the first device of its mesh; with tensor parallelism, the others
    wait while it attends.

    Attributes:
        pools: pools of the devices that have KV heads, the stage's own first.
        elsewhere: pools that other processes lend, by number, once they are known.
        kv: pages of each pool, layer by layer.
        outer: parameters outside the layers.
        layers: parameters of each layer.
    """

    step: SpreadStep
    kv: list[list[KVPages]]

    def __init__(self, plan: StagePlan, parameters: Parameters) -> None:
        self.pools = head_pools(plan)
        self.elsewhere: dict[int, PoolClient] = {}
        self._zeros: dict[Hashable, jax.Array] = {}
        super().__init__(plan, parameters)
        self.outer, self.layers = split_parameters(plan, parameters)
        self._tables: list[PageTables] = []

    def _new_step(self) -> SpreadStep:
        return SpreadStep(self.plan, self.pools)

    def _new_kv(self) -> list[list[KVPages]]:
        return [[] if pool.is_lent else allocate(pool.pages) for pool in self.pools]

    def inputs(
        self, batch: Batch, shape: StepShape, sample_slots: Mapping[str, int], shard: int
    ) -> SpreadInputs | PartInputs[SpreadInputs]:
        """Build the inputs of ``forward`` for a batch; see ``build_spread_inputs``.

        The inputs are those of two halves if the batch has halves, and if KV heads are on devices
        other than the stage's.
        """
        plan = self.plan
        heads = plan.num_kv_heads, plan.config.num_key_value_heads
        if not self._tables:
            shards = range(shard, shard + len(self.pools))
            self._tables = [PageTables(number, plan.num_kv_heads) for number in shards]
        others = slice(shard + 1, shard + len(self.pools))
        cut = batch.halves and any(any(row.hold.tables[others]) for row in batch.rows)
        limits = self.step.limits

        def build(batch: Batch, shape: StepShape) -> SpreadInputs:
            return build_spread_inputs(batch, shape, limits, sample_slots, self._tables, heads)

        if cut:
            return build_parts(batch, shape, limits, sample_slots, build)
        return build(batch, shape)

    def padding(self, shape: StepShape) -> Iterator[SpreadInputs]:
        """Yield inputs without tokens, in all shapes that a step of this shape may need.

        Pools that other processes lend are tried in those processes.
        """
        heads = self.plan.config.num_key_value_heads
        for pairs in self.step.pair_shapes(shape):
            all_ = empty_spread_inputs(shape, pairs, self.step.limits, heads, len(self.pools))
            here = zip(self.pools, all_.tables, strict=True)
            yield all_._replace(tables=[None if pool.is_lent else t for pool, t in here])

    def forward(
        self, key: Key, inputs: SpreadInputs | PartInputs[SpreadInputs], x_TD: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Launch the layers; return hidden states to sample from, and all of them, at once."""
        if x_TD is not None:
            x_TD = put_whole(x_TD, self.plan)
        if isinstance(inputs, SpreadInputs):
            return self._through([self.chain(key.shape, inputs, x_TD)])[0]
        zeros_TD = self.zeros(
            key.shape.tokens, self.plan.config.hidden_size, dtype=jax.numpy.float32
        )
        return self.step.in_turn(
            key.shape,
            inputs,
            x_TD,
            zeros_TD,
            lambda starts: self._through([self.chain(*each) for each in starts]),
        )

    def borrow(self, number: int, address: Address, patience: float | None) -> None:
        """Use the pool of attention group ``number`` that another process lends.

        Args:
            patience: see ``LenderClient``.
        """
        group = self.plan.attention[number].group
        self.elsewhere[number + 1] = PoolClient(address, group, patience)

    def chain(self, shape: StepShape, inputs: SpreadInputs, x_TD: jax.Array | None) -> "Chain":
        """Return the chain that takes a batch through this stage, before the first layer."""
        return Chain(self, shape, inputs, x_TD)

    def _through(self, chains: "Sequence[Chain]") -> list[tuple[jax.Array, jax.Array]]:
        """Launch all layers of batches that take turns, so that each hides the other's waiting."""
        for layer in range(len(self.layers)):
            for chain in chains:
                chain.enter(layer)
                chain.attend()
        return [chain.leave() for chain in chains]

    def begin(self, number: int, inputs: SpreadInputs) -> jax.Array | BegunStep:
        """Send a step's tables to one device; return a handle for them."""
        packed = inputs.tables[number]
        assert packed is not None
        if number in self.elsewhere:
            return self.elsewhere[number].begin(inputs.pairs, packed, inputs.counts[number])
        return jax.device_put(packed, self.pools[number].sharding)

    def attend(
        self,
        number: int,
        layer: int,
        pairs: StepShape,
        piece: jax.Array,
        tables: jax.Array | BegunStep,
    ) -> "jax.Array | Future[np.ndarray]":
        """Launch one layer's attention on one device; return its results, or a future of them.

        Args:
            tables: see ``begin``.
        """
        if isinstance(tables, BegunStep):
            return self.elsewhere[number].attend(tables, layer, piece)
        return self.attend_here(number, layer, pairs, piece, tables)

    def attend_here(
        self, number: int, layer: int, pairs: StepShape, piece: jax.Array, tables: jax.Array
    ) -> jax.Array:
        """Launch a layer's attention on a device of this process; see ``attend``."""
        run = self.step.of(("attend", number, pairs, self.step.windows[layer]))
        self.kv[number][layer], out = run(self.kv[number][layer], piece, tables)
        found: jax.Array = out
        return found

    def zeros(self, *size: int, dtype: Any) -> jax.Array:
        """Return zeros on the stage's mesh, made once for each size and type."""
        key = *size, dtype
        if key not in self._zeros:
            self._zeros[key] = jax.device_put(jax.numpy.zeros(size, dtype), self.plan.whole)
        return self._zeros[key]


class Chain:
    """A batch, or half of one, on its way through a spread stage; its methods only launch work.

    Exception: if KV heads are in other processes, it waits for the data sent there and back.

    Args:
        shape: shape that the step is padded to.
        x_TD: hidden states from the previous stage.
    """

    def __init__(
        self, stage: SpreadStage, shape: StepShape, inputs: SpreadInputs, x_TD: jax.Array | None
    ) -> None:
        self._stage, self._inputs, self._x_TD = stage, inputs, x_TD
        self._shape, self._layer = shape, 0
        self._layout = jax.device_put(inputs.layout, stage.plan.whole)
        # A device without pairs in this step does nothing.
        self._tables = {
            number: stage.begin(number, inputs)
            for number, packed in enumerate(inputs.tables)
            if packed is not None
        }
        self._ropes: Any = None
        self._pieces: list[jax.Array] = []
        config = stage.plan.config
        size = config.num_attention_heads // config.num_key_value_heads, config.head_dim
        # It replaces the result of a device without pairs, and is never read.
        nothing = stage.zeros(inputs.pairs.tokens, *size, dtype=stage.plan.dtype)
        self._outs: list[jax.Array | Future[np.ndarray]] = [nothing] * len(stage.pools)

    def enter(self, layer: int) -> None:
        """Compute from the tokens, or from the last layer's attention, to this one's attention."""
        stage, inputs, of = self._stage, self._inputs, self._stage.step.of
        buckets = self._shape, inputs.pairs
        if not layer:
            (self._x_TD, self._ropes), self._pieces = of(("first", *buckets))(
                stage.outer,
                stage.layers[0],
                stage.previous_S,
                inputs.token_T,
                inputs.source_T,
                inputs.position_T,
                self._layout,
                self._x_TD,
            )
        else:
            run = of(("middle", *buckets, bool(stage.step.windows[layer])))
            self._x_TD, self._pieces = run(
                *stage.layers[layer - 1 : layer + 1],
                (self._x_TD, self._ropes),
                self._found(),
                self._layout,
            )
        self._layer = layer

    def attend(self) -> None:
        """Launch attention on each device's pairs, and send the results to the stage's mesh."""
        stage = self._stage
        # The stage's own device comes last; otherwise, the others would wait for their inputs.
        found = {}
        for number in sorted(self._tables, reverse=True):
            piece = self._pieces[number].addressable_data(0)
            if number and number not in stage.elsewhere:
                piece = jax.device_put(piece, stage.pools[number].sharding)
            table = self._tables[number]
            found[number] = stage.attend(number, self._layer, self._inputs.pairs, piece, table)
        for number, out in found.items():
            self._outs[number] = out if isinstance(out, Future) else put_whole(out, stage.plan)

    def _found(self) -> list[jax.Array | np.ndarray]:
        """Return the results of attention for the stage's mesh; waits for other processes."""
        R = self._inputs.pairs.tokens
        return [padded(out.result(), R) if isinstance(out, Future) else out for out in self._outs]

    def wait(self) -> None:
        """Wait until everything that was launched, except attention, is done."""
        jax.block_until_ready((self._x_TD, self._pieces))

    def leave(self) -> tuple[jax.Array, jax.Array]:
        """Return the hidden states to sample from, and all of them."""
        run = self._stage.step.of(("last", self._shape, self._inputs.pairs))
        found: tuple[jax.Array, jax.Array] = run(
            self._stage.layers[-1],
            self._x_TD,
            self._found(),
            self._layout,
            self._inputs.sample_row_S,
        )
        return found
