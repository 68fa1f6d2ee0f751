"""The compiled step: a forward pass and a sampler per bucket, compiled ahead and counted."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.errors import JaxinferError
from jaxinfer.models.layers import KVPages
from jaxinfer.runtime.sampler import SamplerShape, Samples, SamplingInputs, sample
from jaxinfer.runtime.sampling_inputs import empty_sampling
from jaxinfer.runtime.step_inputs import StepInputs, StepLimits, StepShape, empty_inputs

Parameters = nnx.State[Any, Any]
Key = tuple[StepShape, SamplerShape]


def forward(
    graphdef: nnx.GraphDef[Any],
    parameters: Parameters,
    kv: list[KVPages],
    previous_S: jax.Array,
    inputs: StepInputs,
) -> tuple[list[KVPages], jax.Array]:
    """The model on one step's tokens: the KV pages and the hidden states to sample from [S, D].

    ``previous_S`` holds the tokens that the step before has sampled, which feed back into this
    one without a visit to the host. ``kv`` is to be donated.
    """
    # On GPUs, float32 matmuls would default to TF32.
    with jax.default_matmul_precision("highest"):
        model: Any = nnx.merge(graphdef, parameters)
        fed_back_T = previous_S[jnp.maximum(inputs.source_T, 0)]
        token_T = jnp.where(inputs.source_T >= 0, fed_back_T, inputs.token_T)
        x_TD, kv = model(token_T, kv, inputs.batch)
        return kv, x_TD[inputs.sample_row_S]


def head(
    graphdef: nnx.GraphDef[Any],
    max_num_seqs: int,
    top: int,
    parameters: Parameters,
    x_SD: jax.Array,
    previous_S: jax.Array,
    inputs: SamplingInputs,
) -> Samples:
    """Logits and a token for each hidden state, padded to ``max_num_seqs`` rows."""
    with jax.default_matmul_precision("highest"):
        model: Any = nnx.merge(graphdef, parameters)
        samples = sample(model.logits(x_SD), previous_S, inputs, top)
    pad = max_num_seqs - len(x_SD)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)), samples)


class CompiledStep:
    """Executables by bucket.

    Args:
        graphdef: the model's structure.
        arguments: parameters, KV pages and previous tokens, or their shapes and shardings.
        limits: decides the buckets.
        strict_shapes: a bucket that has not been compiled ahead is an error.

    Attributes:
        compiles: executables compiled, or loaded from the persistent cache.
        compile_s: seconds spent on them.
        late_compiles: those among them during a run: a defect, since the run waits for them.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        arguments: tuple[Parameters, list[KVPages], jax.Array],
        limits: StepLimits,
        strict_shapes: bool,
    ) -> None:
        self.limits = limits
        self.compiles = 0
        self.compile_s = 0.0
        self.late_compiles = 0
        self._strict = strict_shapes
        self._graphdef = graphdef
        self._arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments
        )
        self._forward = jax.jit(partial(forward, graphdef), donate_argnums=1)
        self._executables: dict[Hashable, jax.stages.Compiled] = {}

    def compile_ahead(self, sampler: SamplerShape, run: Callable[[Key], None]) -> Iterator[int]:
        """Compile what runs with this sampler need; yields how many are left, their number first.

        Each bucket is also ``run`` once: a first run allocates, and takes half as long again.
        """
        start = time.perf_counter()
        shapes = self.limits.shapes()
        wanted: list[Hashable] = [(rows, sampler) for rows in self.limits.row_buckets]
        todo = [key for key in [*shapes, *wanted] if key not in self._executables]
        yield len(todo)
        # Tracing holds Python's lock, XLA's compiler does not: two threads overlap them.
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(self._compile, todo)
            for left, (key, executable) in enumerate(zip(todo, compiled, strict=True), 1):
                self._executables[key] = executable
                yield len(todo) - left
        for shape in shapes if todo else []:
            run((shape, sampler))
        self.compiles += len(todo)
        self.compile_s += time.perf_counter() - start

    def __call__(
        self,
        key: Key,
        parameters: Parameters,
        kv: list[KVPages],
        previous_S: jax.Array,
        inputs: StepInputs,
        sampling: SamplingInputs,
    ) -> tuple[list[KVPages], Samples]:
        """Launch the bucket's executables; returns at once, before the step is done."""
        shape, sampler = key
        run_forward, run_head = self._get([shape, (shape.rows, sampler)])
        kv, x_SD = run_forward(parameters, kv, previous_S, inputs)
        samples: Samples = run_head(parameters, x_SD, previous_S, sampling)
        return kv, samples

    def _get(self, keys: Iterable[Hashable]) -> list[jax.stages.Compiled]:
        for key in keys:
            if key not in self._executables:
                if self._strict:
                    raise JaxinferError(f"strict_shapes: {key} was not compiled ahead")
                start = time.perf_counter()
                self._executables[key] = self._compile(key)
                self.compiles += 1
                self.late_compiles += 1
                self.compile_s += time.perf_counter() - start
        return [self._executables[key] for key in keys]

    def _compile(self, key: Any) -> jax.stages.Compiled:
        parameters, kv, previous_S = self._arguments
        if isinstance(key, StepShape):
            inputs = empty_inputs(key, self.limits)
            return self._forward.lower(parameters, kv, previous_S, inputs).compile()
        rows, sampler = key
        largest = empty_inputs(StepShape(rows, rows, 0), self.limits)
        _, x_SD = jax.eval_shape(self._forward, parameters, kv, previous_S, largest)
        x_SD = jax.ShapeDtypeStruct(x_SD.shape, x_SD.dtype, sharding=previous_S.sharding)
        jitted = jax.jit(partial(head, self._graphdef, self.limits.max_num_seqs, sampler.top))
        return jitted.lower(parameters, x_SD, previous_S, empty_sampling(rows, sampler)).compile()
