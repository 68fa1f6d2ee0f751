"""The devices of this process and JAX's settings for them."""

import contextlib
import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.processes import part_of
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.stage.gpu_memory import share_chosen

CACHE_FOLDER = Path("~/.cache/jaxinfer/compiled")


def configure_jax() -> None:
    """Let JAX keep compiled programs between runs, unless the user has set a cache."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        # An arbitrary user of a container has no home directory.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER.expanduser()))
    # By default, only programs that take a second to compile are kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def open_groups(
    groups: Mapping[str, GroupConfig], gpu_share: float | None = None
) -> dict[str, list[jax.Device]]:
    """Return the devices of each group; groups share devices only if one of them says so.

    A CPU counts as any number of devices, if JAX has not counted them yet.

    Args:
        gpu_share: share of each GPU's memory, if JAX has not started; see ``share_chosen``.

    Raises:
        JaxinferError: there are too few devices, or none of the requested kind.
    """
    if not groups:
        return {}  # JAX would take GPU memory that processes of other groups need.
    _count(groups)
    with share_chosen(gpu_share):
        jax.devices()
    taken: set[jax.Device] = set()
    opened = {}
    for name, group in groups.items():
        if group.shares:
            continue
        found = [device for device in _devices(name, group) if device not in taken]
        if len(found) < group.devices:
            platform = found[0].platform if found else group.platform or "such"
            hint = "; set JAX_NUM_CPU_DEVICES before JAX starts" if platform == "cpu" else ""
            raise JaxinferError(
                f"group {name} asks for {group.devices} devices, "
                f"there are {len(found)} {platform} devices left{hint}"
            )
        opened[name] = found[: group.devices]
        taken.update(opened[name])
    return {name: opened[group.shares or name][: group.devices] for name, group in groups.items()}


def count_cpu_devices(clusters: Iterable[ClusterConfig]) -> None:
    """Make JAX count as many CPU devices as the largest of these clusters needs."""
    for cluster in clusters:
        _count(part_of(cluster, None).groups)


def _count(groups: Mapping[str, GroupConfig]) -> None:
    own = [group for group in groups.values() if not group.shares]
    wanted = sum(group.devices for group in own if group.platform != "gpu")
    if wanted > max(jax.config.jax_num_cpu_devices, 1):  # type: ignore[attr-defined]
        # JAX refuses this once it has counted its devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)


def _devices(name: str, group: GroupConfig) -> list[jax.Device]:
    try:
        devices = jax.devices(group.platform)
    except RuntimeError:
        raise JaxinferError(
            f"group {name}: platform {group.platform} is not here, JAX has {jax.default_backend()}"
        ) from None
    kinds = sorted({device.device_kind for device in devices})
    found = [device for device in devices if (group.kind or "") in device.device_kind]
    if not found:
        raise JaxinferError(
            f"groups.{name}.kind is {group.kind!r}, must be part of a device's name: "
            f"{', '.join(kinds)}"
        )
    return found


def device_name(device: jax.Device) -> str:
    """Return a name such as ``"cpu (cpu:0)"`` or ``"NVIDIA H100 80GB HBM3 (gpu:0)"``."""
    return f"{device.device_kind} ({device.platform}:{device.id})"


def return_freed_memory() -> None:
    """Return memory freed by the compiler to the system; glibc keeps 200 MB after nine steps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
