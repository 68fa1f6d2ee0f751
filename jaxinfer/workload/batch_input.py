"""Reads a batch file: one request per line or row, in OpenAI's batch format or plain.

A plain line is the body of an OpenAI line, with the prompt in any of three forms::

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    {"prompt": "Hi", "temperature": 0, "max_tokens": 32}
    {"messages": [{"role": "user", "content": "Hi"}]}
    {"prompt_token_ids": [1, 15043]}

A bad line does not spoil the file: it is returned as a ``BadLine`` with its reason. A row of a
Parquet file is treated as such a line, with its columns as fields.
"""

import gzip
import hashlib
import json
import os
import stat
import zlib
from array import array
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Self, cast

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import as_token_ids, numbered, parse_object, readable, shorten
from jaxinfer.files.shipped import data_path
from jaxinfer.options.validation import did_you_mean
from jaxinfer.request import SamplingParams
from jaxinfer.workload.conversation import Conversation, read_conversation
from jaxinfer.workload.parquet import ParquetRows, check_ending, is_table

# OpenAI's default of 16 cuts most answers short. With its chat default, the rest of the context,
# one line could hold up a batch.
DEFAULT_MAX_TOKENS = 256

_PROMPT_OF_URL = {"/v1/chat/completions": ("messages",), "/v1/completions": ("prompt",)}
_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_ENVELOPE = ("method", "url", "body")

# Options that do not affect the tokens.
_WITHOUT_EFFECT = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# Options that we do not support, with the only value that asks for nothing.
_ONLY_VALUE: dict[str, object] = {
    "best_of": 1,
    "echo": False,
    "function_call": "none",
    "functions": [],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "stream": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
}
# Columns that a Parquet file of requests may have.
_COLUMNS = (
    *("custom_id", *_PROMPTS, *_ENVELOPE, *SamplingParams.model_fields, *_ONLY_VALUE),
    *(*_WITHOUT_EFFECT, "max_completion_tokens", "top_logprobs"),
)


@dataclass(frozen=True)
class BatchLine:
    """A request from line ``number``: a text, token ids, or a conversation.

    ``sampling`` has the options that the line sets. ``custom_id`` is empty until an id is assigned.
    """

    number: int
    custom_id: str
    prompt: str | list[int] | Conversation
    sampling: SamplingParams


@dataclass(frozen=True)
class BadLine:
    """Line ``number`` is not a valid request; ``reason`` is one line, without the number.

    ``custom_id`` is the line's own if it can be read and is unique, otherwise made from the number;
    it is empty until it is assigned.
    """

    number: int
    custom_id: str
    reason: str


class BatchFile:
    """The requests of a JSONL or Parquet file, read twice: first to check the whole file.

    Blank lines are skipped but counted. A line without ``custom_id`` gets ``line-N``, or another id
    if a line already has that. All ids differ; the second line with an id is a bad line. Ids,
    numbers and reasons of bad lines are in memory (about 200 bytes per line), but no prompts.

    Args:
        path: opened once, so that it may be a pipe, whose contents are kept in a temporary file. A
            file that ends in ``.gz`` is decompressed.

    Attributes:
        number_of: id -> line number, in the file's order.
        bad: id -> bad line, in the file's order.
        sha256: SHA-256 of all bytes of the file, in hexadecimal digits.

    Raises:
        JaxinferError: the file is missing, is a folder, has another format, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.number_of: dict[str, int] = {}
        self.bad: dict[str, BadLine] = {}
        self._path = data_path(path)
        packed = self._path.suffix == ".gz"
        inner = self._path.with_suffix("") if packed else self._path
        check_ending(self._path if packed and is_table(inner) else inner, "input")
        self._checksums = array("L")
        self._bad: dict[str | int, BadLine] = {}
        digest = hashlib.sha256()
        # By number if the line has no id of its own.
        found_ids: dict[str | int, int] = {}
        with readable(self._path), ExitStack() as opened:
            source = opened.enter_context(self._path.open("rb"))
            self._file: IO[bytes] = source
            self._rows: ParquetRows | None = None
            if is_table(self._path):
                self.sha256 = hashlib.file_digest(source, "sha256").hexdigest()
                self._rows = ParquetRows(source, self._path, _COLUMNS)
                found = self._rows.lines()
            elif packed:
                self.sha256 = hashlib.file_digest(source, "sha256").hexdigest()
                source.seek(0)
                unpacked = opened.enter_context(gzip.open(source))
                self._file = found = cast(IO[bytes], unpacked)
            else:
                if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                    self._file = opened.enter_context(TemporaryFile())
                found = self._taken(source, digest)
            for number, raw in numbered(found):
                self._add(found_ids, number, raw)
            self._opened = opened.pop_all()
        self._name(found_ids)

    def _again(self) -> Iterable[bytes]:
        if self._rows:
            return self._rows.lines()
        self._file.seek(0)
        return self._file

    def _taken(self, source: IO[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
        for raw in source:
            digest.update(raw)
            if self._file is not source:
                self._file.write(raw)
            yield raw
        self.sha256 = digest.hexdigest()

    def _add(self, ids: dict[str | int, int], number: int, raw: bytes) -> None:
        line = _read_line(number, raw)
        if line.custom_id in ids:
            earlier = ids[line.custom_id]
            # With the same id, a resumed job would take this error for the first line's result.
            reason = f"custom_id {shorten(line.custom_id)} is already that of line {earlier}"
            line = BadLine(number, "", f"{reason}, must be unique")
        key = line.custom_id or number
        ids[key] = number
        self._checksums.append(zlib.crc32(raw))
        if isinstance(line, BadLine):
            self._bad[key] = line

    def _name(self, ids: dict[str | int, int]) -> None:
        """Give each line without an id one that no other line has."""
        for key, number in ids.items():
            custom_id = f"line-{number}" if isinstance(key, int) else key
            while isinstance(key, int) and custom_id in ids:
                custom_id += "-unnamed"
            self.number_of[custom_id] = number
            if line := self._bad.get(key):
                self.bad[custom_id] = replace(line, custom_id=custom_id)

    def lines(self, skipped: Container[str]) -> Iterator[BatchLine]:
        """Read the good lines again, one by one, without those whose ids are ``skipped``.

        Raises:
            JaxinferError: the file cannot be read, or has changed.
        """
        with readable(self._path):
            found = numbered(self._again())
            known = zip(self.number_of.items(), self._checksums, strict=True)
            for (custom_id, number), checksum in known:
                now, raw = next(found, (0, b""))
                if now != number or zlib.crc32(raw) != checksum:
                    raise JaxinferError(
                        f"{self._path} has changed since it was opened, at line {number}: "
                        "leave it as it is until all of its lines are done"
                    )
                if custom_id in self.bad or custom_id in skipped:
                    continue
                line = _read_line(number, raw)
                assert isinstance(line, BatchLine)
                # One string for all requests that keep the id.
                yield replace(line, custom_id=custom_id)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read_line(number: int, raw: bytes) -> BatchLine | BadLine:
    custom_id = ""
    try:
        fields = _without_nulls(parse_object(raw))
        if "custom_id" in fields:
            custom_id = _custom_id(fields.pop("custom_id"))
        body, prompts, what = _body(fields)
        prompt = _prompt(body, prompts, what)
        return BatchLine(number, custom_id, prompt, _sampling(body))
    except JaxinferError as error:
        return BadLine(number, custom_id, str(error))


def _without_nulls(fields: dict[str, object]) -> dict[str, object]:
    """Drop nulls: in OpenAI's API, null is the same as absent."""
    return {name: value for name, value in fields.items() if value is not None}


def _custom_id(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise JaxinferError(f"custom_id is {shorten(value)}, must be a non-empty string")
    return value


def _body(fields: dict[str, object]) -> tuple[dict[str, object], tuple[str, ...], str]:
    """Return a line's body, the prompt fields it may have, and the name of such a request."""
    if not fields.keys() & set(_ENVELOPE):
        return fields, _PROMPTS, "a plain line"
    for name in _ENVELOPE:
        if name not in fields:
            raise JaxinferError(f"a line with {' or '.join(_ENVELOPE)} needs {name!r} too")
    for name in fields:
        if name not in _ENVELOPE:
            raise JaxinferError(f"unknown field {shorten(name)}: {did_you_mean(name, _ENVELOPE)}")
    method, url, body = (fields[name] for name in _ENVELOPE)
    if method != "POST":
        raise JaxinferError(f"method is {shorten(method)}, must be 'POST'")
    if not isinstance(url, str) or url not in _PROMPT_OF_URL:
        raise JaxinferError(f"url is {shorten(url)}, must be {' or '.join(_PROMPT_OF_URL)}")
    if not isinstance(body, dict):
        raise JaxinferError(f"body is {shorten(body)}, must be a JSON object")
    return _without_nulls(body), _PROMPT_OF_URL[url], url


def _prompt(
    body: dict[str, object], allowed: tuple[str, ...], what: str
) -> str | list[int] | Conversation:
    given = [name for name in _PROMPTS if name in body]
    if len(given) != 1 or given[0] not in allowed:
        needed = allowed[0] if len(allowed) == 1 else f"exactly one of {', '.join(allowed)}"
        raise JaxinferError(f"{what} needs {needed}, has {shorten(given or list(body))}")
    value = body[given[0]]
    match given[0]:
        case "messages":
            return read_conversation(value)
        case "prompt":
            return _text_or_token_ids(value)
        case _:
            return as_token_ids(value, "prompt_token_ids")


def _text_or_token_ids(value: object) -> str | list[int]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise JaxinferError("prompt is a list of prompts: write one prompt per line")
        (value,) = value
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return as_token_ids(value, "prompt")
    raise JaxinferError(f"prompt is {shorten(value)}, must be a string or a list of token ids")


def _sampling(body: dict[str, object]) -> SamplingParams:
    options: dict[str, object] = {}
    body = {name: _whole(value) for name, value in body.items()}
    body |= {"logprobs": _num_logprobs(body), "top_logprobs": None}
    for name, value in _without_nulls(body).items():
        if name in _ONLY_VALUE:
            _require_only_value(name, value)
        elif name not in _WITHOUT_EFFECT and name not in _PROMPTS:
            options[name] = value
    limit = options.pop("max_completion_tokens", None)
    if limit is not None and options.setdefault("max_tokens", limit) != limit:
        raise JaxinferError(
            f"max_tokens is {shorten(options['max_tokens'])} but max_completion_tokens is "
            f"{shorten(limit)}, give one"
        )
    if options.get("top_p") == 0 and type(options["top_p"]) is int:
        # In OpenAI's API, this means only the likeliest token.
        options |= {"top_p": 1, "top_k": 1}
    found = SamplingParams.model_validate({"max_tokens": DEFAULT_MAX_TOKENS} | options)
    if "max_tokens" not in options:
        found.model_fields_set.remove("max_tokens")
    return found


def _whole(value: object) -> object:
    """Return a whole number as an integer; some tools write it with a decimal point."""
    is_whole = isinstance(value, float) and abs(value) < 2**53 and value.is_integer()
    return int(value) if is_whole else value  # type: ignore[call-overload]


def _num_logprobs(body: dict[str, object]) -> object:
    """Return how many likeliest tokens to report: a number; for chat, a switch and a number."""
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if "messages" not in body:
        if top:
            raise JaxinferError(f"top_logprobs is {shorten(top)}, for chat; give logprobs a number")
        return None if asked is False else asked
    if asked is not None and not isinstance(asked, bool):
        raise JaxinferError(f"logprobs is {shorten(asked)}, must be true or false for chat")
    if top is not None and (type(top) is not int or not 0 <= top <= 20):
        raise JaxinferError(f"top_logprobs is {shorten(top)}, must be an integer from 0 to 20")
    if top and not asked:
        raise JaxinferError(f"top_logprobs is {shorten(top)}, needs logprobs: true")
    return (0 if top is None else top) if asked else None


def _require_only_value(name: str, value: object) -> None:
    only = _ONLY_VALUE[name]
    # In Python, True == 1; but `logprobs: 0` asks for something that `logprobs: false` does not.
    if value != only or isinstance(value, bool) != isinstance(only, bool):
        raise JaxinferError(
            f"{name} is {shorten(value)}, not supported except as {json.dumps(only)}"
        )
