"""Tokenizers from GGUF metadata, as in llama.cpp: byte-level BPE and SentencePiece's BPE."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from jaxinfer.checkpoints.gguf_ends import CONTROL, token_types
from jaxinfer.errors import JaxinferError
from jaxinfer.text.gguf_pre import Pre, read_pre

# GGUF's token types.
_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED = 1, 2, 4, 5
# SentencePiece's replacement for a space.
_SPACE = "\u2581"
_NAMED_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def read_gguf_tokenizer(
    metadata: Mapping[str, Any], path: Path
) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer that a GGUF file describes.

    Args:
        path: the file, for error messages.

    Returns:
        The tokenizer; and its named tokens and chat template, as keyword arguments of
        ``transformers.PreTrainedTokenizerFast``.

    Raises:
        JaxinferError: the metadata are incomplete or contradictory, or describe a kind of tokenizer
            that is not implemented.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = read_pre(metadata, path)
        tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
        backend, adds_bos = _byte_level(tokens, _merges(metadata, tokens, path), pre), pre.adds_bos
        types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    elif kind == "llama":
        vocabulary = _sentencepiece_vocabulary(metadata, path)
        tokens, types = vocabulary.tokens, vocabulary.types
        backend, adds_bos = _sentencepiece(vocabulary, metadata, path), True
    else:
        raise JaxinferError(
            f"{path}: tokenizer.ggml.model is {kind!r}, must be 'gpt2' (byte-level BPE) or "
            "'llama' (SentencePiece's BPE)"
        )
    _add_tokens(backend, tokens, token_types(metadata, types))
    named = {
        role: _named_token(metadata, name, tokens, path) for role, name in _NAMED_TOKENS.items()
    }
    backend.post_processor = _ends(metadata, adds_bos, named["bos_token"], tokens, path)
    options = named | {"chat_template": metadata.get("tokenizer.chat_template")}
    return backend, {key: value for key, value in options.items() if value is not None}


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Split control and user-defined tokens off the text before anything else.

    llama.cpp does the same. SentencePiece never reads control tokens; it finds user-defined ones
    with spaces also where the text has U+2581 instead.
    """
    typed = list(zip(tokens, types, strict=False))
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in typed
            if kind in (CONTROL, _UNKNOWN)
        ]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED]
    )


def _ends(
    metadata: Mapping[str, Any], adds_bos: bool, bos: str | None, tokens: list[str], path: Path
) -> processors.PostProcessor | None:
    """Return the processor that adds BOS before a text; None if nothing is added."""
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        raise JaxinferError(
            f"{path}: tokenizer.ggml.add_eos_token is true, must be false: nothing can follow a "
            "prompt that ends in EOS"
        )
    if not metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        return None
    if bos is None:
        raise JaxinferError(f"{path}: adds a BOS token but lacks tokenizer.ggml.bos_token_id")
    return processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
    )


# Byte-level BPE.


def _byte_level(tokens: list[str], merges: list[tuple[str, str]], pre: Pre) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges)
    )
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.split
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> list[tuple[str, str]]:
    known = set(tokens)
    pairs = []
    for merge in _strings(metadata, "tokenizer.ggml.merges", path):
        left, _, right = merge.partition(" ")
        if not (left in known and right in known and left + right in known):
            raise JaxinferError(f"{path}: merge {merge!r} does not join two tokens into a third")
        pairs.append((left, right))
    return pairs


# SentencePiece's BPE.


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens in the order of their ids, with their scores and types."""

    tokens: list[str]
    scores: list[float]
    types: list[int]


def _sentencepiece_vocabulary(metadata: Mapping[str, Any], path: Path) -> _Vocabulary:
    stored = _strings(metadata, "tokenizer.ggml.tokens", path)
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(stored), path)
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(stored), path)
    # User-defined tokens are searched in text that still has its spaces, which some files ignore.
    tokens = [
        token.replace(_SPACE, " ") if kind == _USER_DEFINED else token
        for token, kind in zip(stored, types, strict=True)
    ]
    if len(set(tokens)) < len(tokens):
        ((token, count),) = Counter(tokens).most_common(1)
        raise JaxinferError(
            f"{path}: tokenizer.ggml.tokens has {token!r} {count} times, must have it once"
        )
    return _Vocabulary(tokens, scores, types)


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    unknown = _named_token(metadata, "unknown", vocabulary.tokens, path)
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=_merges_of_scores(vocabulary),
            unk_token=unknown or vocabulary.tokens[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        # Before the text, and after each token that is cut out of it.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
        backend.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = decoders.Sequence(to_text)
    return backend


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the ways to make a token of two others, the best token first.

    SentencePiece joins the neighbours that make the token with the highest score, and the leftmost
    of equal ones. Only tokens of ordinary text take part.
    """
    scores = {
        token: score
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
        )
        if kind in (_NORMAL, _UNUSED)
    }
    merges = []
    for token in sorted(scores, key=scores.__getitem__, reverse=True):
        # If two merges overlap in a text, as ab+a and a+ba in "ababa", the one with the longer left
        # part is usually further left.
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


# Metadata.


def _strings(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise JaxinferError(f"{path}: lacks {key!r}, a list of strings, for its tokenizer")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, length: int, path: Path) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
        raise JaxinferError(f"{path}: lacks {key!r}, a list of numbers, for its tokenizer")
    if len(value) != length:
        raise JaxinferError(f"{path}: {key} has {len(value)} entries, must have {length}")
    return value


def _named_token(
    metadata: Mapping[str, Any], name: str, tokens: list[str], path: Path
) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise JaxinferError(f"{path}: {key} is {index!r}, must be below {len(tokens)}")
    return tokens[index]
