"""Ends of a request's text, by tokens of any text."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxinfer.request import Logprob, Sampling, SamplingParams
from jaxinfer.serving.loop import Stop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.text.stop import StopCheck, completion
from jaxinfer.text.tokenizer import Tokenizer


class Pieces:
    """A tokenizer whose tokens are the numbers of these texts, and its own stream."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    is_within = False

    def open_stream(self, after: Sequence[int]) -> "Pieces":
        return self

    def add(self, token: int) -> str:
        return self.texts[token]

    def decode(self, token_ids: list[int], after: Sequence[int]) -> str:
        return "".join(self.texts[token] for token in token_ids)


def ended(
    *texts: str, end_token_ids: tuple[int, ...] = (), **options: Any
) -> tuple[int, Stop | None, str]:
    """A token for each text: how many are taken, why no more, and the output's text."""
    sampling = Sampling(SamplingParams(**options), 0, end_token_ids)
    check = StopCheck(sampling, Pieces(*texts), ())  # type: ignore[arg-type]
    stop = None
    taken = []
    for token in range(len(texts)):
        taken.append(token)
        if stop := check.add(token):
            break
    by_token = stop is not None and not isinstance(stop[1], str)
    return len(taken), stop, check.text(taken, by_token)


def test_a_string_over_several_tokens_is_cut_where_it_begins() -> None:
    assert ended("ab", "cd", "ef", "gh", stop=("de",)) == (3, ("stop", "de"), "abc")
    assert ended("ab", "cd", "ef", "gh", stop=("bcdefg",)) == (4, ("stop", "bcdefg"), "a")
    assert ended("ab", "cd", "ef", "gh", stop=("ac",)) == (4, None, "abcdefgh")


def test_a_string_far_into_the_text() -> None:
    texts = [*"abcdefghij", "klm", "nop"]
    assert ended(*texts, stop=("mn", "xyzw")) == (12, ("stop", "mn"), "abcdefghijkl")


@pytest.mark.parametrize("stop", [("x", "y"), ("y", "x")])
def test_of_several_in_one_token_the_first_in_the_text_ends_it(stop: tuple[str, ...]) -> None:
    assert ended("ab", "cxdye", stop=stop) == (2, ("stop", "x"), "abc")


def test_min_tokens_are_there_before_a_string_ends_the_text() -> None:
    options: Any = {"stop": ("b", "long"), "min_tokens": 2}
    assert ended("ab", "ab", "c", "ab", "d", **options) == (4, ("stop", "b"), "ababca")


def test_the_token_that_ends_the_text_is_not_in_it() -> None:
    assert ended("ab", "cd", "ef", stop_token_ids=(1,)) == (2, ("stop", 1), "ab")
    assert ended("ab", "cd", "ef", end_token_ids=(1,)) == (2, ("stop", None), "ab")
    # Of a token that is both, the user's own reason counts.
    both = ended("ab", "cd", "ef", stop_token_ids=(1,), end_token_ids=(1, 2))
    assert both == (2, ("stop", 1), "ab")


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token a byte."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((found, _),) = letters.pre_tokenize_str(text)
    backend = tokenizer._backend
    return [backend.token_to_id(letter) for letter in found]


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "bytes", (256,))


@pytest.mark.parametrize(
    ("text", "cut", "pieces"),
    [
        ("aé!", 0, ["a", "", "é", "!"]),
        ("a😀b", 0, ["a", "", "", "", "😀", "b"]),
        # The character that is begun at the end is U+FFFD in the text.
        ("a😀", 1, ["a", "", "", "\ufffd"]),
        ("", 0, []),
    ],
)
@pytest.mark.parametrize("ended_by_token", [False, True])
def test_what_each_token_adds(
    byte_tokenizer: Tokenizer, text: str, cut: int, pieces: list[str], ended_by_token: bool
) -> None:
    tokens = tokens_of(byte_tokenizer, text) if text else []
    tokens = tokens[: len(tokens) - cut] + [256] * ended_by_token
    check = StopCheck(Sampling(SamplingParams(), 0), byte_tokenizer, [])
    assert check.pieces(tokens, ended_by_token) == pieces
    assert check.text(tokens, ended_by_token) == "".join(pieces)


def test_a_special_token_after_a_character_that_stays_incomplete(
    byte_tokenizer: Tokenizer,
) -> None:
    """U+FFFD is of the last token that has bytes: a special one, as with ignore_eos, adds none."""
    tokens = [*tokens_of(byte_tokenizer, "a😀")[:-1], 256, 256]
    check = StopCheck(Sampling(SamplingParams(), 0), byte_tokenizer, [])
    assert check.text(tokens, False) == "a\ufffd"
    assert check.pieces(tokens, False) == ["a", "", "", "\ufffd", "", ""]


def test_what_was_drawn_and_what_was_not(byte_tokenizer: Tokenizer) -> None:
    """Drawn tokens have what they add, all others their own texts."""
    drawn = [*tokens_of(byte_tokenizer, "é"), 256]
    other = tokens_of(byte_tokenizer, "x")[0]
    sampling = Sampling(SamplingParams(logprobs=2), 0, (256,))
    request = RequestState("r", 1, 8, prompt_token_ids=[0], payload=sampling)
    request.output_token_ids = drawn
    request.details = [
        {token: Logprob(-1.0, 1), other: Logprob(-2.0, 2)} | {256: Logprob(-3.0, 3)}
        for token in drawn
    ]
    request.finish_reason = "stop"
    check = StopCheck(sampling, byte_tokenizer, [0])
    found = completion(request, check, byte_tokenizer)
    assert found.text == "é"
    assert found.logprobs
    texts = [position[t].decoded_token for t, position in zip(drawn, found.logprobs, strict=True)]
    assert texts == ["", "é", "<end>"]
    content = [position[t].token_bytes for t, position in zip(drawn, found.logprobs, strict=True)]
    assert content == [b"\xc3", b"\xa9", b""]
    for position in found.logprobs:
        assert (position[other].decoded_token, position[other].token_bytes) == ("x", b"x")
        assert position[256].decoded_token == "<end>"
