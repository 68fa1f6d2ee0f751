"""An instance's devices: launches steps, and reports each one when its tokens are on the host."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from queue import SimpleQueue

import jax
import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.request import Logprob
from jaxinfer.runtime.kv.hidden_states import HiddenStates
from jaxinfer.runtime.kv.outcome import Failed, Launched, Post, join
from jaxinfer.runtime.spread.slice_move import Copies, SliceCopies
from jaxinfer.runtime.spread.spread_stage import SpreadStage
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER, SamplerShape, Samples
from jaxinfer.runtime.stage.sampling_inputs import (
    build_sampling,
    next_prompt_tokens,
    prompt_positions,
    sampler_for,
    sampling_of,
)
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key
from jaxinfer.runtime.stage.step_inputs import row_starts
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone, TransferDone


@dataclass
class _Step:
    """A step in flight. Times are those of ``time.perf_counter``."""

    number: int
    batch: Batch
    hidden: list[jax.Array]
    samples: Samples | None
    prompt: Samples | None
    time: float
    origin: float
    post: Post
    ended: "list[Future[None]]"
    stages: list[tuple[float, float]] = field(default_factory=list)


class Worker:
    """The stages of one instance, or those of them that this process has.

    A thread per mesh waits for results, so that launching a step never waits, unless hidden states
    come from another process.

    Args:
        groups: names of the stages' groups, if several may share a mesh.

    Attributes:
        parts: numbers of the stages; consecutive stages on one mesh of one group are together.
        hidden: connections to the processes that have the previous and the next stages.
        moves: copies KV heads between the stages' pools, if there are several.
        without: numbers of the lost KV shards: none, except in ``PipelineWorker``.
    """

    without: Sequence[int] = ()

    def __init__(self, stages: Sequence[Stage], groups: Sequence[str] = ()) -> None:
        self.stages = stages
        self.hidden: HiddenStates | None = None
        # For each stage, the number of its first shard.
        self._shards = [0, *accumulate(len(stage.plan.pool_pages) for stage in stages)]
        self._sampler = PLAIN_SAMPLER
        self._sample_slots: dict[str, int] = {}
        self._ended: list[Future[None]] = []
        is_spread = any(isinstance(stage, SpreadStage) for stage in stages)
        self.moves = SliceCopies(stages) if is_spread else None
        of = groups or [""] * len(stages)
        together = groupby(range(len(stages)), lambda i: (stages[i].plan.mesh, of[i]))
        self.parts = [list(part) for _, part in together]
        self._queues: list[SimpleQueue[_Step | threading.Event | None]]
        self._queues = [SimpleQueue() for _ in self.parts]
        self._threads = [
            threading.Thread(target=self._collect, args=(number,), daemon=True)
            for number in range(len(self.parts))
        ]
        for thread in self._threads:
            thread.start()

    def prepare(
        self, sampler: SamplerShape = PLAIN_SAMPLER, wait: bool = True
    ) -> Generator[int, None, None]:
        """Compile all steps with this sampler; later launches use it.

        Yields the number of steps left, beginning with their total number.

        Args:
            wait: see ``RemoteWorker``; in this process, all is compiled before this returns.
        """
        self._sampler = sampler
        parts = [stage.compile_ahead(sampler) for stage in self.stages]
        left = [next(part) for part in parts]
        yield sum(left)
        for number, part in enumerate(parts):
            for left[number] in part:
                yield sum(left)
        if self.moves:
            self.moves.compile_ahead()

    def launch(
        self,
        batch: Batch,
        origin: float,
        post: Post,
        launched: Launched = lambda *args: None,
        number: int = 0,
    ) -> None:
        """Start a step and return at once. ``post`` gets its StepDone, with times since ``origin``.

        If the last stage is in another process, the StepDone has no tokens.

        Args:
            number: number by which other processes know the step.
        """
        ended = self._ended = [Future() for _ in self.stages]
        try:
            self._queues[0].put(self._launch(number, batch, origin, post, launched, ended))
        except Exception as error:
            _fail(ended, error)
            raise

    def _launch(
        self,
        step: int,
        batch: Batch,
        origin: float,
        post: Post,
        launched: Launched,
        ended: "list[Future[None]]",
    ) -> _Step:
        start = time.perf_counter()
        last = self.stages[-1]
        limits = last.step.limits
        key = Key(limits.shape_for(batch), sampler_for(batch, self._sampler))
        x_TD: jax.Array | None = None
        hidden = []
        for number, stage in enumerate(self.stages):
            shard = self._shards[number]
            inputs = stage.inputs(batch, key.shape, self._sample_slots, shard)
            if not number and self.hidden and self.hidden.before:
                x_TD = self.hidden.take(step, stage.step.hidden(key.shape.tokens))
                start = time.perf_counter()
            x_SD, x_TD = stage.forward(key, inputs, x_TD)
            hidden.append(x_TD)
            launched(number, ended[number])
        samples = prompt = None
        if last.plan.layers.last:
            samples, prompt = self._sample(batch, key, (x_SD, hidden[-1]))
        sampled = (row.request.id for row in batch.rows if row.samples)
        self._sample_slots = {id: slot for slot, id in enumerate(sampled)}
        if len(self.parts) == 1:
            self.stages[0].previous_S = last.previous_S
        return _Step(step, batch, hidden, samples, prompt, start, origin, post, ended)

    def _sample(
        self, batch: Batch, key: Key, hidden: tuple[jax.Array, jax.Array]
    ) -> tuple[Samples, Samples | None]:
        """Launch the head of the model on the result of its last layers."""
        sampling = build_sampling(batch, key.shape.rows, key.sampler, self._sample_slots)
        next_token_T = None
        if key.sampler.prompt_top and any(map(prompt_positions, batch.rows)):
            next_token_T = next_prompt_tokens(batch, key.shape.tokens)
        return self.stages[-1].sample(key, hidden, sampling, next_token_T)

    def move(
        self, transfer: Transfer, origin: float, post: Callable[[TransferDone | Failed], None]
    ) -> None:
        """Start to move KV heads between the instance's devices, and return at once.

        ``post`` gets its TransferDone, with times since ``origin``.
        """
        moves, copies = self.moves, Copies.of(transfer)
        assert moves, "an instance whose KV heads lie together moves none"

        def done(start: float, error: Exception | None) -> None:
            if error:
                post(Failed(transfer.source, error))
                return
            end = time.perf_counter() - origin
            post(TransferDone(transfer, start - origin, end, moves.num_bytes(copies)))

        moves.start(copies, done)

    def recover(self, patience: float | None = None) -> None:
        """Become ready for steps of other requests, wherever earlier steps were interrupted.

        This waits for all work that was launched; failures are posted before this returns.

        Raises:
            JaxinferError: the work has not ended within ``patience`` seconds.
        """
        steps, moves = threading.Event(), threading.Event()
        self._queues[0].put(steps)
        if self.moves:
            self.moves.when_done(moves.set)
        else:
            moves.set()
        for done in (moves, steps):
            if not done.wait(patience):
                raise JaxinferError(f"its steps have not ended within {patience:g} s")
        _fail(self._ended, JaxinferError("the step was broken off as it was launched"))
        if self.hidden:
            self.hidden.forget()
        for stage in self.stages:
            stage.recover()
        self._sample_slots = {}

    def close(self) -> None:
        """End the threads, which would otherwise keep parameters and executables alive."""
        for queue in self._queues:
            queue.put(None)
        if self.moves:
            self.moves.close()
            self._threads.append(self.moves.thread)
        join(self._threads)

    def _collect(self, part: int) -> None:
        """Wait for each step's work on one mesh, and pass the step on."""
        end = 0.0
        while True:
            step = self._queues[part].get()
            if step is None:
                return
            if isinstance(step, threading.Event):
                if part + 1 < len(self.parts):
                    self._queues[part + 1].put(step)
                else:
                    step.set()
                continue
            # Without this, any failure would leave the loop waiting forever.
            try:
                for number in self.parts[part]:
                    end = self._wait(step, number, end)
                if part + 1 < len(self.parts):
                    self._queues[part + 1].put(step)
            except Exception as error:
                step.post(Failed(step.batch.instance, error))
                _fail(step.ended, error)
            del step  # Do not keep its requests here while waiting for the next one.

    def _wait(self, step: _Step, number: int, end: float) -> float:
        """Wait until one stage's part is done; the previous part on its mesh ended at ``end``."""
        stage, ready = self.stages[number], step.time
        if number:
            ready = stage.start_of(step.stages[-1][1], step.hidden[number - 1])
        elif self.hidden and self.hidden.before:
            ready = stage.start_of(ready, step.hidden[0])  # The received array is as large.
        # A part that was launched ahead starts when the previous one has ended.
        start = max(ready, end)
        last = number == len(self.stages) - 1
        samples = found = None
        if last and step.samples:
            samples = on_host(step.samples)
            found = step.prompt and on_host(step.prompt)
        else:
            step.hidden[number].block_until_ready()
        end = stage.end_of(step.batch, start)
        step.stages.append((start, end))
        if last:
            if self.hidden and not samples:
                self.hidden.give(step.number, step.hidden[number])
            step.post(_step_done(step, samples, found))
        # After the post, because transfers of the step's KV end later than the step.
        step.ended[number].set_result(None)
        return end


def on_host(samples: Samples) -> Samples:
    """Wait for a step's results, and copy them to the host."""
    # A list, not a tuple: other threads run while this waits for the device. If one of them calls
    # gc.get_objects, as memory profilers do, a growing tuple raises SystemError.
    return Samples(*[np.asarray(array) for array in samples])


def _fail(ended: "Iterable[Future[None]]", error: Exception) -> None:
    for future in ended:
        if not future.done():
            future.set_exception(error)


def _step_done(step: _Step, samples: Samples | None, prompt: Samples | None) -> StepDone:
    batch = step.batch
    stages = [(start - step.origin, end - step.origin) for start, end in step.stages]
    if samples is None:
        return StepDone(batch, [], stages[0][0], stages[-1][1], stages=stages)
    sampled = [row.request for row in batch.rows if row.samples]
    details = [_sample_logprobs(request, i, samples) for i, request in enumerate(sampled)]
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
    """Return request id -> position in the prompt -> the model's probability of the token there."""
    reported: dict[str, dict[int, object]] = {}
    for at, row in zip(row_starts(batch), batch.rows, strict=True):
        count = sampling_of(row.request).params.prompt_logprobs or 0
        for i, position in enumerate(prompt_positions(row), at):
            here = reported.setdefault(row.request.id, {})
            here[position + 1] = _logprobs(found, i, count)
    return reported


def _logprobs(samples: Samples, i: int, count: int) -> dict[int, Logprob]:
    """Return the log probabilities of row i's token and of the ``count`` likeliest ones."""
    own = Logprob(round(float(samples.logprob_S[i]), 6), int(samples.rank_S[i]))
    found = {int(samples.token_S[i]): own}
    for rank in range(1, min(count, samples.top_token_SN.shape[1]) + 1):
        token = int(samples.top_token_SN[i, rank - 1])
        logprob = round(float(samples.top_logprob_SN[i, rank - 1]), 6)
        found.setdefault(token, Logprob(logprob, rank))
    return found
