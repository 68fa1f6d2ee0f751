"""Pools lent to a stage in another process: who is asked when, and whose memory it is."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import AttentionConfig, StageConfig
from jaxinfer.models.config import ModelConfig, Rope
from jaxinfer.models.stage import Layers
from jaxinfer.runtime import worker_process
from jaxinfer.runtime.kv.sockets import LOOPBACK, Address
from jaxinfer.runtime.processes.messages import Borrow, Left, Loaded, Refused
from jaxinfer.runtime.processes.process_group import OtherProcesses
from jaxinfer.runtime.stage import stage_plan as plans
from jaxinfer.runtime.stage.stage_plan import AttentionPlan, make_plan

# Two layers, 2 KV heads of 8: a page of 16 tokens takes 2 KiB for each head.
MODEL = ModelConfig(
    "LlamaForCausalLM", 20, 16, 32, 2, 4, 2, 8, 100, 1e-5, False, None, (), (None, None),
    Rope((1.0,) * 4),
)  # fmt: skip
PAGE = 2048


class Host:
    """A host's memory, and what its processes do, in order."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.done: list[str] = []


class Lender:
    """A process that lends: what it is asked for is begun at once, and done when it is heard."""

    peer: Any = SimpleNamespace(way=None)

    def __init__(self, name: str, host: Host, patch: pytest.MonkeyPatch, devices: int) -> None:
        self.name, self._host, self._patch = name, host, patch
        self._worker = worker_process.WorkerProcess(SimpleNamespace(), 0)  # type: ignore[arg-type]
        self._worker._groups = {name: GroupConfig(platform="cpu", devices=devices)}

    def ask(self, message: Any) -> Iterator[Any]:
        said: list[Any] = []
        taken: list[int] = []

        class Pool:
            address = Address(LOOPBACK, 1, self.name.encode())

            def __init__(self, plan: Any, number: int, host: str) -> None:
                taken.append(plan.attention[number].kv_bytes)

            part = "attention"

            def compile_ahead(self) -> Iterator[int]:
                yield from (2, 0)

        self._patch.setattr(worker_process, "PoolServer", Pool)
        self._patch.setattr(self._worker, "_say", said.append)
        self._host.done.append(f"{type(message).__name__} {self.name}")
        self._worker._attempt(message)

        def answers() -> Iterator[Any]:
            self._host.free -= sum(taken)
            for each in said:
                if isinstance(each, Refused):
                    raise JaxinferError(f"groups.{self.name}: {each.line}")
                yield each

        return answers()


def lend(host: Host, patch: pytest.MonkeyPatch, pages: dict[str, int], devices: int = 1) -> Any:
    """Have groups lend pools of the given pages to a stage, and return the stage's plan.

    Args:
        devices: of each group.
    """
    patch.setattr(plans, "available_memory", lambda: host.free)
    options = EngineOptions(page_size=16, max_num_seqs=4, num_pages=2)
    plan = make_plan(MODEL, options, jax.devices()[:1], Layers(0, 2, 2), 0, is_spread=True)
    attention = tuple(
        AttentionPlan(name, None, count, devices=devices, number=number)
        for name, count in pages.items()
        for number in range(devices)
    )
    stage = StageConfig(group="p", attention=tuple(AttentionConfig(group=name) for name in pages))
    config = ClusterConfig(
        groups={name: GroupConfig(process="own") for name in ("p", *pages)},
        instances={"x": InstanceConfig(stages=(stage,), enable_prefix_caching=False)},
    )
    others = OtherProcesses(config, "model", {})
    lenders: Any = {name: Lender(name, host, patch, devices) for name in pages}
    others._processes = lenders
    borrowed: list[Borrow] = []

    def borrow(message: Borrow) -> Iterator[Left]:
        borrowed.append(message)
        return iter([Left("pools", 0)])

    process: Any = SimpleNamespace(ask=borrow)
    loaded = Loaded({"x": [replace(plan, attention=attention).facts]}, {}, {})
    told: list[tuple[str, int]] = []
    _, loaded = others.lend("x", "p", process, loaded, lambda *left: told.append(left))
    owners = [name for name in pages for _ in range(devices)]
    assert [(each.number, each.address.key.decode()) for each in borrowed] == [*enumerate(owners)]
    left = [more + some for more in reversed(range(devices)) for some in (2, 0)]
    assert told == [(f"{name}: compiling attention", some) for name in pages for some in left]
    return loaded.plans["x"][0]


def test_all_take_their_memory_before_any_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(2**20)
    plan = lend(host, monkeypatch, {"a": 7, "b": 9})
    assert [place.kv_bytes for place in plan.attention] == [13 * PAGE, 17 * PAGE]
    assert host.free == 2**20 - 30 * PAGE
    assert host.done == ["Lend a", "Lend b", "OpenPools a", "OpenPools b"]


def test_pools_on_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone would fit, and the two of them just do; not another page."""
    half = 128
    free = (2 * (half - 1) + 1 + 2 * half + 1) * PAGE
    assert lend(Host(free), monkeypatch, {"a": half, "b": half + 1})
    too_much = rf"^groups\.b: attention group b: num_pages {half + 1} of 16 tokens takes 0\.0"
    with pytest.raises(JaxinferError, match=too_much):
        lend(Host(free - 1), monkeypatch, {"a": half, "b": half + 1})


def test_devices_of_one_group_have_equal_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three devices share twelve pages of a head, four each, and have one for padding."""
    host = Host(2**20)
    plan = lend(host, monkeypatch, {"a": 7}, devices=3)
    assert [place.kv_bytes for place in plan.attention] == [5 * PAGE] * 3
    assert [place.device.id for place in plan.attention] == [0, 1, 2]
    assert (plan.pool_pages, host.free) == ([3, 5, 5, 5], 2**20 - 15 * PAGE)
    assert host.done == ["Lend a", "Lend a", "Lend a", "OpenPools a"]
    too_few = r"^groups\.a: attention group a: num_pages 2 makes 2 pages of one KV head, its 3 devi"
    with pytest.raises(JaxinferError, match=too_few):
        lend(host, monkeypatch, {"a": 2}, devices=3)
