"""The compiled step: one executable per bucket, compiled ahead and counted."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.errors import JaxinferError
from jaxinfer.models.layers import KVPages
from jaxinfer.runtime.sampler import sample
from jaxinfer.runtime.step_inputs import StepInputs, StepLimits, StepShape, empty_inputs

Parameters = nnx.State[Any, Any]
StepOutputs = tuple[list[KVPages], jax.Array, jax.Array]


def make_step(
    graphdef: nnx.GraphDef[Any], max_num_seqs: int
) -> Callable[[Parameters, list[KVPages], jax.Array, StepInputs], StepOutputs]:
    """The pure function of one step.

    ``(parameters, kv, previous_S, inputs) -> (kv, token_S, logprob_S)`` with S of
    ``max_num_seqs``: ``previous_S`` holds the tokens that the step before has sampled, which
    feed back into this one without a visit to the host. ``kv`` is to be donated.
    """

    def step(
        parameters: Parameters, kv: list[KVPages], previous_S: jax.Array, inputs: StepInputs
    ) -> StepOutputs:
        # On GPUs, float32 matmuls would default to TF32.
        with jax.default_matmul_precision("highest"):
            model: Any = nnx.merge(graphdef, parameters)
            fed_back_T = previous_S[jnp.maximum(inputs.source_T, 0)]
            token_T = jnp.where(inputs.source_T >= 0, fed_back_T, inputs.token_T)
            x_TD, kv = model(token_T, kv, inputs.batch)
            logits_SV = model.logits(x_TD[inputs.sample_row_S])
            token_S, logprob_S = sample(logits_SV, inputs.sampling)
        pad = max_num_seqs - token_S.shape[0]
        return kv, jnp.pad(token_S, (0, pad)), jnp.pad(logprob_S, (0, pad))

    return step


class CompiledStep:
    """Executables of one step function by bucket.

    Args:
        step: see ``make_step``.
        arguments: parameters, KV pages and previous tokens, or their shapes and shardings.
        limits: decides the buckets.
        strict_shapes: a bucket that ``warm_up`` has not compiled is an error.

    Attributes:
        compiles: executables compiled, or loaded from the persistent cache.
        compile_s: seconds spent on them.
        late_compiles: those among them after ``warm_up``: a defect, since a run waits for them.
    """

    def __init__(
        self,
        step: Callable[..., StepOutputs],
        arguments: tuple[Parameters, list[KVPages], jax.Array],
        limits: StepLimits,
        strict_shapes: bool,
    ) -> None:
        self.limits = limits
        self.compiles = 0
        self.compile_s = 0.0
        self.late_compiles = 0
        self._strict = strict_shapes
        self._jitted = jax.jit(step, donate_argnums=1)
        self._arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments
        )
        self._executables: dict[StepShape, jax.stages.Compiled] = {}

    def warm_up(self, run: Callable[[StepShape], None]) -> Iterator[int]:
        """Compile every bucket; yields how many are left, first of all their number.

        Each is also ``run`` once: a first run allocates, and takes half as long again.
        """
        shapes = self.limits.shapes()
        start = time.perf_counter()
        yield len(shapes)
        # Tracing holds Python's lock, XLA's compiler does not: two threads overlap them.
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(self._compile, shapes)
            for left, (shape, executable) in enumerate(zip(shapes, compiled, strict=True), 1):
                self._executables[shape] = executable
                run(shape)
                yield len(shapes) - left
        self.compiles += len(shapes)
        self.compile_s += time.perf_counter() - start

    def __call__(
        self,
        shape: StepShape,
        parameters: Parameters,
        kv: list[KVPages],
        previous_S: jax.Array,
        inputs: StepInputs,
    ) -> StepOutputs:
        """Launch the bucket's executable; returns at once, before the step is done."""
        if shape not in self._executables:
            if self._strict:
                raise JaxinferError(
                    f"strict_shapes: a step of {shape.rows} rows and {shape.tokens} tokens was not "
                    "compiled ahead"
                )
            start = time.perf_counter()
            self._executables[shape] = self._compile(shape)
            self.compiles += 1
            self.late_compiles += 1
            self.compile_s += time.perf_counter() - start
        outputs: StepOutputs = self._executables[shape](parameters, kv, previous_S, inputs)
        return outputs

    def _compile(self, shape: StepShape) -> jax.stages.Compiled:
        inputs = empty_inputs(shape, self.limits)
        return self._jitted.lower(*self._arguments, inputs).compile()
