"""A run's files: ``run.json`` with what was run and how it went, ``steps.jsonl`` with each step."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.world import StepDone

PACKAGES = ("jaxinfer", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")


class RunFolder:
    """A new folder ``<parent>/<n>`` for one run; n counts up, so that nothing is overwritten.

    ``run.json`` says ``running`` until the run ends; a run that was killed still says so.

    Args:
        parent: made if it does not exist.
        description: configuration and devices, as JSON values.

    Raises:
        JaxinferError: the folder cannot be made.
    """

    def __init__(self, parent: Path, description: Mapping[str, object]) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = _next_folder(parent)
            self._steps = (self.path / "steps.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise JaxinferError(f"run folder {parent}: {error.strerror}") from None
        self._run = dict(description) | {
            "versions": {name: version(name) for name in PACKAGES},
            "python": sys.version.split()[0],
            "machine": platform.platform(),
        }
        self._write("running", {})

    def add_step(self, done: StepDone) -> None:
        """Write a line of ``steps.jsonl``."""
        batch = done.batch
        decodes = batch.num_decodes
        line = {
            "instance": batch.instance,
            "start": round(done.start, 6),
            "end": round(done.end, 6),
            "rows": len(batch.rows),
            "decode_tokens": decodes,
            "prefill_tokens": batch.num_tokens - decodes,
            "sampled": len(done.tokens),
            "waiting": batch.num_waiting,
            "running": batch.num_running,
            "pages_in_use": batch.pages_in_use,
        }
        self._steps.write(json.dumps(line) + "\n")

    def finish(self, metrics: Mapping[str, object]) -> None:
        """Complete ``run.json``."""
        self._write("finished", metrics)

    def _write(self, status: str, metrics: Mapping[str, object]) -> None:
        path = self.path / "run.json"
        part = path.with_suffix(".part")
        record = {"status": status} | self._run | {"metrics": dict(metrics)}
        part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush the steps, whatever has happened."""
        self._steps.close()


def _next_folder(parent: Path) -> Path:
    used = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    path = parent / str(max(used, default=0) + 1)
    path.mkdir()
    return path
