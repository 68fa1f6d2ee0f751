"""A pipeline stage whose attention is spread over several devices, by KV heads of requests."""

from collections.abc import Iterator, Mapping

import jax

from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.head_pools import head_pools
from jaxinfer.runtime.kv_cache import allocate
from jaxinfer.runtime.pair_inputs import (
    PageTables,
    SpreadInputs,
    build_spread_inputs,
    empty_spread_inputs,
)
from jaxinfer.runtime.plan import Plan
from jaxinfer.runtime.spread_step import SpreadStep, split_parameters
from jaxinfer.runtime.stage import Stage, put_whole
from jaxinfer.runtime.step import Key, Parameters
from jaxinfer.serving.batch import Batch
from jaxinfer.steps.shapes import StepShape


class SpreadStage(Stage):
    """Dense layers on the stage's mesh; each KV head of a request is attended to where it lies.

    The stage's own heads lie on the first device of its mesh: with tensor parallelism, the others
    wait while it attends.

    Attributes:
        pools: the devices that have KV heads, the stage's own first.
        kv: of each of them, its pages, layer by layer.
    """

    step: SpreadStep
    kv: list[list[KVPages]]

    def __init__(self, plan: Plan, parameters: Parameters) -> None:
        self.pools = head_pools(plan)
        self._zeros: dict[StepShape, jax.Array] = {}
        super().__init__(plan, parameters)
        self._outer, self._layers = split_parameters(plan, parameters)
        self._tables: list[PageTables] = []

    def _new_step(self) -> SpreadStep:
        return SpreadStep(self.plan, self.pools)

    def _new_kv(self) -> list[list[KVPages]]:
        return [allocate(pool.pages) for pool in self.pools]

    def inputs(
        self, batch: Batch, shape: StepShape, sample_slots: Mapping[str, int], shard: int
    ) -> SpreadInputs:
        """What ``forward`` takes of a batch; see ``build_spread_inputs``."""
        plan = self.plan
        heads = plan.num_kv_heads, plan.config.num_key_value_heads
        if not self._tables:
            shards = range(shard, shard + len(self.pools))
            self._tables = [PageTables(number, plan.num_kv_heads) for number in shards]
        return build_spread_inputs(
            batch, shape, self.step.limits, sample_slots, self._tables, heads
        )

    def _padding(self, shape: StepShape) -> Iterator[SpreadInputs]:
        heads = self.plan.config.num_key_value_heads
        for pairs in self.step.pair_shapes(shape):
            yield empty_spread_inputs(shape, pairs, self.step.limits, heads, len(self.pools))

    def forward(
        self, key: Key, inputs: SpreadInputs, x_TD: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Launch the layers; hidden states to sample from, and all. Returns at once."""
        shape, pairs = key.shape, inputs.pairs
        of, windows, layers = self.step.of, self.step.windows, self._layers
        if x_TD is not None:
            x_TD = put_whole(x_TD, self.plan)
        layout = jax.device_put(inputs.layout, self.plan.whole)
        # Whoever has no pair in this step does nothing.
        tables = {
            number: jax.device_put(packed, self.pools[number].sharding)
            for number, packed in enumerate(inputs.tables)
            if packed is not None
        }
        (x_TD, ropes), pieces = of(("first", shape, pairs))(
            self._outer, layers[0], self.previous_S, inputs.token_T, inputs.source_T,
            inputs.position_T, layout, x_TD,
        )  # fmt: skip
        for number, window in enumerate(windows[1:]):
            outs = self._attend(number, pairs, pieces, tables)
            run = of(("middle", shape, pairs, bool(window)))
            x_TD, pieces = run(layers[number], layers[number + 1], (x_TD, ropes), outs, layout)
        outs = self._attend(len(layers) - 1, pairs, pieces, tables)
        run = of(("last", shape, pairs))
        found: tuple[jax.Array, jax.Array] = run(
            layers[-1], x_TD, outs, layout, inputs.sample_row_S
        )
        return found

    def _attend(
        self,
        layer: int,
        pairs: StepShape,
        pieces: list[jax.Array],
        tables: Mapping[int, jax.Array],
    ) -> list[jax.Array]:
        """What each device finds for its pairs, on the stage's mesh."""
        outs = {}
        # The stage's own device last: it would have the others wait for what they are to attend to.
        for number in sorted(tables, reverse=True):
            piece = pieces[number].addressable_data(0)
            if number:
                piece = jax.device_put(piece, self.pools[number].sharding)
            outs[number] = self.attend(number, layer, pairs, piece, tables[number])
        nothing = self._nothing(pairs)
        return [
            put_whole(outs[number], self.plan) if number in outs else nothing
            for number in range(len(self.pools))
        ]

    def attend(
        self, number: int, layer: int, pairs: StepShape, piece: jax.Array, tables: jax.Array
    ) -> jax.Array:
        """Launch what one device does of one layer; what it finds, there."""
        run = self.step.of(("attend", number, pairs, self.step.windows[layer]))
        self.kv[number][layer], out = run(self.kv[number][layer], piece, tables)
        found: jax.Array = out
        return found

    def _nothing(self, pairs: StepShape) -> jax.Array:
        """Stands for what a device without pairs has found; nobody looks at it."""
        if pairs not in self._zeros:
            config = self.plan.config
            size = config.num_attention_heads // config.num_key_value_heads, config.head_dim
            self._zeros[pairs] = jax.device_put(
                jax.numpy.zeros((pairs.tokens, *size), self.plan.dtype), self.plan.whole
            )
        return self._zeros[pairs]
