"""The compiled step: a forward pass and a sampler per bucket, compiled ahead and counted."""

import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.errors import JaxinferError
from jaxinfer.models.layouts import Layout
from jaxinfer.models.sharding import for_use
from jaxinfer.models.stage import Layers
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.stage.devices import return_freed_memory
from jaxinfer.runtime.stage.lay_out import BLOCK_ROWS
from jaxinfer.runtime.stage.leaves import Graph, Leaves, flat, without_layers
from jaxinfer.runtime.stage.sampler import SamplerShape, Samples, SamplingInputs, look_up, sample
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step_inputs import StepInputs, empty_inputs
from jaxinfer.steps.shapes import StepShape

Parameters = nnx.State[Any, Any]


class StageLeaves(NamedTuple):
    """A stage's parameters as tuples that programs take: all of them, and those outside layers."""

    all: Leaves
    outer: Leaves


class Key(NamedTuple):
    """The shapes that identify a step's compiled programs; ``sampler`` is one of ``samplers``."""

    shape: StepShape
    sampler: SamplerShape


def ready(layers: Layers, layout: Layout, parameters: Parameters) -> Parameters:
    """Return a stage's parameters as they are multiplied, gathered if the layout says so."""
    if layout.gathered == ():
        return parameters
    flat = [
        (path, nnx.Param(for_use(layers.path(".".join(map(str, path))), leaf.get_value(), layout)))
        for path, leaf in nnx.to_flat_state(parameters)
    ]
    return nnx.from_flat_state(flat)


def forward(
    graph: Graph,
    layers: Layers,
    layout: Layout,
    leaves: Leaves,
    kv: list[KVPages],
    previous_S: jax.Array,
    inputs: StepInputs,
    x_TD: jax.Array | None,
) -> tuple[list[KVPages], jax.Array, jax.Array]:
    """Compute a stage of the model on one step's tokens.

    Args:
        kv: KV pages; should be donated.
        previous_S: tokens that the previous step has sampled, which are inputs here without a visit
            to the host.
        x_TD: result of the previous stage; None for the first stage.

    Returns:
        The KV pages, and the hidden states: those to sample from [S, D], and all [T, D].
    """
    # On GPUs, float32 matmuls would use TF32 by default.
    with jax.default_matmul_precision("highest"):
        parameters = ready(layers, layout, graph.state(leaves))
        model: Any = nnx.merge(graph.graphdef, parameters)
        if layers.first:
            fed_back_T = previous_S[jnp.maximum(inputs.source_T, 0)]
            token_T = jnp.where(inputs.source_T >= 0, fed_back_T, inputs.token_T)
            x_TD = model.embed(token_T, inputs.batch)
        x_TD, kv = model(x_TD, kv, inputs.batch)
        assert x_TD is not None
        return kv, x_TD[inputs.sample_row_S], x_TD


def head(
    graph: Graph,
    max_num_seqs: int,
    sampler: SamplerShape,
    leaves: Leaves,
    x_SD: jax.Array,
    previous_S: jax.Array,
    inputs: SamplingInputs,
) -> Samples:
    """Compute logits and sample a token for each hidden state, padded to ``max_num_seqs`` rows."""
    with jax.default_matmul_precision("highest"):
        model = graph.merge(leaves)
        samples = sample(model.logits(x_SD), previous_S, inputs, sampler)
    pad = max_num_seqs - len(x_SD)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)), samples)


def prompt_head(
    graph: Graph,
    top: int,
    leaves: Leaves,
    x_TD: jax.Array,
    token_T: jax.Array,
) -> Samples:
    """Return the log probabilities of given tokens, each of which follows a hidden state."""
    with jax.default_matmul_precision("highest"):
        model = graph.merge(leaves)
        pad = -len(x_TD) % BLOCK_ROWS
        x_BRD = jnp.pad(x_TD, ((0, pad), (0, 0))).reshape(-1, BLOCK_ROWS, x_TD.shape[1])
        token_BR = jnp.pad(token_T, (0, pad)).reshape(-1, BLOCK_ROWS)
        found = jax.lax.map(lambda x: look_up(model.logits(x[0]), x[1], top), (x_BRD, token_BR))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: len(x_TD)], found)


class CompiledStep:
    """A stage's executables, by bucket.

    Args:
        plan: plan of the stage; with its ``strict_shapes``, a bucket that was not compiled ahead is
            an error.

    Attributes:
        compiles: number of executables compiled, or loaded from the persistent cache.
        compile_s: seconds spent on them.
        late_compiles: number of executables that were compiled during a run, which is a defect,
            since the run has to wait.
    """

    def __init__(self, plan: StagePlan) -> None:
        self.limits = plan.limits
        self.layers = plan.layers
        self.compiles = 0
        self.compile_s = 0.0
        self.late_compiles = 0
        self._strict = plan.options.strict_shapes
        parameters, *self._arguments = plan.step_arguments
        tree = jax.tree.structure(parameters)
        # The head does not use layers; passing hundreds of arrays would cost time in each call.
        self._head_graph, outer = flat(without_layers(plan.graphdef, parameters))
        self._graphdef = plan.graphdef
        self._leaves = StageLeaves(tuple(jax.tree.leaves(parameters)), outer)
        self._hidden_size = plan.config.hidden_size
        self._mesh = plan.mesh
        self._whole = plan.whole
        # Donated pages are written in place only if both sides have the same layout.
        kv_shardings = jax.tree.map(lambda x: x.sharding, self._arguments[0])
        self._forward = jax.jit(
            partial(forward, Graph(plan.graphdef, tree), plan.layers, plan.config.layout),
            donate_argnums=1,
            out_shardings=(kv_shardings, self._whole, self._whole),
        )
        self._executables: dict[Hashable, jax.stages.Compiled] = {}

    def compile_ahead(self, sampler: SamplerShape, run: Callable[[Key], None]) -> Iterator[int]:
        """Compile all that steps with this sampler need; yield the number left, the total first.

        Each bucket is also ``run`` once, because a first run allocates memory, and takes 1.5 times
        as long.
        """
        start = time.perf_counter()
        keys = [Key(shape, one) for one in sampler.samplers() for shape in self.limits.shapes()]
        parts = dict.fromkeys(part for key in keys for part in self._parts(key))
        todo = [part for part in parts if part not in self._executables]
        yield len(todo)
        # Tracing holds Python's lock, but XLA's compiler does not; two threads overlap them.
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(self._compile, todo)
            for left, (part, executable) in enumerate(zip(todo, compiled, strict=True), 1):
                self._executables[part] = executable
                return_freed_memory()
                yield len(todo) - left
        # The smallest step that has a part; the largest keys come first.
        with_part = {part: key for key in keys for part in self._parts(key)}
        for key in {with_part[part]: None for part in todo}:
            run(key)
        self.compiles += len(todo)
        self.compile_s += time.perf_counter() - start

    def leaves(self, parameters: Parameters) -> StageLeaves:
        """Return a stage's parameters in the form that ``forward`` and ``sample`` take."""
        _, outer = flat(without_layers(self._graphdef, parameters))
        return StageLeaves(tuple(jax.tree.leaves(parameters)), outer)

    def forward(
        self,
        key: Key,
        leaves: StageLeaves,
        kv: list[KVPages],
        previous_S: jax.Array,
        inputs: StepInputs,
        x_TD: jax.Array | None,
    ) -> tuple[list[KVPages], jax.Array, jax.Array]:
        """Launch the stage's layers; return at once, before they are done."""
        (run,) = self._get([key.shape])
        found: tuple[list[KVPages], jax.Array, jax.Array] = run(
            leaves.all, kv, previous_S, inputs, x_TD
        )
        return found

    def sample(
        self,
        key: Key,
        leaves: StageLeaves,
        hidden: tuple[jax.Array, jax.Array],
        previous_S: jax.Array,
        sampling: SamplingInputs,
        next_token_T: np.ndarray | None = None,
    ) -> tuple[Samples, Samples | None]:
        """Launch the last stage's head on the result of ``forward``.

        The results are the samples and, if ``next_token_T`` has prompt tokens to report on, the
        model's probabilities of these tokens.
        """
        x_SD, x_TD = hidden
        run_head, *run_prompt_head = self._get(self._head_parts(key))
        samples: Samples = run_head(leaves.outer, x_SD, previous_S, sampling)
        found = None
        if next_token_T is not None:
            found = run_prompt_head[0](leaves.outer, x_TD, next_token_T)
        return samples, found

    def _get(self, parts: list[Hashable]) -> list[jax.stages.Compiled]:
        for part in parts:
            if part not in self._executables:
                if self._strict:
                    raise JaxinferError(f"strict_shapes: {part} was not compiled ahead")
                start = time.perf_counter()
                self._executables[part] = self._compile(part)
                self.compiles += 1
                self.late_compiles += 1
                self.compile_s += time.perf_counter() - start
        return [self._executables[part] for part in parts]

    def compile_parts(self, key: Key) -> list[jax.stages.Compiled]:
        """Compile the executables of one step."""
        return [self._compile(part) for part in self._parts(key)]

    def _compile(self, part: Any) -> jax.stages.Compiled:
        with jax.set_mesh(self._mesh):
            return self._lower(part).compile()

    def _lower(self, part: Any) -> jax.stages.Lowered:
        (every, outer), (kv, previous_S) = self._leaves, self._arguments
        match part:
            case StepShape():
                inputs = empty_inputs(part, self.limits)
                x_TD = None if self.layers.first else self.hidden(part.tokens)
                return self._forward.lower(every, kv, previous_S, inputs, x_TD)
            case "head", int(rows), SamplerShape() as sampler:
                jitted = jax.jit(
                    partial(head, self._head_graph, self.limits.max_num_seqs, sampler),
                    out_shardings=self._whole,
                )
                sampling = empty_sampling(rows, sampler)
                x_SD = self.hidden(rows)
                return jitted.lower(outer, x_SD, previous_S, sampling)
            case "prompt head", int(tokens), int(top):
                jitted = jax.jit(
                    partial(prompt_head, self._head_graph, top), out_shardings=self._whole
                )
                next_token_T = np.zeros(tokens, np.int32)
                return jitted.lower(outer, self.hidden(tokens), next_token_T)
        raise AssertionError(part)

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return the shape of hidden states between stages: float32, replicated."""
        return jax.ShapeDtypeStruct((rows, self._hidden_size), jnp.float32, sharding=self._whole)

    def _parts(self, key: Key) -> list[Hashable]:
        """Return the keys of the executables of one step of this stage."""
        return self._layer_parts(key.shape) + self._head_parts(key)

    def _layer_parts(self, shape: StepShape) -> list[Hashable]:
        return [shape]

    def _head_parts(self, key: Key) -> list[Hashable]:
        shape, sampler = key
        parts: list[Hashable] = []
        if self.layers.last:
            parts.append(("head", shape.rows, sampler._replace(prompt_top=0)))
            if sampler.prompt_top:
                parts.append(("prompt head", shape.tokens, sampler.prompt_top))
        return parts
