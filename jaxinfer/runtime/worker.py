"""One instance's devices: launches steps, and reports each when its tokens are on the host."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.models.layers import KVPages
from jaxinfer.request import Logprob
from jaxinfer.runtime.sampler import SamplerShape, Samples
from jaxinfer.runtime.sampling_inputs import (
    build_sampling,
    empty_sampling,
    next_prompt_tokens,
    prompt_positions,
    sampler_shape,
    sampling_of,
)
from jaxinfer.runtime.step import CompiledStep, Key, Parameters
from jaxinfer.runtime.step_inputs import build_inputs, empty_inputs, row_starts
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import Batch, StepDone

Post = Callable[[StepDone | Exception], None]


class _Launched(NamedTuple):
    batch: Batch
    samples: Samples
    prompt: Samples | None
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
        self._sampler = SamplerShape()
        self._sample_slots: dict[str, int] = {}
        self._launched: SimpleQueue[_Launched] = SimpleQueue()
        threading.Thread(target=self._collect, daemon=True).start()

    def prepare(self, requests: Iterable[RequestState] = ()) -> Iterator[int]:
        """Compile all steps for a run of these requests; yields how many are left."""
        self._sampler = sampler_shape(requests)

        def run_on_padding(key: Key) -> None:
            inputs = empty_inputs(key.shape, self.step.limits)
            sampling = empty_sampling(key.shape.rows, key.sampler)
            self._kv, samples, _ = self.step(
                key, self._parameters, self._kv, self._previous_S, inputs, sampling
            )
            samples.token_S.block_until_ready()

        return self.step.compile_ahead(self._sampler, run_on_padding)

    def launch(self, batch: Batch, origin: float, post: Post) -> None:
        """Start a step and return. ``post`` gets its StepDone, with times since ``origin``."""
        start = time.perf_counter()
        limits = self.step.limits
        shape = limits.shape_for(batch)
        inputs = build_inputs(batch, shape, limits, self._sample_slots)
        sampling = build_sampling(batch, shape.rows, self._sampler, self._sample_slots)
        next_token_T = None
        if self._sampler.prompt_top and any(map(prompt_positions, batch.rows)):
            next_token_T = next_prompt_tokens(batch, shape.tokens)
        self._kv, samples, prompt = self.step(
            Key(shape, self._sampler), self._parameters, self._kv, self._previous_S,
            inputs, sampling, next_token_T,
        )  # fmt: skip
        self._previous_S = samples.token_S
        sampled = (row.request.id for row in batch.rows if row.samples)
        self._sample_slots = {id: slot for slot, id in enumerate(sampled)}
        self._launched.put(_Launched(batch, samples, prompt, start, origin, post))

    def _collect(self) -> None:
        end = 0.0
        while True:
            batch, on_device, prompt, launched, origin, post = self._launched.get()
            # Whatever fails here would otherwise leave the loop waiting for ever.
            try:
                samples = Samples(*map(np.asarray, on_device))
                found = prompt and Samples(*map(np.asarray, prompt))
                # A step launched ahead starts when the one before it has ended.
                start, end = max(launched, end), time.perf_counter()
                post(_step_done(batch, samples, found, start - origin, end - origin))
            except Exception as error:
                post(error)


def _step_done(
    batch: Batch, samples: Samples, prompt: Samples | None, start: float, end: float
) -> StepDone:
    sampled = [row.request for row in batch.rows if row.samples]
    details = [_sample_logprobs(request, i, samples) for i, request in enumerate(sampled)]
    return StepDone(
        batch,
        samples.token_S[: len(sampled)].tolist(),
        start,
        end,
        samples.logprob_S[: len(sampled)].tolist(),
        details if any(details) else (),
        _prompt_logprobs(batch, prompt) if prompt else {},
    )


def _sample_logprobs(request: RequestState, i: int, samples: Samples) -> dict[int, Logprob] | None:
    count = sampling_of(request).params.logprobs
    return None if count is None else _logprobs(samples, i, count)


def _prompt_logprobs(batch: Batch, found: Samples) -> dict[str, dict[int, object]]:
    """Request id -> position in the prompt -> what the model says of the token there."""
    reported: dict[str, dict[int, object]] = {}
    for at, row in zip(row_starts(batch), batch.rows, strict=True):
        count = sampling_of(row.request).params.prompt_logprobs or 0
        for i, position in enumerate(prompt_positions(row), at):
            here = reported.setdefault(row.request.id, {})
            here[position + 1] = _logprobs(found, i, count)
    return reported


def _logprobs(samples: Samples, i: int, count: int) -> dict[int, Logprob]:
    """Row i's token, then the ``count`` likeliest ones."""
    own = Logprob(round(float(samples.logprob_S[i]), 6), int(samples.rank_S[i]))
    found = {int(samples.token_S[i]): own}
    for rank in range(1, min(count, samples.top_token_SN.shape[1]) + 1):
        token = int(samples.top_token_SN[i, rank - 1])
        logprob = round(float(samples.top_logprob_SN[i, rank - 1]), 6)
        found.setdefault(token, Logprob(logprob, rank))
    return found
