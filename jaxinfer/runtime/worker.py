"""One instance's devices: launches steps, and reports each when its tokens are on the host."""

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.models.layers import KVPages
from jaxinfer.runtime.step import CompiledStep, Parameters
from jaxinfer.runtime.step_inputs import StepShape, build_inputs, empty_inputs
from jaxinfer.serving.world import Batch, StepDone

Post = Callable[[StepDone | Exception], None]


class _Launched(NamedTuple):
    batch: Batch
    token_S: jax.Array
    logprob_S: jax.Array
    time: float
    origin: float
    post: Post


class Worker:
    """Parameters, KV pages and compiled step of one instance.

    A thread of its own waits for the device, so that whoever launches never does.
    """

    def __init__(
        self,
        step: CompiledStep,
        parameters: Parameters,
        kv: list[KVPages],
        previous_S: jax.Array,
    ) -> None:
        self.step = step
        self._parameters = parameters
        self._kv = kv
        self._previous_S = previous_S
        self._sample_slots: dict[str, int] = {}
        self._launched: SimpleQueue[_Launched] = SimpleQueue()
        threading.Thread(target=self._collect, daemon=True).start()

    def warm_up(self) -> Iterator[int]:
        """Compile every step, and run each once on padding; yields how many are left."""

        def run_on_padding(shape: StepShape) -> None:
            inputs = empty_inputs(shape, self.step.limits)
            self._kv, token_S, _ = self.step(
                shape, self._parameters, self._kv, self._previous_S, inputs
            )
            token_S.block_until_ready()

        return self.step.warm_up(run_on_padding)

    def launch(self, batch: Batch, origin: float, post: Post) -> None:
        """Start a step and return. ``post`` gets its StepDone, with times since ``origin``."""
        start = time.perf_counter()
        limits = self.step.limits
        shape = limits.shape_for(batch)
        inputs = build_inputs(batch, shape, limits, self._sample_slots)
        self._kv, token_S, logprob_S = self.step(
            shape, self._parameters, self._kv, self._previous_S, inputs
        )
        self._previous_S = token_S
        sampling = (row.request.id for row in batch.rows if row.samples)
        self._sample_slots = {id: slot for slot, id in enumerate(sampling)}
        self._launched.put(_Launched(batch, token_S, logprob_S, start, origin, post))

    def _collect(self) -> None:
        end = 0.0
        while True:
            batch, token_S, logprob_S, launched, origin, post = self._launched.get()
            try:
                samples = sum(row.samples for row in batch.rows)
                tokens = np.asarray(token_S)[:samples].tolist()
                logprobs = np.asarray(logprob_S)[:samples].tolist()
            except Exception as error:
                post(error)
                continue
            # A step launched ahead starts when the one before it has ended.
            start, end = max(launched, end), time.perf_counter()
            post(StepDone(batch, tokens, start - origin, end - origin, logprobs))
