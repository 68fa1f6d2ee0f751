"""Processes that are lost and started again: tokens, who takes work again, and what is left."""

import gc
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attention_restarts import Return
from cluster_cases import Pair, Side, free_executables, load
from cluster_checks import Done, Ran, serve
from host_cases import KEY, elsewhere, jobs, listening
from process_cases import SYSTEMS, check_nothing_left, children, pid_of, serve_once
from waiting import wait_until

from jaxinfer import LLM, JaxinferError
from jaxinfer.runtime.processes.messages import Launch
from jaxinfer.runtime.processes.remote_worker import RemoteWorker
from jaxinfer.runtime.processes.restarts import Restarts
from jaxinfer.serving.world import StepDone

PAIR = Pair("two", Side(1, 8), Side(2, 16), apart="b")


def restartable(
    model: Path, folder: Path, times: int, system: dict[str, Any], **more: Any
) -> tuple[LLM, Restarts]:
    sections = PAIR.sections | {"system": system} | more
    sections["groups"]["b"]["restart"] = times
    llm = load(model, folder, **sections)
    assert llm.cluster.restarts
    return llm, llm.cluster.restarts


def kill(llm: LLM) -> int:
    pid = pid_of(llm, "b")
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_for_news(restarts: Restarts) -> None:
    wait_until(lambda: restarts._homes["b"].news is not None)


def serve_with(
    llm: LLM, folder: Path, acts: dict[int, Callable[[], object]]
) -> tuple[list[Done], dict[str, Any], list[str]]:
    """Serve the requests, run ``acts`` by ended steps, and return whose steps they were."""
    instances: list[str] = []

    def on_step(done: StepDone) -> None:
        instances.append(done.instance)
        acts.get(len(instances), lambda: None)()

    found, run = serve_once(llm, folder, on_step)
    assert len(instances) > max(acts, default=0)
    return found, run, instances


@pytest.mark.slow
@pytest.mark.parametrize("system", ["disaggregated", "cronus"])
def test_it_takes_work_again_and_the_second_loss_is_for_good(
    system: str, models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    before = children()
    llm, restarts = restartable(models["two"], tmp_path, 1, SYSTEMS[system], verify_transfers=True)
    pids: list[int] = []

    def kill_and_wait() -> None:
        pids.append(kill(llm))
        wait_for_news(restarts)

    found, run, instances = serve_with(llm, tmp_path / "runs", {9: kill_and_wait})
    assert found == expected["two"]
    # Of the lost process, two steps may have been under way.
    assert instances[9:].count("b") > 2
    assert run["lost"] == {}
    (restart,) = run["restarts"]
    assert (restart["group"], restart["instances"], restart["error"]) == ("b", ["b"], None)
    assert restart["why"] == f"process of group b (pid {pids[0]}) was ended by signal 9"
    assert restart["seconds"] > 0
    assert run["metrics"]["late_compiles"] == 0

    found, run, _ = serve_with(llm, tmp_path / "runs", {9: lambda: pids.append(kill(llm))})
    assert found == expected["two"]
    assert pids[1] != pids[0]
    why = f"ProcessLost: process of group b (pid {pids[1]}) was ended by signal 9"
    assert (run["lost"], run["restarts"]) == ({"b": why}, [])
    with pytest.raises(JaxinferError, match="instance b was lost, load the model again"):
        serve(llm)
    wait_until(lambda: children() <= before)


@pytest.mark.slow
def test_one_that_is_lost_between_two_runs(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The instance is back for the next run, with none of the pages that the prefix cache knew.

    And it is waited for in one that begins meanwhile, where all goes by it.
    """
    llm, restarts = restartable(models["two"], tmp_path, 2, SYSTEMS["disaggregated"])
    assert serve(llm) == expected["two"]
    kill(llm)
    wait_for_news(restarts)
    found, run, instances = serve_with(llm, tmp_path / "runs", {})
    assert found == expected["two"]
    assert (run["lost"], len(run["restarts"])) == ({}, 1)
    assert "b" in instances
    assert Ran.last(tmp_path / "runs").record.transfers

    del llm, restarts
    free_executables()


@pytest.mark.slow
def test_who_has_only_that_process_waits(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Also from the beginning of a run; requests are not all read meanwhile."""
    sections = PAIR.sections
    del sections["instances"]["a"], sections["groups"]["a"]
    sections["groups"]["b"]["restart"] = 2
    llm = load(models["two"], tmp_path, **sections, system="single")
    found, run, instances = serve_with(llm, tmp_path / "runs", {9: lambda: kill(llm)})
    assert found == expected["two"]
    assert (set(instances), run["lost"], len(run["restarts"])) == ({"b"}, {}, 1)
    kill(llm)
    assert serve(llm) == expected["two"]
    kill(llm)
    with pytest.raises(JaxinferError, match=r"process of group b .* was ended by signal 9"):
        serve(llm)


@pytest.mark.slow
def test_one_that_cannot_be_started(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    before = children()
    llm, restarts = restartable(models["two"], tmp_path, 2, SYSTEMS["least_loaded"])
    llm.cluster.config.groups["b"].environment["JAX_PLATFORMS"] = "nonsense"

    def kill_and_wait() -> None:
        kill(llm)
        wait_for_news(restarts)

    found, run, _ = serve_with(llm, tmp_path / "runs", {5: kill_and_wait})
    assert found == expected["two"]
    assert list(run["lost"]) == ["b"]
    assert "nonsense" in run["lost"]["b"]
    assert [restart["error"] for restart in run["restarts"]] == [run["lost"]["b"]]
    assert restarts._homes["b"].left == 0
    wait_until(lambda: children() <= before)


@pytest.mark.slow
def test_an_instance_that_fails_takes_those_beside_it_along_and_back(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The process lives, and is told of a step that makes no sense."""
    sections = PAIR.sections
    sections["groups"]["b"] |= {"devices": 2, "tensor_parallel_size": 1, "restart": 1}
    sections["instances"]["c"] = sections["instances"]["b"]
    llm = load(models["two"], tmp_path, **sections, system="least_loaded")
    restarts, worker = llm.cluster.restarts, llm.cluster.engines["b"].worker
    assert restarts
    assert isinstance(worker, RemoteWorker)
    nonsense = Launch("b", 10**6, 0.0, [], [], [(12345, [1])], b"", [])
    acts = {9: lambda: worker.process.send(nonsense), 40: Return(restarts._homes["b"])}
    found, run, _ = serve_with(llm, tmp_path / "runs", acts)
    assert found == expected["two"]
    assert run["lost"] == {}
    (restart,) = run["restarts"]
    assert (restart["instances"], restart["error"]) == (["b", "c"], None)
    assert restart["why"] == "instance b: ProcessLost: KeyError: 12345"
    found, run, instances = serve_with(llm, tmp_path / "runs", {})
    assert found == expected["two"]
    assert {"a", "b", "c"} == set(instances)


@pytest.mark.slow
def test_what_is_closed_while_a_process_is_started_leaves_none(
    models: dict[str, Path], tmp_path: Path
) -> None:
    before = children()
    llm, restarts = restartable(models["two"], tmp_path, 9, SYSTEMS["least_loaded"])
    pid = kill(llm)
    wait_until(lambda: bool(children() - before - {pid}))
    del llm, restarts
    gc.collect()
    wait_until(lambda: not children() - before)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["host", "transfer_server"])
def test_one_of_another_host(
    transport: str,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker there starts another; KV goes to that one, by either transport."""
    monkeypatch.setenv("JAXINFER_KEY", KEY)
    with listening() as (address, server):
        sections = elsewhere(replace(PAIR, apart=""), {"b": address})
        sections["groups"]["b"]["restart"] = 1
        options = {"transport": transport, "verify_transfers": True}
        llm = load(models["two"], tmp_path, system=SYSTEMS["disaggregated"], **sections, **options)
        restarts = llm.cluster.restarts
        assert restarts
        (job,) = jobs(server)

        def kill_and_wait() -> None:
            job.kill()
            wait_for_news(restarts)

        found, run, instances = serve_with(llm, tmp_path / "runs", {9: kill_and_wait})
        assert found == expected["two"]
        assert instances[9:].count("b") > 2
        assert run["lost"] == {}
        (restart,) = run["restarts"]
        why = f"process of group b (at {address}) was ended by signal 9"
        assert (restart["why"], restart["error"]) == (why, None)
        assert run["transports"] == {"a -> b": transport}
        moved = Ran.last(tmp_path / "runs").record.transfers
        assert {(transfer.source, transfer.dest) for transfer in moved} == {("a", "b")}
        (after,) = jobs(server)
        assert after.pid != job.pid
        check_nothing_left(llm)
        del llm
        gc.collect()
        wait_until(lambda: not jobs(server))
    free_executables()
