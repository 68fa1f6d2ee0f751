"""The Python interface, on the tiny model."""

import json
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import TINY_OPTIONS

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import RunFile, Workload
from jaxinfer.report.latencies import Latencies
from jaxinfer.report.origin import PACKAGES
from jaxinfer.report.records import read_run
from jaxinfer.report.summary import figures
from jaxinfer.request import Sampling
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.world import RealWorld
from jaxinfer.text.stop import StopCheck
from jaxinfer.workload.predictor import Buckets

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["Hello", "A longer prompt than the other one, by far.", "x" * 150, "Ünïcode ✓"]


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> LLM:
    """24 pages, and two buckets of rows."""
    return LLM(
        str(tiny_folder),
        progress=False,
        page_size=8,
        num_pages=25,
        max_num_seqs=16,
        max_num_batched_tokens=32,
    )


@pytest.fixture(scope="module")
def unlike(tiny_folder: Path) -> LLM:
    """Unlike ``tiny`` in all that is to change no token."""
    return LLM(
        str(tiny_folder),
        progress=False,
        page_size=16,
        max_num_seqs=2,
        max_num_batched_tokens=7,
        launch_ahead=False,
    )


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, params, progress=False)
    return [o.outputs[0].token_ids for o in outputs]


def test_outputs_come_in_the_order_asked_with_all_fields(tiny: LLM) -> None:
    params = [GREEDY.model_copy(update={"max_tokens": n}) for n in (30, 1, 5, 12)]
    outputs = tiny.generate(PROMPTS, params, progress=False)
    assert [o.prompt for o in outputs] == PROMPTS
    assert len({o.request_id for o in outputs}) == 4
    for prompt, output, n in zip(PROMPTS, outputs, (30, 1, 5, 12), strict=True):
        (completion,) = output.outputs
        assert output.prompt_token_ids == tiny.tokenizer.encode(prompt)
        assert len(completion.token_ids) == n
        assert completion.text == tiny.tokenizer.decode(completion.token_ids)
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.cumulative_logprob is not None
        assert completion.cumulative_logprob < 0
        assert output.finished
        assert len(output.metrics.token_times) == n
        assert output.metrics.token_times == sorted(output.metrics.token_times)


def test_one_prompt_text_or_tokens_is_the_same(tiny: LLM) -> None:
    ids = tiny.tokenizer.encode("Hello")
    one = tokens(tiny, "Hello", GREEDY)
    assert tokens(tiny, {"prompt_token_ids": ids}, GREEDY) == one
    assert tokens(tiny, [{"prompt_token_ids": ids}, "Hello"], GREEDY) == one * 2


def test_chat_applies_the_template(tiny: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = tiny.chat(messages, GREEDY, progress=False)
    assert output.prompt_token_ids == tiny.tokenizer.encode("<user>Hi<end><assistant>")
    several = tiny.chat([messages, messages], GREEDY, progress=False)
    assert [o.outputs[0].token_ids for o in several] == [output.outputs[0].token_ids] * 2


def test_sampled_tokens_do_not_depend_on_batch_mates_order_or_preemption(tiny: LLM) -> None:
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, seed=s, max_tokens=40, ignore_eos=True)
        for t, k, p, s in [(1.0, 0, 1.0, 1), (0.7, 20, 1.0, 2), (1.3, 0, 0.8, 3), (1, 50, 0.9, 4)]
    ]
    alone = [tokens(tiny, p, s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert tokens(tiny, PROMPTS, params) == alone
    assert tokens(tiny, PROMPTS[::-1], params[::-1]) == alone[::-1]
    # 16 requests of up to 24 pages in 64 pages: preemptions.
    requests = [
        request
        for i in range(16)
        for request in tiny.make_requests(
            f"r{i}", tiny.tokenizer.encode(PROMPTS[i % 4]), params[i % 4]
        )
    ]
    seen = {}
    metrics = tiny.run(
        requests, lambda o: seen.update({o.request_id: o.outputs[0].token_ids}), progress=False
    )
    assert [seen[f"r{i}"] for i in range(16)] == alone * 4
    assert metrics.output_tokens == 16 * 40


def test_preemption_happens_and_changes_nothing(tiny: LLM, small: LLM, tmp_path: Path) -> None:
    params = GREEDY.model_copy(update={"max_tokens": 90})
    prompts = [PROMPTS[1] + str(i) for i in range(6)]
    alone = [tokens(tiny, p, params)[0] for p in prompts]
    outputs = small.generate(prompts, params, progress=False, run_dir=tmp_path)
    preemptions = sum(o.metrics.num_preemptions for o in outputs)
    run = json.loads((tmp_path / "1" / "run.json").read_text())
    assert run["metrics"]["preemptions"] == preemptions > 0
    assert [o.outputs[0].token_ids for o in outputs] == alone


def test_requests_without_a_seed_differ_but_repeat_in_a_new_engine(tiny: LLM) -> None:
    params = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True)
    first, second = tokens(tiny, ["Hello", "Hello"], params)
    assert first != second
    same = [tiny.make_requests("same-id", [1, 2, 3], params)[0].payload for _ in range(2)]
    assert same[0] == same[1]


def test_stop_conditions(tiny: LLM) -> None:
    (free,) = tiny.generate("Hello", GREEDY, progress=False)
    ids, text = free.outputs[0].token_ids, free.outputs[0].text

    stop_id = ids[7]
    cut = ids[: ids.index(stop_id) + 1]
    params = GREEDY.model_copy(update={"stop_token_ids": (stop_id,)})
    (by_id,) = tiny.generate("Hello", params, progress=False)[0].outputs
    assert by_id.token_ids == cut
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", stop_id)
    assert by_id.text == tiny.tokenizer.decode(cut[:-1])

    middle = text[3:6]  # Several tokens: each is one byte.
    params = GREEDY.model_copy(update={"stop": ("never in the text", middle)})
    (by_text,) = tiny.generate("Hello", params, progress=False)[0].outputs
    assert by_text.text == text[: text.index(middle)]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", middle)
    # The token that completed the string is the last: launched-ahead ones are dropped.
    assert middle in tiny.tokenizer.decode(by_text.token_ids)
    assert middle not in tiny.tokenizer.decode(by_text.token_ids[:-1])


def test_eos_stops_unless_ignored(tiny: LLM) -> None:
    eos = tiny.tokenizer.eos_token_ids[0]
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=100, ignore_eos=True)
    requests = [f"prompt {i}" for i in range(24)]
    ignoring = tiny.generate(requests, params, progress=False)
    with_eos = [o for o in ignoring if eos in o.outputs[0].token_ids]
    assert with_eos, "no output has an EOS; the test needs other seeds"
    prompts = [o.prompt for o in with_eos if o.prompt]
    stopping = tiny.generate(prompts, SamplingParams(temperature=2.0, seed=3, max_tokens=100))
    for free, stopped in zip(with_eos, stopping, strict=True):
        ids = free.outputs[0].token_ids
        assert stopped.outputs[0].token_ids == ids[: ids.index(eos) + 1]
        assert stopped.outputs[0].finish_reason == "stop"
        assert stopped.outputs[0].stop_reason is None


def test_max_tokens_ends_at_the_models_length(tiny: LLM) -> None:
    params = GREEDY.model_copy(update={"max_tokens": 1000})
    (ids,) = tokens(tiny, "x" * 250, params)
    assert len(ids) == 256 - 250


def test_a_request_too_large_for_the_pool_is_refused_and_the_rest_served(small: LLM) -> None:
    """The last of 20 output tokens has no KV."""
    prompts = ["x" * (24 * 8 - 19 + 1), "Hello", "y" * (24 * 8 - 19)]
    outputs = small.generate(prompts, GREEDY, progress=False)
    assert outputs[0].outputs == []
    assert outputs[0].error
    assert "needs 25 pages" in outputs[0].error
    assert "which has 24" in outputs[0].error
    assert [len(o.outputs[0].token_ids) for o in outputs[1:]] == [20, 20]


def test_a_prompt_counts_once_however_many_continuations_fail(small: LLM) -> None:
    """The continuations that wait for the first one's prompt fail as it does."""
    params = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
    made = small.make_requests("large", [1] * 174, params) + small.make_requests("b", [1], params)
    ended: dict[str, int] = {}
    metrics = small.run(
        made, lambda o: ended.update({o.request_id: len(o.outputs)}), progress=False
    )
    assert ended == {"large": 0, "b": 3}
    assert (metrics.requests, metrics.failed) == (2, 1)
    assert ["needs 25 pages" in (request.error or "") for request in made] == [True] * 3 + [
        False
    ] * 3


def test_a_run_and_its_folder_count_alike(small: LLM, tmp_path: Path) -> None:
    """The second of the prompts with three continuations fails."""
    params = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
    prompts = [("a", [1]), ("large", [1] * 174), *((name, [2]) for name in "bcdefgh")]
    made = [each for name, tokens in prompts for each in small.make_requests(name, tokens, params)]
    metrics = small.run(made, lambda output: None, progress=False, run_dir=tmp_path)
    found = figures(read_run(tmp_path / "1"))
    assert (metrics.requests, metrics.failed) == (9, 1)
    assert found.failed == 1
    assert found.requests_s * metrics.wall_s == pytest.approx(8)
    assert found.output_tok_s == pytest.approx(metrics.output_tok_s)
    # Prompts and tokens of one window, each prompt with 60.
    assert metrics.steady_requests_s
    assert metrics.steady_output_tok_s == pytest.approx(60 * metrics.steady_requests_s)
    names = [field.name for field in fields(Latencies)]
    for name in names:
        # The folder's times are rounded to microseconds.
        assert getattr(found, name) == pytest.approx(getattr(metrics, name), abs=2e-6)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt 0: the prompt is empty"),
        (["ok", {"prompt_token_ids": []}], GREEDY, "prompt 1: the prompt is empty"),
        (["ok", {"prompt_token_ids": [999]}], GREEDY, "token id 999 is not in the vocabulary"),
        (["ok", {"prompt_token_ids": [-1]}], GREEDY, "token id -1 is not in the vocabulary"),
        ([{"prompt_token_ids": ["a"]}], GREEDY, "must be a list of integers"),
        ([{"prompt_token_idz": [1]}], GREEDY, "must be a text, "),
        ([3], GREEDY, "must be a text, "),
        ("x" * 256, GREEDY, "prompt 0: the prompt has 256 tokens, max_model_len is 256"),
        (["a", "b"], [GREEDY], "1 sampling_params, but more prompts"),
        (["a"], [GREEDY, GREEDY], "1 prompts, but more sampling_params"),
    ],
)
def test_bad_prompts_are_named_before_anything_runs(
    tiny: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(JaxinferError, match=message) as caught:
        tiny.generate(prompts, params, progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "max_num_seq: unknown option, did you mean 'max_num_seqs'"),
        ({"num_pages": 1}, "num_pages is 1, must be"),
        ({"dtype": "fp16"}, "dtype: fp16 is not supported: bfloat16 takes as much memory"),
        ({"dtype": "fp8"}, "fp8 is a format of weights alone: weight_dtype: fp8"),
        ({"max_model_len": 257}, "max_model_len is 257, the model was made for 256"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "must be at least max_num_seqs"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"num_pages": 10**12}, "num_pages 1000000000000 of 64 tokens takes"),
        ({"memory_fraction": 1e-12}, "leaves room for 0 KV pages"),
    ],
)
def test_wrong_options_are_one_line(
    tiny_folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(JaxinferError) as caught:
        LLM(str(tiny_folder), progress=False, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_launch_ahead_and_pool_size_do_not_change_tokens(tiny: LLM, unlike: LLM) -> None:
    assert tokens(unlike, PROMPTS, GREEDY) == tokens(tiny, PROMPTS, GREEDY)


def test_a_run_leaves_its_files(tiny: LLM, tmp_path: Path) -> None:
    for _ in range(2):
        tiny.reset_prefix_cache()
        tiny.generate(PROMPTS, GREEDY, progress=False, run_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    run = json.loads((tmp_path / "2" / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["instances"]["engine"]["engine"]["max_num_seqs"] == 4
    assert set(run["versions"]) == {"jaxinfer", *PACKAGES}
    steps = [json.loads(line) for line in (tmp_path / "2" / "steps.jsonl").open()]
    assert len(steps) == run["metrics"]["steps"]
    # The first token comes from prefill, the others from one decode each.
    prompt_tokens = sum(len(tiny.tokenizer.encode(p)) for p in PROMPTS)
    assert sum(s["prefill_tokens"] for s in steps) == prompt_tokens
    assert sum(s["decode_tokens"] for s in steps) == 4 * 19
    assert sum(s["sampled"] for s in steps) == 4 * 20
    assert max(s["pages_in_use"] for s in steps) == run["metrics"]["peak_pages"]
    for before, after in pairwise(steps):
        assert before["start"] <= before["end"] <= after["start"] <= after["end"]
    m = run["metrics"]
    assert m["late_compiles"] == 0
    assert m["prompt_tokens"] == prompt_tokens
    assert m["output_tokens"] == 80
    assert m["num_pages"] == TINY_OPTIONS["num_pages"] - 1  # One is padding's.


def test_a_run_tells_what_is_its_own(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither compilations nor delays of the runs before it, nor time that was spent twice."""
    late = [{"engine": [9.0]}, {"engine": [0.25, 0.5]}]
    monkeypatch.setattr(Cluster, "take_overruns", lambda cluster: late.pop(0))
    monkeypatch.setattr(tiny.engine.worker.stages[0].step, "late_compiles", 5)
    worlds: list[RealWorld] = []

    def make(*args: Any) -> RealWorld:
        worlds.append(RealWorld(*args))
        return worlds[-1]

    monkeypatch.setattr("jaxinfer.runtime.run.RealWorld", make)
    made = tiny.make_requests("a", [5, 6, 7], GREEDY)
    metrics = tiny.run(made, lambda output: None, progress=False, run_dir=tmp_path)
    run = json.loads((tmp_path / "1" / "run.json").read_text())
    assert run["overruns"] == {"engine": {"steps": 2, "seconds": 0.75}}
    assert metrics.late_compiles == 0
    assert 0 < metrics.launching_s == worlds[0].launching_s
    parts = metrics.loop_s + metrics.launching_s + worlds[0].waited_s
    assert 0 < metrics.loop_s < parts <= metrics.wall_s


def test_strict_shapes_refuses_a_step_that_was_not_compiled(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_folder), progress=False, strict_shapes=True, **TINY_OPTIONS)
    assert tokens(llm, "Hello", GREEDY)
    step = llm.engine.worker.stages[0].step
    assert step.late_compiles == 0
    step._executables.clear()
    monkeypatch.setattr(step, "compile_ahead", lambda *args: iter([0]))
    with pytest.raises(JaxinferError, match="strict_shapes"):
        tokens(llm, "Hello", GREEDY)
    step._strict = False
    assert tokens(llm, "Hello", GREEDY)
    assert step.late_compiles > 0


def test_penalties_are_a_bias_by_the_tokens_so_far(tiny: LLM) -> None:
    """Step by step: one token from prompt and output, with the penalties as a logit bias."""
    params = GREEDY.model_copy(
        update={"max_tokens": 12, "presence_penalty": 1.5, "frequency_penalty": 0.75}
    )
    (got,) = tokens(tiny, "Hello", params)
    assert got != tokens(tiny, "Hello", GREEDY)[0][:12]
    prompt = tiny.tokenizer.encode("Hello")
    output: list[int] = []
    for _ in range(12):
        bias = {t: -(1.5 + 0.75 * output.count(t)) for t in output}
        step = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logit_bias=bias)
        output += tokens(tiny, {"prompt_token_ids": prompt + output}, step)[0]
    assert got == output


def test_repetition_penalty_sees_the_prompt(tiny: LLM) -> None:
    prompt = tiny.tokenizer.encode("Hello")
    params = GREEDY.model_copy(update={"max_tokens": 15, "repetition_penalty": 100.0})
    (got,) = tokens(tiny, "Hello", params)
    assert len({*got, *prompt}) == 15 + len(set(prompt))


def test_min_tokens_holds_back_every_end(tiny: LLM) -> None:
    (free,) = tiny.generate("Hello", GREEDY, progress=False)
    ids, text = free.outputs[0].token_ids, free.outputs[0].text
    params = SamplingParams(
        temperature=0, max_tokens=20, min_tokens=10, stop_token_ids=(ids[2],), ignore_eos=True
    )
    (held,) = tokens(tiny, "Hello", params)
    assert ids[2] not in held[:10]
    assert held[:2] == ids[:2]
    params = GREEDY.model_copy(update={"min_tokens": 10, "stop": (text[2:4],)})
    (by_text,) = tiny.generate("Hello", params, progress=False)[0].outputs
    assert len(by_text.token_ids) > 10
    assert by_text.text.startswith(text[:10])


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 4), (3, 4), (4, None)])
def test_a_stop_string_may_begin_before_min_tokens_but_not_end_there(
    tiny: LLM, min_tokens: int, ends_at: int | None
) -> None:
    params = SamplingParams(min_tokens=min_tokens, stop=("cd", "longer than that"))
    check = StopCheck(Sampling(params, seed=0), tiny.tokenizer, [])
    ids = tiny.tokenizer.encode("abcdefgh")
    stops = [check.add(token) for token in ids]
    assert [i for i, stop in enumerate(stops, 1) if stop] == ([ends_at] if ends_at else [])
    if ends_at:
        assert check.text(ids[:ends_at], ended_by_token=False) == "ab"


def test_requests_come_in_the_order_given(tiny: LLM) -> None:
    llm_ids = [[i] * 20 for i in range(6)]
    requests = [r for i, ids in enumerate(llm_ids) for r in tiny.make_requests(str(i), ids, GREEDY)]
    tiny.run(requests, lambda output: None, progress=False)
    starts = [request.metrics.first_scheduled or 0.0 for request in requests]
    assert starts == sorted(starts)
    assert starts[0] < starts[-1]


def test_ids_that_look_like_those_of_continuations_do_not_clash(tiny: LLM) -> None:
    several = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    one = SamplingParams(max_tokens=3, ignore_eos=True)
    asked = {"a": several, "a (2 of 2)": one, "a (1 of 2)": one, "a (1 of 2) (1 of 1)": one}
    requests = [r for name, p in asked.items() for r in tiny.make_requests(name, [1, 2], p)]
    outputs = {}
    tiny.run(requests, lambda o: outputs.update({o.request_id: len(o.outputs)}), progress=False)
    assert outputs == {name: params.n for name, params in asked.items()}
    with pytest.raises(JaxinferError, match="two requests have the id 'a'"):
        tiny.run(tiny.make_requests("a", [1], one) * 2, lambda output: None, progress=False)


def test_a_failure_in_reporting_ends_the_run(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.runtime.worker._sample_logprobs", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.generate("Hello", GREEDY, progress=False)
    monkeypatch.undo()
    assert len(tokens(tiny, "Hello", GREEDY)[0]) == 20


def test_n_continuations_of_one_prompt(tiny: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    first, other = tiny.generate(["Hello", "Other"], params, progress=False)
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    alone = params.model_copy(update={"n": 1})
    assert tokens(tiny, "Hello", alone)[0] == first.outputs[0].token_ids
    (again,) = tiny.generate("Hello", params, progress=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in first.outputs]
    assert len(other.outputs) == 3


def test_greedy_continuations_are_alike(tiny: LLM) -> None:
    (several,) = tiny.generate("Hello", GREEDY.model_copy(update={"n": 3}), progress=False)
    assert [found.token_ids for found in several.outputs] == tokens(tiny, "Hello", GREEDY) * 3


def test_logprobs(tiny: LLM) -> None:
    params = GREEDY.model_copy(update={"logprobs": 3})
    (output,) = tiny.generate("Hello", params, progress=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 20
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert [found.rank for found in position.values()] == [1, 2, 3]
        assert next(iter(position)) == token
        assert sum(np.exp(found.logprob) for found in position.values()) < 1
    drawn = [p[t] for t, p in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert "".join(found.decoded_token or "" for found in drawn) == completion.text
    assert (
        b"".join(found.token_bytes or b"" for found in drawn).decode(errors="replace")
        == completion.text
    )
    chosen = [found.logprob for found in drawn]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)

    params = SamplingParams(temperature=3.0, seed=1, max_tokens=20, ignore_eos=True, logprobs=0)
    (completion,) = tiny.generate("Hello", params, progress=False)[0].outputs
    assert completion.logprobs is not None
    assert all(len(position) == 1 for position in completion.logprobs)
    assert any(found.rank > 1 for p in completion.logprobs for found in p.values())
    assert tiny.generate("Hello", GREEDY, progress=False)[0].outputs[0].logprobs is None


@pytest.mark.parametrize("option", ["logit_bias", "stop_token_ids"])
def test_tokens_outside_the_vocabulary_are_refused(tiny: LLM, option: str) -> None:
    params = GREEDY.model_copy(update={option: {260: 1.0}})
    with pytest.raises(JaxinferError, match="prompt 0: token id 260 is not in the vocabulary"):
        tiny.generate("Hello", params, progress=False)


def test_a_prompt_seen_before_is_not_computed_again(tiny: LLM) -> None:
    """Pages of 8 tokens: 43 prompt tokens leave 40 that can be reused."""
    prompt = PROMPTS[1]
    assert len(tiny.tokenizer.encode(prompt)) == 43
    tiny.reset_prefix_cache()
    found = [tiny.generate(prompt, GREEDY, progress=False)[0] for _ in range(3)]
    assert [output.metrics.num_cached_tokens for output in found] == [0, 40, 40]
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1
    tiny.reset_prefix_cache()
    assert tiny.generate(prompt, GREEDY, progress=False)[0].metrics.num_cached_tokens == 0
    # The other continuations wait for the first one's pages.
    params = SamplingParams(n=4, seed=1, max_tokens=5)
    tiny.reset_prefix_cache()
    requests = tiny.make_requests("r", tiny.tokenizer.encode(prompt), params)
    metrics = tiny.run(requests, lambda output: None, progress=False)
    assert [r.metrics.num_cached_tokens for r in requests] == [0, 40, 40, 40]
    assert (metrics.requests, metrics.prompt_tokens, metrics.cached_tokens) == (1, 172, 120)
    # For all of them, however many steps of 32 tokens the prompt takes: 18 pages of 150 tokens.
    requests = tiny.make_requests("long", list(range(150)), params)
    tiny.run(requests, lambda output: None, progress=False)
    assert [r.metrics.num_cached_tokens for r in requests] == [0, 144, 144, 144]


def test_an_interrupted_run_leaves_a_fresh_pool(
    small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(small.engine.worker, "launch", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            small.generate(PROMPTS, GREEDY, progress=False)
    outputs = small.generate(PROMPTS, GREEDY, progress=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [20] * 4


@pytest.mark.parametrize("name", ["tiny", "small", "unlike"])
def test_prompt_logprobs_are_those_of_the_tokens_one_by_one(
    tiny: LLM, name: str, request: pytest.FixtureRequest
) -> None:
    """The figures against what ``logprobs`` reports after each beginning of the prompt."""
    llm = request.getfixturevalue(name)
    prompts = [tiny.tokenizer.encode(p) for p in ("Hello there", PROMPTS[1], "x" * 90)]
    params = GREEDY.model_copy(update={"prompt_logprobs": 2})
    for _ in range(2):  # The second time, the prefix cache has it all.
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, progress=False)
        assert [o.metrics.num_cached_tokens for o in outputs] == [0, 0, 0]
        assert (sum(o.metrics.num_preemptions for o in outputs) > 0) == (name == "small")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        beginnings = [{"prompt_token_ids": prompt[:end]} for end in range(1, len(prompt))]
        after = tiny.generate(
            beginnings, SamplingParams(temperature=0, max_tokens=1, logprobs=20), progress=False
        )
        for token, position, one in zip(prompt[1:], rest, after, strict=True):
            assert position is not None
            assert next(iter(position)) == token
            assert one.outputs[0].logprobs is not None
            expected = one.outputs[0].logprobs[0]
            likeliest = sorted(expected.items(), key=lambda item: item[1].rank)[:2]
            got = sorted(position.items(), key=lambda item: item[1].rank)[:2]
            assert [t for t, _ in got] == [t for t, _ in likeliest]
            for (_, ours), (_, theirs) in zip(got, likeliest, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            if token in expected:
                assert position[token].rank == expected[token].rank
                assert position[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_a_users_predictor_is_asked_as_requests_come_in(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "predictor_of_prompts.py").write_text(
        "def predict(request):\n    return 1, 2 * request.prompt_len\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workload = Workload(predictor="predictor_of_prompts:predict")
    config = RunFile(
        model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS), workload=workload
    )
    llm = LLM.from_config(config, progress=False)
    made = llm.make_requests("a", [5, 6, 7], GREEDY)
    llm.run(made, lambda output: None, progress=False)
    assert [request.predicted for request in made] == [(1, 6)]


def test_each_run_has_a_predictor_of_its_own(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that counts begins anew, as it does in simulations."""
    (tmp_path / "predictor_that_counts.py").write_text(
        "class Counts:\n    asked = 0\n\n    def __call__(self, request):\n"
        "        self.asked += 1\n        return 0, self.asked\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workload = Workload(predictor="predictor_that_counts:Counts")
    config = RunFile(
        model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS), workload=workload
    )
    llm = LLM.from_config(config, progress=False)
    for _ in range(2):
        made = [each for name in "ab" for each in llm.make_requests(name, [5, 6], GREEDY)]
        llm.run(made, lambda output: None, progress=False)
        assert [request.predicted for request in made] == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    "option", [{"predictor": Buckets(granularity=9, accuracy=1)}, {"max_tokens": 5}]
)
def test_what_only_a_modelled_run_knows(tiny_folder: Path, option: dict[str, Any]) -> None:
    config = RunFile(model=str(tiny_folder), workload=Workload(**option))
    with pytest.raises(
        JaxinferError, match=r"^workload\.(predictor: b|max_tokens: w).* modelled run"
    ):
        LLM.from_config(config, progress=False)
