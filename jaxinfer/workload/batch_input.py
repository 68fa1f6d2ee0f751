"""Reading a batch file: one request a line or row, in OpenAI's batch format or plain.

A plain line is what would be the body of an OpenAI line, with the prompt in any of three forms::

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    {"prompt": "Hi", "temperature": 0, "max_tokens": 32}
    {"messages": [{"role": "user", "content": "Hi"}]}
    {"prompt_token_ids": [1, 15043]}

One bad line does not spoil the file: it comes back as a ``BadLine`` with its reason. A row of a
Parquet file is such a line, whose fields are its columns.
"""

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
from typing import IO, Self

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import as_token_ids, numbered, parse_object, readable, shorten
from jaxinfer.files.shipped import data_path
from jaxinfer.options.validation import did_you_mean
from jaxinfer.request import SamplingParams
from jaxinfer.workload.conversation import Conversation, read_conversation
from jaxinfer.workload.parquet import SUFFIX as PARQUET
from jaxinfer.workload.parquet import ParquetRows

# OpenAI's 16 cuts most answers short; its chat default, the rest of the context, lets one line
# hold up a batch.
DEFAULT_MAX_TOKENS = 256

_PROMPT_OF_URL = {"/v1/chat/completions": ("messages",), "/v1/completions": ("prompt",)}
_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_ENVELOPE = ("method", "url", "body")

# Options without influence on the tokens.
_WITHOUT_EFFECT = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# Options that we do not have, with the one value that asks for nothing.
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
# What a Parquet file of requests may have as columns.
_COLUMNS = (
    *("custom_id", *_PROMPTS, *_ENVELOPE, *SamplingParams.model_fields, *_ONLY_VALUE),
    *(*_WITHOUT_EFFECT, "max_completion_tokens", "top_logprobs"),
)


@dataclass(frozen=True)
class BatchLine:
    """A request as read from line ``number``: a text, token ids, or a conversation."""

    number: int
    custom_id: str
    prompt: str | list[int] | Conversation
    sampling: SamplingParams


@dataclass(frozen=True)
class BadLine:
    """Line ``number`` is no request, because of ``reason`` (one line, without the number).

    ``custom_id`` is the line's own where it can be told and is free, else made of the number.
    """

    number: int
    custom_id: str
    reason: str


class BatchFile:
    """The requests of a JSONL or Parquet file, read twice: first for what holds of all of it.

    Blank lines are skipped but counted. A line without ``custom_id`` gets ``line-N``. All ids
    differ; the second user of an id is a bad line. Ids, numbers and bad lines' reasons are in
    memory, some 200 bytes for each line, but no prompts.

    Args:
        path: is opened once, so that it may be a pipe; what comes out of one is kept in a
            temporary file.

    Attributes:
        number_of: id -> line number, in the file's order.
        bad: id -> bad line, likewise.
        sha256: of all bytes of the file, in hexadecimal digits.

    Raises:
        JaxinferError: the file is missing, a folder, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.number_of: dict[str, int] = {}
        self.bad: dict[str, BadLine] = {}
        self._path = data_path(path)
        self._checksums = array("L")
        digest = hashlib.sha256()
        with readable(self._path), ExitStack() as opened:
            source: IO[bytes] = opened.enter_context(self._path.open("rb"))
            self._file = source
            self._rows: ParquetRows | None = None
            if self._path.suffix == PARQUET:
                self.sha256 = _digest_of(source)
                self._rows = ParquetRows(source, self._path, _COLUMNS)
                found = self._rows.lines()
            else:
                if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                    self._file = opened.enter_context(TemporaryFile())
                found = self._taken(source, digest)
            for number, raw in numbered(found):
                self._add(number, raw)
            self._opened = opened.pop_all()

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

    def _add(self, number: int, raw: bytes) -> None:
        line = _read_line(number, raw)
        if line.custom_id in self.number_of:
            line = _duplicate(line, self.number_of)
        self.number_of[line.custom_id] = number
        self._checksums.append(zlib.crc32(raw))
        if isinstance(line, BadLine):
            self.bad[line.custom_id] = line

    def lines(self, skipped: Container[str]) -> Iterator[BatchLine]:
        """Read the good lines again, one by one, without those of some ids.

        Raises:
            JaxinferError: the file cannot be read, or is no longer what it was.
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
                # One string for all that keep the id.
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


def _digest_of(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()


def _read_line(number: int, raw: bytes) -> BatchLine | BadLine:
    custom_id = f"line-{number}"
    try:
        fields = _without_nulls(parse_object(raw))
        custom_id = _custom_id(fields.pop("custom_id", custom_id))
        body, prompts, what = _body(fields)
        prompt = _prompt(body, prompts, what)
        return BatchLine(number, custom_id, prompt, _sampling(body))
    except JaxinferError as error:
        return BadLine(number, custom_id, str(error))


def _duplicate(line: BatchLine | BadLine, number_of: dict[str, int]) -> BadLine:
    # Under the shared id, a resumed job would take this line's error for the first line's result.
    own_id = f"line-{line.number}"
    while own_id in number_of:
        own_id += "-duplicate"
    earlier = number_of[line.custom_id]
    reason = f"custom_id {shorten(line.custom_id)} is already that of line {earlier}"
    return BadLine(line.number, own_id, f"{reason}, must be unique")


def _without_nulls(fields: dict[str, object]) -> dict[str, object]:
    """Drop nulls: in OpenAI's API, null is the same as absent."""
    return {name: value for name, value in fields.items() if value is not None}


def _custom_id(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise JaxinferError(f"custom_id is {shorten(value)}, must be a non-empty string")
    return value


def _body(fields: dict[str, object]) -> tuple[dict[str, object], tuple[str, ...], str]:
    """The body of a line, the prompt fields it may have, and what to call such a request."""
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
    body = body | {"logprobs": _num_logprobs(body), "top_logprobs": None}
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
    options.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    return SamplingParams.model_validate(options)


def _num_logprobs(body: dict[str, object]) -> object:
    """Likeliest tokens to report: a number for completions, a switch and a number for chat."""
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
    # To Python, True == 1; but `logprobs: 0` asks for something that `logprobs: false` does not.
    if value != only or isinstance(value, bool) != isinstance(only, bool):
        raise JaxinferError(
            f"{name} is {shorten(value)}, not supported except as {json.dumps(only)}"
        )
