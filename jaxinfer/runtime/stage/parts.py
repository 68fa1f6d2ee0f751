"""Stages whose layers are separate programs, and steps that compute parts of their rows in turn.

Parts are the halves of a spread stage, or the micro-batches of a stage with an FFN group. ``part``
selects one from the previous stage's result, and ``join`` combines them at the end.

Shape suffixes: those of ``layers``.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxinfer.runtime.stage.leaves import Graph, Leaves, flat, without_layers
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import CompiledStep, Key, Parameters
from jaxinfer.runtime.stage.step_inputs import empty_inputs, fill_tokens, row_starts
from jaxinfer.serving.batch import Batch
from jaxinfer.steps.shapes import StepLimits, StepShape

# Values kept between the layers' programs: the residual stream, and the rotations of positions.
Stream = tuple[jax.Array, Any]
# Hidden states to sample from, and all of them.
States = tuple[jax.Array, jax.Array]
Inputs = TypeVar("Inputs")
# The bucket of a part, its arguments, and hidden states from the previous stage.
PartStart = tuple[StepShape, Inputs, jax.Array | None]


class PartInputs(NamedTuple, Generic[Inputs]):
    """The arrays that the parts of one step take.

    Attributes:
        shapes: bucket to which each part is padded.
        inputs: arrays that each part takes.
        place_T: for each part, int32, the positions of its tokens among the step's; for padding, a
            position behind all of the step's tokens.
        sample_row_S: sampling rows of the step, see ``StepInputs``.
    """

    shapes: Sequence[StepShape]
    inputs: Sequence[Inputs]
    place_T: Sequence[np.ndarray]
    sample_row_S: np.ndarray


def build_parts(
    batch: Batch,
    shape: StepShape,
    limits: StepLimits,
    sample_slots: Mapping[str, int],
    build: Callable[[Batch, StepShape], Inputs],
) -> PartInputs[Inputs]:
    """Build the inputs of each part of a batch, each in its own bucket."""
    starts = row_starts(batch)
    plain = empty_inputs(shape, limits)
    fill_tokens(plain, batch, starts, sample_slots)
    at = {row.request.id: start for start, row in zip(starts, batch.rows, strict=True)}
    shapes, inputs, places = [], [], []
    for rows in batch.halves:
        one = Batch(batch.instance, rows, 0, 0, 0)
        shapes.append(limits.shape_for(one))
        inputs.append(build(one, shapes[-1]))
        place_T = np.full(shapes[-1].tokens, shape.tokens, np.int32)
        for start, row in zip(row_starts(one), rows, strict=True):
            there = at[row.request.id]
            place_T[start : start + row.count] = np.arange(there, there + row.count)
        places.append(place_T)
    return PartInputs(shapes, inputs, places, plain.sample_row_S)


def part(x_TD: jax.Array, place_T: jax.Array) -> jax.Array:
    """Return the hidden states of one part's tokens."""
    return x_TD[place_T]


def join(
    x_TD: jax.Array, part_TD: jax.Array, place_T: jax.Array, sample_row_S: jax.Array
) -> States:
    """Put one part's hidden states in their places; return those to sample from, and all."""
    x_TD = x_TD.at[place_T].set(part_TD, mode="drop")
    return x_TD[sample_row_S], x_TD


class LayerStep(CompiledStep):
    """A stage's executables, if each of its programs computes one layer.

    Args:
        in_parts: whether steps may be computed as parts.

    Attributes:
        windows: attention windows of the stage's layers; None for a layer without one.
    """

    def __init__(self, plan: StagePlan, in_parts: bool) -> None:
        super().__init__(plan)
        self._plan, self._in_parts = plan, in_parts
        self.windows = plan.config.windows[plan.layers.start : plan.layers.stop]
        (self._outer, self._layer), (outer, layers) = _split(plan, plan.abstract_state)
        self._outer_leaves, self._layer_leaves = outer, layers[0]

    def of(self, program: Hashable) -> jax.stages.Compiled:
        """Return the executable of one of a step's programs."""
        return self._get([program])[0]

    def compile_parts(self, key: Key) -> list[jax.stages.Compiled]:
        """Compile the executables of a step, and return each one as often as it runs."""
        programs = [*self._largest(key.shape), *self._head_parts(key)]
        compiled = {program: self._compile(program) for program in dict.fromkeys(programs)}
        return [compiled[program] for program in programs]

    def _largest(self, shape: StepShape) -> list[Hashable]:
        """Return the programs of the largest step in a bucket, in order."""
        raise NotImplementedError

    def _cuts(self, shape: StepShape) -> list[Hashable]:
        """Return the programs that cut a step into parts and join them."""
        if not self._in_parts:
            return []
        smaller = [each for each in self.limits.shapes() if each.tokens <= shape.tokens]
        kinds = ("join",) if self.layers.first else ("join", "part")
        return [(kind, shape, each) for kind in kinds for each in smaller]

    def _lower(self, program: Any) -> jax.stages.Lowered:
        if program[0] not in ("part", "join"):
            return super()._lower(program)
        kind, shape, smaller = program
        x_TD, place_T = self.hidden(shape.tokens), np.zeros(smaller.tokens, np.int32)
        if kind == "part":
            return jax.jit(part, out_shardings=self._whole).lower(x_TD, place_T)
        sample_row_S = np.zeros(shape.rows, np.int32)
        return jax.jit(join, out_shardings=self._whole).lower(
            x_TD, self.hidden(smaller.tokens), place_T, sample_row_S
        )

    def in_turn(
        self,
        shape: StepShape,
        inputs: PartInputs[Inputs],
        x_TD: jax.Array | None,
        zeros_TD: jax.Array,
        through: Callable[[Sequence[PartStart[Inputs]]], Sequence[States]],
    ) -> States:
        """Launch the parts of a step, and return the step's hidden states.

        Args:
            x_TD: hidden states from the previous stage.
            zeros_TD: zeros in the shape of the step's hidden states.
            through: launches the layers of all parts.
        """
        starts: list[PartStart[Inputs]] = []
        for each, own, place_T in zip(inputs.shapes, inputs.inputs, inputs.place_T, strict=True):
            given = None if x_TD is None else self.of(("part", shape, each))(x_TD, place_T)
            starts.append((each, own, given))
        joined_TD = zeros_TD
        for (each, *_), place_T, (_, part_TD) in zip(
            starts, inputs.place_T, through(starts), strict=True
        ):
            run = self.of(("join", shape, each))
            x_SD, joined_TD = run(joined_TD, part_TD, place_T, inputs.sample_row_S)
        return x_SD, joined_TD


def split_parameters(plan: StagePlan, parameters: Parameters) -> tuple[Leaves, list[Leaves]]:
    """Split parameters into those outside the layers, and each layer's."""
    return _split(plan, parameters)[1]


def _split(
    plan: StagePlan, parameters: Parameters
) -> tuple[tuple[Graph, Graph], tuple[Leaves, list[Leaves]]]:
    model: Any = nnx.merge(plan.graphdef, parameters)
    layers = [flat(layer) for layer in model.layers]
    outer, outer_leaves = flat(without_layers(plan.graphdef, parameters))
    return (outer, layers[0][0]), (outer_leaves, [leaves for _, leaves in layers])
