"""Tokenizers that several tests use, and the checks that they share."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.errors import JaxinferError
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

USER = {"role": "user", "content": "Hi"}


@cache
def demo_checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2-135m-instruct")


@cache
def demo() -> Tokenizer:
    return load_tokenizer(demo_checkpoint())


def check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    """The pieces make up the whole text, but for an incomplete character at its end."""
    decoded, stream = tokenizer.decode(ids), tokenizer.open_stream()
    text = "".join(stream.add(token_id) for token_id in ids)
    assert set(decoded[len(text) :]) <= {"\ufffd"}
    # Where a run of bytes became invalid, all of it is replaced.
    assert all(a in (b, "\ufffd") for a, b in zip(decoded, text, strict=False))


def with_metadata(**changes: Any) -> Checkpoint:
    """The demo checkpoint with other ``tokenizer.*`` metadata; None removes a key."""
    source = demo_checkpoint().tokenizer_source
    assert not isinstance(source, Path)
    changed = dict(source) | {f"tokenizer.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in changed.items() if value is not None}
    return dataclasses.replace(demo_checkpoint(), tokenizer_source=kept)


def tiny_vocabulary(**changes: Any) -> Checkpoint:
    """A GGUF vocabulary of the byte alphabet and a few merges, control and added tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    added = ["<bos>", "<eos>", "<tool>"]
    tokens = [*alphabet, "12", "123", "Ġa", *added]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    return with_metadata(
        **{
            "ggml.tokens": tokens,
            "ggml.token_type": types,
            "ggml.merges": ["1 2", "12 3", "Ġ a"],
            "ggml.bos_token_id": len(tokens) - 3,
            "ggml.eos_token_id": len(tokens) - 2,
            "ggml.unknown_token_id": None,
            "ggml.padding_token_id": None,
        }
        | changes
    )


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


def error_of(checkpoint: Checkpoint) -> str:
    with pytest.raises(JaxinferError) as caught:
        load_tokenizer(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    assert str(checkpoint.path) in message
    return message
