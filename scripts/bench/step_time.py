"""Compare a step of decodes in a run with its programs alone, to find the host's time.

This needs no trace, which could change what it measures. The time of a step in a run is the time
between the ends of two steps. The device's own time is that of the same programs, launched over and
over on the inputs of one of those steps, which are already on the device.
"""

import statistics
import time
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key
from jaxinfer.serving.world import StepDone
from jaxinfer.steps.shapes import StepShape

SAMPLERS = {
    "greedy": SamplerShape(),
    "drawn": SamplerShape(greedy=False, drawn=True),
    "top_p": SamplerShape(greedy=False, drawn=True, top_p=True),
    "top_k, top_p": SamplerShape(greedy=False, drawn=True, top_k=True, top_p=True),
}
# Numbers of steps for the device's time and for the host's; JAX blocks callers with many
# computations in flight.
LAUNCHES, FEW = 20, 4


class StepWatch:
    """Looks for successive steps of decodes of one shape in a run, and keeps one step's inputs.

    Args:
        least: smallest number of decodes of such a step.
        side: number of such steps before, and after, the step whose inputs are kept.

    Attributes:
        kept: the step's shape and inputs, once there was such a step.
    """

    def __init__(self, stage: Stage, least: int, side: int) -> None:
        self.kept: tuple[StepShape, Any] | None = None
        self._stage, self._least, self._side = stage, least, side
        self._shape: StepShape | None = None
        self._ends: list[float] = []

    def on_step(self, done: StepDone) -> None:
        """Take note of an ended step; for ``LLM.run``."""
        batch = done.batch
        if len(self._ends) > 2 * self._side:
            return
        shape = self._stage.step.limits.shape_for(batch)
        of_kind = batch.work.tokens == batch.work.decodes >= self._least
        if not of_kind or shape != self._shape:
            self._shape, self._ends, self.kept = shape if of_kind else None, [], None
        if of_kind:
            self._ends.append(done.end)
        if of_kind and len(self._ends) == self._side + 1:
            # The time does not depend on the tokens that are fed back.
            slots: defaultdict[str, int] = defaultdict(int)
            self.kept = shape, self._stage.inputs(batch, shape, slots, 0)

    def figures(self, sampler: str) -> dict[str, Any] | str:
        """Return the seconds of a step in the run, and alone with each of ``SAMPLERS``.

        Returns a reason if there are none.

        Args:
            sampler: the run's sampler, one of ``SAMPLERS``.
        """
        if self.kept is None or len(self._ends) <= 2 * self._side:
            return "no such steps in the run"
        step_s = statistics.median(np.diff(self._ends).tolist())
        alone = {name: self._alone(SAMPLERS[name]) for name in SAMPLERS}
        device_s = alone[sampler]["device_s"]
        return {
            "rows": self.kept[0].rows,
            "step_s": step_s,
            "host_share": max(1 - device_s / step_s, 0.0),
            "alone": alone,
        }

    def _alone(self, sampler: SamplerShape) -> dict[str, float]:
        """Return the seconds of a step on the device, and of a launch with inputs from the host."""
        assert self.kept
        shape, inputs = self.kept
        sampling = empty_sampling(shape.rows, sampler)
        drawn = np.full(shape.rows, sampler.drawn, np.float32)
        sampling = sampling._replace(temperature_S=drawn, seed_S2=sampling.seed_S2 + np.uint32(7))
        sampling.top_k_S[:], sampling.top_p_S[:] = 50 * sampler.top_k, 0.9 if sampler.top_p else 1
        on_device = jax.device_put((inputs, sampling), self._stage.plan.whole)
        key = Key(shape, sampler)
        _, device_s = self._launch(LAUNCHES, key, *on_device)
        launch_s, _ = self._launch(FEW, key, inputs, sampling)
        return {"device_s": device_s, "launch_s": launch_s}

    def _launch(self, launches: int, key: Key, inputs: Any, sampling: Any) -> tuple[float, float]:
        stage = self._stage
        for count in (1, launches):  # The first one may compile.
            start = time.perf_counter()
            for _ in range(count):
                hidden = stage.forward(key, inputs, None)
                samples, _ = stage.sample(key, hidden, sampling, None)
            launched = time.perf_counter() - start
            samples.token_S.block_until_ready()
            took = time.perf_counter() - start
        return launched / launches, took / launches
