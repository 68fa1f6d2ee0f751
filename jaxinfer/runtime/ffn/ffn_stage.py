"""A pipeline stage whose FFN, or experts, are on another group."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.runtime.ffn.ffn_step import FfnStep, ffn_leaves
from jaxinfer.runtime.stage.devices import device_name
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
from jaxinfer.serving.batch import Batch
from jaxinfer.steps.shapes import StepShape


class FfnStage(Stage):
    """Attention on the stage's mesh, and each layer's FFN on that of another group.

    Args:
        ffn_parameters: parameters of the FFN.

    Attributes:
        outer: parameters outside the layers.
        layers: the attention side's parameters of each layer.
        ffn: the FFN's parameters of each layer.
    """

    step: FfnStep

    def __init__(self, plan: StagePlan, parameters: Parameters, ffn_parameters: Parameters) -> None:
        assert plan.ffn
        super().__init__(plan, parameters)
        self.ffn_plan = plan.ffn
        self.outer, self.layers = split_parameters(plan, parameters)
        _, self.ffn = ffn_leaves(plan.ffn, ffn_parameters)
        self._zeros: dict[int, jax.Array] = {}

    def _new_step(self) -> FfnStep:
        return FfnStep(self.plan)

    def inputs(
        self, batch: Batch, shape: StepShape, sample_slots: Mapping[str, int], shard: int
    ) -> StepInputs | PartInputs[StepInputs]:
        """Build the inputs of ``forward``: those of each micro-batch if the batch has some."""
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
        chains = [Chain(self, *each) for each in starts]
        for layer in range(len(self.layers)):
            for chain in chains:
                chain.enter(layer)
        return [chain.leave() for chain in chains]

    def _no_states(self, tokens: int) -> jax.Array:
        """Return zeros in the shape of hidden states, made once for each number of tokens."""
        if tokens not in self._zeros:
            zeros = jnp.zeros((tokens, self.plan.config.hidden_size), jnp.float32)
            self._zeros[tokens] = jax.device_put(zeros, self.plan.whole)
        return self._zeros[tokens]


def describe_ffn(plan: StageFacts, groups: Sequence[str], number: int) -> dict[str, object]:
    """Describe the FFN group of a stage by its number, if it has one, as JSON values."""
    if not (isinstance(plan, StagePlan) and plan.ffn):
        return {}
    devices = [device_name(device) for device in plan.ffn.devices]
    return {"ffn": {"group": groups[number], "devices": devices}}


class Chain:
    """A micro-batch on its way through a stage; launches and never waits.

    Args:
        shape: shape that it is padded to.
        x_TD: hidden states from the previous stage.
    """

    def __init__(
        self, stage: FfnStage, shape: StepShape, inputs: StepInputs, x_TD: jax.Array | None
    ) -> None:
        self._stage, self._shape, self._inputs, self._x_TD = stage, shape, inputs, x_TD
        self._batch = jax.device_put(inputs.batch, stage.plan.whole)
        self._ropes: Any = None
        self._y_TD: Any = None

    def enter(self, layer: int) -> None:
        """Compute from the tokens, or from the last layer's FFN, to the end of this one's."""
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
                self._y_TD,
                self._batch,
            )
        x_TD = put_whole(y_TD, stage.ffn_plan)
        self._y_TD = put_whole(of(("ffn", self._shape.tokens))(stage.ffn[layer], x_TD), stage.plan)

    def leave(self) -> tuple[jax.Array, jax.Array]:
        """Return the hidden states to sample from, and all of them."""
        stage = self._stage
        run = stage.step.of(("last", self._shape))
        found: tuple[jax.Array, jax.Array] = run(
            stage.layers[-1], self._x_TD, self._y_TD, self._inputs.sample_row_S
        )
        return found
