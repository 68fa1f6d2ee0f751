"""Penalties, stops, continuations and log probabilities, on the tiny model."""

import numpy as np
import pytest
from llm_cases import GREEDY, tokens

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.request import Sampling
from jaxinfer.text.stop import StopCheck


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
