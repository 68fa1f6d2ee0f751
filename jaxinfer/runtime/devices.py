"""The devices of this process and JAX's settings for them."""

import os
from pathlib import Path

import jax

CACHE_FOLDER = Path("~/.cache/jaxinfer/compiled")


def configure_jax() -> None:
    """Keep compiled programs from run to run, unless the user has set a cache of their own."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER.expanduser()))
    # The defaults keep only what takes a second to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def describe(device: jax.Device) -> str:
    """E.g. ``"cpu (cpu:0)"`` or ``"NVIDIA H100 80GB HBM3 (gpu:0)"``."""
    return f"{device.device_kind} ({device.platform}:{device.id})"
