"""What results depend on besides what is asked: the package's code and data, and the machine."""

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxinfer.config.shipped import SHIPPED

PACKAGE = Path(__file__).parents[1]
# What a simulation does not load; links in a checkout.
_REAL_ALONE = ("models", "pallas_kernels")


@cache
def code_version() -> str:
    """A digest of what simulations are made of: all Python files and tables of the package."""
    return digest_of(PACKAGE, leave_out=_REAL_ALONE)


def digest_of(folder: Path, leave_out: tuple[str, ...] = ()) -> str:
    """SHA-256 of the ``.py`` and ``.yaml`` files of a folder, with their paths in it.

    Args:
        leave_out: folders in it that do not count.
    """
    found = hashlib.sha256()
    for at, folders, files in os.walk(folder, followlinks=True):
        if Path(at) == SHIPPED:
            folders.clear()  # Run files: those that are asked for are known by their contents.
        folders[:] = sorted(name for name in folders if name not in (*leave_out, "__pycache__"))
        for name in sorted(files):
            if name.endswith((".py", ".yaml")):
                path = Path(at, name)
                data = path.read_bytes()
                found.update(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return found.hexdigest()


def real_version() -> str:
    """What real runs depend on: the whole package, the host, its devices, JAX and Numba.

    It initialises JAX.
    """
    import jax

    devices = sorted({f"{each.platform} {each.device_kind}" for each in jax.devices()})
    packages = [f"{name} {_version_of(name)}" for name in ("jax", "jaxlib", "numba")]
    machine = [platform.node(), platform.machine(), str(os.cpu_count())]
    text = "\n".join([digest_of(PACKAGE), *machine, *devices, *packages])
    return hashlib.sha256(text.encode()).hexdigest()


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
