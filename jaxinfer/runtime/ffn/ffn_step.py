"""The programs of a stage whose FFN is on another group.

``first`` computes from the tokens to the first layer's FFN, ``middle`` from one layer's FFN to the
next one's, and ``last`` from the last FFN to the stage's end. In between, ``ffn`` runs on the other
group. Parameters are arguments, so that all layers with the same window use one executable. Hidden
states are sent in the weights' dtype.

Shape suffixes: those of ``layers``.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.layers import PagedBatch
from jaxinfer.models.stage import Layers
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.stage.leaves import Graph, Leaves, flat
from jaxinfer.runtime.stage.parts import LayerStep, Stream
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import Parameters
from jaxinfer.runtime.stage.step_inputs import empty_inputs
from jaxinfer.steps.shapes import StepShape


def first(
    outer: Graph,
    layer: Graph,
    layers: Layers,
    window: int | None,
    dtype: jnp.dtype,
    outer_leaves: Leaves,
    leaves: Leaves,
    kv: KVPages,
    previous_S: jax.Array,
    token_T: jax.Array,
    source_T: jax.Array,
    batch: PagedBatch,
    x_TD: jax.Array | None,
) -> tuple[KVPages, Stream, jax.Array]:
    """Compute the first FFN's input from tokens, or from the previous stage's result."""
    with jax.default_matmul_precision("highest"):
        model = outer.merge(outer_leaves)
        if layers.first:
            fed_back_T = previous_S[jnp.maximum(source_T, 0)]
            x_TD = model.embed(jnp.where(source_T >= 0, fed_back_T, token_T), batch)
        ropes = model.ropes(batch.position_T)
        x_TD, y_TD, kv = layer.merge(leaves).attended(x_TD, ropes[bool(window)], kv, batch, window)
        return kv, (x_TD, ropes), y_TD.astype(dtype)


def middle(
    layer: Graph,
    window: int | None,
    dtype: jnp.dtype,
    leaves: Leaves,
    next_leaves: Leaves,
    kv: KVPages,
    stream: Stream,
    y_TD: jax.Array,
    batch: PagedBatch,
) -> tuple[KVPages, jax.Array, jax.Array]:
    """Compute from one FFN's output to the next FFN's input and residual stream [T, D]."""
    with jax.default_matmul_precision("highest"):
        x_TD, ropes = stream
        x_TD = layer.merge(leaves).with_ffn(x_TD, y_TD.astype(jnp.float32))
        x_TD, y_TD, kv = layer.merge(next_leaves).attended(
            x_TD, ropes[bool(window)], kv, batch, window
        )
        return kv, x_TD, y_TD.astype(dtype)


def last(
    layer: Graph, leaves: Leaves, x_TD: jax.Array, y_TD: jax.Array, sample_row_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute hidden states from the last FFN's output: those to sample from, and all."""
    x_TD = layer.merge(leaves).with_ffn(x_TD, y_TD.astype(jnp.float32))
    return x_TD[sample_row_S], x_TD


def ffn(layer: Graph, dtype: jnp.dtype, leaves: Leaves, x_TD: jax.Array) -> jax.Array:
    """Compute one layer's FFN on the FFN group."""
    with jax.default_matmul_precision("highest"):
        found: jax.Array = layer.merge(leaves)(x_TD.astype(jnp.float32)).astype(dtype)
        return found


class FfnStep(LayerStep):
    """A stage's executables, by the buckets of its steps or of its micro-batches."""

    def __init__(self, plan: StagePlan) -> None:
        super().__init__(plan, plan.options.micro_batches > 1)

    def _largest(self, shape: StepShape) -> list[Hashable]:
        ffn: list[Hashable] = [("ffn", shape.tokens)] if self._plan.ffn else []
        runs: list[Hashable] = [("first", shape), *ffn]
        for window in self.windows[1:]:
            runs += [("middle", shape, window), *ffn]
        return [*runs, ("last", shape)]

    def _layer_parts(self, shape: StepShape) -> list[Hashable]:
        return [*dict.fromkeys(self._largest(shape)), *self._cuts(shape)]

    def _compile(self, part: Any) -> jax.stages.Compiled:
        if part[0] != "ffn":
            return super()._compile(part)
        assert self._plan.ffn
        return compile_ffn(self._plan.ffn, part[1])

    def _lower(self, part: Any) -> jax.stages.Lowered:
        match part:
            case "first" | "middle" | "last", StepShape() as shape, *window:
                return self._lower_layer(part[0], shape, *window)
        return super()._lower(part)

    def _lower_layer(
        self, kind: str, shape: StepShape, window: int | None = None
    ) -> jax.stages.Lowered:
        plan, leaves = self._plan, self._layer_leaves
        whole = partial(jax.ShapeDtypeStruct, sharding=plan.whole)
        inputs = empty_inputs(shape, self.limits)
        batch = jax.tree.map(lambda x: whole(x.shape, x.dtype), inputs.batch)
        x_TD = self.hidden(shape.tokens)
        y_TD = whole(x_TD.shape, plan.dtype)
        kv = plan.pages[0]
        kv_shardings = jax.tree.map(lambda x: x.sharding, kv)
        if kind == "last":
            run = jax.jit(partial(last, self._layer), out_shardings=plan.whole)
            return run.lower(leaves, x_TD, y_TD, inputs.sample_row_S)
        out_shardings = (kv_shardings, plan.whole, plan.whole)
        if kind == "first":
            window = self.windows[0]
            fixed = self._outer, self._layer, plan.layers, window, plan.dtype
            run = jax.jit(partial(first, *fixed), donate_argnums=2, out_shardings=out_shardings)
            given = None if plan.layers.first else x_TD
            return run.lower(
                self._outer_leaves, leaves, kv, self._arguments[1], inputs.token_T,
                inputs.source_T, batch, given,
            )  # fmt: skip
        model = self._outer.merge(self._outer_leaves)
        ropes = jax.eval_shape(model.ropes, jax.ShapeDtypeStruct((shape.tokens,), jnp.int32))
        stream = x_TD, jax.tree.map(lambda x: whole(x.shape, x.dtype), ropes)
        fixed_ = self._layer, window, plan.dtype
        run = jax.jit(partial(middle, *fixed_), donate_argnums=2, out_shardings=out_shardings)
        return run.lower(leaves, leaves, kv, stream, y_TD, batch)


def compile_ffn(plan: StagePlan, tokens: int) -> jax.stages.Compiled:
    """Compile the FFN of a layer for steps, or micro-batches, of ``tokens`` tokens.

    Args:
        plan: plan of the FFN.
    """
    graph, layers = ffn_leaves(plan, plan.abstract_state)
    x_TD = jax.ShapeDtypeStruct((tokens, plan.config.hidden_size), plan.dtype, sharding=plan.whole)
    run = jax.jit(partial(ffn, graph, plan.dtype), out_shardings=plan.whole)
    with jax.set_mesh(plan.mesh):
        return run.lower(layers[0], x_TD).compile()


def ffn_leaves(plan: StagePlan, parameters: Parameters) -> tuple[Graph, list[Leaves]]:
    """Return the module of a layer's FFN, and each layer's parameters."""
    model: Any = nnx.merge(plan.graphdef, parameters)
    found = [flat(layer.mlp) for layer in model.layers]
    return found[0][0], [leaves for _, leaves in found]
