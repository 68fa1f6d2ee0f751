"""The Python interface, on the tiny model."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from llm_cases import GREEDY, PROMPTS, tokens

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.report.latencies import Latencies
from jaxinfer.report.records import read_run
from jaxinfer.report.summary import figures


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
