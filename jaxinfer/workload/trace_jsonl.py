"""Traces as JSONL, distinguished by the first line's fields: token ids,
Mooncake's, conversations.
"""

import math
from collections.abc import Callable
from pathlib import Path

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import as_token_ids, numbered_lines, parse_object, shorten
from jaxinfer.options.validation import did_you_mean
from jaxinfer.workload.bench_request import BLOCK, BenchRequest
from jaxinfer.workload.sharegpt import Conversations
from jaxinfer.workload.trace import Encode, Trace, at

_TOKENS = ("prompt_token_ids", "max_tokens", "id", "prompt_len", "text")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")


def read_jsonl(path: Path, limit: int | None, encode: Encode) -> Trace:
    """Return the first ``limit`` requests, or all.

    Args:
        encode: called with texts, if the file has conversations.

    Raises:
        JaxinferError: the file cannot be read, has other fields, or has a wrong value.
    """
    requests: list[BenchRequest] = []
    conversations = Conversations(encode)
    has_times = False
    read: Callable[[dict[str, object]], BenchRequest | None] | None = None
    for number, raw in numbered_lines(path):
        if len(requests) == limit:
            break
        with at(f"{path} line {number}"):
            fields = parse_object(raw)
            if read is None:
                has_times = "timestamp" in fields
                if has_times:
                    read = _mooncake
                else:
                    read = conversations.read if "conversations" in fields else _tokens
            if (found := read(fields)) is not None:
                requests.append(found)
    return Trace(requests, has_times, conversations.note(path))


def _refuse_others(fields: dict[str, object], known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            raise JaxinferError(f"unknown field {shorten(name)}: {did_you_mean(name, known)}")


def _tokens(fields: dict[str, object]) -> BenchRequest:
    if not fields.keys() & set(_TOKENS):
        raise JaxinferError(
            f"has the fields {shorten(','.join(fields))}, must have prompt_token_ids,max_tokens or "
            f"{','.join(_MOONCAKE[:3])}[,hash_ids] or conversations"
        )
    _refuse_others(fields, _TOKENS)
    tokens = as_token_ids(fields.get("prompt_token_ids"), "prompt_token_ids")
    if fields.get("prompt_len", len(tokens)) != len(tokens):
        raise JaxinferError(
            f"prompt_len is {shorten(fields['prompt_len'])}, "
            f"but there are {len(tokens)} prompt_token_ids"
        )
    return BenchRequest(tokens, len(tokens), _length(fields, "max_tokens"), arrival=0.0)


def _mooncake(fields: dict[str, object]) -> BenchRequest:
    _refuse_others(fields, _MOONCAKE)
    prompt, output = _length(fields, "input_length"), _length(fields, "output_length")
    time = fields.get("timestamp")
    # isinstance accepts True as an int.
    if isinstance(time, bool) or not isinstance(time, int | float) or time < 0:
        raise JaxinferError(f"timestamp is {shorten(time)}, must be a number of milliseconds >= 0")
    return BenchRequest(None, prompt, output, time / 1000, _hash_ids(fields, prompt))


def _hash_ids(fields: dict[str, object], prompt_len: int) -> tuple[int, ...] | None:
    if "hash_ids" not in fields:
        return None
    found = tuple(as_token_ids(fields["hash_ids"], "hash_ids"))
    if len(found) != (needed := math.ceil(prompt_len / BLOCK)):
        raise JaxinferError(
            f"hash_ids has {len(found)} blocks, must have {needed}: one for each {BLOCK} of "
            f"input_length's {prompt_len} tokens"
        )
    return found


def _length(fields: dict[str, object], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 1:
        raise JaxinferError(f"{name} is {shorten(value)}, must be an integer >= 1")
    return value
