"""Pipelines whose stages stand in several processes: tokens, hand-offs, losses, what is left."""

import gc
import os
import random
import signal
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import shifted_worker
from cluster_cases import RULES, Case, Loader, Pair, Side, Way, free_executables, load, roomy
from cluster_checks import REQUESTS, Done, Ran, check_case, serve
from host_cases import KEY, jobs, listening
from process_cases import (
    SILENT,
    SYSTEMS,
    call_silent_who_is_stopped,
    check_nothing_left,
    children,
    serve_struck,
    serve_until,
)
from waiting import wait_until

from jaxinfer import JaxinferError
from jaxinfer.runtime.kv.kv_messages import Offer, Place, Pull
from jaxinfer.runtime.processes.messages import Launch
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker

SHIFTED = (sys.executable, shifted_worker.__file__)


def pipeline(*stages: tuple[int, int], **options: Any) -> dict[str, Any]:
    """Return groups and one instance; each stage has its devices, layers and a process."""
    groups = {
        f"s{number}": {"devices": devices, "process": "own"}
        for number, (devices, _) in enumerate(stages)
    }
    places = [{"group": f"s{n}", "layers": layers} for n, (_, layers) in enumerate(stages)]
    return {"groups": groups, "instances": {"b": {"stages": places} | roomy(8) | options}}


@dataclass(frozen=True)
class Divided(Pair):
    """A pair of which ``b`` has each of its stages in a process of its own.

    ``devices``: of each stage.
    """

    devices: tuple[int, ...] = ()

    @property
    def sections(self) -> dict[str, Any]:
        found = super().sections
        b = found["instances"].pop("b")
        options = {name: b[name] for name in ("page_size", "num_pages", "segments")}
        stages = zip(self.devices, self.b.stages, strict=True)
        divided = pipeline(*stages, **options)
        groups = {"a": found["groups"]["a"]} | divided["groups"]
        return {"groups": groups, "instances": found["instances"] | divided["instances"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        ((1, 1), (2, 3)),
        ((2, 1), (1, 2), (2, 1)),
        pytest.param(((1, 2), (1, 2)), marks=pytest.mark.long),
        pytest.param(((2, 3), (1, 1)), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_process(
    stages: Any, models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Greedy and drawn; a stage has a step while the one after it has the step before."""
    sections = pipeline(*stages) | {"system": {"name": "least_loaded"}}
    before = children()
    llm = load(models["two"], tmp_path, **sections)
    assert len(children() - before) == len(stages)
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    ran = Ran.last(tmp_path / "runs")
    assert ran.metrics["late_compiles"] == 0
    steps = [step.stages for step in ran.record.steps]
    assert all(len(step) == len(stages) for step in steps)
    assert all(one[1] <= other[0] for step in steps for one, other in pairwise(step))
    assert any(later[0][0] < sooner[-1][1] for sooner, later in pairwise(steps))
    del llm
    gc.collect()
    wait_until(lambda: not children() - before)


@pytest.mark.slow
def test_samplers_are_compiled_when_new_options_come(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Only the last process samples: drawn requests, after greedy ones, need more of it."""
    sections = pipeline((1, 2), (1, 2)) | {"system": {"name": "least_loaded"}}
    llm = load(models["two"], tmp_path, **sections)
    worker: Any = llm.cluster.engines["b"].worker
    compiles, samplers = [], []
    for every in (2, 1, 1):
        found = serve(llm, REQUESTS[::every], run_dir=tmp_path / "runs")
        assert found == expected["two"][::every]
        metrics = Ran.last(tmp_path / "runs").metrics
        assert metrics["late_compiles"] == 0
        compiles.append([stage.step.compiles for stage in worker.stages])
        samplers.append(worker.sampler)
    assert samplers[0] != samplers[1] == samplers[2]
    assert samplers[1] == samplers[0].widened(samplers[1])
    (first, last), after, again = compiles
    assert after[0] == first
    assert after[1] > last
    assert again == after


@pytest.mark.slow
def test_stages_and_links_that_are_slowed_down(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Stages begin when the hidden states would have come by the link."""
    sections = pipeline((1, 2), (1, 2), max_num_seqs=2)
    for group in sections["groups"].values():
        group |= {"platform": "cpu", "emulate": {"slowdown": 3}}
    sections["links"] = [{"between": ["s0", "s1"], "gb_s": 1, "latency_s": 0.02}]
    llm = load(models["two"], tmp_path, **sections, system={"name": "least_loaded"})
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    steps = [step.stages for step in Ran.last(tmp_path / "runs").record.steps]
    assert all(later[0] - sooner[1] >= 0.02 for sooner, later in steps)


@pytest.mark.slow
def test_a_stage_on_another_host(
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stage's times are by the loop's clock, not its own; hidden states come by its name."""
    monkeypatch.setenv("JAXINFER_KEY", KEY)
    sections = pipeline((1, 2), (1, 2))
    with listening(command=SHIFTED) as (address, server):
        sections["groups"]["s0"] = {"host": address}
        llm = load(models["two"], tmp_path, **sections, system={"name": "least_loaded"})
        assert len(jobs(server)) == 1
        assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
        steps = [step.stages for step in Ran.last(tmp_path / "runs").record.steps]
        # The shortest round trip says how far the clocks may be apart: far less than they are.
        assert all(-1 < sooner[1] <= later[0] + 1 < 600 for sooner, later in steps)
        del llm
        gc.collect()
        wait_until(lambda: not jobs(server))


TWO = Divided("three", Side(2, 16), Side(1, 8, (1, 3), segments=1), devices=(1, 2))
THREE = Divided("two", Side(1, 32), Side(2, 8, (1, 2, 1)), apart="a", devices=(2, 1, 2))
WAYS = [
    ("cronus_a_b", 31, "at_end", "", "twice"),
    ("cronus_a_b", 0.98, "per_segment", "b", "off"),
    ("cronus_a_b", 33, "on_demand", "", "on"),
    ("cronus_a_b", 32, "per_chunk", "a", "off"),
    ("disaggregated_b_a", None, "per_segment", "", "off"),
    ("disaggregated_b_a", None, "at_end", "b", "on"),
    ("data_parallel", None, "", "b", "on"),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way(*way) for way in WAYS], ids=str)
@pytest.mark.parametrize("pair", [TWO, pytest.param(THREE, marks=pytest.mark.long)], ids=str)
def test_kv_comes_and_goes_by_all_rules(
    pair: Pair, way: Way, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    check_case(Case(pair, way), loader.pair(pair), expected[pair.heads], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "stage", "by", "step"),
    [
        ("cronus", 0, signal.SIGKILL, 9),
        ("cronus", 1, signal.SIGSTOP, 20),
        pytest.param("disaggregated", 1, signal.SIGKILL, 17, marks=pytest.mark.long),
        pytest.param("least_loaded", 0, signal.SIGSTOP, 7, marks=pytest.mark.long),
    ],
)
def test_who_loses_a_stage_loses_the_instance(
    system: str,
    stage: int,
    by: signal.Signals,
    step: int,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other instance serves all; the processes of all its stages are ended."""
    call_silent_who_is_stopped(monkeypatch)
    before = children()
    pair = Divided("two", Side(1, 8), Side(1, 16, (2, 2)), devices=(1, 1))
    sections = pair.sections | {"system": SYSTEMS[system]}
    llm = load(models["two"], tmp_path, **sections)
    worker = llm.cluster.engines["b"].worker
    assert isinstance(worker, PipelineWorker)
    pids = [process.peer.pid for process in worker.processes]  # type: ignore[attr-defined]
    assert children() - before == set(pids)
    found, run = serve_until(llm, step, lambda: os.kill(pids[stage], by), tmp_path / "runs")
    assert found == expected["two"]
    why = f"was ended by signal {by}" if by == signal.SIGKILL else SILENT
    lost = f"ProcessLost: process of group s{stage} (pid {pids[stage]}) {why}"
    assert run["lost"] == {"b": lost}
    check_nothing_left(llm, ["b"])
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    with pytest.raises(JaxinferError, match="instance b was lost, load the model again"):
        serve(llm)
    del llm, worker
    gc.collect()
    wait_until(lambda: not children() - before)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_pipeline_whose_stage_is_lost_is_started_again(
    stage: int, models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """All of its processes are new; KV comes to them, and hidden states go between them."""
    before = children()
    pair = Divided("two", Side(1, 8), Side(1, 16, (2, 2)), devices=(1, 1))
    sections = pair.sections | {"system": SYSTEMS["disaggregated"], "verify_transfers": True}
    for name in ("s0", "s1"):
        sections["groups"][name]["restart"] = 1
    llm = load(models["two"], tmp_path, **sections)
    assert llm.cluster.restarts
    home = llm.cluster.restarts._homes["s0 and s1"]
    pids = [process.peer.pid for process in home.processes.values()]  # type: ignore[attr-defined]

    def kill_and_wait() -> None:
        os.kill(pids[stage], signal.SIGKILL)
        wait_until(lambda: home.news)

    found, run = serve_until(llm, 9, kill_and_wait, tmp_path / "runs")
    assert found == expected["two"]
    assert run["lost"] == {}
    (restart,) = run["restarts"]
    assert (restart["group"], restart["instances"]) == ("s0 and s1", ["b"])
    assert (restart["error"], run["metrics"]["late_compiles"]) == (None, 0)
    why = f"process of group s{stage} (pid {pids[stage]}) was ended by signal 9"
    assert restart["why"].endswith(why)  # Or by way of the other, which ends with it.
    check_nothing_left(llm)
    assert not {*pids} & children()
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    assert Ran.last(tmp_path / "runs").instances == {"a", "b"}
    del llm
    free_executables()
    wait_until(lambda: not children() - before)


def moments(stage: int, count: int) -> list[Any]:
    """Right after so large a share of the messages of one kind that a run takes; the hand-off."""
    rng = random.Random(stage)
    return [
        (
            rng.choice((Launch, Offer, Pull, Place)),
            rng.uniform(0, 0.8),
            signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL,
            RULES[number % len(RULES)],
        )
        for number in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("draws", [2, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_stage_dies_at_any_moment(
    stage: int,
    draws: int,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call_silent_who_is_stopped(monkeypatch)
    pair = Divided("two", Side(1, 8), Side(1, 16, (2, 2)), devices=(1, 1))
    before = children()
    noticed = 0
    for kind, share, by, rule in moments(stage, draws):
        system = SYSTEMS["cronus"] | {"hand_off": rule}
        llm = load(models["two"], tmp_path, **pair.sections, system=system, verify_transfers=True)
        pids = [process.peer.pid for process in llm.cluster.engines["b"].worker.processes]
        strike = partial(os.kill, pids[stage], by)
        run = serve_struck(llm, tmp_path / "runs", expected["two"], kind, share, strike)
        why = "was ended by signal 9" if by == signal.SIGKILL else SILENT
        lost = f"ProcessLost: process of group s{stage} (pid {pids[stage]}) {why}"
        assert run["lost"] in ({}, {"b": lost})
        noticed += bool(run["lost"])
        check_nothing_left(llm, run["lost"])
        if run["lost"]:
            wait_until(lambda pids=pids: not any(map(psutil.pid_exists, pids)))
        del llm
        free_executables()
        wait_until(lambda: not children() - before)
    assert noticed
