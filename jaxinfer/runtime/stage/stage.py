"""A pipeline stage on its mesh: parameters, KV pages and compiled step."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.stage.kv_cache import allocate
from jaxinfer.runtime.stage.sampler import SamplerShape, Samples, SamplingInputs
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import CompiledStep, Key, Parameters, StageLeaves
from jaxinfer.runtime.stage.step_inputs import build_inputs, empty_inputs
from jaxinfer.serving.batch import Batch
from jaxinfer.steps.shapes import StepShape


class Stage:
    """A part of a model that runs steps for a worker; most instances have only one.

    Attributes:
        kv: pages; each step, and each transfer into the pages, replaces these arrays.
        emulate: function that returns how many seconds a step takes on an emulated slower device,
            or None.
        link: link from the previous stage to this one, if emulated.
        overruns: seconds by which emulated steps were late, one for each late step.
        previous_S: the last step's tokens, which are inputs of the next step.
        transfers: compiled programs that gather slabs from the pages and scatter slabs into them;
            channels with the same format share them.
    """

    def __init__(self, plan: StagePlan, parameters: Parameters) -> None:
        self.plan = plan
        self.step = self._new_step()
        self.parameters = parameters
        self._leaves = self._leaves_of(parameters)
        self.kv = self._new_kv()
        self.emulate: Callable[[Batch], float] | None = None
        self.link: LinkConfig | None = None
        self.overruns: list[float] = []
        self.transfers: dict[Hashable, jax.stages.Compiled] = {}
        self.previous_S = self._no_tokens()

    def _leaves_of(self, parameters: Parameters) -> StageLeaves:
        return self.step.leaves(parameters)

    def _new_step(self) -> CompiledStep:
        return CompiledStep(self.plan)

    def _new_kv(self) -> Any:
        return allocate(self.plan.pages)

    def _no_tokens(self) -> jax.Array:
        like = self.plan.step_arguments[2]
        return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)

    def recover(self) -> None:
        """Replace pages that a failed step or transfer has destroyed by zeroed ones."""
        self.previous_S = self._no_tokens()
        if not _are_there(self.kv):
            self.kv = None  # The memory is needed.
            self.kv = self._new_kv()

    def inputs(
        self, batch: Batch, shape: StepShape, sample_slots: Mapping[str, int], shard: int
    ) -> Any:
        """Build the inputs of ``forward`` for a batch; see ``build_inputs``."""
        return build_inputs(batch, shape, self.step.limits, sample_slots, shard)

    def padding(self, shape: StepShape) -> Iterator[Any]:
        """Yield inputs without tokens, one for each variant of a step of this shape."""
        yield empty_inputs(shape, self.step.limits)

    def compile_ahead(self, sampler: SamplerShape) -> Iterator[int]:
        """Compile all steps with this sampler; yield the number of steps left."""

        def run_on_padding(key: Key) -> None:
            x_TD, previous_S = None, self.previous_S
            if not self.plan.layers.first:
                like = self.step.hidden(key.shape.tokens)
                x_TD = jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
            for inputs in self.padding(key.shape):
                hidden = self.forward(key, inputs, x_TD)
            if self.plan.layers.last:
                sampling = empty_sampling(key.shape.rows, key.sampler)
                samples, _ = self.step.sample(key, self._leaves, hidden, self.previous_S, sampling)
                samples.token_S.block_until_ready()
                # In the middle of a run, the next step has not been launched yet.
                self.previous_S = previous_S

        return self.step.compile_ahead(sampler, run_on_padding)

    def forward(self, key: Key, inputs: Any, x_TD: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Launch the layers; return the hidden states to sample from, and all of them, at once.

        Args:
            inputs: see ``inputs``.
        """
        if x_TD is not None:
            x_TD = put_whole(x_TD, self.plan)
        self.kv, x_SD, x_TD = self.step.forward(
            key, self._leaves, self.kv, self.previous_S, inputs, x_TD
        )
        return x_SD, x_TD

    def sample(
        self,
        key: Key,
        hidden: tuple[jax.Array, jax.Array],
        sampling: SamplingInputs,
        next_token_T: np.ndarray | None,
    ) -> tuple[Samples, Samples | None]:
        """Launch the head; its tokens are inputs of the next step."""
        samples, prompt = self.step.sample(
            key, self._leaves, hidden, self.previous_S, sampling, next_token_T
        )
        self.previous_S = samples.token_S
        return samples, prompt

    def start_of(self, before: float, x_TD: jax.Array) -> float:
        """Return when hidden states arrive here from the previous stage, which ended at ``before``.

        Their travel time counts only if steps are emulated; profiles, for example, exclude it.
        """
        late = self.link if self.emulate else None
        return before + (late.seconds(x_TD.nbytes) if late else 0.0)

    def end_of(self, batch: Batch, start: float) -> float:
        """Return the end, by ``time.perf_counter``, of a part of a step that is done now.

        On an emulated device, the end is later, and this method waits for the end.
        """
        now = time.perf_counter()
        if self.emulate is None:
            return now
        end = start + self.emulate(batch)
        if now > end:
            self.overruns.append(now - end)
            return now
        time.sleep(end - now)
        return end


def _are_there(pages: Any) -> bool:
    """Tell whether arrays can be used: neither donated nor the result of a failed program."""
    if pages is None:
        return False
    try:
        for array in jax.tree.leaves(pages):
            array.block_until_ready()
    except RuntimeError:  # It is deleted, or comes from a failed program.
        return False
    return True


def put_whole(x: jax.Array, plan: StagePlan) -> jax.Array:
    """Copy an array that is replicated on one mesh to every device of another.

    On one mesh it is the array itself. Otherwise one device's copy is sent: between different
    numbers of devices, sending the array itself would block until it exists.
    """
    if x.sharding == plan.whole:
        return x
    one = x.addressable_shards[0].data
    copies = [jax.device_put(one, device) for device in plan.devices]
    return jax.make_array_from_single_device_arrays(x.shape, plan.whole, copies)
