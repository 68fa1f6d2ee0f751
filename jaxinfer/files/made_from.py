"""Digests and names of everything that results depend on, other than their inputs."""

import contextlib
import hashlib
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxinfer.files.shipped import SHIPPED

PACKAGE = Path(__file__).parents[1]
# Parts of the package that no simulation imports; a test checks this.
_REAL_ALONE = ("pallas_kernels",)


@cache
def code_version() -> str:
    """Return a digest of all Python files and tables of the package that simulations use."""
    return digest_of(PACKAGE, leave_out=_REAL_ALONE)


def real_version() -> str:
    """Return a digest for real runs: the package, processor, devices, JAX and Numba.

    The host's name is left out, since each container has another. This initialises JAX.
    """
    import jax

    devices = sorted({f"{each.platform} {each.device_kind}" for each in jax.devices()})
    packages = [f"{name} {version_of(name)}" for name in ("jax", "jaxlib", "numba")]
    machine = [cpu_name(), str(os.cpu_count())]
    text = "\n".join([digest_of(PACKAGE), *machine, *devices, *packages])
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(folder: Path, leave_out: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 of a folder's ``.py`` and ``.yaml`` files, with their paths in it.

    Args:
        leave_out: folders inside the folder whose files do not count.
    """
    found = hashlib.sha256()
    for at, folders, files in os.walk(folder, followlinks=True):
        if Path(at) == SHIPPED:
            folders.clear()  # Requested run files count by their contents.
        folders[:] = sorted(name for name in folders if name not in (*leave_out, "__pycache__"))
        for name in sorted(files):
            if name.endswith((".py", ".yaml")):
                path = Path(at, name)
                data = path.read_bytes()
                found.update(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return found.hexdigest()


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the model name of this machine's CPU, or its architecture if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
