"""Divides the memory of GPUs that several processes of a cluster use, before they start.

Otherwise each process would take nearly all free memory, at the same time as the others.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.stage.gpu_memory import SETTINGS, SHARE, free_shares, has_started

# Name of the loop's process among the groups that have their own.
HERE = ""


@dataclass(frozen=True)
class GpuProcess:
    """A process in which JAX may use GPUs.

    Attributes:
        gpus: names of the GPUs that the process sees, as in CUDA_VISIBLE_DEVICES; empty for all.
        given: share of the GPUs' memory that the user has set; None if jaxinfer chooses it.
    """

    gpus: Sequence[str]
    given: float | None


def gpu_processes(config: ClusterConfig, has_gpus: bool) -> dict[str, GpuProcess]:
    """Return this host's processes that will use GPUs, by the names of their groups.

    Args:
        has_gpus: whether groups without a ``platform`` use GPUs.

    Raises:
        JaxinferError: a share set by the user is not a number.
    """
    found = {}
    for name, group in config.groups.items():
        if group.host or group.ray or not (group.platform == "gpu" or has_gpus):
            continue
        process = name if group.process else HERE
        if group.platform == "cpu" or (process == HERE and has_started()):
            continue
        environment = {**os.environ, **group.environment}
        if environment.get("JAX_PLATFORMS") == "cpu":
            continue
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
        found[process] = GpuProcess(gpus, _given(name, environment))
    return found


def on_same_gpus(config: ClusterConfig) -> ClusterConfig:
    """Treat groups whose processes see the same GPUs as groups of one process that share them."""
    first: dict[str, str] = {}
    groups = {}
    for name, group in config.groups.items():
        gpus = group.environment.get("CUDA_VISIBLE_DEVICES", "") if group.process else ""
        if gpus and first.setdefault(gpus, name) != name:
            shared = {"shares": first[gpus], "platform": None, "kind": None, "process": None}
            group = group.model_copy(update=shared)
        groups[name] = group
    return config.model_copy(update={"groups": groups})


def _given(group: str, environment: Mapping[str, str]) -> float | None:
    for setting in SETTINGS:
        if value := environment.get(setting):
            try:
                return float(value)
            except ValueError:
                where = f"groups.{group}.environment.{setting}"
                raise JaxinferError(f"{where} is {value!r}, must be a number up to 1") from None
    return None


def divide(processes: Mapping[str, GpuProcess], free: Mapping[str, float]) -> dict[str, float]:
    """Return the share of GPU memory for each process that shares a GPU with another.

    Processes divide ``SHARE`` of the free memory. Shares set by the user are subtracted, and the
    rest is divided evenly. A process has one share for all its GPUs: the smallest of them.

    Args:
        free: free share of each GPU's memory, by name; a missing GPU counts as free.

    Raises:
        JaxinferError: nothing is left for a process.
    """
    found = {}
    for name, process in processes.items():
        if process.given is not None:
            continue
        shares = [
            _share(gpu, sharers, free)
            for gpu in _seen(process, free)
            if len(sharers := _sharers(gpu, processes, free)) > 1
        ]
        if not shares:
            continue
        # Rounded down to whole percents, as for a process that has a GPU alone.
        found[name] = share = math.floor(100 * min(shares)) / 100
        if share <= 0:
            raise JaxinferError(
                f"{_called(name)}: nothing is left of its GPUs' memory, of which "
                f"{SETTINGS[0]} gives others all; give them less"
            )
    return found


def _share(gpu: str, sharers: Collection[GpuProcess], free: Mapping[str, float]) -> float:
    given = [each.given for each in sharers if each.given is not None]
    return (SHARE * free.get(gpu, 1.0) - sum(given)) / (len(sharers) - len(given))


def _seen(process: GpuProcess, free: Mapping[str, float]) -> Sequence[str]:
    return process.gpus or [*free] or ["0"]


def _sharers(
    gpu: str, processes: Mapping[str, GpuProcess], free: Mapping[str, float]
) -> list[GpuProcess]:
    return [each for each in processes.values() if gpu in _seen(each, free)]


def _called(name: str) -> str:
    return f"group {name}'s process" if name else "this process"


class GpuShares:
    """The shares of GPU memory that the processes of a cluster are told to take.

    Attributes:
        of: share by process, ``HERE`` for this one; only for processes that share a GPU.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.of: Mapping[str, float] = {}
        if any(group.process for group in config.groups.values()):
            free = free_shares()
            self.of = divide(gpu_processes(config, bool(free)), free)

    def environment(self, group: str) -> dict[str, str]:
        """Return additional environment variables for a group's process."""
        share = self.of.get(group)
        return {} if share is None else {SETTINGS[0]: f"{share:.2f}"}

    def lines(self) -> Iterator[str]:
        """Yield lines that tell the user which share each process takes."""
        if self.of:
            each = ", ".join(f"{_called(name)} {share:.0%}" for name, share in self.of.items())
            yield (
                f"of the memory of GPUs that several processes see, JAX takes: {each}; "
                f"{SETTINGS[0]} in a group's environment sets another share"
            )
