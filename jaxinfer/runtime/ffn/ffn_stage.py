"""A pipeline stage whose FFN, or experts, are on another group."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.runtime.ffn.emulated_ffn import EmulatedFfn
from jaxinfer.runtime.ffn.ffn_messages import FfnClient
from jaxinfer.runtime.ffn.ffn_step import FfnStep, ffn_leaves
from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.spread.lender_client import padded
from jaxinfer.runtime.stage.devices import device_name
from jaxinfer.runtime.stage.leaves import Leaves
from jaxinfer.runtime.stage.parts import (
    PartInputs,
    PartStart,
    States,
    build_parts,
    split_parameters,
)
from jaxinfer.runtime.stage.stage import Stage, put_whole
from jaxinfer.runtime.stage.stage_plan import StageFacts, StagePlan
from jaxinfer.runtime.stage.step import Key, Parameters
from jaxinfer.runtime.stage.step_inputs import StepInputs, build_inputs
from jaxinfer.serving.batch import Batch, Work
from jaxinfer.steps.shapes import StepShape


class FfnStage(Stage):
    """Attention on the stage's mesh, and each layer's FFN on the mesh of another group.

    Args:
        ffn_parameters: the FFN's parameters; None if another process has them.

    Attributes:
        elsewhere: the FFN in another process, once it is known.
        leaves_out_ffn: whether steps leave out the FFN, as they do while the rest is measured.
        emulated: both groups at the speeds of slower devices, if they are emulated.
        outer: parameters outside the layers.
        layers: the attention side's parameters of each layer.
        ffn: the FFN's parameters of each layer.
    """

    step: FfnStep

    def __init__(
        self, plan: StagePlan, parameters: Parameters, ffn_parameters: Parameters | None
    ) -> None:
        super().__init__(plan, parameters)
        self.elsewhere: FfnClient | None = None
        self.leaves_out_ffn = False
        self.emulated: EmulatedFfn | None = None
        # Work of the micro-batches of the step that is launched next, if groups are emulated.
        self._works: Sequence[Work] = ()
        self.outer, self.layers = split_parameters(plan, parameters)
        self.ffn: list[Leaves] = []
        if plan.ffn:
            assert ffn_parameters
            _, self.ffn = ffn_leaves(plan.ffn, ffn_parameters)
        self._zeros: dict[int, jax.Array] = {}

    def _new_step(self) -> FfnStep:
        return FfnStep(self.plan)

    def inputs(
        self, batch: Batch, shape: StepShape, sample_slots: Mapping[str, int], shard: int
    ) -> StepInputs | PartInputs[StepInputs]:
        """Build the inputs of ``forward``: those of each micro-batch if the batch has some."""
        if self.emulated:
            self._works = batch.work.halves or [batch.work]
        if not batch.halves:
            return super().inputs(batch, shape, sample_slots, shard)
        limits = self.step.limits
        build = partial(build_inputs, limits=limits, sample_slots=sample_slots, shard=shard)
        return build_parts(batch, shape, limits, sample_slots, build)

    def forward(
        self, key: Key, inputs: StepInputs | PartInputs[StepInputs], x_TD: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Launch the layers; return hidden states to sample from, and all of them, at once."""
        if x_TD is not None:
            x_TD = put_whole(x_TD, self.plan)
        if isinstance(inputs, StepInputs):
            return self._through([(key.shape, inputs, x_TD)])[0]
        zeros_TD = self._no_states(key.shape.tokens)
        return self.step.in_turn(key.shape, inputs, x_TD, zeros_TD, self._through)

    def _through(self, starts: Sequence[PartStart[StepInputs]]) -> list[States]:
        """Launch all layers of micro-batches in turn.

        While one of them is on the FFN group, the stage's own group attends to the others.
        """
        chains = self._chains(starts)
        for layer in range(len(self.layers)):
            for chain in chains:
                chain.enter(layer)
        found = [chain.leave() for chain in chains]
        if self.emulated and (late := self.emulated.take_late()):
            self.overruns.append(late)
        return found

    def _chains(self, starts: Sequence[PartStart[StepInputs]]) -> "Sequence[Chain]":
        works, self._works = self._works, ()
        if self.emulated and works:  # Steps of padding alone have no work.
            each = zip(starts, works, strict=True)
            return [EmulatedChain(self, *start, self.emulated, work) for start, work in each]
        kind = OwnChain if self.leaves_out_ffn else Chain
        return [kind(self, *start) for start in starts]

    def borrow(self, number: int, address: Address, patience: float | None) -> None:
        """Use the FFN that another process computes for this stage.

        Args:
            number: number of the FFN among the parts in ``StageFacts.lenders``.
            patience: see ``LenderClient``.
        """
        self.elsewhere = FfnClient(address, self.plan.lenders[number], patience)

    def compute_ffn(
        self, layer: int, y_TD: jax.Array, count: int
    ) -> "jax.Array | np.ndarray | Future[np.ndarray]":
        """Launch one layer's FFN for ``count`` tokens and their padding, or request it.

        Returns:
            The FFN's output; if another process computes it, a future of the output without
            padding.
        """
        if plan := self.plan.ffn:
            run = self.step.of(("ffn", len(y_TD)))
            return put_whole(run(self.ffn[layer], put_whole(y_TD, plan)), self.plan)
        if not count:  # Padding alone is not sent; the other process tries its programs itself.
            return np.zeros(y_TD.shape, y_TD.dtype)
        assert self.elsewhere
        return self.elsewhere.compute(layer, y_TD, count)

    def _no_states(self, tokens: int) -> jax.Array:
        """Return zeros in the shape of hidden states, made once for each number of tokens."""
        if tokens not in self._zeros:
            zeros = jnp.zeros((tokens, self.plan.config.hidden_size), jnp.float32)
            self._zeros[tokens] = jax.device_put(zeros, self.plan.whole)
        return self._zeros[tokens]


def describe_ffn(plan: StageFacts) -> dict[str, object]:
    """Describe the FFN group of a stage, if it has one, as JSON values."""
    if not plan.ffn:
        return {}
    devices = [device_name(device) for device in plan.ffn.devices]
    return {"ffn": {"group": plan.ffn_group, "devices": devices}}


class Chain:
    """A micro-batch on its way through a stage; its methods launch work without waiting for it.

    Exception: if the FFN is in another process, it waits for the hidden states sent there and back.

    Args:
        shape: shape that it is padded to.
        x_TD: hidden states from the previous stage.
    """

    def __init__(
        self, stage: FfnStage, shape: StepShape, inputs: StepInputs, x_TD: jax.Array | None
    ) -> None:
        self._stage, self._shape, self._inputs, self._x_TD = stage, shape, inputs, x_TD
        self._batch = jax.device_put(inputs.batch, stage.plan.whole)
        self._count = int(inputs.batch.chunk_row_C1[-1])  # Tokens without padding.
        self._ropes: Any = None
        self._y_TD: Any = None

    def enter(self, layer: int) -> None:
        """Compute from the tokens, or from the previous layer's FFN, to the end of this FFN."""
        stage, of, inputs = self._stage, self._stage.step.of, self._inputs
        if not layer:
            stage.kv[0], (self._x_TD, self._ropes), y_TD = of(("first", self._shape))(
                stage.outer,
                stage.layers[0],
                stage.kv[0],
                stage.previous_S,
                inputs.token_T,
                inputs.source_T,
                self._batch,
                self._x_TD,
            )
        else:
            run = of(("middle", self._shape, stage.step.windows[layer]))
            stage.kv[layer], self._x_TD, y_TD = run(
                *stage.layers[layer - 1 : layer + 1],
                stage.kv[layer],
                (self._x_TD, self._ropes),
                self._found(),
                self._batch,
            )
        self._y_TD = self._ask(layer, y_TD)

    def _ask(self, layer: int, y_TD: jax.Array) -> Any:
        """Launch a layer's FFN, or ask for it."""
        return self._stage.compute_ffn(layer, y_TD, self._count)

    def _found(self) -> jax.Array | np.ndarray:
        """Return the last FFN's output for the stage's mesh; waits for another process."""
        if isinstance(self._y_TD, Future):
            return padded(self._y_TD.result(), self._shape.tokens)
        return self._y_TD

    def leave(self) -> tuple[jax.Array, jax.Array]:
        """Return the hidden states to sample from, and all of them."""
        stage = self._stage
        run = stage.step.of(("last", self._shape))
        found: tuple[jax.Array, jax.Array] = run(
            stage.layers[-1], self._x_TD, self._found(), self._inputs.sample_row_S
        )
        return found


class EmulatedChain(Chain):
    """A micro-batch on its way through an emulated stage; its methods wait until each part ends.

    Args:
        work: work of the micro-batch.
    """

    def __init__(
        self,
        stage: FfnStage,
        shape: StepShape,
        inputs: StepInputs,
        x_TD: jax.Array | None,
        emulated: EmulatedFfn,
        work: Work,
    ) -> None:
        super().__init__(stage, shape, inputs, x_TD)
        self._emulated = emulated
        self._seconds = emulated.seconds.of_attention(work)
        self._ready = time.perf_counter()

    def _ask(self, layer: int, y_TD: jax.Array) -> Any:
        y_TD.block_until_ready()
        end = self._emulated.own.end_of(self._ready, self._seconds)
        launch = partial(super()._ask, layer, y_TD)
        return self._emulated.ask(launch, self._shape.tokens, end)

    def _found(self) -> Any:
        y_TD, self._ready = self._y_TD.result()
        return y_TD


class OwnChain(Chain):
    """A micro-batch on its way through a stage that leaves out its FFN, to measure the rest."""

    def _ask(self, layer: int, y_TD: jax.Array) -> Any:
        return y_TD
