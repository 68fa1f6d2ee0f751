"""Inputs of a step that is computed as micro-batches, in turn."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.runtime.stage.step_inputs import StepInputs, build_inputs, empty_inputs, row_starts
from jaxinfer.serving.batch import Batch
from jaxinfer.steps.shapes import StepLimits, StepShape


class MicroBatches(NamedTuple):
    """Arguments of the micro-batches of one step.

    Attributes:
        shapes: bucket that each one is padded to.
        inputs: arguments of each one.
        place_T: for each one, int32, positions of its tokens among the step's; for padding, a
            position behind all of them.
        sample_row_S: sampling rows of the step, see ``StepInputs``.
    """

    shapes: Sequence[StepShape]
    inputs: Sequence[StepInputs]
    place_T: Sequence[np.ndarray]
    sample_row_S: np.ndarray


def build_micro_batches(
    batch: Batch,
    shape: StepShape,
    limits: StepLimits,
    sample_slots: Mapping[str, int],
    shard: int,
) -> MicroBatches:
    """Build the inputs of each micro-batch in its own bucket; see ``build_inputs``."""
    at = {row.request.id: start for start, row in zip(row_starts(batch), batch.rows, strict=True)}
    shapes, inputs, places = [], [], []
    for rows in batch.halves:
        part = Batch(batch.instance, rows, 0, 0, 0)
        shapes.append(limits.shape_for(part))
        inputs.append(build_inputs(part, shapes[-1], limits, sample_slots, shard))
        place_T = np.full(shapes[-1].tokens, shape.tokens, np.int32)
        for start, row in zip(row_starts(part), rows, strict=True):
            there = at[row.request.id]
            place_T[start : start + row.count] = np.arange(there, there + row.count)
        places.append(place_T)
    sampled = [at[row.request.id] + row.count - 1 for row in batch.rows if row.samples]
    sample_row_S = empty_inputs(shape, limits).sample_row_S
    sample_row_S[: len(sampled)] = sampled
    return MicroBatches(shapes, inputs, places, sample_row_S)
