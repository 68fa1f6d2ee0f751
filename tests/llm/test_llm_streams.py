"""Requests that are read as the run goes on, on the tiny model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from failure_cases import tokens
from stream_cases import READ_AHEAD, greedy

from jaxinfer import LLM, JaxinferError, RequestOutput, SamplingParams
from jaxinfer.config.resolve import Resolved
from jaxinfer.report.progress import RunProgress
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, Leg


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
    """The sampler comes before its first step, and without disturbing what is under way."""
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
    """Routes nothing until a given number of requests have arrived."""

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
