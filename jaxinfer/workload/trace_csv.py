"""Traces of lengths as CSV, distinguished by their columns: Vidur's, Azure's and BurstGPT's."""

import csv
import io
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import open_bytes, shorten
from jaxinfer.files.shipped import why_not
from jaxinfer.workload.bench_request import BenchRequest
from jaxinfer.workload.trace import Trace, at


@dataclass(frozen=True)
class _Columns:
    """A format: the names of its columns and its notation of time.

    ``extra`` are columns that are not read. With ``fails``, a row without output belongs to a
    request that has failed.
    """

    prompt: str
    output: str
    time: str
    seconds: Callable[[str], float]
    time_required: bool = True
    extra: tuple[str, ...] = ()
    fails: bool = False

    def fit(self, header: list[str]) -> bool:
        needed = {self.prompt, self.output} | ({self.time} if self.time_required else set())
        return needed <= set(header) <= needed | {self.time, *self.extra}

    def header(self) -> str:
        return f"{self.prompt},{self.output}" + (
            f",{self.time}" if self.time_required else f"[,{self.time}]"
        )


def _seconds(cell: str, name: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise JaxinferError(f"{name} is {shorten(cell)}, must be a number of seconds >= 0")
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
    partial(_seconds, name="arrived_at"),
    time_required=False,
    extra=("num_total_tokens", "pd_ratio"),
)
_AZURE = _Columns("ContextTokens", "GeneratedTokens", "TIMESTAMP", _timestamp)
_BURST_GPT = _Columns(
    "Request tokens",
    "Response tokens",
    "Timestamp",
    partial(_seconds, name="Timestamp"),
    extra=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
    fails=True,
)
_FORMATS = (_VIDUR, _AZURE, _BURST_GPT)


def read_csv(path: Path, limit: int | None) -> Trace:
    """Return the first ``limit`` requests, or all; Azure's earliest request arrives at 0.

    Raises:
        JaxinferError: the file cannot be read, has other columns, or has a wrong value.
    """
    rows = _rows(path)
    _, header = next(rows, (1, []))
    columns = next((c for c in _FORMATS if c.fit(header)), None)
    if columns is None or len(set(header)) < len(header):
        wanted = " or ".join(c.header() for c in _FORMATS)
        raise JaxinferError(
            f"workload {path} has the columns {shorten(','.join(header))}, must have {wanted}"
        )
    found: list[tuple[int, int, float]] = []
    num_failed = 0
    for number, cells in rows:
        if len(found) == limit:
            break
        with at(f"{path} line {number}"):
            row = _row(header, cells)
            if columns.fails and _number(row[columns.output]) == 0:
                num_failed += 1
                continue
            time = columns.seconds(row[columns.time]) if columns.time in row else 0.0
            found.append((_length(row, columns.prompt), _length(row, columns.output), time))
    start = 0.0
    if columns is _AZURE:
        start = min((time for _, _, time in found), default=0.0)
    # With seconds since 1970, a float has no digits below a microsecond.
    requests = [
        BenchRequest(None, prompt, output, round(time - start, 6) if start else time)
        for prompt, output, time in found
    ]
    failed = "1 row left out, a failure"
    if num_failed > 1:
        failed = f"{num_failed} rows left out, failures"
    note = f"{path}: {failed} without response tokens"
    return Trace(requests, columns.time in header, note if num_failed else "")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield each non-blank row of cells with its line number."""
    try:
        raw = open_bytes(path)
        with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
    except OSError as error:
        raise JaxinferError(f"cannot read {path}: {why_not(path, error)}") from error
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise JaxinferError(f"cannot read {path} as CSV: {error}") from error


def _row(header: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) != len(header):
        raise JaxinferError(f"{len(cells)} cells, must be {len(header)} as in the header")
    return dict(zip(header, cells, strict=True))


def _length(row: dict[str, str], name: str) -> int:
    found = _number(row[name])
    if not found:
        raise JaxinferError(f"{name} is {shorten(row[name].strip())}, must be an integer >= 1")
    return found


def _number(cell: str) -> int | None:
    """Return a whole number, which pandas may have written as ``10.0``; None for anything else."""
    whole, _, rest = cell.strip().partition(".")
    return int(whole) if whole.isascii() and whole.isdigit() and not rest.strip("0") else None
