"""Tokens that end a text in a GGUF file, by keys and by texts, as llama.cpp's."""

from typing import Any

import pytest
from tokenizer_checks import tiny_vocabulary

from jaxinfer.checkpoints.gguf_ends import end_token_ids, token_types
from jaxinfer.text.tokenizer import load_tokenizer


def metadata(tokens: list[str], types: list[int] | None = None, **named: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if types:
        found["tokenizer.ggml.token_type"] = types
    return found | {f"tokenizer.ggml.{key}_token_id": token for key, token in named.items()}


def ends(tokens: list[str], types: list[int] | None = None, **named: int) -> list[str]:
    return [tokens[token] for token in end_token_ids(metadata(tokens, types, **named))]


def test_the_file_s_own_end_comes_first() -> None:
    llama3 = ["a", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    assert ends(llama3, eos=3) == ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]
    assert ends(llama3, eos=1, eot=3) == ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]
    assert ends(["a", "b", "c"], eos=2, eot=1, eom=0) == ["c", "b", "a"]
    assert ends(["a", "b", "c"], eos=2, eot=2) == ["c"]
    assert ends(["a", "b"]) == []


@pytest.mark.parametrize(
    ("tokens", "of_them"),
    [
        (["<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>"], [1, 3, 4]),  # Phi 3
        (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], [1, 3]),  # Gemma
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [0, 2]),
        (["<fim_pad>", "<reponame>", "<|file_sep|>", "<fim_prefix>"], [0, 1, 2]),
        (["<\uff5cend\u2581of\u2581sentence\uff5c>", "_<EOT>", "[EOS]", "[PAD]"], [0, 1, 2, 3]),
        # There, <|end|> ends a message.
        (["<|return|>", "<|call|>", "<|end|>", "<|start|>"], [0, 1]),
        (["<|flush|>", "<|calls|>", "<|end|>"], [0, 1]),
        (["<|call|>", "<|end|>"], [0, 1]),
        (["<|return|>", "<|end|>"], [0, 1]),
        (["</s>", "<|tool_response>", "<turn|>"], [1, 2]),
        (["<EOT>", "[EOT]", "<end_of_utterance>", "<|eom_id|>", "[e~[", "<EOS>"], [0, 1, 2, 3, 4]),
    ],
)
def test_ends_by_text(tokens: list[str], of_them: list[int]) -> None:
    wanted = [tokens[token] for token in of_them]
    assert ends(tokens) == wanted
    assert ends(tokens, [3] * len(tokens)) == wanted


def test_a_key_goes_before_a_text_for_what_is_filled_in() -> None:
    assert ends(["<|fim_pad|>", "<|repo_name|>", "x"], fim_pad=2) == ["<|repo_name|>", "x"]
    assert ends(["<fim_pad>", "<|fim_pad|>"]) == ["<|fim_pad|>"]


def test_a_closing_tag_of_html_is_no_end() -> None:
    """Gemma's ``</s>`` is user-defined; Llama's is a control token."""
    assert ends(["<s>", "</s>"], [4, 4]) == []
    assert ends(["<s>", "</s>"], [3, 3]) == ["</s>"]


def test_an_end_that_is_typed_as_text_is_a_control_token_all_the_same() -> None:
    found = metadata(["a", "<|im_end|>", "b"], [1, 1, 4])
    assert token_types(found, [1, 1, 4]) == [1, 3, 4]
    # A key may name a token that there is not, and types may be fewer.
    assert token_types(found | metadata(["a", "<|im_end|>"], fim_pad=9), [1, 1]) == [1, 3]
    assert token_types(found, [1]) == [1]
    checkpoint = tiny_vocabulary()
    source = dict(checkpoint.tokenizer_source)  # type: ignore[arg-type]
    tokens = [*source["tokenizer.ggml.tokens"], "<|im_end|>"]
    types = [*source["tokenizer.ggml.token_type"], 1]
    tokenizer = load_tokenizer(tiny_vocabulary(**{"ggml.tokens": tokens, "ggml.token_type": types}))
    assert tokenizer.encode("a<|im_end|>")[-1] == len(tokens) - 1
    assert tokenizer.decode([len(tokens) - 1]) == ""
