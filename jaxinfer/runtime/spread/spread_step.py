"""The programs of a stage whose attention is spread over several devices.

``first`` computes up to the first layer's attention, ``middle`` from one layer's attention to the
next, and ``last`` from the last attention to the stage's end. In between, each device attends to
its own pairs. Parameters are arguments, so that all layers use one executable.

Shape suffixes: those of ``layers``; R pairs of one device, W devices, X query heads of a pair and
its key and value.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.layers import PagedBatch, paged_attention
from jaxinfer.models.stage import Layers
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.spread.head_pools import HeadPool
from jaxinfer.runtime.spread.spread_inputs import empty_spread_inputs, pair_shapes, unpack
from jaxinfer.runtime.stage.leaves import Graph, Leaves
from jaxinfer.runtime.stage.parts import LayerStep, Stream
from jaxinfer.runtime.stage.stage_plan import StageFacts, StagePlan
from jaxinfer.steps.shapes import StepLimits, StepShape


class HeadSplit:
    """Divides queries, keys and values into the devices' pairs, and joins the results.

    Args:
        plan: plan of the stage.
        devices: number of devices with pairs.
        pairs: number of pairs on each device.
    """

    def __init__(self, plan: StageFacts, devices: int, pairs: int) -> None:
        config = plan.config
        self.K, self.H = config.num_key_value_heads, config.head_dim
        self.G = config.num_attention_heads // self.K
        self.scale = config.attention_scale or self.H**-0.5
        self.W, self.R = devices, pairs
        # Attention rounds queries, keys and values to this dtype anyway, except for entries of 8
        # bits.
        self.dtype = plan.kv_dtype if plan.kv_dtype.itemsize > 1 else jnp.dtype("float32")

    def pieces(
        self, q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, layout: jax.Array
    ) -> list[jax.Array]:
        """Return the pairs [R, X, H] of each device: a key, a value, and the scaled queries."""
        q_TKGH = (q_TNH * self.scale).reshape(len(q_TNH), self.K, self.G, self.H)
        x_TKXH = jnp.concatenate([k_TKH[:, :, None], v_TKH[:, :, None], q_TKGH], 2)
        x_PXH = x_TKXH.reshape(-1, self.G + 2, self.H).astype(self.dtype)
        cut_WR = layout[: self.W * self.R].reshape(self.W, self.R)
        return [x_PXH[cut_R] for cut_R in cut_WR]

    def joined(self, outs: Sequence[jax.Array], layout: jax.Array) -> jax.Array:
        """Join the results of the devices, [T, N, H]; zeros if no device has the pair."""
        out_RGH = jnp.concatenate([*outs, jnp.zeros((1, self.G, self.H), outs[0].dtype)])
        out_PGH = out_RGH[layout[self.W * self.R :]]
        return out_PGH.reshape(-1, self.K * self.G, self.H)


def first(
    outer: Graph,
    layer: Graph,
    layers: Layers,
    windowed: bool,
    cut: HeadSplit,
    outer_leaves: Leaves,
    layer_leaves: Leaves,
    previous_S: jax.Array,
    token_T: jax.Array,
    source_T: jax.Array,
    position_T: jax.Array,
    layout: jax.Array,
    x_TD: jax.Array | None,
) -> tuple[Stream, list[jax.Array]]:
    """Compute the first layer's pairs from tokens, or from the previous stage's result."""
    with jax.default_matmul_precision("highest"):
        model = outer.merge(outer_leaves)
        if layers.first:
            fed_back_T = previous_S[jnp.maximum(source_T, 0)]
            token_T = jnp.where(source_T >= 0, fed_back_T, token_T)
            x_TD = model.embed(token_T, PagedBatch(position_T, *[None] * 7))
        assert x_TD is not None
        ropes = model.ropes(position_T)
        q_TNH, k_TKH, v_TKH = layer.merge(layer_leaves).before(x_TD, ropes[windowed])
        return (x_TD, ropes), cut.pieces(q_TNH, k_TKH, v_TKH, layout)


def middle(
    layer: Graph,
    windowed: bool,
    cut: HeadSplit,
    leaves: Leaves,
    next_leaves: Leaves,
    stream: Stream,
    outs: Sequence[jax.Array],
    layout: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """Compute from one layer's attention to the next layer's pairs and residual stream [T, D]."""
    with jax.default_matmul_precision("highest"):
        x_TD, ropes = stream
        x_TD = layer.merge(leaves).after(x_TD, cut.joined(outs, layout))
        q_TNH, k_TKH, v_TKH = layer.merge(next_leaves).before(x_TD, ropes[windowed])
        return x_TD, cut.pieces(q_TNH, k_TKH, v_TKH, layout)


def last(
    layer: Graph,
    cut: HeadSplit,
    leaves: Leaves,
    x_TD: jax.Array,
    outs: Sequence[jax.Array],
    layout: jax.Array,
    sample_row_S: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute hidden states from the last layer's attention: those to sample from, and all."""
    with jax.default_matmul_precision("highest"):
        x_TD = layer.merge(leaves).after(x_TD, cut.joined(outs, layout))
        return x_TD[sample_row_S], x_TD


def attend(
    pairs: StepShape,
    limits: StepLimits,
    pool: HeadPool,
    window: int | None,
    dtype: jnp.dtype,
    kv: KVPages,
    piece_RXH: jax.Array,
    tables: jax.Array,
) -> tuple[KVPages, jax.Array]:
    """Compute a layer's attention for one device's pairs [R, G, H]; ``kv`` should be donated."""
    with jax.default_matmul_precision("highest"):
        batch = unpack(tables, pairs, limits)
        k_R1H, v_R1H, q_RGH = piece_RXH[:, :1], piece_RXH[:, 1:2], piece_RXH[:, 2:]

        def once(q_RGH: jax.Array, kv: KVPages) -> tuple[jax.Array, KVPages]:
            return paged_attention(
                q_RGH, k_R1H, v_R1H, kv, batch, pool.kernels, scale=1.0, window=window
            )

        out_RGH, kv = once(q_RGH, kv)
        if pool.repeats > 1:
            # Each call waits for the previous one; it writes and reads the same.
            out_RGH, kv = jax.lax.fori_loop(
                1, pool.repeats, lambda i, x: once(q_RGH + 0 * x[0], x[1]), (out_RGH, kv)
            )
        return kv, out_RGH.astype(dtype)


def compile_attend(
    plan: StageFacts, pool: HeadPool, pairs: StepShape, window: int | None
) -> jax.stages.Compiled:
    """Compile one device's attention in a layer with this window, for steps of ``pairs`` pairs."""
    cut = HeadSplit(plan, 1, pairs.tokens)
    there = partial(jax.ShapeDtypeStruct, sharding=pool.sharding)
    inputs = empty_spread_inputs(pairs, pairs, plan.limits, 1, 1)
    tables = inputs.tables[0]
    assert tables is not None
    kv = pool.pages[0]
    jitted = jax.jit(
        partial(attend, pairs, plan.limits, pool, window, plan.dtype),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, kv), pool.sharding),
    )
    with jax.set_mesh(pool.mesh):
        return jitted.lower(
            kv,
            there((pairs.tokens, cut.G + 2, cut.H), cut.dtype),
            there(tables.shape, tables.dtype),
        ).compile()


class SpreadStep(LayerStep):
    """A stage's executables, by the buckets of the step and of its devices' pairs.

    Args:
        pools: pools that hold the stage's KV heads.
    """

    def __init__(self, plan: StagePlan, pools: Sequence[HeadPool]) -> None:
        super().__init__(plan, plan.options.half_batches != "never")
        self._pools = pools

    def pair_shapes(self, shape: StepShape) -> list[StepShape]:
        """Return the buckets to which one device's pairs may be padded."""
        return pair_shapes(shape, self._plan.num_kv_heads)

    def _largest(self, shape: StepShape) -> list[Hashable]:
        """Return the programs of a step with pairs on all devices."""
        return self._runs(shape, self.pair_shapes(shape)[-1])

    def _layer_parts(self, shape: StepShape) -> list[Hashable]:
        parts = [part for pairs in self.pair_shapes(shape) for part in self._runs(shape, pairs)]
        return list(dict.fromkeys(parts + self._cuts(shape)))

    def _runs(self, shape: StepShape, pairs: StepShape) -> list[Hashable]:
        """Return the parts that a step runs, in order, if every device has pairs."""
        here = [number for number, pool in enumerate(self._pools) if not pool.is_lent]
        parts: list[Hashable] = [("first", shape, pairs)]
        for number, window in enumerate(self.windows):
            if number:
                parts.append(("middle", shape, pairs, bool(window)))
            parts += [("attend", device, pairs, window) for device in here]
        return [*parts, ("last", shape, pairs)]

    def _compile(self, part: Any) -> jax.stages.Compiled:
        if part[0] != "attend":
            return super()._compile(part)
        _, number, pairs, window = part
        return compile_attend(self._plan, self._pools[number], pairs, window)

    def _lower(self, part: Any) -> jax.stages.Lowered:
        if part[0] not in ("first", "middle", "last"):
            return super()._lower(part)
        kind, shape, pairs, *rest = part
        plan, W = self._plan, len(self._pools)
        cut = HeadSplit(plan, W, pairs.tokens)
        whole = partial(jax.ShapeDtypeStruct, sharding=plan.whole)
        inputs = empty_spread_inputs(shape, pairs, self.limits, cut.K, W)
        layout = whole(inputs.layout.shape, jnp.int32)
        outs = [whole((pairs.tokens, cut.G, cut.H), plan.dtype)] * W
        x_TD = self.hidden(shape.tokens)
        leaves = self._layer_leaves
        jitted = partial(jax.jit, out_shardings=plan.whole)
        if kind == "last":
            run = jitted(partial(last, self._layer, cut))
            return run.lower(leaves, x_TD, outs, layout, inputs.sample_row_S)
        if kind == "first":
            windowed = bool(self.windows[0])
            run = jitted(partial(first, self._outer, self._layer, plan.layers, windowed, cut))
            return run.lower(
                self._outer_leaves,
                leaves,
                self._arguments[1],
                inputs.token_T,
                inputs.source_T,
                inputs.position_T,
                layout,
                None if plan.layers.first else x_TD,
            )
        model = self._outer.merge(self._outer_leaves)
        ropes = jax.eval_shape(model.ropes, jax.ShapeDtypeStruct((shape.tokens,), jnp.int32))
        stream = x_TD, jax.tree.map(lambda x: whole(x.shape, x.dtype), ropes)
        run = jitted(partial(middle, self._layer, rest[0], cut))
        return run.lower(leaves, leaves, stream, outs, layout)
