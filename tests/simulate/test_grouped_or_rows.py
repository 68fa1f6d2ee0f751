"""Decodes that are advanced together give what a row for each gives, in every system.

So do their steps where they follow each other in runs, to the last byte of all files.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from random_runs import random_run
from same_runs import compare_runs

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.ledger.ledger_file import NAME, read_ledger
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.run import prepare, serve, simulate
from jaxinfer.simulate.world import SimulatedWorld
from jaxinfer.systems.registry import SYSTEMS
from jaxinfer.workload.bench_request import BenchRequest

# KV heads in several places cannot be shared, and have no linear times.
CACHES = [system for system in SYSTEMS if system != "hetis"]


def outcome(
    data: dict[str, Any], work: Sequence[BenchRequest], folder: Path
) -> tuple[dict[str, list[Any]], int]:
    """Return what a run came to, in order, and how many of its decodes had no row."""
    cluster = prepare(as_run_file(data | {"ledger": True}))
    requests: list[Any] = []
    steps: list[Any] = []
    grouped = 0

    def on_request(request: RequestState, times: Sequence[float]) -> None:
        metrics = request.metrics
        counts = metrics.num_preemptions, metrics.cut, metrics.num_cached_tokens
        scheduled = metrics.first_scheduled, *counts
        requests.append((request.id, list(times), request.finish_reason, scheduled))

    def on_step(step: StepDone) -> None:
        nonlocal grouped
        batch = step.batch
        grouped += batch.grouped
        there = batch.num_waiting, batch.num_running, batch.pages_in_use
        steps.append((step.instance, step.start, step.end, batch.work, there))

    error = None
    try:
        serve(cluster, work, folder, on_request, on_step=on_step, in_runs=False)
    except JaxinferError as found:  # One that no pool holds, in both alike.
        error = str(found)
    (ledger,) = folder.rglob(NAME)
    # Of a step, a ledger has the rows; all else is the same.
    decided = [(k, v[:2] if k == "batch" else v) for k, v, _ in read_ledger(ledger)]
    return {"requests": requests, "steps": steps, "decided": decided, "error": [error]}, grouped


def compare(data: dict[str, Any], work: Sequence[BenchRequest], folder: Path, said: str) -> int:
    """Run with decodes in groups and as rows; return how many decodes were in groups."""
    one, grouped = outcome(data, work, folder / "groups")
    with pytest.MonkeyPatch.context() as patch:
        kind = type(prepare(as_run_file(data)).resolved.new_system())
        patch.setattr(kind, "needs_decode_rows", True)
        other, rows = outcome(data, work, folder / "rows")
    assert rows == 0
    for what in one:
        assert one[what] == other[what], f"{said}: other {what}"
    return grouped


@pytest.mark.parametrize("system", SYSTEMS)
def test_some_runs_of_each_system(system: str, tmp_path: Path) -> None:
    grouped = [
        compare(*random_run(system, seed), tmp_path / str(seed), f"{system}, seed {seed}")
        for seed in range(5)
    ]
    # KV heads in several places have rows.
    assert (max(grouped) > 0) == (system != "hetis")


def with_shared_prompts(
    data: dict[str, Any], work: Sequence[BenchRequest], seed: int
) -> tuple[dict[str, Any], list[BenchRequest]]:
    """The same with prefix caching, and prompts that begin alike, by tokens or names of blocks."""
    rng = Random(seed)
    begins = [[rng.randint(0, 2) for _ in range(400)] for _ in range(3)]
    changes: list[dict[str, Any]] = []
    for item in work:
        which = rng.randrange(len(begins))
        by_name = {"hash_ids": (which,)}
        changes.append(
            by_name if seed % 2 else {"prompt_token_ids": begins[which][: item.prompt_len]}
        )
    engine = data["engine"] | {"enable_prefix_caching": True}
    shared = [replace(item, **change) for item, change in zip(work, changes, strict=True)]
    return data | {"engine": engine}, shared


@pytest.mark.parametrize("system", SYSTEMS)
def test_some_runs_of_steps(system: str, tmp_path: Path) -> None:
    for seed in range(2):
        data, work = random_run(system, seed)
        compare_runs(as_run_file(data), work, tmp_path / str(seed), f"{system}, seed {seed}")


@pytest.mark.parametrize("system", CACHES)
def test_some_runs_with_shared_prompts(system: str, tmp_path: Path) -> None:
    for seed in range(2):
        data, work = with_shared_prompts(*random_run(system, seed), seed)
        compare(data, work, tmp_path / str(seed), f"{system}, seed {seed}")
        compare_runs(as_run_file(data), work, tmp_path / f"runs {seed}", f"{system}, seed {seed}")


def with_equal_times(
    data: dict[str, Any], work: Sequence[BenchRequest]
) -> tuple[dict[str, Any], list[BenchRequest]]:
    """The same with steps of 1/128 s and arrivals at multiples of it: steps end together."""
    costs = data.get("simulate", {}) | {"linear": {"step_s": 1 / 128}}
    grid = [replace(item, arrival=round(item.arrival * 16) / 16) for item in work]
    return data | {"simulate": costs}, grid


@pytest.mark.parametrize("system", CACHES)
def test_some_runs_whose_steps_end_together(system: str, tmp_path: Path) -> None:
    for seed in range(3):
        data, work = with_equal_times(*random_run(system, seed))
        compare_runs(as_run_file(data), work, tmp_path / str(seed), f"{system}, seed {seed}")


def test_steps_that_end_together_are_in_runs() -> None:
    """Four instances of equal speed start at once, and one of them ends its requests earlier."""
    names = [f"i{number}" for number in range(4)]
    data = {
        "model": "llama-3-8b",
        "engine": {"page_size": 16, "num_pages": 400, "max_model_len": 600},
        "groups": {name: {"kind": "A10"} for name in names},
        "instances": {name: {"group": name} for name in names},
        "system": {"name": "least_loaded"},
        "simulate": {"linear": {"step_s": 1 / 128}},
    }
    work = [BenchRequest(None, 30, 200 if n % 4 else 90, 0.0) for n in range(16)]
    with pytest.MonkeyPatch.context() as patch:
        rounds = []
        launch = SimulatedWorld.launch
        patch.setattr(SimulatedWorld, "launch", lambda *given: rounds.append(launch(*given)))
        found = simulate(as_run_file(data), work)
    assert found.steps == 3 * 200 + 90
    assert len(rounds) < 40


def many_seeds() -> list[Any]:
    """Each system with a few seeds as a slow test, and with many more as a long one."""
    slow, long = pytest.mark.slow, pytest.mark.long
    cases = [pytest.param(system, range(5, 13), marks=slow, id=system) for system in SYSTEMS]
    for system in SYSTEMS:
        seeds = range(13, 205 if system == "takeover" else 45)
        cases.append(pytest.param(system, seeds, marks=long, id=f"{system}, more"))
    return cases


@pytest.mark.parametrize(("system", "seeds"), many_seeds())
def test_many_runs_of_each_system(system: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        said, given = f"{system}, seed {seed}", random_run(system, seed)
        runs = [given, with_shared_prompts(*given, seed)] if system in CACHES else [given]
        if system in CACHES and seed < 15:
            runs.append(with_equal_times(*runs[-1]))
        for number, (data, work) in enumerate(runs):
            folder = tmp_path / f"{seed} {number}"
            compare(data, work, folder, f"{said}, {number}")
            compare_runs(as_run_file(data), work, folder / "runs", f"{said}, {number}")
