"""A finished run as pandas DataFrames. Only this file imports pandas, and only when called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import JaxinferError
from jaxinfer.report.records import read_lines, reporting_damage

if TYPE_CHECKING:
    from pandas import DataFrame

# Columns and their content; missing floats are NaN.
REQUESTS = {
    "id": "object", "parent": "object", "arrival": "float64", "first_scheduled": "float64",
    "prompt_len": "int64", "output_tokens": "int64", "cut": "int64", "cached_tokens": "int64",
    "preemptions": "int64", "delay": "float64", "ttft": "float64", "tpot": "float64",
    "e2e": "float64", "token_times": "object", "error": "object",
}  # fmt: skip
STEPS = {
    "instance": "object", "start": "float64", "end": "float64", "rows": "int64",
    "prefill_tokens": "int64", "decode_tokens": "int64", "sampled": "int64", "waiting": "int64",
    "running": "int64", "pages_in_use": "int64", "stages": "object",
}  # fmt: skip
TRANSFERS = {
    "request": "object",
    "source": "object",
    "dest": "object",
    "tokens": "int64",
    "bytes": "int64",
    "requested": "float64",
    "start": "float64",
    "end": "float64",
    "hidden_s": "float64",
}


@dataclass(frozen=True, eq=False)
class RunFrames:
    """A run. All times are in seconds since its start, all durations in seconds.

    Attributes:
        requests: one row per continuation, in the order of their ends. ``id``; ``parent``: id of
            the prompt, the same for all of its continuations; ``arrival``; ``first_scheduled``:
            start of the first step; ``prompt_len``; ``output_tokens``; ``cut``: number of prompt
            tokens whose KV the first instance handed over; ``cached_tokens``: number of prompt
            tokens from the prefix cache; ``preemptions``; ``delay``: from arrival to the first
            step; ``ttft``, ``tpot`` (mean time between tokens) and ``e2e``, as in ``Latencies``;
            ``token_times``: a tuple; ``error``: None without an error. Floats are NaN if there is
            no value.
        steps: one row per step, in the order of their ends. ``instance``, ``start``, ``end``,
            ``rows`` (requests), ``prefill_tokens``, ``decode_tokens``, ``sampled`` (tokens); at
            launch ``waiting`` and ``running`` (requests) and ``pages_in_use``; ``stages``: start
            and end of each pipeline stage's part, as a tuple of pairs.
        transfers: one row per transfer of KV. ``request``, ``source``, ``dest`` (instances),
            ``tokens``, ``bytes``, ``requested``, ``start``, ``end``; ``hidden_s``: how much of its
            time the destination was computing, or the source was computing the same prompt.
        run: all of ``run.json``.
    """

    requests: "DataFrame"
    steps: "DataFrame"
    transfers: "DataFrame"
    run: dict[str, Any]


def load_run(folder: str | Path) -> RunFrames:
    """Read the folder of a finished run, real or simulated, which must have ``run.json``.

    Raises:
        JaxinferError: pandas is not installed, a file is missing or damaged, or the run did not
            finish.
    """
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise JaxinferError(
            "load_run needs pandas, which is not installed: it comes with jaxinfer's extra "
            "[analysis], or by pip install 'pandas>=2.2,<4'"
        ) from None
    lines = read_lines(folder)
    with reporting_damage(folder):
        return RunFrames(
            requests=_frame([_request(line) for line in lines.requests], REQUESTS),
            steps=_frame([_step(line) for line in lines.steps], STEPS),
            transfers=_frame(lines.transfers, TRANSFERS),
            run=lines.run,
        )


def _frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> "DataFrame":
    """Return a frame with these columns, whose types do not depend on the rows."""
    from pandas import DataFrame, Series

    return DataFrame(
        {name: Series([row[name] for row in rows], dtype=kind) for name, kind in columns.items()}
    )


def _request(line: Mapping[str, Any]) -> dict[str, Any]:
    arrival, started, times = line["arrival"], line["first_scheduled"], line["token_times"]
    count = len(times)
    return {
        **line,
        # Older runs have none.
        "parent": line.get("parent", line["id"]),
        "output_tokens": count,
        "delay": None if started is None else started - arrival,
        "ttft": times[0] - arrival if times else None,
        "tpot": (times[-1] - times[0]) / (count - 1) if count > 1 else None,
        "e2e": times[-1] - arrival if times else None,
        "token_times": tuple(times),
    }


def _step(line: Mapping[str, Any]) -> dict[str, Any]:
    stages = line.get("stages", [[line["start"], line["end"]]])
    return {**line, "stages": tuple((start, end) for start, end in stages)}
