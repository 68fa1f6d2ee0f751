"""Reads a finished run's folder: ``run.json``, ``steps.jsonl`` and ``requests.jsonl``."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import read_json


@dataclass(frozen=True)
class StepRecord:
    """A step.

    Attributes:
        stages: start and end of each pipeline stage's part, in seconds.
        heads: number of its requests' KV heads in each shard of the instance; empty if each stage
            has one shard. A stage's own group comes first, then its attention groups.
    """

    instance: str
    stages: tuple[tuple[float, float], ...]
    prefill_tokens: int
    decode_tokens: int
    heads: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransferRecord:
    """A transfer of KV. Times are in seconds.

    Attributes:
        requested: time at which the transfer was requested.
        start: time at which the first byte left.
        hidden_s: seconds of the transfer during which the destination was computing, or the source
            was computing the prompt.
    """

    request: str
    source: str
    dest: str
    num_tokens: int
    num_bytes: int
    requested: float
    start: float
    end: float
    hidden_s: float


@dataclass(frozen=True)
class RequestRecord:
    """A continuation of a prompt. Times are in seconds.

    Attributes:
        parent: id of the prompt; empty if the file has none, or if the prompt has only one
            continuation.
        token_times: time of each output token. If the run counts transfers in TTFT, the first
            token's time is the arrival of its KV.
        cut: tokens of the prompt whose KV the first instance computed and handed on; 0 if none.
        first_scheduled: start of its first step; None if it had no step or the file has no such
            time.
    """

    id: str
    arrival: float
    prompt_len: int
    token_times: tuple[float, ...]
    cut: int
    preemptions: int
    error: str | None
    first_scheduled: float | None = None
    parent: str = ""

    @property
    def prompt(self) -> str:
        """The common id of all continuations of one prompt."""
        return self.parent or self.id

    @property
    def ttft(self) -> float | None:
        """Time from arrival to the first token; None without one."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> list[float]:
        """Times between tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True)
class RunRecord:
    """A finished run, read from its folder.

    Attributes:
        name: name of the system, or the reader's name for the run.
        wall_s: seconds from the start to the last request's end.
        groups: instance -> the device group of each of its stages.
        emulated: descriptions of what was emulated; empty for a real run.
        run: all of ``run.json``.
    """

    name: str
    wall_s: float
    groups: Mapping[str, tuple[str, ...]]
    emulated: tuple[str, ...]
    steps: tuple[StepRecord, ...]
    transfers: tuple[TransferRecord, ...]
    requests: tuple[RequestRecord, ...]
    run: Mapping[str, Any]

    @property
    def rate(self) -> float:
        """Requests per second, from the start of the run to the end of its last request."""
        return len(self.requests) / self.wall_s


@dataclass(frozen=True)
class RunLines:
    """A finished run's files; lines of ``steps.jsonl`` are divided into steps and transfers."""

    run: dict[str, Any]
    steps: list[dict[str, Any]]
    transfers: list[dict[str, Any]]
    requests: list[dict[str, Any]]


def read_lines(folder: str | Path) -> RunLines:
    """Read a run's files as JSON values; ``run_folder.py`` describes them.

    Raises:
        JaxinferError: a file is missing or is not JSON, or the run did not finish.
    """
    folder = Path(folder)
    run = read_run_json(folder)
    if run.get("status") != "finished":
        raise JaxinferError(f"{folder}: the run is {run.get('status')!r}, must be finished")
    lines = _lines(folder / "steps.jsonl")
    steps = [line for line in lines if "request" not in line]
    transfers = [line for line in lines if "request" in line]
    requests = _lines(folder / "requests.jsonl")
    with reporting_damage(folder):
        prompts = len({line.get("parent", line["id"]) for line in requests})
        for count, what in ((len(steps), "steps"), (prompts, "requests")):
            if count != run["metrics"].get(what, count):
                raise JaxinferError(
                    f"{folder / what}.jsonl: has {count} {what}, the run had "
                    f"{run['metrics'][what]}: lines are missing or too many"
                )
    return RunLines(run, steps, transfers, requests)


def read_run_json(folder: Path) -> dict[str, Any]:
    """Read ``run.json`` in a run's folder.

    Raises:
        JaxinferError: it cannot be read. If there are runs in folders below, the message names one.
    """
    path = folder / "run.json"
    if not path.exists():
        below = next(
            (p for p in ("*", "*/*", "runs/*/*") for _ in folder.glob(f"{p}/run.json")), ""
        )
        found = sorted(folder.glob(f"{below}/run.json")) if below else []
        if found:
            raise JaxinferError(
                f"{folder}: no run.json there, give the folder of one run, such as "
                f"{found[0].parent}"
            )
    return read_json(path)


@contextmanager
def reporting_damage(folder: str | Path) -> Iterator[None]:
    """Raise JaxinferError if a run's lines lack required entries."""
    try:
        yield
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise JaxinferError(f"{folder}: damaged, {type(error).__name__}: {error}") from None


def read_run(folder: str | Path, name: str | None = None) -> RunRecord:
    """Read a run's files as records, for figures, tables and pictures.

    Args:
        name: name for the run; by default its system's name.

    Raises:
        JaxinferError: a file is missing or damaged, or the run did not finish.
    """
    with reporting_damage(folder):
        return _as_record(read_lines(folder), name)


def _as_record(lines: RunLines, name: str | None) -> RunRecord:
    run = lines.run
    return RunRecord(
        name=name or run["system"]["name"],
        wall_s=run["metrics"]["wall_s"],
        groups={
            instance: tuple(stage["group"] for stage in described["stages"])
            for instance, described in run["instances"].items()
        },
        emulated=tuple(run["emulated"]),
        steps=tuple(
            StepRecord(
                s["instance"],
                tuple((a, b) for a, b in s.get("stages", [[s["start"], s["end"]]])),
                s["prefill_tokens"],
                s["decode_tokens"],
                tuple(s.get("heads", ())),
            )
            for s in lines.steps
        ),
        transfers=tuple(
            TransferRecord(
                t["request"], t["source"], t["dest"], t["tokens"], t["bytes"], t["requested"],
                t["start"], t["end"], t["hidden_s"],
            )
            for t in lines.transfers
        ),
        requests=tuple(
            RequestRecord(
                r["id"], r["arrival"], r["prompt_len"], tuple(r["token_times"]), r["cut"],
                r["preemptions"], r["error"], r.get("first_scheduled"), r.get("parent", ""),
            )
            for r in lines.requests
        ),
        run=run,
    )  # fmt: skip


def _lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                found.append(json.loads(line))
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        at = f"line {len(found) + 1}, column {error.colno}"
        raise JaxinferError(f"{path}: not JSON lines: {error.msg} at {at}") from None
    except ValueError as error:  # It is no UTF-8.
        raise JaxinferError(f"{path}: not JSON lines: line {len(found) + 1}: {error}") from None
    return found
