"""Detects versions of NVIDIA's assembler, used by Mosaic GPU, that generate wrong code."""

import re
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version

# From CUDA 12.8.0 on, but before 12.9.1; jax's own attention refuses causal masks with these.
WRONG_FROM, RIGHT_FROM = (12, 8, 0), (12, 9, 86)
PACKAGE = "nvidia-cuda-nvcc-cu12"


def why_not(found: tuple[int, ...] | None) -> str | None:
    """Return why causal kernels for Hopper cannot be assembled, or None.

    Args:
        found: ptxas's version; None if it is unknown, which is assumed to be right.
    """
    if found is None or not WRONG_FROM <= found < RIGHT_FROM:
        return None
    at_least = ".".join(map(str, RIGHT_FROM))
    return (
        f"ptxas {'.'.join(map(str, found))} makes wrong code of causal masks: "
        f"pip install '{PACKAGE}>={at_least}'"
    )


@cache
def ptxas_version() -> tuple[int, ...] | None:
    """Return the version of ptxas on PATH, or else in NVIDIA's wheel; None without either."""
    if path := shutil.which("ptxas"):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"V(\d+\.\d+\.\d+)", said.stdout)
        return tuple(map(int, found[1].split("."))) if found else None
    try:
        return tuple(map(int, version(PACKAGE).split(".")[:3]))
    except PackageNotFoundError:
        return None
