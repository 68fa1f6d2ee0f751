"""JAX's share of GPUs' memory, chosen before it starts; NVML is a stand-in."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxinfer.runtime.stage import gpu_memory

NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture
def before_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which JAX has not started, and nothing is set."""
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    for name in (NAME, "XLA_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, *free_of: tuple[int, int]) -> None:
    """A stand-in for NVML, with the free and total bytes of each GPU."""

    class Library:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetCount_v2(self, count: Any) -> int:
            count._obj.value = len(free_of)
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, number: int, device: Any) -> int:
            device._obj.value = number + 1
            return 0

        def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
            memory._obj.free, memory._obj.total = free_of[device.value - 1]
            return 0

        def nvmlShutdown(self) -> int:
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def chosen(fraction: float | None = None) -> str | None:
    with gpu_memory.share_chosen(fraction):
        return os.environ.get(NAME)


def test_what_is_free(
    before_jax: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounded down: 95 % of 79 / 80, and of half."""
    pretend(monkeypatch, (79, 80))
    assert chosen() == "0.93"
    assert capsys.readouterr().err == (
        "jaxinfer: JAX takes 93% of each GPU's memory, 95% of what is free; "
        f"{NAME} sets another share\n"
    )
    assert NAME not in os.environ
    pretend(monkeypatch, (80, 80), (40, 80))
    assert chosen() == "0.47"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert chosen() == "0.95"


def test_a_share_beside_other_processes(
    before_jax: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, (79, 80))
    assert chosen(0.31) == "0.31"
    assert capsys.readouterr().err == (
        "jaxinfer: JAX takes 31% of each GPU's memory, beside other processes; "
        f"{NAME} sets another share\n"
    )


@pytest.mark.parametrize("name", [NAME, "XLA_CLIENT_MEM_FRACTION"])
def test_what_the_user_has_set_stays(
    before_jax: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    pretend(monkeypatch, (80, 80))
    monkeypatch.setenv(name, ".5")
    assert chosen() == (".5" if name == NAME else None)
    assert os.environ[name] == ".5"
    assert not capsys.readouterr().err


def test_nothing_is_set_without_nvml_or_once_jax_has_started(
    before_jax: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert chosen() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 1))
    assert chosen() is None
    pretend(monkeypatch, (80, 80))
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: True)
    assert chosen() is None
    assert not capsys.readouterr().err


def test_a_gpu_that_nvml_does_not_know_keeps_jax_s_share(
    before_jax: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    assert chosen() is None
    assert capsys.readouterr().err == (
        "jaxinfer: JAX takes its own share of each GPU's memory, since NVML does not tell what is "
        f"free; {NAME} sets another share\n"
    )


def test_nothing_is_said_where_jax_has_no_gpu(
    before_jax: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, (80, 80))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    chosen()
    assert not capsys.readouterr().err
