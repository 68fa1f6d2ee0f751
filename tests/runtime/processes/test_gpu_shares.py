"""The memory of GPUs that several processes see: shares by hand; NVML is a stand-in."""

from collections.abc import Mapping
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.runtime.processes import gpu_shares
from jaxinfer.runtime.processes.gpu_shares import GpuProcess, GpuShares, divide

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def seen(*gpus: str, given: float | None = None) -> GpuProcess:
    return GpuProcess(gpus, given)


@pytest.mark.parametrize(
    ("processes", "free", "shares"),
    [
        # 95 % of what is free, in two and in three, down to whole percents.
        ({"a": seen("0"), "b": seen("0")}, {"0": 1.0}, {"a": 0.47, "b": 0.47}),
        (
            {"a": seen("0"), "b": seen("0"), "": seen("0")},
            {"0": 0.8},
            dict.fromkeys(["a", "b", ""], 0.25),
        ),
        # Each alone: they choose by themselves.
        ({"a": seen("0"), "b": seen("1")}, {"0": 1.0, "1": 1.0}, {}),
        # One that sees all, of which the fullest has 0.95 x 0.6 for two.
        ({"a": seen(), "b": seen("1")}, {"0": 0.9, "1": 0.6}, {"a": 0.28, "b": 0.28}),
        # a sees two others' GPUs; b and c do not see each other's.
        (
            {"a": seen("0", "1"), "b": seen("0"), "c": seen("1")},
            {"0": 1.0, "1": 0.5},
            {"a": 0.23, "b": 0.47, "c": 0.23},
        ),
        # What one has been given comes off.
        ({"a": seen("0", given=0.6), "b": seen("0")}, {"0": 1.0}, {"b": 0.35}),
        ({"a": seen("0", given=0.3), "b": seen("0", given=0.6)}, {"0": 1.0}, {}),
        # Without NVML, or by a name that it does not have, all of it is taken as free.
        ({"a": seen(), "b": seen()}, {}, {"a": 0.47, "b": 0.47}),
        ({"a": seen("GPU-1"), "b": seen("GPU-1")}, {"0": 0.1}, {"a": 0.47, "b": 0.47}),
    ],
)
def test_division(
    processes: dict[str, GpuProcess], free: Mapping[str, float], shares: dict[str, float]
) -> None:
    assert divide(processes, free) == shares


def test_nothing_left() -> None:
    with pytest.raises(
        JaxinferError, match=r"^group b's process: nothing is left of its GPUs' mem"
    ):
        divide({"a": seen("0", given=0.95), "b": seen("0")}, {"0": 1.0})


def cluster(*, here: str = "gpu", **environments: dict[str, str]) -> ClusterConfig:
    """A group of each environment, with a process, and one of this process."""
    groups: dict[str, Any] = {
        name: {"platform": "gpu", "process": "own", "environment": environment}
        for name, environment in environments.items()
    }
    groups["here"] = {"platform": here}
    instances = {name: {"group": name} for name in groups}
    return ClusterConfig.model_validate({"groups": groups, "instances": instances})


ZERO, ONE = {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has not started; all of two GPUs' memory is free."""
    monkeypatch.setattr(gpu_shares, "free_shares", lambda: {"0": 1.0, "1": 1.0})
    monkeypatch.setattr(gpu_shares, "has_started", lambda: False)
    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)


def test_processes_are_told_before_they_start() -> None:
    shares = GpuShares(cluster(here="cpu", a=ZERO, b=ZERO, c=ONE))
    assert shares.environment("a") == shares.environment("b") == {FRACTION: "0.47"}
    assert shares.environment("c") == {}
    assert list(shares.lines()) == [
        "of the memory of GPUs that several processes see, JAX takes: group a's process 47%, "
        f"group b's process 47%; {FRACTION} in a group's environment sets another share"
    ]


def test_the_loop_s_process_counts_until_it_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuShares(cluster(a=ZERO)).of == {"a": 0.47, "": 0.47}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert GpuShares(cluster(a=ZERO)).of == {}
    monkeypatch.undo()
    monkeypatch.setattr(gpu_shares, "free_shares", lambda: {"0": 0.5})
    monkeypatch.setattr(gpu_shares, "has_started", lambda: True)
    assert GpuShares(cluster(a=ZERO)).of == {}


def test_what_has_no_gpu_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuShares(cluster(here="cpu", a=ZERO, b=ZERO | {"JAX_PLATFORMS": "cpu"})).of == {}
    given = GpuShares(cluster(here="cpu", a=ZERO | {FRACTION: ".2"}, b=ZERO))
    assert given.of == {"b": 0.75}
    assert given.environment("a") == {}
    with pytest.raises(
        JaxinferError, match=r"^groups\.a\.environment\.XLA.* is 'x', must be a num"
    ):
        GpuShares(cluster(a=ZERO | {FRACTION: "x"}))
    monkeypatch.setattr(gpu_shares, "free_shares", dict)
    groups = {name: {"process": "own"} for name in "ab"}
    instances = {name: {"group": name} for name in "ab"}
    made = ClusterConfig.model_validate({"groups": groups, "instances": instances})
    assert GpuShares(made).of == {}
