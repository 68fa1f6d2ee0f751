"""Writes a run's files.

``run.json`` has the run's inputs and results, ``steps.jsonl`` each step and transfer, and
``requests.jsonl`` each continuation of a prompt.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxinfer.errors import JaxinferError
from jaxinfer.files.lines import Lines, cannot_write
from jaxinfer.report.hidden_time import HasSteps, HiddenTime, Settled
from jaxinfer.report.origin import origin
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone, TransferDone

# Parts of a description that name files which a replay needs; these files are copied.
PROFILE_FILES = "profile_files"


class RunFolder:
    """A new folder ``<parent>/<n>`` for one run; n counts up, so that nothing is overwritten.

    ``run.json`` says ``running`` until the run ends; a run that was killed still says so.

    Args:
        parent: created if it does not exist.
        description: configuration and devices, as JSON values; takes precedence over ``origin``'s.

    Raises:
        JaxinferError: the folder cannot be made.
    """

    def __init__(self, parent: Path, description: Mapping[str, object]) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = _next_folder(parent)
            self._steps = Lines(self.path / "steps.jsonl")
            self._requests = Lines(self.path / "requests.jsonl")
        except OSError as error:
            raise JaxinferError(f"run folder {parent}: {error.strerror}") from None
        self._hidden = HiddenTime()
        self._run = origin() | dict(description)
        profiles: Any = self._run.pop(PROFILE_FILES, ())
        for file in profiles:
            shutil.copy(file, self.path)
        self._write("running", {})

    def add_step(self, done: StepDone, moving: Sequence[Transfer]) -> None:
        """Write a line of ``steps.jsonl``.

        Args:
            moving: transfers that have not landed.
        """
        batch = done.batch
        work = batch.work
        line = {
            "instance": batch.instance,
            "start": round(done.start, 6),
            "end": round(done.end, 6),
            "rows": work.sequences,
            "decode_tokens": work.decodes,
            "prefill_tokens": work.tokens - work.decodes,
            "sampled": len(done.tokens),
            "waiting": batch.num_waiting,
            "running": batch.num_running,
            "pages_in_use": batch.pages_in_use,
        }
        if len(done.stages) > 1:
            line["stages"] = [[round(start, 6), round(end, 6)] for start, end in done.stages]
        if work.shards:  # KV heads of the step's requests, in each shard of the instance.
            line["heads"] = [shard.heads for shard in work.shards]
        if work.halves:  # The rows of each of two halves that were computed in turn.
            line["halves"] = [half.sequences for half in work.halves]
        self._steps.write(json.dumps(line) + "\n")
        self._write_transfers(self._hidden.add_step(done, moving))

    def add_transfer(self, done: TransferDone, instances: Mapping[str, HasSteps]) -> None:
        """Write a line of ``steps.jsonl``, once it is known which steps overlapped.

        Args:
            instances: all instances that are not lost.
        """
        self._write_transfers(self._hidden.add_transfer(done, instances))

    def lose_instance(self, name: str) -> None:
        """Record that steps in flight on this instance never end."""
        self._write_transfers(self._hidden.lose(name))

    def add_request(
        self,
        request: RequestState,
        parent: str,
        ttft_counts_transfer: bool,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Write a line of ``requests.jsonl``.

        Args:
            parent: id of the prompt that it continues.
            tokens: output tokens of a real run, whose digest is compared with another run's.
        """
        metrics, first = request.metrics, request.metrics.first_scheduled
        line = {
            "id": request.id,
            "parent": parent,
            "arrival": round(metrics.arrival, 6),
            "first_scheduled": None if first is None else round(first, 6),
            "prompt_len": request.prompt_len,
            "cut": min(metrics.cut or 0, request.prompt_len),
            "preemptions": metrics.num_preemptions,
            "cached_tokens": metrics.num_cached_tokens,
            "token_times": [round(t, 6) for t in metrics.delivered(ttft_counts_transfer)],
            "error": request.error,
        }
        if tokens is not None:
            line["tokens_sha256"] = hashlib.sha256(array("q", tokens).tobytes()).hexdigest()
        self._requests.write(json.dumps(line) + "\n")

    def note(self, key: str, value: object) -> None:
        """Add an entry, a JSON value, to ``run.json`` at the run's end."""
        self._run[key] = value

    def finish(
        self,
        metrics: Mapping[str, object],
        overruns: Mapping[str, Sequence[float]],
        lost: Mapping[str, str],
        system: Mapping[str, object],
        wrong: str | None = None,
        restarts: Sequence[Mapping[str, object]] = (),
    ) -> Path:
        """Complete all files; return ``run.json``.

        Args:
            overruns: instance -> seconds by which its emulated steps were late.
            lost: reason for each failed instance.
            system: report of the system.
            wrong: problem with the system's report, see ``reported``.
            restarts: restarts of lost processes, as JSON values.
        """
        self._run["overruns"] = {
            name: {"steps": len(late), "seconds": round(sum(late), 3)}
            for name, late in overruns.items()
        }
        self._run["lost"] = dict(lost)
        self._run["restarts"] = list(restarts)
        self._run["system_report"] = dict(system)
        if wrong:
            self._run["system_report_error"] = wrong
        self._write("finished", metrics)
        return self.path / "run.json"

    def _write_transfers(self, settled: Iterable[Settled]) -> None:
        for done, hidden_s in settled:
            t = done.transfer
            line = {
                "request": t.request.id,
                "source": t.source,
                "dest": t.dest,
                "tokens": t.stop - t.start,
                "bytes": done.num_bytes,
                "requested": round(t.requested, 6),
                "start": round(done.start, 6),
                "end": round(done.end, 6),
                "hidden_s": round(hidden_s, 6),
            }
            if t.slice_move:  # The KV heads, from shard to shard of the instance.
                line["moves"] = t.slice_move.moves
            self._steps.write(json.dumps(line) + "\n")

    def _write(self, status: str, metrics: Mapping[str, object]) -> None:
        path = self.path / "run.json"
        part = path.with_suffix(".part")
        record = {"status": status} | self._run | {"metrics": dict(metrics)}
        try:
            with part.open("w", encoding="utf-8") as file:
                json.dump(record, file, indent=2)
                file.write("\n")
            os.replace(part, path)
        except OSError as error:
            raise cannot_write(path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush the lines, even after an error; the first error counts."""
        try:
            self._steps.close()
        finally:
            self._requests.close()


def run_folders(parent: Path) -> list[Path]:
    """Return the folders of all runs so far, newest last."""
    found = [path for path in parent.iterdir() if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def _next_folder(parent: Path) -> Path:
    while True:
        used = [int(path.name) for path in run_folders(parent)[-1:]]
        path = parent / str(max(used, default=0) + 1)
        try:
            path.mkdir()
        except FileExistsError:  # Another run made it just now, or a broken link.
            if path.is_dir():
                continue
            raise
        return path
