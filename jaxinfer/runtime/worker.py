"""One instance's devices: launches steps, and reports each when its tokens are on the host."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import jax
import numpy as np

from jaxinfer.request import Logprob
from jaxinfer.runtime.sampler import SamplerShape, Samples
from jaxinfer.runtime.sampling_inputs import (
    build_sampling,
    next_prompt_tokens,
    prompt_positions,
    sampler_shape,
    sampling_of,
)
from jaxinfer.runtime.stage import Stage
from jaxinfer.runtime.step import Key
from jaxinfer.runtime.step_inputs import build_inputs, row_starts
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import Batch, StepDone


@dataclass(frozen=True)
class Failed:
    """An instance can do no more."""

    instance: str
    error: Exception


Post = Callable[[StepDone | Failed], None]


@dataclass
class _Launched:
    """A step under way. Times are those of ``time.perf_counter``."""

    batch: Batch
    hidden: list[jax.Array]
    samples: Samples
    prompt: Samples | None
    time: float
    origin: float
    post: Post
    stages: list[tuple[float, float]] = field(default_factory=list)


class Worker:
    """The stages of one instance.

    Each has a thread that waits for its device, so that whoever launches never does.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self._sampler = SamplerShape()
        self._sample_slots: dict[str, int] = {}
        self._queues: list[SimpleQueue[_Launched | None]] = [SimpleQueue() for _ in stages]
        self._threads = [
            threading.Thread(target=self._collect, args=(number,), daemon=True)
            for number in range(len(stages))
        ]
        for thread in self._threads:
            thread.start()

    def prepare(self, requests: Iterable[RequestState] = ()) -> Iterator[int]:
        """Compile all steps for a run of these requests; yields how many are left."""
        self._sampler = sampler_shape(requests)
        parts = [stage.compile_ahead(self._sampler) for stage in self.stages]
        left = [next(part) for part in parts]
        yield sum(left)
        for number, part in enumerate(parts):
            for left[number] in part:
                yield sum(left)

    def launch(self, batch: Batch, origin: float, post: Post) -> None:
        """Start a step and return. ``post`` gets its StepDone, with times since ``origin``."""
        start = time.perf_counter()
        last = self.stages[-1]
        limits = last.step.limits
        key = Key(limits.shape_for(batch), self._sampler)
        sampling = build_sampling(batch, key.shape.rows, self._sampler, self._sample_slots)
        next_token_T = None
        if self._sampler.prompt_top and any(map(prompt_positions, batch.rows)):
            next_token_T = next_prompt_tokens(batch, key.shape.tokens)
        x_TD: jax.Array | None = None
        hidden = []
        for shard, stage in enumerate(self.stages):
            inputs = build_inputs(batch, key.shape, limits, self._sample_slots, shard)
            x_SD, x_TD = stage.forward(key, inputs, x_TD)
            hidden.append(x_TD)
        samples, prompt = last.sample(key, (x_SD, hidden[-1]), sampling, next_token_T)
        sampled = (row.request.id for row in batch.rows if row.samples)
        self._sample_slots = {id: slot for slot, id in enumerate(sampled)}
        self._queues[0].put(_Launched(batch, hidden, samples, prompt, start, origin, post))

    def close(self) -> None:
        """End the threads, which would keep parameters and executables for ever."""
        for queue in self._queues:
            queue.put(None)
        join(self._threads)

    def _collect(self, number: int) -> None:
        """Wait for one stage's part of each step, and pass it on."""
        last = number == len(self.stages) - 1
        end = 0.0
        while True:
            step = self._queues[number].get()
            if step is None:
                return
            # Whatever fails here would otherwise leave the loop waiting for ever.
            try:
                ready = step.time
                if number:
                    before = step.stages[-1][1]
                    ready = self.stages[number].start_of(before, step.hidden[number - 1])
                # A part launched ahead starts when the one before it has ended.
                start = max(ready, end)
                if last:
                    samples = Samples(*map(np.asarray, step.samples))
                    found = step.prompt and Samples(*map(np.asarray, step.prompt))
                else:
                    step.hidden[number].block_until_ready()
                end = self.stages[number].end_of(step.batch, start)
                step.stages.append((start, end))
                if last:
                    step.post(_step_done(step, samples, found))
                else:
                    self._queues[number + 1].put(step)
            except Exception as error:
                step.post(Failed(step.batch.instance, error))


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads that have been told to end, but not for one that hangs.

    One that was still freeing arrays when the interpreter ends would crash it.
    """
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=2)


def _step_done(step: _Launched, samples: Samples, prompt: Samples | None) -> StepDone:
    batch = step.batch
    sampled = [row.request for row in batch.rows if row.samples]
    details = [_sample_logprobs(request, i, samples) for i, request in enumerate(sampled)]
    stages = [(start - step.origin, end - step.origin) for start, end in step.stages]
    return StepDone(
        batch,
        samples.token_S[: len(sampled)].tolist(),
        stages[0][0],
        stages[-1][1],
        samples.logprob_S[: len(sampled)].tolist(),
        details if any(details) else (),
        _prompt_logprobs(batch, prompt) if prompt else {},
        stages,
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
