"""A log of vLLM's requests beside a simulation of them.

A log has a line of JSON for each request: tokens of its prompt and answer, when the client sent it,
by its own clock, and when the engine noted it, had its first and its last token, by the engine's.
Requests arrive when the client sent them. The engine takes note of one between two steps only, so
that ``queued_ts`` is half a step later in the mean; a time to first token counts from the arrival.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.report.records import RequestRecord, RunRecord, read_run
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.bench_request import BLOCK, BenchRequest

FIELDS = (
    "input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts",
)  # fmt: skip
Real = Mapping[str, Any]


def read_requests(path: Path) -> list[Real]:
    """Read vLLM's timings of the requests that have been answered; adds ``arrival``, by one clock.

    Raises:
        JaxinferError: the file cannot be read, or a line lacks a field.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise JaxinferError(f"{path}: not lines of JSON: {error}") from None
    for number, line in enumerate(lines, 1):
        for field in FIELDS:
            if not isinstance(line, dict) or field not in line:
                raise JaxinferError(f"{path}, line {number}: lacks {field}")
    answered = [line for line in lines if line["output_toks"]]
    if not answered:
        raise JaxinferError(f"{path}: no request was answered")
    # The client's clock is another: whoever was queued quickest ties the two.
    ahead = min(line["queued_ts"] - line["arrival_time"] for line in answered)
    return [line | {"arrival": line["arrival_time"] + ahead} for line in answered]


def simulated(config: RunFile, real: Sequence[Real], out: Path) -> RunRecord:
    """Serve the same requests on the modelled machine.

    No two prompts begin alike, but a preempted one finds its own pages in a prefix cache.
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
    """A figure of a whole log, in seconds: as it was measured, and ours."""

    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Return (simulated - measured) / measured."""
        return self.simulated / self.measured - 1

    @property
    def line(self) -> str:
        """The figure in words."""
        both = f"vLLM {self.measured:9.4f}  simulated {self.simulated:9.4f}"
        return f"{f'{self.name} (s)':15} {both}  {self.error:+.1%}"


def request_rows(real: Sequence[Real], ours: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Return each request's given columns, and its times in milliseconds: measured and ours."""
    by_number = {int(request.id): request for request in ours}
    rows = []
    for number, line in enumerate(real):
        times = by_number[number].token_times
        measured = _milliseconds(
            line["arrival"], line["first_token_ts"], line["last_token_ts"], line["output_toks"]
        )
        found = _milliseconds(by_number[number].arrival, times[0], times[-1], len(times))
        given = {key: value for key, value in line.items() if key != "arrival"}
        rows.append(given | {f"silicon_{name}": ms for name, ms in measured.items()} | found)
    return rows


def _milliseconds(arrival: float, first: float, last: float, count: int) -> dict[str, Any]:
    """A request of one token has no time per output token."""
    tpot = 1e3 * (last - first) / (count - 1) if count > 1 else ""
    return {"ttft_ms": 1e3 * (first - arrival), "tpot_ms": tpot, "e2e_ms": 1e3 * (last - arrival)}


def figures(
    rows: Sequence[Mapping[str, Any]], real: Sequence[Real], ours: Sequence[RequestRecord]
) -> list[Figure]:
    """Mean TTFT and mean TPOT over requests, and the makespan."""
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
    return [*found, Figure("makespan", span, max(each.token_times[-1] for each in ours))]
