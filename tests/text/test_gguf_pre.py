"""Cuts of text into words, beside the library's own pre-tokenisers and by hand."""

import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import Split

from jaxinfer.text.gguf_pre import _CASED, read_pre

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS_APART = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])


def split(name: str) -> pre_tokenizers.PreTokenizer:
    return read_pre({"tokenizer.ggml.pre": name}, Path("x.gguf")).split


def words(name: str, text: str) -> list[str]:
    """Return the pieces of the text, each as a stretch of it."""
    return [text[begin:end] for _, (begin, end) in split(name).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("gpt-2", GPT2),
        ("smollm", DIGITS_APART),
        ("starcoder", DIGITS_APART),
        ("command-r", DIGITS_APART),
    ],
)
@given(text=st.text(st.sampled_from(" \n\t\r'stABé東12٣²!=$+._\u00a0\u3000")) | st.text())
@examples(100)
def test_as_the_tokenizers_they_are_of(
    name: str, own: pre_tokenizers.PreTokenizer, text: str
) -> None:
    assert split(name).pre_tokenize_str(text) == own.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("falcon", "it's 12345 (a+b", ["it", "'", "s", " ", "123", "45", " ", "(", "a", "+", "b"]),
        ("falcon", " 12 `x` ~", [" 12", " ", "`", "x", "`", " ", "~"]),
        ("default", "it's 12345 `x`", ["it", "'", "s", " ", "123", "45", " `", "x", "`"]),
        ("default", " 12", [" ", "12"]),
        ("deepseek-coder", "a1 23\n\n c.d", ["a", "1", " ", "2", "3", "\n", "\n", " c", ".", "d"]),
        ("deepseek-coder", " 東京é", [" ", "東京", "é"]),
        ("deepseek-llm", "a1b 23\n\n c.d", ["a", "1", "b", " ", "23", "\n", "\n", " c", ".", "d"]),
        # Its marks are from ":" to "~", and so all of a to z: they part from letters with accents.
        ("deepseek-llm", "xé東京 ДЖ", ["x", "é", "東京", " ДЖ"]),
        ("deepseek-llm", "Дªº", ["Д", "ªº"]),
        ("deepseek-llm", "a  ", ["a", "  "]),
    ],
)
def test_by_hand(name: str, text: str, wanted: list[str]) -> None:
    """The expressions of llama.cpp's ``llama-vocab.cpp``, one after the other."""
    assert words(name, text) == wanted


def test_deepseek_s_letters_have_cases() -> None:
    letters = Split(Regex(f"[{_CASED}]"), "removed", invert=True)
    every = "".join(map(chr, [*range(0x21, 0xD800), *range(0xE000, 0x1EA00)]))
    found = {word for word, _ in letters.pre_tokenize_str(every)}
    assert {unicodedata.category(char) for char in found} <= {"Lu", "Ll", "Lt", "Cn"}
    # Those that Unicode has had for long; left out are Georgian's and those of formulas.
    cased = {c for c in every[:0x10A0] if unicodedata.category(c) in ("Lu", "Ll", "Lt")}
    assert cased <= found | {char for char in cased if 0x560 <= ord(char) <= 0x588}
    assert len(found) == sum(_sizes())


def _sizes() -> list[int]:
    """Sizes of the ranges, by themselves."""
    ends = re.findall("(.)-(.)|(.)", _CASED)
    return [ord(last) - ord(first) + 1 if first else 1 for first, last, _ in ends]
