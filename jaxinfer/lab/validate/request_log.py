"""Compares a log of vLLM's requests with a simulation of them.

A log has a line of JSON for each request: the tokens of its prompt and answer; when the client sent
it, by the client's clock; and when the engine queued it and produced its first and last token, by
the engine's clock. Requests arrive when the client sent them. The engine queues requests only
between two steps, so ``queued_ts`` is half a step later on average. A time to first token counts
from the arrival.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import numbered_lines, parse_object
from jaxinfer.lab.validate.table import beside
from jaxinfer.options.validation import shown
from jaxinfer.report.records import RequestRecord, RunRecord, read_run
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.bench_request import BLOCK, BenchRequest

TOKENS = "input_toks", "output_toks"
TIMES = "arrival_time", "queued_ts", "first_token_ts", "last_token_ts"
# A number above this counts as a mistake, such as nanoseconds.
_MOST_TOKENS, _MOST_SECONDS = 10_000_000, 1e11
Real = Mapping[str, Any]


def read_requests(path: Path) -> list[Real]:
    """Read vLLM's timings of the answered requests; add ``arrival`` by a common clock.

    Raises:
        JaxinferError: the file cannot be read; or a field of a line is missing or invalid, or
            contradicts another field. (The request is not left out, because the run would then be
            another one.)
    """
    wrong, answered = [], []
    for number, raw in numbered_lines(path):
        try:
            line = _request(parse_object(raw))
        except JaxinferError as error:
            wrong.append(f"{path}, line {number}: {error}")
            continue
        if line["output_toks"]:
            answered.append(line)
    if wrong:
        more = f" (of {len(wrong)} such lines the first)" if len(wrong) > 1 else ""
        raise JaxinferError(f"{wrong[0]}{more}")
    if not answered:
        raise JaxinferError(f"{path}: no request was answered")
    # The client has another clock; the request that was queued fastest aligns the two.
    ahead = min(line["queued_ts"] - line["arrival_time"] for line in answered)
    return [line | {"arrival": line["arrival_time"] + ahead} for line in answered]


def _request(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line's checked fields; raise JaxinferError."""
    if missing := [name for name in (*TOKENS, *TIMES) if name not in line]:
        raise JaxinferError(f"lacks {missing[0]}")
    for name, least in zip(TOKENS, (1, 0), strict=True):
        value = line[name]
        if not _is_number(value) or value != int(value) or not least <= value <= _MOST_TOKENS:
            raise JaxinferError(
                f"{name} is {shown(value)}, must be an integer from {least} to {_MOST_TOKENS}"
            )
        line[name] = int(value)
    if not line["output_toks"]:
        return line  # Without an answer, it may lack times.
    for name in TIMES:
        if not _is_number(line[name]) or abs(line[name]) > _MOST_SECONDS:
            raise JaxinferError(
                f"{name} is {shown(line[name])}, must be a number of seconds, at most "
                f"{_MOST_SECONDS:g}"
            )
    for earlier, later in pairwise(TIMES[1:]):
        if line[later] < line[earlier]:
            raise JaxinferError(
                f"{later} is {line[later]:g}, before {earlier}, which is {line[earlier]:g}"
            )
    return line


def _is_number(value: object) -> bool:
    """Tell whether JSON has a finite number; ``parse_object`` refuses NaN and infinities."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def simulated(config: RunFile, real: Sequence[Real], out: Path) -> RunRecord:
    """Serve the logged requests on the modelled machine, and return the run's record.

    No two prompts have a common prefix, but a preempted one finds its own pages in a prefix cache.
    """
    start = min(line["arrival"] for line in real)
    work = [
        BenchRequest(
            None,
            line["input_toks"],
            line["output_toks"],
            line["arrival"] - start,
            (number,) * -(-line["input_toks"] // BLOCK),
        )
        for number, line in enumerate(real)
    ]
    simulate(config, work, out)
    numbered = (folder for folder in out.iterdir() if folder.name.isdecimal())
    return read_run(max(numbered, key=lambda folder: int(folder.name)))


@dataclass(frozen=True)
class Figure:
    """A figure of a whole log, measured and simulated, in seconds."""

    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """The relative error: (simulated - measured) / measured."""
        return self.simulated / self.measured - 1

    @property
    def line(self) -> str:
        """The figure as a line of text."""
        both = f"vLLM {self.measured:9.4f}  simulated {self.simulated:9.4f}"
        return f"{f'{self.name} (s)':15} {both}  {self.error:+.1%}"


def request_rows(real: Sequence[Real], ours: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Return each request's given columns, and its measured and simulated times in milliseconds."""
    by_number = {int(request.id): request for request in ours}
    rows = []
    for number, line in enumerate(real):
        times = by_number[number].token_times
        measured = _milliseconds(
            line["arrival"], line["first_token_ts"], line["last_token_ts"], line["output_toks"]
        )
        found = _milliseconds(by_number[number].arrival, times[0], times[-1], len(times))
        given = {key: value for key, value in line.items() if key != "arrival"}
        both = {f"silicon_{name}": ms for name, ms in measured.items()} | found
        rows.append(beside(given, both))
    return rows


def _milliseconds(arrival: float, first: float, last: float, count: int) -> dict[str, Any]:
    """Return times in milliseconds; a request of one token has no time per output token."""
    tpot = 1e3 * (last - first) / (count - 1) if count > 1 else ""
    return {"ttft_ms": 1e3 * (first - arrival), "tpot_ms": tpot, "e2e_ms": 1e3 * (last - arrival)}


def figures(
    rows: Sequence[Mapping[str, Any]], real: Sequence[Real], ours: Sequence[RequestRecord]
) -> list[Figure]:
    """Return mean TTFT and mean TPOT over requests, and the makespan."""
    found = []
    for name in ("ttft", "tpot"):
        both = [
            [row[f"{side}{name}_ms"] for row in rows if row[f"{side}{name}_ms"] != ""]
            for side in ("silicon_", "")
        ]
        measured, simulated = (statistics.fmean(each) / 1e3 if each else 0.0 for each in both)
        if measured:
            found.append(Figure(f"{name.upper()} mean", measured, simulated))
    start = min(line["arrival"] for line in real)
    span = max(line["last_token_ts"] for line in real) - start
    if span:
        found.append(Figure("makespan", span, max(each.token_times[-1] for each in ours)))
    return found
