"""A cache of compiled layers, keyed by everything that they depend on."""

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
# Packages that affect the compiled programs.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "numba")


class CompiledCache:
    """Stores each compiled layer in a file.

    Args:
        folder: folder for the files, created when one is stored; a user without a home directory
            stores nothing.
        target, mesh, model, dtype: common to all jobs.
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
        # Programs depend on all of these: the models have the activations' names, the specs and the
        # experts.
        folders = ("hardware", "sharding", "models", "pallas_kernels")
        code = [digest_of(PACKAGE / name) for name in folders]
        asked = [str(target), list(mesh.items()), model.model_dump(), dtype]
        self._common = key_of(versions, code, asked)

    def _path(self, job: LayerJob) -> Path:
        key = key_of(self._common, job.part, job.tokens, job.context, job.layout)
        return self._folder / f"{key}.json"

    def get(self, job: LayerJob) -> Compiled | None:
        """Return the stored result of a job; None if there is none, or it cannot be read."""
        try:
            found = json.loads(self._path(job).read_text(encoding="utf-8"))
            return Compiled.of(found)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def add(self, job: LayerJob, compiled: Compiled) -> None:
        """Store a result; if another process writes the same file, it has the same contents."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(job), json.dumps(asdict(compiled)).encode())
