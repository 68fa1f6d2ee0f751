"""Outputs one by one, and requests that are read as the run goes on, on the tiny model."""

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from jaxinfer import LLM, JaxinferError, RequestOutput, SamplingParams
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.resolve import Resolved
from jaxinfer.report.progress import RunProgress
from jaxinfer.runtime import run as real_run
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment, ClusterView, Leg, System

# 2 x max_num_seqs + 16, by hand.
READ_AHEAD = 24


def test_how_many_are_read_ahead() -> None:
    engines = {
        name: SimpleNamespace(plan=SimpleNamespace(options=EngineOptions(max_num_seqs=seqs)))
        for name, seqs in (("a", 5), ("b", 32))
    }
    cluster = Cluster(None, engines, {}, {})  # type: ignore[arg-type]
    assert cluster.read_ahead == 2 * 37 + 16


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[RealWorld]:
    """The worlds of all runs from here on."""
    made: list[RealWorld] = []

    def make(*args: Any) -> RealWorld:
        made.append(RealWorld(*args))
        return made[-1]

    monkeypatch.setattr(real_run, "RealWorld", make)
    return made


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of the requests that were made from here on and are still known to somebody.

    Asking gc.get_objects would give a reference to what other threads are still building.
    """
    known: set[int] = set()
    make = RequestState.__init__

    def note(request: RequestState, *args: Any, **options: Any) -> None:
        known.add(id(request))
        make(request, *args, **options)

    def forget(request: RequestState) -> None:
        known.discard(id(request))

    monkeypatch.setattr(RequestState, "__init__", note)
    monkeypatch.setattr(RequestState, "__del__", forget, raising=False)
    return known


def test_outputs_come_as_they_end_and_say_which_prompt_they_are_of(tiny: LLM) -> None:
    """Four requests run at once, so that they end in the order of their lengths."""
    prompts = ["one", "two", {"prompt_token_ids": [1, 2]}, "four"]
    params = [greedy(count) for count in (40, 10, 20, 30)]
    expected = tiny.generate(prompts, params, progress=False)
    assert [output.prompt_index for output in expected] == [0, 1, 2, 3]
    outputs = list(tiny.generate_iter(prompts, params, progress=False))
    assert [output.prompt_index for output in outputs] == [1, 2, 3, 0]
    assert [output.prompt for output in outputs] == ["two", None, "four", "one"]
    in_order = sorted(outputs, key=lambda output: output.prompt_index)
    assert tokens(in_order) == tokens(expected)
    # Ids count all prompts of all calls, in their order.
    ids = [int(output.request_id) for output in in_order]
    assert ids == list(range(ids[0], ids[0] + 4))
    assert ids[0] == int(expected[-1].request_id) + 1


def test_an_output_comes_while_others_are_under_way(tiny: LLM, worlds: list[RealWorld]) -> None:
    outputs = tiny.generate_iter(["long", "short"], [greedy(100), greedy(2)], progress=False)
    first = next(outputs)
    assert first.prompt_index == 1
    assert worlds[0]._steps
    (second,) = outputs
    assert len(second.outputs[0].token_ids) == 100
    assert second.metrics.token_times[10] > first.metrics.token_times[-1]


def test_conversations_one_by_one(tiny: LLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("a", "b")]
    expected = tokens(tiny.chat(talks, greedy(5), progress=False))
    for given in (talks, iter(talks)):
        outputs = sorted(
            tiny.chat_iter(given, greedy(5), progress=False), key=lambda o: o.prompt_index
        )
        assert tokens(outputs) == expected
    assert tokens(list(tiny.chat_iter(talks[0], greedy(5), progress=False))) == expected[:1]


def by_break(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    for _ in llm.generate_iter(prompts, params, progress=False):
        break


def by_error(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    def consume() -> None:
        for _ in llm.generate_iter(prompts, params, progress=False):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        consume()
    assert caught.value.__traceback__  # Which knows the frame of the loop.


def by_close(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    outputs = llm.generate_iter(prompts, params, progress=False)
    next(outputs)
    outputs.close()


def by_close_elsewhere(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    outputs = llm.generate_iter(prompts, params, progress=False)
    next(outputs)
    thread = threading.Thread(target=outputs.close)
    thread.start()
    thread.join(HANG_S)


def by_throw(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    outputs = llm.generate_iter(prompts, params, progress=False)
    next(outputs)
    with pytest.raises(ZeroDivisionError):
        outputs.throw(ZeroDivisionError())


@pytest.mark.parametrize("leave", [by_break, by_error, by_close, by_close_elsewhere, by_throw])
def test_a_run_that_is_left_leaves_nothing_behind(
    tiny: LLM,
    worlds: list[RealWorld],
    live: set[int],
    leave: Callable[[LLM, list[str], list[SamplingParams]], None],
) -> None:
    prompts, params = [f"prompt {i}" for i in range(8)], [greedy(4)] + [greedy(60)] * 7
    expected = tokens(tiny.generate(prompts, params, progress=False))
    leave(tiny, prompts, params)
    assert worlds[-1].is_idle
    # Each launched step has been waited for.
    assert worlds[-1]._posted.empty()
    worlds.clear()
    wait_until(lambda: gc.collect() >= 0 and not live)
    # Of 64 pages, this needs all: 8 requests of 8 + 60 tokens are 9 pages each.
    assert tokens(tiny.generate(prompts, params, progress=False)) == expected


def test_the_run_after_one_that_was_left_has_a_pool_of_its_own(tiny: LLM) -> None:
    """Pages of the other's are still in use."""
    tiny.generate("a", greedy(1), progress=False)
    (before,) = tiny._runs.kv.values()
    by_break(tiny, ["a", "b"], [greedy(2), greedy(30)])
    assert not tiny._runs.kv
    tiny.generate("a", greedy(1), progress=False)
    (after,) = tiny._runs.kv.values()
    assert after is not before


def test_a_run_that_has_ended_is_forgotten(
    tiny: LLM, worlds: list[RealWorld], live: set[int]
) -> None:
    """The KV stays for the next one, and with it nothing of the loop that had it."""
    tiny.generate(["a", "b"], greedy(3), progress=False)
    world = weakref.ref(worlds.pop())
    gc.collect()
    assert world() is None
    assert not live


def test_what_is_asked_for_in_the_middle_is_refused(tiny: LLM) -> None:
    outputs = tiny.generate_iter(["a", "b"], [greedy(2), greedy(30)], progress=False)
    # Nothing runs until the first output is asked for.
    assert len(tiny.generate("c", greedy(2), progress=False)) == 1
    next(outputs)
    for ask in (lambda: tiny.generate("c", progress=False), tiny.reset_prefix_cache):
        with pytest.raises(JaxinferError, match=r"in the middle of a run: wait .* close its iter"):
            ask()
    with pytest.raises(JaxinferError, match="in the middle of a run"):
        next(tiny.generate_iter("c", progress=False))
    assert [output.prompt_index for output in outputs] == [1]
    tiny.reset_prefix_cache()


def test_who_goes_on_with_an_iterator_has_the_turn(tiny: LLM) -> None:
    """The thread that began it may wait for it; the one that goes on would wait for itself."""
    outputs = tiny.generate_iter(["a", "b", "c"], [greedy(2), greedy(9), greedy(40)])
    next(outputs)
    said: list[str] = []

    def go_on() -> None:
        next(outputs)
        try:
            tiny.generate("d", progress=False)
        except JaxinferError as error:
            said.append(str(error))
        waits.wait(HANG_S)
        said.append("left" if waiting.is_alive() else "has not waited")
        outputs.close()

    waits = threading.Event()
    going_on = threading.Thread(target=go_on)
    waiting = threading.Thread(target=lambda: tiny.generate("e", greedy(2), progress=False))
    going_on.start()
    waiting.start()
    waiting.join(0.2)
    waits.set()
    for thread in (going_on, waiting):
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert [text.split(":")[0] for text in said] == ["this LLM is in the middle of a run", "left"]


def counted(llm: LLM, count: int, taken: list[int], **options: Any) -> Iterator[RequestState]:
    for i in range(count):
        taken.append(i)
        yield from llm.make_requests(f"r{i}", [i % 250, 1, 2], greedy(1 + i % 3, **options))


def test_a_stream_is_read_as_the_run_goes_on(tiny: LLM, live: set[int]) -> None:
    """Never more than the bound is unfinished, and what has ended is forgotten."""
    taken: list[int] = []
    done: list[str] = []
    ahead, known = [], []

    def take(output: RequestOutput) -> None:
        done.append(output.request_id)
        ahead.append(len(taken) - len(done))
        if len(done) % 50 == 0:
            known.append(len(live))

    metrics = tiny.run(counted(tiny, 400, taken), take, progress=False)
    assert sorted(done, key=lambda name: int(name[1:])) == [f"r{i}" for i in range(400)]
    assert (metrics.requests, metrics.failed) == (400, 0)
    assert metrics.output_tokens == sum(1 + i % 3 for i in range(400))
    assert max(ahead) < READ_AHEAD
    # All instances have always had something to do.
    assert min(ahead[:-READ_AHEAD]) >= READ_AHEAD - 2 * 4
    # Those that a step or two in flight still know.
    assert max(known) <= READ_AHEAD + 2 * 4
    # A list is there anyway.
    taken.clear()
    done.clear()
    ahead.clear()
    tiny.run(list(counted(tiny, 50, taken)), take, progress=False)
    assert ahead == list(range(49, -1, -1))


def test_prompts_are_read_as_they_are_needed(tiny: LLM) -> None:
    taken: list[int] = []

    def prompts() -> Iterator[str]:
        for i in range(200):
            taken.append(i)
            yield f"prompt {i}"

    outputs = tiny.generate_iter(prompts(), (greedy(2) for _ in range(200)), progress=False)
    assert not taken
    next(outputs)
    assert len(taken) <= READ_AHEAD + 4
    assert sorted(output.prompt_index for output in outputs) != list(range(200))
    assert len(taken) == 200


def test_a_prompt_that_cannot_be_run_ends_the_run_when_it_is_read(
    tiny: LLM, worlds: list[RealWorld]
) -> None:
    prompts = ["fine"] * 60 + [""] + ["fine"] * 10
    came: list[int] = []
    with pytest.raises(
        JaxinferError, match=r"^prompt 60: the prompt is empty, needs at least one token$"
    ):
        came.extend(o.prompt_index for o in tiny.generate_iter(iter(prompts), greedy(2)))
    assert 60 - READ_AHEAD < len(came) < 60
    assert worlds[-1].is_idle
    assert len(tiny.generate("fine", greedy(2), progress=False)) == 1
    for params, message in (([greedy(1)] * 50, "50 sampling_params, but more"), ([None], "None")):
        with pytest.raises(JaxinferError, match=message):
            list(tiny.generate_iter(["fine"] * 60, iter(params), progress=False))


def test_a_sampler_that_a_later_request_needs_is_compiled_then(tiny: LLM, tmp_path: Path) -> None:
    """Before its first step, and without disturbing what is under way."""
    # No other test has these: 64 edits, and with them a history and log probabilities.
    bias = dict.fromkeys(range(40), -0.5)
    odd = {30: {"logit_bias": bias}, 45: {"logit_bias": bias, "presence_penalty": 1.0}}
    odd[60] = {"logit_bias": bias, "logprobs": 3}
    # Among those that are greedy, and have steps of their own left.
    odd[70] = {"temperature": 2.0, "top_p": 0.9, "top_k": 30, "seed": 5}

    def params(i: int) -> SamplingParams:
        return greedy(5 + 7 * (i % 5)).model_copy(update=odd.get(i, {}))

    def requests() -> Iterator[RequestState]:
        for i in range(80):
            yield from tiny.make_requests(str(i), [i, 3], params(i))

    found: dict[int, RequestOutput] = {}
    compiles = tiny.engine.worker.stages[0].step.compiles
    metrics = tiny.run(
        requests(),
        lambda o: found.update({int(o.request_id): o}),
        progress=False,
        run_dir=tmp_path,
    )
    assert metrics.late_compiles == 0
    # A head for each of the two numbers of rows, of each of the three samplers, and to draw.
    shapes = {shape.rows for shape in tiny.engine.plan.limits.shapes()}
    assert metrics.compiles - compiles == 4 * len(shapes)
    prompts = [{"prompt_token_ids": [i, 3]} for i in range(80)]
    expected = tiny.generate(prompts, [params(i) for i in range(80)], progress=False)
    assert tokens([found[i] for i in range(80)]) == tokens(expected)
    assert [i for i in range(80) if found[i].outputs[0].logprobs] == [60]
    # The next run is free of it.
    tiny.generate("Hello", greedy(2), progress=False)
    assert tiny.engine.worker._sampler == PLAIN_SAMPLER


def test_continuations_stay_together_in_a_stream(tiny: LLM) -> None:
    """Continuations of prompts of several pages wait for the first, and find its pages."""
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    prompts = [[i] * (20 if i % 2 else 3) for i in range(20)]

    def requests() -> Iterator[RequestState]:
        for i, prompt in enumerate(prompts):
            for request in tiny.make_requests(str(i), prompt, params):
                made.append(request)
                yield request

    made: list[RequestState] = []
    found: dict[int, RequestOutput] = {}
    tiny.reset_prefix_cache()
    metrics = tiny.run(requests(), lambda o: found.update({int(o.request_id): o}), progress=False)
    assert (metrics.requests, len(found)) == (20, 20)
    for i in range(20):
        cached = [request.metrics.num_cached_tokens for request in made[3 * i : 3 * i + 3]]
        assert cached == ([0, 16, 16] if i % 2 else [0, 0, 0])
        assert [choice.index for choice in found[i].outputs] == [0, 1, 2]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = tiny.generate(asked, params, progress=False)
    for i in range(20):
        ours, theirs = found[i].outputs, expected[i].outputs
        assert [choice.token_ids for choice in ours] == [choice.token_ids for choice in theirs]


def test_ids_are_told_apart_however_late_they_come(tiny: LLM) -> None:
    several = SamplingParams(n=2, max_tokens=2, ignore_eos=True)

    def twice(name: str, params: SamplingParams) -> Iterator[RequestState]:
        yield from tiny.make_requests(name, [1], params)
        yield from counted(tiny, 60, [])
        yield from tiny.make_requests(name, [1], params)

    outputs: list[RequestOutput] = []
    with pytest.raises(JaxinferError, match=r"^two requests have the id 'a'$"):
        tiny.run(twice("a", greedy(1)), outputs.append, progress=False)
    assert len(outputs) > 60 - READ_AHEAD
    with pytest.raises(JaxinferError, match=r"^request 'a \(1 of 2\)' does not follow the other"):
        tiny.run(twice("a", several), outputs.append, progress=False)
    first, second = tiny.make_requests("a", [1], several)
    between = tiny.make_requests("b", [1], greedy(1))
    with pytest.raises(JaxinferError, match=r"^request 'a \(2 of 2\)' does not follow the other"):
        tiny.run([first, *between, second], outputs.append, progress=False)
    with pytest.raises(JaxinferError, match=r"^two requests have the id 'a \(1 of 2\)'$"):
        tiny.run([first, first], outputs.append, progress=False)
    # Fewer than were made are answered as they are.
    outputs.clear()
    tiny.run([*between, second], outputs.append, progress=False)
    assert {o.request_id: len(o.outputs) for o in outputs} == {"a": 1, "b": 1}


def test_requests_of_a_stream_arrive_at_their_times(tiny: LLM) -> None:
    made: list[RequestState] = []

    def requests() -> Iterator[RequestState]:
        for i in range(40):
            (request,) = tiny.make_requests(str(i), [i, 1], greedy(2))
            request.arrival = request.metrics.arrival = 0.01 * i
            made.append(request)
            yield request

    metrics = tiny.run(requests(), lambda output: None, progress=False)
    starts = [request.metrics.first_scheduled or 0.0 for request in made]
    assert all(start >= request.arrival for start, request in zip(starts, made, strict=True))
    assert metrics.wall_s >= 0.39


class Patient(System):
    """Routes nothing until so many requests have come."""

    def __init__(self, count: int) -> None:
        self.count = count

    def route(self, waiting: Any, view: ClusterView) -> list[Assignment]:
        if len(waiting) < self.count:
            return []
        self.count = 0
        return [Assignment(request.id, (Leg("engine"),)) for request in waiting]


def test_a_system_that_waits_for_more_gets_more(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound does not make a run wait for ever with nothing under way."""
    monkeypatch.setattr(Resolved, "new_system", lambda site: Patient(40))
    taken: list[int] = []
    first: list[int] = []
    tiny.run(counted(tiny, 60, taken), lambda o: first.append(len(taken)), progress=False)
    assert len(first) == 60
    assert first[0] == 40
    with pytest.raises(JaxinferError, match=r"stall|route"):
        tiny.run(counted(tiny, 30, taken), lambda output: None, progress=False)


def test_the_bar_counts_what_has_been_read(
    tiny: LLM, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny.run(counted(tiny, 30, []), lambda output: None, run_dir=tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"requests: 0 of {READ_AHEAD}, 0 s"
    assert lines[-1].startswith("requests: 30 of 30")
    tiny.run(counted(tiny, 30, []), lambda output: None, num_requests=30)
    assert capsys.readouterr().err.startswith("requests: 0 of 30, 0 s\n")
    list(tiny.generate_iter(["a"] * 30, greedy(1)))
    assert capsys.readouterr().err.startswith("requests: 0 of 30, 0 s\n")
    run = json.loads((tmp_path / "1" / "run.json").read_text())
    assert run["metrics"]["requests"] == 30


def test_the_bar_hears_of_each_step_once_it_counts(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    monkeypatch.setattr(RunProgress, "step_done", lambda bar, totals: heard.append(totals.steps))
    metrics = tiny.run(counted(tiny, 9, []), lambda output: None, progress=False)
    assert heard == list(range(1, metrics.steps + 1))
    assert metrics.steps > 3
