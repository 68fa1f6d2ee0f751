"""Instances that fail in the midst of a run: their requests go on elsewhere, or say why not."""

import gc
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from failure_cases import (
    CRONUS,
    INSTANCE,
    PARAMS,
    PROMPTS,
    break_device,
    break_gathers,
    cluster,
    tokens,
)
from waiting import wait_until

from jaxinfer import LLM, JaxinferError
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import RunFile
from jaxinfer.runtime.kv.channel import Channel
from jaxinfer.runtime.worker import Worker
from jaxinfer.runtime.world import RealWorld

SHARES = {"name": "data_parallel", "shares": {n: {"weight": 1, "max_waiting": 2} for n in "ab"}}


def break_launch(llm: LLM, name: str, after: int) -> None:
    worker = llm.cluster.engines[name].worker
    launch, calls = worker.launch, iter(range(10**6))

    def failing(*args: Any) -> None:
        if next(calls) >= after:
            raise RuntimeError("injected")
        launch(*args)

    worker.launch = failing  # type: ignore[method-assign]


# Instances that hang.
HUNG: set[str] = set()


@pytest.fixture(autouse=True)
def quick_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs is given up at once; a slow one, on a busy machine, is waited for."""
    HUNG.clear()
    quiet_since, patience = RealWorld._quiet_since, RealWorld._patience

    def long_ago(world: RealWorld) -> dict[str, float]:
        found = quiet_since(world)
        return {name: -math.inf if name in HUNG else since for name, since in found.items()}

    monkeypatch.setattr(RealWorld, "_quiet_since", long_ago)
    monkeypatch.setattr(RealWorld, "_patience", lambda world: min(patience(world) or 0.1, 0.1))


def hang(llm: LLM, name: str, after: int) -> None:
    stage, calls = llm.cluster.engines[name].worker.stages[-1], iter(range(10**6))
    end_of = stage.end_of

    def hanging(*args: Any) -> float:
        if next(calls) >= after:
            HUNG.add(name)
            threading.Event().wait()
        return end_of(*args)

    stage.end_of = hanging  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def expected(tiny: LLM) -> list[list[int]]:
    return tokens(tiny.generate(PROMPTS, PARAMS, progress=False))


FAILURES = (break_launch, break_device, hang)
LOSSES = ((CRONUS, "a", 0), (CRONUS, "b", 3), (SHARES, "a", 3), (SHARES, "b", 0))


# Every pair of system, instance and time; each of these with each failure takes longer.
@pytest.mark.parametrize(
    ("system", "lost", "after", "failure"),
    [
        pytest.param(
            *loss,
            failure,
            id=f"{loss[0]['name']}-{loss[1]}-{loss[2]}-{failure.__name__}",
            marks=[pytest.mark.slow] * ((i + j) % 2),
        )
        for i, loss in enumerate(LOSSES)
        for j, failure in enumerate(FAILURES)
    ],
)
def test_requests_are_recomputed_elsewhere(
    tiny_folder: Path,
    tmp_path: Path,
    expected: list[list[int]],
    system: dict[str, Any],
    lost: str,
    failure: Callable[[LLM, str, int], None],
    after: int,
) -> None:
    llm = cluster(tiny_folder, system, "a", "b")
    failure(llm, lost, after)
    outputs = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path)
    assert tokens(outputs) == expected
    run = json.loads((tmp_path / "1" / "run.json").read_text())
    assert list(run["lost"]) == [lost]
    assert "injected" in run["lost"][lost] or "has not reported for 600 s" in run["lost"][lost]
    with pytest.raises(JaxinferError, match=f"instance {lost} was lost, load the model again"):
        llm.generate(PROMPTS, PARAMS, progress=False)


@pytest.mark.parametrize("after", [0, 2])
def test_the_source_dies_between_export_and_arrival(
    tiny_folder: Path, expected: list[list[int]], after: int
) -> None:
    llm = cluster(tiny_folder, CRONUS, "a", "b")
    break_gathers(llm, "a", after)
    assert tokens(llm.generate(PROMPTS, PARAMS, progress=False)) == expected


def test_with_nobody_left_each_request_says_why(tiny_folder: Path) -> None:
    llm = cluster(tiny_folder, CRONUS, "a", "b")
    break_launch(llm, "a", 2)
    break_launch(llm, "b", 2)
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert len(outputs) == len(PROMPTS)
    for output in outputs:
        assert output.error
        assert (
            "was lost, and the system has no other for it: RuntimeError: injected" in output.error
        )
        assert "\n" not in output.error


def test_one_instance_that_hangs_ends_the_batch(tiny_folder: Path) -> None:
    config = RunFile(model=str(tiny_folder), engine=EngineOptions(**INSTANCE))
    llm = LLM.from_config(config, progress=False)
    hang(llm, "engine", 1)
    outputs = llm.generate(PROMPTS[:2], PARAMS, progress=False)
    assert all("has not reported for 600 s" in (output.error or "") for output in outputs)


def test_a_model_that_nobody_has_any_more_is_freed(tiny_folder: Path) -> None:
    """The threads end; with them go parameters, pages and executables."""
    llm = cluster(tiny_folder, CRONUS, "a", "b")
    llm.generate(PROMPTS, PARAMS, progress=False)
    stages = [weakref.ref(stage) for stage in llm.cluster.stages]
    del llm
    wait_until(lambda: gc.collect() >= 0 and not any(stage() for stage in stages))


@pytest.mark.parametrize("part", ["steps of the second instance", "transfers"])
def test_a_load_that_fails_late_leaves_nothing(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """No threads are left, which would keep all they know, nor weights and pages."""
    prepared = iter(("steps of the first instance", "steps of the second instance"))

    def prepare(worker: Worker) -> Iterator[int]:
        if next(prepared) == part:
            raise RuntimeError("injected")
        return iter(())

    def probe(channel: Channel, names: str) -> float:
        raise RuntimeError("injected")

    monkeypatch.setattr(Worker, "prepare", prepare)
    monkeypatch.setattr(Channel, "probe", probe)
    gc.collect()
    threads, arrays = threading.active_count(), len(jax.live_arrays())
    with pytest.raises(RuntimeError, match="injected"):
        cluster(tiny_folder, CRONUS, "a", "b")
    gc.collect()
    # Fewer, where what an earlier test has left hanging has ended meanwhile.
    assert threading.active_count() <= threads
    assert len(jax.live_arrays()) <= arrays
