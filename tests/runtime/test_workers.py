"""A worker's order, times and reports, with stages that compute nothing."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from interrupts import Interrupt
from waiting import HANG_S

from jaxinfer import JaxinferError
from jaxinfer.request import Logprob, Sampling, SamplingParams
from jaxinfer.runtime.kv.outcome import Failed, join
from jaxinfer.runtime.stage.sampler import SamplerShape, Samples
from jaxinfer.runtime.stage.sampling_inputs import sampler_shape
from jaxinfer.runtime.stage.step_inputs import build_inputs
from jaxinfer.runtime.worker import Worker, on_host
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone
from jaxinfer.steps.shapes import StepLimits

LIMITS = StepLimits(max_num_seqs=4, max_num_batched_tokens=16, max_pages=8, page_size=4)


def samples(rows: int) -> Samples:
    """Row i draws token 10 + i; the likeliest three are that one, then 20 + i, then 30 + i."""
    i = jnp.arange(rows)
    top = jnp.stack([10 + i, 20 + i, 30 + i], 1)
    return Samples(10 + i, -0.25 * (1 + i), 1 + i, top, -1.0 * top)


class Stage:
    """Ends at the times it is given, one after the other."""

    def __init__(self, mesh: str, ends: list[float], hop: float = 0.0) -> None:
        self.plan = SimpleNamespace(mesh=mesh, pool_pages=[200])
        self.step = SimpleNamespace(limits=LIMITS)
        self.previous_S = f"of {mesh}"
        self.ends, self.hop = iter(ends), hop
        self.given: list[Any] = []
        self.starts: list[float] = []
        self.prompt: Samples | None = None
        self.left = [0]

    def compile_ahead(self, sampler: SamplerShape) -> Iterator[int]:
        self.sampler = sampler
        return iter(self.left)

    def inputs(self, batch: Batch, shape: Any, sample_slots: Any, shard: int) -> Any:
        return build_inputs(batch, shape, LIMITS, sample_slots, shard)

    def recover(self) -> None:
        self.given = []

    def forward(self, key: Any, inputs: Any, x_TD: Any) -> tuple[Any, Any]:
        self.given.append((key, inputs, x_TD))
        return "rows", jnp.full(1, len(self.given))

    def sample(self, key: Any, hidden: Any, sampling: Any, next_token_T: Any) -> Any:
        self.sampled = hidden, sampling, next_token_T
        self.previous_S = "new"
        return samples(key.shape.rows), self.prompt

    def start_of(self, before: float, x_TD: Any) -> float:
        return before + self.hop

    def end_of(self, batch: Batch, start: float) -> float:
        self.starts.append(start)
        return next(self.ends)


def worker_of(*stages: Stage, last: bool = True) -> Worker:
    """Return a worker of these; whether the last one has the model's head."""
    for stage in stages:
        stage.plan.layers = SimpleNamespace(last=last and stage is stages[-1])
    return Worker(stages)  # type: ignore[arg-type]


def request(name: str = "r", prompt: int = 3, **params: Any) -> RequestState:
    sampling = Sampling(SamplingParams(max_tokens=9, temperature=0, **params), 1, (7,))
    return RequestState(name, prompt, 9, prompt_token_ids=range(40, 40 + prompt), payload=sampling)


KV = KVShards([Shard(PagePool(200, 4), stage=number) for number in range(3)])


def row(of: RequestState, start: int, count: int, samples: bool, pending: bool = False) -> Row:
    hold = KV.reserve(start + count)
    assert hold
    return Row(of, start, count, samples, pending, 0, hold)


def batch(*rows: Row) -> Batch:
    return Batch("x", list(rows), 0, len(rows), 0)


def run(worker: Worker, *batches: Batch, origin: float = 0.0) -> list[Any]:
    """Return the results posted for steps that are launched one behind the other."""
    posted: SimpleQueue[Any] = SimpleQueue()
    for number, each in enumerate(batches):
        worker.launch(each, origin, posted.put, number=20 + number)
    found = [posted.get(timeout=HANG_S) for _ in batches]
    worker.close()
    return found


PROMPT = request("prompt")


def test_parts_are_the_stages_that_follow_each_other_on_one_mesh() -> None:
    worker = worker_of(*(Stage(mesh, []) for mesh in "aabba"))
    assert worker.parts == [[0, 1], [2, 3], [4]]
    worker.close()
    assert not any(thread.is_alive() for thread in worker._threads)


def test_what_is_left_to_compile_counts_down_over_all_stages() -> None:
    """Stages say first how many there are."""
    first, second = Stage("a", []), Stage("b", [])
    first.left, second.left = [2, 1, 0], [1, 0]
    worker = worker_of(first, second)
    assert list(worker.prepare(sampler_shape([request(logprobs=3)]))) == [3, 2, 1, 0]
    assert first.sampler == second.sampler == SamplerShape(top=8)
    worker.close()


def test_a_steps_times_and_tokens() -> None:
    """Rows that sample are the first and the third; the clock of the run began at 1,000."""
    stage = Stage("a", [1007.0])
    rows = [row(request("a"), 2, 1, True), row(PROMPT, 0, 2, False), row(request("c"), 0, 3, True)]
    (done,) = run(worker_of(stage), batch(*rows), origin=1000.0)
    assert isinstance(done, StepDone)
    assert list(done.tokens) == [10, 11]
    assert list(done.logprobs) == [-0.25, -0.5]
    assert (done.details, done.prompt_details) == ((), {})
    (start,) = stage.starts
    assert done.start == start - 1000
    assert done.end == 7
    assert done.stages == [(done.start, 7)]
    key, inputs, x_TD = stage.given[0]
    assert key.shape == LIMITS.shape_for(batch(*rows))
    assert x_TD is None
    assert inputs.token_T[:6].tolist() == [42, 40, 41, 40, 41, 42]


def test_stages_follow_one_another_and_steps_wait_for_their_mesh() -> None:
    """Two meshes: the second step's first part waits for the first's, its second for both."""
    now = 10**9  # Whatever the clock says, the steps were launched before.
    first, second = Stage("a", [now + 2.0, now + 5.0]), Stage("b", [now + 9.0, now + 12.0], hop=0.5)
    steps = [batch(row(PROMPT, 0, 2, True)), batch(row(PROMPT, 2, 1, True))]
    one, two = run(worker_of(first, second), *steps)
    assert first.starts[1] == now + 2
    assert second.starts == [now + 2.5, now + 9]
    assert one.stages[1:] == [(now + 2.5, now + 9)]
    assert two.stages == [(now + 2, now + 5), (now + 9, now + 12)]
    assert (two.start, two.end) == (now + 2, now + 12)
    # The second stage goes on from what the first one has computed, and draws.
    assert [int(x[0]) for _, _, x in second.given] == [1, 2]
    assert second.sampled[0][0] == "rows"


def test_a_third_stage_starts_when_the_second_has_ended() -> None:
    now = 10**9
    stages = [Stage(mesh, [now + end]) for mesh, end in zip("aab", (2.0, 3.0, 7.0), strict=True)]
    (done,) = run(worker_of(*stages), batch(row(PROMPT, 0, 2, True)))
    assert done.stages[1:] == [(now + 2, now + 3), (now + 3, now + 7)]


@pytest.mark.parametrize(("meshes", "fed_back"), [("aa", "new"), ("ab", "of a")])
def test_tokens_feed_back_within_one_mesh(meshes: str, fed_back: str) -> None:
    """Tokens go through the host over several meshes."""
    stages = [Stage(mesh, [1.0]) for mesh in meshes]
    run(worker_of(*stages), batch(row(PROMPT, 0, 2, True)))
    assert stages[0].previous_S == fed_back


def test_a_token_that_is_on_the_device_is_found_by_its_place() -> None:
    """The second of the last step's samples."""
    stage = Stage("a", [1.0, 2.0])
    a, b = request("a"), request("b")
    first = batch(row(PROMPT, 0, 2, False), row(a, 0, 3, True), row(b, 0, 3, True))
    run(worker_of(stage), first, batch(row(b, 3, 1, True, pending=True), row(a, 3, 1, True, True)))
    assert stage.given[1][1].source_T[:2].tolist() == [1, 0]


def test_each_stage_has_its_own_pages() -> None:
    stages = [Stage(mesh, [1.0]) for mesh in "abc"]
    KV.shards[1].pool.take(1)
    step = batch(row(PROMPT, 0, 3, True))
    (tables,) = [each.hold.tables for each in step.rows]
    assert tables[0] != tables[1]
    run(worker_of(*stages), step)
    for number, stage in enumerate(stages):
        found = stage.given[0][1].batch.chunk_table_CM[0, : len(tables[number][0])]
        assert found.tolist() == list(tables[number][0])


def test_log_probabilities_of_tokens() -> None:
    """A request has as many as it asks for, and its own token's with the rank, wherever it is."""
    given = [request(str(count), logprobs=count) for count in (None, 0, 2, 5)]
    (done,) = run(worker_of(Stage("a", [1.0])), batch(*(row(each, 0, 3, True) for each in given)))
    none, zero, two, every = done.details
    assert none is None
    assert zero == {11: Logprob(-0.5, 2)}
    # Its own one is among them, and is not reported twice.
    assert two == {12: Logprob(-0.75, 3), 22: Logprob(-22.0, 2)}
    assert every == {13: Logprob(-1.0, 4), 23: Logprob(-23.0, 2), 33: Logprob(-33.0, 3)}


def test_log_probabilities_of_prompts() -> None:
    """Positions but the last, whose next token is drawn, give those of the next token."""
    stage = Stage("a", [1.0])
    stage.prompt = samples(16)
    worker = worker_of(stage)
    asking, decoding = request("asks", prompt=5, prompt_logprobs=1), request("decodes")
    list(worker.prepare(sampler_shape([asking])))
    rows = [row(decoding, 2, 1, True), row(asking, 1, 4, True)]
    (done,) = run(worker, batch(*rows))
    # Rows 1 to 4 of the step are positions 1 to 4; of 4, the next token is not the prompt's.
    assert done.prompt_details == {
        "asks": {
            2: {11: Logprob(-0.5, 2)},
            3: {12: Logprob(-0.75, 3)},
            4: {13: Logprob(-1.0, 4)},
        }
    }
    assert stage.sampled[2][:5].tolist() == [0, 42, 43, 44, 0]


def test_nothing_is_said_of_prompts_where_no_row_asks() -> None:
    stage = Stage("a", [1.0])
    worker = worker_of(stage)
    list(worker.prepare(sampler_shape([request("asks", prompt_logprobs=1)])))
    run(worker, batch(row(request("decodes"), 2, 1, True)))
    assert stage.sampled[2] is None


# Failures, and what waits for a part of a step.


def launched_into(ended: dict[int, "Future[None]"]) -> Any:
    return lambda stage, future: ended.setdefault(stage, future)


def test_each_stages_end_is_told_after_the_step() -> None:
    posted: SimpleQueue[Any] = SimpleQueue()
    ended: dict[int, Future[None]] = {}
    worker = worker_of(Stage("a", [1.0]), Stage("b", [2.0]))
    worker.launch(batch(row(PROMPT, 0, 2, True)), 0.0, posted.put, launched_into(ended))
    assert [ended[stage].result(timeout=HANG_S) for stage in (0, 1)] == [None, None]
    assert isinstance(posted.get_nowait(), StepDone)
    worker.close()


def test_what_fails_on_a_device_is_posted_and_ends_all_that_waits() -> None:
    """The first stage has ended; the second one fails."""
    posted: SimpleQueue[Any] = SimpleQueue()
    ended: dict[int, Future[None]] = {}
    worker = worker_of(Stage("a", [1.0]), Stage("b", []), Stage("c", [3.0]))
    worker.launch(batch(row(PROMPT, 0, 2, True)), 0.0, posted.put, launched_into(ended))
    failed = posted.get(timeout=HANG_S)
    assert isinstance(failed, Failed)
    assert failed.instance == "x"
    assert isinstance(failed.error, StopIteration)
    assert ended[0].result(timeout=HANG_S) is None
    for stage in (1, 2):
        assert ended[stage].exception(timeout=HANG_S) is failed.error
    worker.close()


def test_what_fails_at_launch_is_raised_and_ends_all_that_waits() -> None:
    ended: dict[int, Future[None]] = {}
    first, second = Stage("a", [1.0]), Stage("b", [2.0])
    worker = worker_of(first, second)
    second.forward = lambda *args: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        worker.launch(batch(row(PROMPT, 0, 2, True)), 0.0, print, launched_into(ended))
    assert isinstance(ended[0].exception(timeout=HANG_S), ZeroDivisionError)
    worker.close()


def test_a_thread_does_not_wait_for_itself_nor_for_ever() -> None:
    given: list[float] = []
    hangs: Any = SimpleNamespace(join=lambda timeout: given.append(timeout))
    join([threading.current_thread(), hangs])
    assert given == [2]


def test_results_may_be_read_while_a_profiler_lists_all_objects() -> None:
    """A profiler that lists all objects holds a reference to what another thread is building."""
    listed: list[list[object]] = []

    class Slow:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            listed.append(gc.get_objects())
            return np.arange(3)

    found = on_host(Samples(*[Slow() for _ in Samples._fields]))  # type: ignore[arg-type]
    assert [list(array) for array in found] == [[0, 1, 2]] * 5
    assert len(listed) == 5


class Hidden:
    """Ways to and from other processes: what has come is there at once."""

    def __init__(self, before: Any = None) -> None:
        self.before = before
        self.given: list[Any] = []

    def take(self, step: int, like: Any) -> str:
        return f"hidden {like} of {step}"

    def give(self, step: int, x_TD: Any) -> None:
        self.given.append((step, x_TD))

    def forget(self) -> None:
        self.given = []


def test_stages_with_others_in_the_processes_before_and_after() -> None:
    """The stages begin with what comes, hand on what the last one has, and have no tokens."""
    first, middle = Stage("a", [5.0, 7.0], hop=1e9), Stage("b", [6.0, 8.0])
    first.step.hidden = lambda tokens: tokens
    worker = worker_of(first, middle, last=False)
    hidden: Any = Hidden("there")
    worker.hidden = hidden
    done = run(worker, batch(row(PROMPT, 0, 3, True)), batch(row(PROMPT, 0, 2, False)))
    assert [each.tokens for each in done] == [[], []]
    assert [[end for _, end in each.stages] for each in done] == [[5.0, 6.0], [7.0, 8.0]]
    size = LIMITS.token_buckets[-1]
    assert [given[2] for given in first.given] == [f"hidden {size} of {n}" for n in (20, 21)]
    assert [(n, x.tolist()) for n, x in hidden.given] == [(20, [1]), (21, [2])]
    assert not hasattr(middle, "sampled")
    assert min(first.starts) > 1e9  # A link plays a slower one.


def test_the_first_stages_take_nothing_and_the_last_ones_hand_nothing_on() -> None:
    one, other = Stage("a", [5.0]), Stage("b", [6.0])
    other.step.hidden = lambda tokens: tokens
    for stage, hidden, last in ((one, Hidden(), False), (other, Hidden("there"), True)):
        worker = worker_of(stage, last=last)
        worker.hidden = hidden  # type: ignore[assignment]
        (done,) = run(worker, batch(row(PROMPT, 0, 3, True)))
        assert len(done.tokens) == last
        assert len(hidden.given) == 1 - last
    assert one.given[0][2] is None
    assert other.given[0][2].startswith("hidden ")


@pytest.mark.parametrize("at", ["_launch", "put"])
def test_a_step_whose_launch_is_interrupted_ends_for_who_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """A transfer behind its last stage would wait for ever, and all behind it."""
    worker = worker_of(Stage("a", [5.0] * 9), Stage("b", [6.0] * 9))
    ends: list[Future[None]] = []

    def launched(stage: int, end: Any) -> None:
        ends.append(end)
        if at == "_launch" and stage:
            raise Interrupt

    def put(step: Any) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        if at == "put":
            patch.setattr(worker, "_queues", [SimpleNamespace(put=put), *worker._queues[1:]])
        with pytest.raises(Interrupt):
            worker.launch(batch(row(PROMPT, 0, 3, True)), 0.0, print, launched)
    assert [end.done() for end in ends] == [False, False]
    worker.recover()
    for end in ends:
        with pytest.raises(JaxinferError, match=r"^the step was broken off as it was launched$"):
            end.result(timeout=0)
    (done,) = run(worker, batch(row(PROMPT, 0, 3, True)))
    assert len(done.tokens) == 1


def test_a_step_that_does_not_end_is_not_waited_for_for_ever() -> None:
    stage, go = Stage("a", [5.0]), threading.Event()
    worker = worker_of(stage)
    stage.end_of = lambda batch, start: go.wait(HANG_S) and 5.0  # type: ignore[method-assign]
    worker.launch(batch(row(PROMPT, 0, 3, True)), 0.0, lambda posted: None)
    with pytest.raises(JaxinferError, match=r"^its steps have not ended within 0\.05 s$"):
        worker.recover(0.05)
    go.set()
    worker.recover(HANG_S)
    worker.close()
