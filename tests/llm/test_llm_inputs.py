"""Inputs of the Python interface, odd and wrong: served, or refused in one line."""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from waiting import HANG_S

from jaxinfer import LLM, JaxinferError, RequestOutput, SamplingParams
from jaxinfer.runtime.session import Session
from jaxinfer.runtime.stage.sampling_inputs import sampling_of
from jaxinfer.text.prompts import text_or_token_ids
from jaxinfer.text.tokenizer import NoTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
HELLO = [72, 69, 76, 76, 79]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny: LLM) -> list[int]:
    """Return the tokens that follow ``HELLO``."""
    (found,) = tokens(tiny.generate({"prompt_token_ids": HELLO}, GREEDY, progress=False))
    return found


@pytest.mark.parametrize(
    "given",
    [
        tuple(HELLO),
        np.array(HELLO),
        np.array(HELLO, np.uint8),
        [np.int32(token) for token in HELLO],
        (np.int64(72), *HELLO[1:]),
    ],
    ids=["tuple", "array", "bytes", "numbers", "both"],
)
def test_token_ids_of_any_kind(tiny: LLM, plain: list[int], given: Any) -> None:
    (output,) = tiny.generate({"prompt_token_ids": given}, GREEDY, progress=False)
    assert tokens([output]) == [plain]
    assert output.prompt_token_ids == HELLO
    assert {type(token) for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    "given", [np.array([1.0]), np.array([[1]]), [True], [1, True], 5, "ab", np.int64(5), {1}, None]
)
def test_what_are_no_token_ids(tiny: LLM, given: Any) -> None:
    with pytest.raises(JaxinferError, match=r"prompt 0: prompt_token_ids is .* must be a list"):
        tiny.generate({"prompt_token_ids": given}, GREEDY, progress=False)


def test_numbers_of_numpy_are_sampling_options() -> None:
    given = {
        "max_tokens": np.int64(4),
        "temperature": np.float32(0.5),
        "ignore_eos": np.bool_(True),
        "stop_token_ids": np.array([7, 8]),
        "logit_bias": {np.int32(3): np.float64(-1.5), 4: 2},
        "stop": ("a", "b"),
    }
    params = SamplingParams(**given)
    plain = SamplingParams(
        max_tokens=4,
        temperature=0.5,
        ignore_eos=True,
        stop_token_ids=(7, 8),
        logit_bias={3: -1.5, 4: 2},
        stop=("a", "b"),
    )
    assert params == plain
    assert type(params.max_tokens) is int
    assert {type(token) for token in params.logit_bias} == {int}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"stop": ""}, "stop: '' is empty, must have at least one character"),
        ({"stop": ["a", ""]}, "stop: '' is empty, must have at least one character"),
        ({"stop": 3}, "stop: 3 must be a text or a list of texts"),
        ({"stop_token_ids": 3}, "stop_token_ids: 3 must be a list of tokens"),
        ({"stop_token_ids": "7"}, "stop_token_ids: '7' must be a list of tokens"),
        ({"logit_bias": [3]}, r"logit_bias: \[3\] must be a mapping from tokens to numbers"),
        ({"temperature": 1e308}, r"temperature is 1e\+308, must be less than or equal to 100"),
        ({"max_tokens": np.float32(3)}, "max_tokens is 3.0, must be an integer"),
        ({"max_tokens": np.array([3])}, r"max_tokens is \[3\], must be an integer"),
    ],
)
def test_wrong_sampling_options(option: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError, match=f"^{message}"):
        SamplingParams(**option)


# Values that the sampler's float32 and int32 cannot hold, and those that mean the same.
@pytest.mark.parametrize(
    ("extreme", "same"),
    [
        ({"top_k": 3_000_000_000}, {"top_k": 0}),
        ({"top_k": 10**12}, {"top_k": 0}),
        ({"temperature": 1.2e-38}, {"temperature": 0}),
        ({"temperature": 5e-324}, {"temperature": 0}),
        ({"top_p": 1e-60}, {"temperature": 0}),
    ],
)
def test_extreme_sampling_options(tiny: LLM, extreme: dict[str, Any], same: dict[str, Any]) -> None:
    common = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    params = [SamplingParams(**{**common, **given}) for given in (extreme, same)]
    found, expected = tokens(tiny.generate(["Hello", "Hello"], params, progress=False))
    assert found == expected


def test_prompts_of_a_generator_are_served(tiny: LLM) -> None:
    texts = ["one", "two"]
    expected = tokens(tiny.generate(texts, GREEDY, progress=False))
    params = (GREEDY for _ in texts)
    assert tokens(tiny.generate(iter(texts), params, progress=False)) == expected
    talks = [[{"role": "user", "content": text}] for text in texts]
    expected = tokens(tiny.chat(talks, GREEDY, progress=False))
    assert tokens(tiny.chat((talk for talk in talks), GREEDY, progress=False)) == expected
    assert tokens(tiny.chat(iter(talks[0]), GREEDY, progress=False)) == expected[:1]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "prompts is None, must be one or a list of them"),
        (7, None, "prompts is 7, must be one or a list of them"),
        (b"Hi", None, "prompt 0: b'Hi' must be a text, "),
        ("a\ud800b", None, r"prompt 0: the text holds '\\ud800', which is half of a surrogate"),
        ([None], None, "prompt 0: None must be a text, "),
        ([3], None, "prompt 0: 3 must be a text, "),
        (np.ones((1, 2, 2)), None, r"prompt 0: array\(\[\[1., 1.\],  +\[1., 1.\]\]\) must be a"),
        (["a"], {"temperature": 0}, r"sampling_params is \{'temperature': 0\}, must be Samp"),
        (["a"], [{"temperature": 0}], "sampling_params is .* must be SamplingParams"),
        (["a"], [None], "sampling_params is None, must be SamplingParams"),
        (["a"], 3, "sampling_params is 3, must be one or a list of them"),
        (["a"], "greedy", "sampling_params is 'greedy', must be SamplingParams"),
    ],
)
def test_wrong_prompts(tiny: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(JaxinferError, match=f"^{message}") as caught:
        tiny.generate(prompts, params, progress=False)
    assert "\n" not in str(caught.value)


PART = {"type": "text", "text": "Hi"}


def test_a_chat_takes_text_parts_as_lines_of_a_batch_do(tiny: LLM) -> None:
    plain = [{"role": "system", "content": "Hi\nHi"}, {"role": "user", "content": "Hi"}]
    parts = ({"role": "system", "content": (PART, PART)}, {"role": "user", "content": [PART]})
    first, second = (tiny.chat(given, GREEDY, progress=False)[0] for given in (plain, parts))
    assert first.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is None, must be one or a list of them"),
        ("Hi", "prompt 0: messages is 'Hi', must be a non-empty list of messages"),
        ({"role": "user", "content": "Hi"}, "prompt 0: messages is {'role': 'user', 'cont"),
        ([[]], "prompt 0: messages is [], must be a non-empty list"),
        ([[], []], "prompt 0: messages is [], must be a non-empty list"),
        (["Hi"], "prompt 0: messages is 'Hi', must be a non-empty list"),
        ([{"role": "user"}], "prompt 0: messages[0] has content None, must be a string or a list"),
        ([{"role": "user", "content": None}], "messages[0] has content None, must be a string or"),
        ([{"role": "user", "content": 3}], "messages[0] has content 3, must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image"}]}], "part {'type': 'image'}, must"),
        ([{"content": "Hi"}], "messages[0] has role None, must be a non-empty string"),
        ([{"role": "user", "content": "Hi", "tone": "dry"}], "messages[0] has 'tone', can only"),
        ([{"role": "user", "content": "\ud800"}], "which is half of a surrogate pair"),
    ],
)
def test_wrong_chats(tiny: LLM, messages: Any, message: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        tiny.chat(messages, GREEDY, progress=False)
    assert message in str(caught.value)


@pytest.mark.parametrize("model", [None, "", 3, ["smollm2-135m-instruct"]])
def test_a_model_that_is_no_name(model: Any) -> None:
    with pytest.raises(JaxinferError, match=r"^model is .*, must be a demo's name, a file"):
        LLM(model)


def test_threads_are_served_one_after_the_other(tiny: LLM) -> None:
    """Threads get what they asked for, though they all ask at once."""
    prompts = [f"prompt {number}" for number in range(4)]
    expected = [tokens(tiny.generate(prompt, GREEDY, progress=False)) for prompt in prompts]
    tiny.reset_prefix_cache()
    found: dict[int, list[list[int]]] = {}
    together = threading.Barrier(len(prompts))

    def ask(number: int) -> None:
        together.wait()
        found[number] = tokens(tiny.generate(prompts[number], GREEDY, progress=False))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(prompts))] == expected


def test_runs_do_not_overlap(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread waits until the first one's run has ended, and then has its turn."""
    inside, overlaps = threading.Semaphore(1), []
    started, go_on = threading.Event(), threading.Event()
    run = Session.run

    def watched(self: Session, *args: Any) -> Any:
        overlaps.append(not inside.acquire(blocking=False))
        started.set()
        go_on.wait(HANG_S)
        try:
            return run(self, *args)
        finally:
            inside.release()

    monkeypatch.setattr(Session, "run", watched)

    def ask() -> None:
        tiny.generate("Hello", GREEDY, progress=False)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert started.wait(HANG_S)
    threads[1].start()
    threads[1].join(0.1)
    go_on.set()
    for thread in threads:
        thread.join()
    assert overlaps == [False, False]


def test_a_run_within_a_run_is_refused(tiny: LLM) -> None:
    said = []

    def take(output: RequestOutput) -> None:
        for again in (
            lambda: tiny.generate("Hello", GREEDY, progress=False),
            lambda: tiny.run(tiny.make_requests("b", HELLO, GREEDY), print, progress=False),
        ):
            with pytest.raises(JaxinferError) as caught:
                again()
            said.append(str(caught.value))

    tiny.run(tiny.make_requests("a", HELLO, GREEDY), take, progress=False)
    refusal = "this LLM is in the middle of a run: wait until it has ended, or close its iterator"
    assert said == [refusal] * 2
    assert len(tiny.generate("Hello", GREEDY, progress=False)) == 1


def test_requests_made_by_hand(tiny: LLM, plain: list[int]) -> None:
    """Requests made by hand come to the same as by ``generate``, also from a generator."""
    made = (r for name in "ab" for r in tiny.make_requests(name, np.array(HELLO), GREEDY))  # type: ignore[arg-type]
    outputs: list[RequestOutput] = []
    tiny.run(made, outputs.append, progress=False)
    assert tokens(outputs) == [plain] * 2


def test_what_requests_are_not_made_of(tiny: LLM) -> None:
    for given in ("abc", [1.5], [True], None):
        with pytest.raises(JaxinferError, match=r"^request 'a': prompt_token_ids is .*, must be a"):
            tiny.make_requests("a", given, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(JaxinferError, match=r"^request 'a': sampling_params is None, must be"):
        tiny.make_requests("a", HELLO, None)  # type: ignore[arg-type]
    with pytest.raises(JaxinferError, match=r"^request 'empty': the prompt is empty"):
        tiny.make_requests("empty", [], GREEDY)
    with pytest.raises(JaxinferError, match=r"^requests is None, must be one or a list of them"):
        tiny.run(None, print, progress=False)  # type: ignore[arg-type]
    with pytest.raises(JaxinferError, match=r"^request 'a' is none that make_requests has made$"):
        tiny.run(["a"], print, progress=False)  # type: ignore[list-item]


def test_requests_are_used_up_by_a_run(tiny: LLM) -> None:
    requests = tiny.make_requests("a", HELLO, GREEDY)
    outputs: list[RequestOutput] = []
    tiny.run(requests, outputs.append, progress=False)
    with pytest.raises(JaxinferError, match=r"^request 'a' is used up: make_requests makes new"):
        tiny.run(requests, outputs.append, progress=False)
    assert len(outputs) == 1


def test_requests_of_a_run_that_failed_are_used_up(tiny: LLM) -> None:
    requests = tiny.make_requests("a", HELLO, GREEDY) + tiny.make_requests("b", HELLO, GREEDY)

    def fail(*_: object) -> None:
        raise RuntimeError("the user's own")

    hooks: list[dict[str, Callable[..., None]]] = [
        {"on_output": fail},
        {"on_output": print, "on_step": fail},
    ]
    for hook in hooks:
        requests = tiny.make_requests("a", HELLO, GREEDY)
        with pytest.raises(RuntimeError, match="own"):
            tiny.run(requests, progress=False, **hook)
        with pytest.raises(JaxinferError, match="used up"):
            tiny.run(requests, print, progress=False)


def hash63(text: str) -> int:
    """Return a hash by BLAKE2, as in the README of a resumed job, not by Python's own hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seeds(llm: LLM, request_id: str, **options: Any) -> list[int]:
    made = llm.make_requests(request_id, HELLO, SamplingParams(**options))
    return [sampling_of(request).seed for request in made]


def test_seeds_follow_from_the_engine_s_and_the_id(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in each process, so that a job that is resumed repeats its tokens."""
    second = hash63("7#0")
    assert seeds(tiny, "a", seed=7, n=3) == [7, second, hash63(f"{second}#1")]
    assert seeds(tiny, "a") == [hash63("0/a")]
    monkeypatch.setattr(tiny, "_maker", replace(tiny._maker, seed=5))
    assert seeds(tiny, "a") == [hash63("5/a")]


def test_requests_of_all_calls_have_ids_of_their_own(tiny: LLM) -> None:
    calls = [tiny.generate(["a", "b", "c"], GREEDY, progress=False) for _ in range(2)]
    assert len({output.request_id for outputs in calls for output in outputs}) == 6


def test_one_continuation_reports_on_the_prompt(tiny: LLM) -> None:
    """The others may take its KV from the prefix cache."""
    params = SamplingParams(n=3, prompt_logprobs=2)
    requests = tiny.make_requests("a", HELLO, params)
    assert [sampling_of(r).params.prompt_logprobs for r in requests] == [2, None, None]
    assert [request.takes_cached for request in requests] == [False, True, True]


def test_stop_strings_need_a_tokenizer(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything runs; stop tokens do without."""
    bare = replace(tiny._maker, tokenizer=NoTokenizer("bare", ()))
    monkeypatch.setattr(tiny, "_maker", bare)
    with pytest.raises(JaxinferError, match="'bare' has no tokenizer for stop strings"):
        tiny.make_requests("a", HELLO, SamplingParams(stop="x"))
    assert tiny.make_requests("a", HELLO, SamplingParams(stop_token_ids=(1,)))


def test_a_prompt_as_vllm_has_it() -> None:
    assert text_or_token_ids({"prompt": "Hi"}) == "Hi"
    assert text_or_token_ids({"prompt_token_ids": (1, 2)}) == [1, 2]
    for wrong in ({"prompt": 3}, {"prompt": "Hi", "prompt_token_ids": [1]}, {}):
        with pytest.raises(JaxinferError, match=r"must be a text, \{'prompt': text\} or"):
            text_or_token_ids(wrong)
