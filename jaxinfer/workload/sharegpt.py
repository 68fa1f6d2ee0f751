"""Conversations in ShareGPT's files, used as in vLLM's benchmarks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import open_bytes, readable, shorten
from jaxinfer.workload.bench_request import BenchRequest
from jaxinfer.workload.trace import Encode, Trace, at

# vLLM's filter: smallest number of tokens of prompt and of output, largest of the prompt, and
# largest of both together.
_LEAST, _MOST_PROMPT, _MOST = 4, 1024, 2048


class Conversations:
    """Makes requests from conversations: the first turn is the prompt, the second the answer.

    Conversations that vLLM's filter drops are only counted.

    Args:
        encode: converts a text to its tokens; the answer is as long as its text in tokens.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._num_read = self._num_dropped = 0

    def read(self, entry: dict[str, Any]) -> BenchRequest | None:
        """Return a conversation's request; None if the conversation is dropped.

        Raises:
            JaxinferError: the entry is not a conversation, or there is no tokenizer.
        """
        turns = entry.get("conversations", ())
        self._num_read += 1
        found = None
        if isinstance(turns, list) and len(turns) >= 2:
            prompt, answer = (self._encode(_text(turn)) for turn in turns[:2])
            if _fits(len(prompt), len(answer)):
                found = BenchRequest(prompt, len(prompt), len(answer), 0.0)
        self._num_dropped += found is None
        return found

    def note(self, path: Path) -> str:
        """Return a line with the number of dropped conversations."""
        if not self._num_dropped:
            return ""
        return (
            f"{path}: {self._num_dropped} of {self._num_read} conversations left out, as vLLM does:"
            f" of fewer than two turns, prompt or answer below {_LEAST} tokens, prompt above "
            f"{_MOST_PROMPT}, or both above {_MOST}"
        )


def read_sharegpt(path: Path, limit: int | None, encode: Encode) -> Trace:
    """Return the first requests of a JSON list of conversations, or all, in the file's order.

    Raises:
        JaxinferError: the file cannot be read, or is not such a list.
    """
    conversations = Conversations(encode)
    requests: list[BenchRequest] = []
    for number, entry in enumerate(_entries(path), 1):
        if len(requests) == limit:
            break
        with at(f"{path} entry {number}"):
            if not isinstance(entry, dict):
                raise JaxinferError(f"{shorten(entry)} is no object with conversations")
            if number == 1 and "conversations" not in entry:
                fields = shorten(",".join(entry))
                raise JaxinferError(f"has the fields {fields}, must have conversations")
            if (found := conversations.read(entry)) is not None:
                requests.append(found)
    return Trace(requests, note=conversations.note(path))


def _entries(path: Path) -> Iterator[Any]:
    """Yield the list's entries one at a time, since all of ShareGPT takes gigabytes of memory."""
    with readable(path):
        try:
            with open_bytes(path) as file:
                text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise JaxinferError(f"{path}: not UTF-8: {error.reason}") from None
    decoder, at = json.JSONDecoder(), _skip(text, 0)
    if text[at : at + 1] != "[":
        raise JaxinferError(f"{path}: must be a list of objects with conversations")
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        try:
            entry, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise JaxinferError(f"{path}: not JSON: {error}") from None
        yield entry
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise JaxinferError(f"{path}: not JSON: the list does not end")


def _skip(text: str, at: int) -> int:
    """Return the position of the next character that is not white space."""
    while text[at : at + 1].isspace():
        at += 1
    return at


def _text(turn: Any) -> str:
    value = turn.get("value") if isinstance(turn, dict) else None
    if not isinstance(value, str):
        raise JaxinferError(f"turn {shorten(turn)} has no value, which must be a text")
    return value


def _fits(prompt: int, answer: int) -> bool:
    return min(prompt, answer) >= _LEAST and prompt <= _MOST_PROMPT and prompt + answer <= _MOST
