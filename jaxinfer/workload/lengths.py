"""Workloads to measure with: prompts in token ids, or only lengths and arrival times."""

import contextlib
import csv
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from jaxinfer.config.shipped import data_path, why_not
from jaxinfer.config.validation import did_you_mean
from jaxinfer.errors import JaxinferError
from jaxinfer.workload.json_lines import as_token_ids, numbered_lines, parse_object, shorten


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request to measure with: ``prompt_len`` tokens in, ``max_tokens`` out.

    ``prompt_token_ids`` is None where the file has only lengths. ``arrival`` is in seconds
    since the start of the run.
    """

    prompt_token_ids: list[int] | None
    prompt_len: int
    max_tokens: int
    arrival: float


def read_workload(path: str | Path, limit: int | None = None) -> list[BenchRequest]:
    """Read a ``.jsonl`` file of prompts or a ``.csv`` trace of lengths, in the file's order.

    With ``limit``, the first so many; what comes after them is not looked at.

    JSONL lines have ``prompt_token_ids`` and ``max_tokens`` (and may have ``id``,
    ``prompt_len``, ``text``); all arrive at 0. A CSV has Vidur's columns (``arrived_at`` in
    seconds, 0 where the column is missing) or those of Azure's 2023 traces, whose earliest
    request arrives at 0.

    Raises:
        JaxinferError: the file cannot be read, is of another kind, holds no request, or has a
            wrong value, which the message names with its line number.
    """
    path = data_path(path)
    match path.suffix:
        case ".jsonl":
            requests = _read_jsonl(path, limit)
        case ".csv":
            requests = _read_csv(path, limit)
        case _:
            raise JaxinferError(f"workload {path} must be a .jsonl or .csv file")
    if not requests:
        raise JaxinferError(f"workload {path} holds no request")
    return requests


def synthetic_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    """``length`` token ids below ``vocab_size``, drawn evenly; the same for the same ``seed``."""
    return random.Random(seed).choices(range(vocab_size), k=length)


def _read_jsonl(path: Path, limit: int | None) -> list[BenchRequest]:
    requests = []
    for number, raw in islice(numbered_lines(path), limit):
        with _line(path, number):
            requests.append(_from_json(raw))
    return requests


def _from_json(raw: bytes) -> BenchRequest:
    fields = parse_object(raw)
    known = ("prompt_token_ids", "max_tokens", "id", "prompt_len", "text")
    for name in fields:
        if name not in known:
            raise JaxinferError(f"unknown field {shorten(name)}: {did_you_mean(name, known)}")
    tokens = as_token_ids(fields.get("prompt_token_ids"), "prompt_token_ids")
    if fields.get("prompt_len", len(tokens)) != len(tokens):
        raise JaxinferError(
            f"prompt_len is {shorten(fields['prompt_len'])}, "
            f"but there are {len(tokens)} prompt_token_ids"
        )
    max_tokens = fields.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 1:
        raise JaxinferError(f"max_tokens is {shorten(max_tokens)}, must be an integer >= 1")
    return BenchRequest(tokens, len(tokens), max_tokens, arrival=0.0)


@dataclass(frozen=True)
class _Columns:
    """One CSV format: the names of its columns and how it tells the time.

    ``extra`` are columns that follow from the lengths and are not read.
    """

    prompt: str
    output: str
    time: str
    time_required: bool
    seconds: Callable[[str], float]
    extra: tuple[str, ...] = ()

    def fit(self, header: list[str]) -> bool:
        needed = {self.prompt, self.output} | ({self.time} if self.time_required else set())
        return needed <= set(header) <= needed | {self.time, *self.extra}

    def header(self) -> str:
        return f"{self.prompt},{self.output}" + (
            f",{self.time}" if self.time_required else f"[,{self.time}]"
        )


def _seconds(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise JaxinferError(f"arrived_at is {shorten(cell)}, must be a number of seconds >= 0")
    return value


def _timestamp(cell: str) -> float:
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        raise JaxinferError(
            f"TIMESTAMP is {shorten(cell)}, must be like 2023-11-16 18:15:46.680590"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_VIDUR = _Columns(
    "num_prefill_tokens",
    "num_decode_tokens",
    "arrived_at",
    time_required=False,
    seconds=_seconds,
    extra=("num_total_tokens", "pd_ratio"),
)
_AZURE_2023 = _Columns(
    "ContextTokens", "GeneratedTokens", "TIMESTAMP", time_required=True, seconds=_timestamp
)
_FORMATS = (_VIDUR, _AZURE_2023)


def _read_csv(path: Path, limit: int | None) -> list[BenchRequest]:
    rows = _rows(path)
    _, header = next(rows, (1, []))
    columns = next((c for c in _FORMATS if c.fit(header)), None)
    if columns is None or len(set(header)) < len(header):
        wanted = " or ".join(c.header() for c in _FORMATS)
        raise JaxinferError(
            f"workload {path} has the columns {shorten(','.join(header))}, must have {wanted}"
        )
    found = []
    for number, cells in islice(rows, limit):
        try:
            found.append(_from_cells(columns, header, cells))
        except JaxinferError as error:
            raise _at_line(path, number, error) from None
    start = 0.0
    if columns is _AZURE_2023:
        start = min((time for _, _, time in found), default=0.0)
    # Seconds since 1970 leave a float no digits beyond the microsecond.
    return [
        BenchRequest(None, prompt, output, round(time - start, 6) if start else time)
        for prompt, output, time in found
    ]


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row of cells that is not blank, with its line number."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
    except OSError as error:
        raise JaxinferError(f"cannot read {path}: {why_not(path, error)}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise JaxinferError(f"cannot read {path} as CSV: {error}") from error


def _from_cells(columns: _Columns, header: list[str], cells: list[str]) -> tuple[int, int, float]:
    """Prompt and output tokens, and when the request comes."""
    if len(cells) != len(header):
        raise JaxinferError(f"{len(cells)} cells, must be {len(header)} as in the header")
    row = dict(zip(header, cells, strict=True))
    time = columns.seconds(row[columns.time]) if columns.time in row else 0.0
    return _length(row, columns.prompt), _length(row, columns.output), time


def _length(row: dict[str, str], name: str) -> int:
    cell = row[name].strip()
    if not (cell.isascii() and cell.isdigit() and int(cell) > 0):
        raise JaxinferError(f"{name} is {shorten(cell)}, must be an integer >= 1")
    return int(cell)


@contextlib.contextmanager
def _line(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except JaxinferError as error:
        raise _at_line(path, number, error) from None


def _at_line(path: Path, number: int, error: JaxinferError) -> JaxinferError:
    return JaxinferError(f"{path} line {number}: {error}")
