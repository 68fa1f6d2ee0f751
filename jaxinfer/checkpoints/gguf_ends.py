"""Tokens that end a text in a GGUF file: those that its keys name, and those with known texts.

The texts, and the rules that exclude some of them, are those of llama.cpp's ``llama-vocab.cpp``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CONTROL = 3

END_KEYS = tuple(f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    }
)  # fmt: skip
# Special tokens of code completion: padding, and ends of repository names and files. They precede a
# key.
_FILLING = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text, those named by keys first."""
    named = [metadata.get(key) for key in END_KEYS]
    ids = dict.fromkeys(token for token in named if token is not None)
    return tuple(ids | dict.fromkeys(_by_text(metadata)))


def token_types(metadata: Mapping[str, Any], types: Sequence[int]) -> list[int]:
    """Return the types of all tokens; end tokens found by their text become control tokens.

    llama.cpp corrects them in this way, because some files declare them as ordinary text. The
    tokenizer would then split the markers of a conversation into letters.
    """
    found = list(types)
    for token in _by_text(metadata):
        if token < len(found):
            found[token] = CONTROL
    return found


def _by_text(metadata: Mapping[str, Any]) -> list[int]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        return []
    known = _TEXTS.union(*_FILLING.values())
    found = {text: index for index, text in enumerate(tokens) if text in known}
    if "</s>" in found and isinstance(types, list) and CONTROL not in types[found["</s>"] :][:1]:
        # Gemma has it as a user-defined token that closes an HTML tag. (llama.cpp still ends
        # there.)
        del found["</s>"]
    calls = not found.keys().isdisjoint({"<|call|>", "<|calls|>"})
    if calls and not found.keys().isdisjoint({"<|return|>", "<|flush|>"}):
        found.pop("<|end|>", None)  # There, it ends a message, not the turn.
    if "<|tool_response>" in found:
        found.pop("</s>", None)
    for key, texts in _FILLING.items():
        named = metadata.get(f"tokenizer.ggml.{key}_token_id")
        there = [text for text in texts if text in found]
        for text in there[named is None :]:
            del found[text]
        if isinstance(named, int):
            found[key] = named
    return sorted(found.values())
