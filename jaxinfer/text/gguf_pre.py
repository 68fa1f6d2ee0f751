"""Meanings of ``tokenizer.ggml.pre`` in GGUF files: how text is split into words before merging."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers

from jaxinfer.errors import JaxinferError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Single digits.
_QWEN2_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_THREE_DIGITS = "[0-9][0-9][0-9]"


def _characters(ranges: str) -> str:
    """Return a character class for regular expressions, from hexadecimal code points."""
    ends = [[chr(int(end, 16)) for end in each.split("-")] for each in ranges.split()]
    return "".join(map("-".join, ends))


# DeepSeek's letters with cases, as its tokenizer.json lists them.
_CASED = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_MARKS = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_EAST_ASIAN = rf"[{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}]+"


@dataclass(frozen=True)
class Pre:
    """How a tokenizer prepares a text before it merges tokens.

    Attributes:
        split: splits text into words, within which tokens are merged.
        composes: whether text is first normalised to Unicode NFC.
        ignore_merges: whether a word that is a token becomes that token, regardless of merges.
        adds_bos: default of ``tokenizer.ggml.add_bos_token``.
    """

    split: pre_tokenizers.PreTokenizer
    composes: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def read_pre(metadata: Mapping[str, Any], path: Path) -> Pre:
    """Return the steps that ``tokenizer.ggml.pre`` names; by default llama.cpp's, with a warning.

    Args:
        path: the file, for messages.

    Raises:
        JaxinferError: the steps with this name are not implemented.
    """
    pres = _known_pres()
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logging.getLogger(__name__).warning(
            "%s: lacks tokenizer.ggml.pre, so that text is cut as llama.cpp does by default, which "
            "is not as the model has learned it; convert the model anew",
            path,
        )
        name = "default"
    if name not in list(pres):
        raise JaxinferError(
            f"{path}: tokenizer.ggml.pre is {name!r}, must be one of: {', '.join(pres)}"
        )
    return pres[name]


def _known_pres() -> dict[str, Pre]:
    """Return the kinds by their names, as in llama.cpp's ``llama-vocab.cpp``.

    NFC is not llama.cpp's, but that of the tokenizers with which the models were trained.
    """
    digits_apart = (r"\p{N}", _GPT2_WORDS)
    llama3 = Pre(_words(_LLAMA3_WORDS), ignore_merges=True, adds_bos=True)
    return {
        "smollm": Pre(_words(*digits_apart)),
        "gpt-2": Pre(_words(_GPT2_WORDS)),
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "qwen2": Pre(_words(_QWEN2_WORDS), composes=True),
        "starcoder": Pre(_words(*digits_apart)),
        "command-r": Pre(_words(*digits_apart), composes=True),
        "falcon": Pre(_words(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, _THREE_DIGITS)),
        "deepseek-coder": Pre(_words(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
        "deepseek-llm": Pre(
            _words(
                *(r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$"),
                *(_EAST_ASIAN, r"\p{N}+"),
            )
        ),
        "default": Pre(_words(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", _THREE_DIGITS)),
    }


def _words(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Split words with each pattern in turn, applied to the pieces left by the one before."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_only])
