"""Compiled layers, kept from run to run by all that they depend on."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from jaxinfer.files.kept import key_of, write_whole
from jaxinfer.files.made_from import PACKAGE, digest_of, version_of
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.lab.sharding.compiling import Compiled, LayerJob
from jaxinfer.lab.sharding.targets import CompileTarget

FOLDER = Path("~/.cache/jaxinfer/sharding")
# Packages that decide what is compiled.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "numba")


class CompiledCache:
    """A file for each layer that was compiled.

    Args:
        folder: made when something is kept; a user without a home keeps nothing.
        target, mesh, model, dtype: what all jobs have in common.
    """

    def __init__(
        self,
        folder: Path,
        target: CompileTarget,
        mesh: dict[str, int],
        model: ModelShape,
        dtype: str,
    ) -> None:
        self._folder = folder
        versions = [f"{name} {version_of(name)}" for name in _COMPILERS]
        # Programs are of all: models have the activations' names, how specs are made, experts.
        folders = ("hardware", "sharding", "models", "pallas_kernels")
        code = [digest_of(PACKAGE / name) for name in folders]
        asked = [str(target), list(mesh.items()), model.model_dump(), dtype]
        self._common = key_of(versions, code, asked)

    def _path(self, job: LayerJob) -> Path:
        key = key_of(self._common, job.part, job.tokens, job.context, job.layout)
        return self._folder / f"{key}.json"

    def get(self, job: LayerJob) -> Compiled | None:
        """The kept result of a job; None where there is none, or it cannot be read."""
        try:
            found = json.loads(self._path(job).read_text(encoding="utf-8"))
            return Compiled.of(found)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def add(self, job: LayerJob, compiled: Compiled) -> None:
        """Keep one; a file that another process writes at once has the same."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(job), json.dumps(asdict(compiled)).encode())
