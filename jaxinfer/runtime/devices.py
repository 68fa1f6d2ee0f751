"""The devices of this process and JAX's settings for them."""

import contextlib
import ctypes
import os
from pathlib import Path

import jax

from jaxinfer.errors import JaxinferError

CACHE_FOLDER = Path("~/.cache/jaxinfer/compiled")


def configure_jax() -> None:
    """Keep compiled programs from run to run, unless the user has set a cache of their own."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER.expanduser()))
    # The defaults keep only what takes a second to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def take_devices(count: int) -> list[jax.Device]:
    """The first ``count`` devices; on CPU, as many as asked for, if JAX has not yet counted them.

    Raises:
        JaxinferError: there are fewer.
    """
    if count > max(jax.config.jax_num_cpu_devices, 1):  # type: ignore[attr-defined]
        # JAX refuses once it has counted.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        platform = devices[0].platform
        hint = "; set JAX_NUM_CPU_DEVICES before JAX starts" if platform == "cpu" else ""
        raise JaxinferError(
            f"tensor_parallel_size is {count}, there are {len(devices)} {platform} devices{hint}"
        )
    return devices[:count]


def describe(device: jax.Device) -> str:
    """E.g. ``"cpu (cpu:0)"`` or ``"NVIDIA H100 80GB HBM3 (gpu:0)"``."""
    return f"{device.device_kind} ({device.platform}:{device.id})"


def return_freed_memory() -> None:
    """Give the system what the compiler has freed; glibc keeps it: 200 MB after nine steps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
