"""Chooses JAX's share of a GPU's memory before JAX starts, unless the user has set it.

By default, JAX takes 75 % when it starts, and fails if less is free.
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

# Two names of one setting; JAX refuses both together.
SETTINGS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# The share of the free memory to use; the rest is for CUDA's context, its libraries and captured
# graphs.
SHARE = 0.95


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``: bytes."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def has_started() -> bool:
    """Tell whether JAX has taken its memory in this process."""
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


@contextmanager
def share_chosen(fraction: float | None = None) -> Iterator[None]:
    """Let JAX start within this context, with ``SHARE`` of the fullest visible GPU's free memory.

    The user's setting is kept, and JAX's default is used if NVML knows no GPU. Processes that start
    later choose for themselves.

    Args:
        fraction: fraction of each GPU's memory, if other processes take some of it at the same
            time.
    """
    if any(os.environ.get(name) for name in SETTINGS) or has_started():
        yield
        return
    shares = _visible_shares() if fraction is None else []
    said = "its own share of each GPU's memory, since NVML does not tell what is free"
    if fraction is not None:
        said = f"{fraction:.0%} of each GPU's memory, beside other processes"
    elif shares:
        fraction = math.floor(100 * SHARE * min(shares)) / 100
        said = f"{fraction:.0%} of each GPU's memory, {SHARE:.0%} of what is free"
    if fraction is not None:
        os.environ[SETTINGS[0]] = f"{fraction:.2f}"
    try:
        yield
    finally:
        os.environ.pop(SETTINGS[0], None)
    if jax.default_backend() == "gpu":
        line = f"jaxinfer: JAX takes {said}; {SETTINGS[0]} sets another share"
        print(line, file=sys.stderr, flush=True)


def free_shares() -> dict[str, float]:
    """Return the free share of each GPU's memory by its number; empty without NVML."""
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    if library.nvmlInit_v2():
        return {}
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = {str(number): _free_share(library, number) for number in range(count.value)}
    finally:
        library.nvmlShutdown()
    return {number: share for number, share in found.items() if share is not None}


def _visible_shares() -> list[float]:
    found = free_shares()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # Devices that are not named by number may be any.
    chosen = [name.strip() for name in visible if name.strip().isdecimal()] or list(found)
    return [share for number in chosen if (share := found.get(number)) is not None]


def _free_share(library: Any, number: int) -> float | None:
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) or not memory.total:
        return None
    return memory.free / memory.total
