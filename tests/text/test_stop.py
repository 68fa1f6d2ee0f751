"""Where a request's text ends, by tokens of any text."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.serving.loop import Stop
from jaxinfer.text.stop import StopCheck


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
    """One token for each text: how many are taken, why no more, and the output's text."""
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
