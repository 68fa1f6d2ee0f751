"""Answers to batches, as Ray Data hands them over; Ray itself is not needed."""

from typing import Any

import numpy as np
import pytest
from tiny_model import TINY_OPTIONS

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.ray.generator import ANSWER, Generator

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def generator(tiny: LLM, tiny_loaded_once: None) -> Generator:
    """Return a generator of the tiny model, which is loaded already."""
    run_file = {"model": tiny.model, "engine": TINY_OPTIONS}
    return Generator(run_file, sampling_params=GREEDY)


def column(*cells: Any) -> np.ndarray:
    found = np.empty(len(cells), object)
    for index, cell in enumerate(cells):
        found[index] = cell
    return found


def test_rows_are_answered_in_their_order_beside_their_columns(
    generator: Generator, tiny: LLM
) -> None:
    prompts = ["one", "a longer prompt", "three"]
    given = {"prompt": np.array(prompts), "key": np.arange(3)}
    found = generator(given)
    expected = tiny.generate(prompts, SamplingParams(**GREEDY), progress=False)
    assert found["key"].tolist() == [0, 1, 2]
    assert found["generated_tokens"].tolist() == [o.outputs[0].token_ids for o in expected]
    assert found["generated_text"].tolist() == [o.outputs[0].text for o in expected]
    assert found["num_input_tokens"].tolist() == [len(o.prompt_token_ids) for o in expected]
    assert found["num_generated_tokens"].tolist() == [8, 8, 8]
    assert found["finish_reason"].tolist() == ["length"] * 3
    assert found["error"].tolist() == [None] * 3
    assert "generated_text" not in given


def test_a_row_asks_by_tokens_text_or_messages_and_samples_as_it_says(
    generator: Generator, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.tokenizer, "encode_chat", lambda messages: [len(messages), 7])
    rows = {
        "prompt": column("text", None, None),
        "prompt_token_ids": column(None, np.array([5, 6, 7]), None),
        "messages": column(None, None, column({"role": "user", "content": "text", "name": None})),
        # As Arrow has it, where rows give different ones.
        "sampling_params": column(
            {"max_tokens": 3, "seed": None}, None, {"max_tokens": np.int64(5)}
        ),
    }
    found = generator(rows)
    expected = tiny.generate(
        ["text", {"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [1, 7]}],
        [SamplingParams(**GREEDY | {"max_tokens": n}) for n in (3, 8, 5)],
        progress=False,
    )
    assert found["generated_tokens"].tolist() == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x" * 300}, "300 tokens"),
        ({"prompt": None}, "none of prompt, prompt_token_ids, messages"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "has prompt, prompt_token_ids of"),
        ({"prompt": "x", "sampling_params": 3}, "sampling_params is 3, must be a mapping"),
        ({"prompt": "x", "sampling_params": {"tempreture": 1}}, "did you mean 'temperature'"),
        ({"prompt": "x", "sampling_params": {"n": 2, "temperature": 1}}, "n is 2, must be 1"),
        ({"prompt_token_ids": [999]}, "token id 999 is not in the vocabulary"),
    ],
)
def test_a_row_that_cannot_be_answered_says_why_and_costs_no_other(
    generator: Generator, row: dict[str, Any], error: str
) -> None:
    good = {"prompt": None, "prompt_token_ids": [1, 2], "sampling_params": None}
    rows = [good, dict.fromkeys(good) | row, good]
    found = generator({name: column(*(r[name] for r in rows)) for name in good})
    assert [bool(e) for e in found["error"]] == [False, True, False]
    assert error in found["error"][1]
    assert found["generated_tokens"][1] is found["generated_text"][1] is None
    assert found["generated_tokens"][0] == found["generated_tokens"][2] != []


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({"text": column("x")}, r"columns \['text'\]: one of prompt, prompt_token_ids, messages"),
        *(({"prompt": column("x"), name: column(1)}, f"column {name}") for name in ANSWER),
        ([{"prompt": "x"}], "batch is a list: leave batch_format out"),
    ],
)
def test_a_batch_that_is_none_is_refused(generator: Generator, batch: Any, error: str) -> None:
    with pytest.raises(JaxinferError, match=error):
        generator(batch)


def test_what_is_wrong_with_the_constructor_is_refused() -> None:
    with pytest.raises(JaxinferError, match="max_num_seqs: beside a run file"):
        Generator({"model": "m"}, max_num_seqs=3)
    with pytest.raises(JaxinferError, match="did you mean 'temperature'"):
        Generator({"model": "m"}, sampling_params={"temperatur": 0})


def test_an_instance_that_is_lost_ends_the_batch(
    generator: Generator, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LLM.run

    def lose(self: LLM, requests: Any, take: Any, **options: Any) -> Any:
        def lost(output: Any) -> None:
            output.lost, output.error = True, "instance b was lost"
            take(output)

        return run(self, requests, lost, **options)

    monkeypatch.setattr(LLM, "run", lose)
    with pytest.raises(JaxinferError, match="row 0: instance b was lost"):
        generator({"prompt": column("x")})
