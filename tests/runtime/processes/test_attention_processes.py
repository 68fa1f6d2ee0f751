"""Instances whose attention groups have processes of their own: tokens, moves, losses."""

import gc
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
from cluster_cases import free_executables, load, roomy
from cluster_checks import REQUESTS, Done, Ran, serve
from host_cases import KEY, jobs, listening
from process_cases import (
    SILENT,
    call_silent_who_is_stopped,
    check_nothing_left,
    children,
    serve_once,
    serve_struck,
    serve_until,
    told,
    wait_until,
)
from scatter import of_two_devices, spread
from waiting import HANG_S

from jaxinfer import LLM, JaxinferError
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.processes import process as process_module
from jaxinfer.runtime.processes.messages import Launch, Move, Prepare
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.runtime.processes.process import Process
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone

# Of Hetis' placement: attention elsewhere takes less time, so that heads are handed out.
SECONDS = {
    "p": {"per_pair": 1e-4, "per_entry": 1e-6},
    "a0": {"per_pair": 5e-5, "per_entry": 5e-7, "exchange": 1e-5},
    "a1": {"per_pair": 6e-5, "per_entry": 5e-7, "exchange": 1e-5},
}


def apart(attention: list[int | None], primary: int = 1, **options: Any) -> dict[str, Any]:
    """Sections of ``spread``, each group in a process of its own."""
    sections = spread(attention, primary, **roomy(16) | options)
    for group in sections["groups"].values():
        group["process"] = "own"
    return sections


def two_stages() -> dict[str, Any]:
    """A cluster of two stages in a process each, which share an attention group."""
    sections = apart([None])
    sections["groups"]["q"] = {"process": "own"}
    sections["instances"]["x"]["stages"] = [
        {"group": "p", "layers": 3, "attention": ["a0"]},
        {"group": "q", "layers": 1, "attention": [{"group": "a0", "num_pages": 12}]},
    ]
    return sections


def beside_another() -> dict[str, Any]:
    """An instance with attention groups, and one in this process."""
    sections = apart([None, None])
    sections["groups"]["q"] = {}
    sections["instances"]["y"] = {"group": "q", "enable_prefix_caching": False} | roomy(16)
    shares = {name: {"weight": 1, "max_waiting": 2} for name in "xy"}
    sections["system"] = {"name": "data_parallel", "shares": shares}
    return sections


HALVES = {"max_num_batched_tokens": 24, "half_batches": "always"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "sections"),
    [
        ("two", apart([None, None])),
        ("three", apart([20, 9], 2, **HALVES)),
        ("two", apart([None, None]) | {"system": {"name": "hetis", "attention": SECONDS}}),
        ("three", of_two_devices(apart([20, 9]))),
        pytest.param("three", two_stages(), marks=pytest.mark.long),
        pytest.param("three", apart([20, 9, 40]), marks=pytest.mark.long),
    ],
    ids=["random", "halves", "hetis", "devices", "stages", "small"],
)
def test_tokens_are_those_of_one_process(
    heads: str,
    sections: dict[str, Any],
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
) -> None:
    """Greedy and drawn, while heads move from process to process."""
    before = children()
    llm = load(models[heads], tmp_path, **sections)
    assert len(children() - before) == len(sections["groups"])
    assert serve(llm, run_dir=tmp_path / "runs") == expected[heads]
    ran = Ran.last(tmp_path / "runs")
    assert ran.metrics["late_compiles"] == 0
    moves = ran.metrics["slice_moves"]
    assert moves["begun"] > (0 if "hetis" in str(sections["system"]) else 20)
    assert moves["num_bytes"] == sum(each.num_bytes for each in ran.record.transfers)
    x = ran.record.run["instances"]["x"]
    assert set(x["process"].split(" and ")) == set(sections["groups"])
    assert all(place["devices"] for stage in x["stages"] for place in stage["attention"])
    check_nothing_left(llm)
    del llm
    gc.collect()
    wait_until(lambda: not children() - before)


def pids_of(llm: LLM) -> dict[str, int]:
    worker = llm.cluster.engines["x"].worker
    assert isinstance(worker, PipelineWorker)
    return {each.name: each.peer.pid for each in worker.processes}  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "by", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_an_instance_goes_on_without_its_attention_groups(
    by: signal.Signals,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group is lost in a run, the other between that and the next; all is computed anew."""
    call_silent_who_is_stopped(monkeypatch)
    before = children()
    llm = load(models["two"], tmp_path, **apart([None, None]))
    pids = pids_of(llm)
    assert children() - before == set(pids.values())
    found, run = serve_until(llm, 9, lambda: os.kill(pids["a0"], by), tmp_path / "runs")
    assert found == expected["two"]
    why = f"was ended by signal {by}" if by == signal.SIGKILL else SILENT
    lost = f"ProcessLost: process of group a0 (pid {pids['a0']}) {why}"
    (rest,) = run["restarts"]
    assert run["lost"] == {}
    assert rest.pop("seconds") > 0
    assert rest == {"group": "a0", "instances": ["x"], "why": lost, "error": None, "without": [1]}
    check_nothing_left(llm)
    assert [shard.num_pages > 0 for shard in llm._runs.kv["x"].shards] == [True, False, True]
    assert pids_of(llm) == {"p": pids["p"], "a1": pids["a1"]}
    os.kill(pids["a1"], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pids["a1"]))
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    ran = Ran.last(tmp_path / "runs")
    assert [each["without"] for each in ran.record.run["restarts"]] == [[1, 2]]
    assert ran.metrics["slice_moves"]["begun"] == 0
    check_nothing_left(llm)
    assert children() - before == {pids["p"]}
    del llm
    gc.collect()
    wait_until(lambda: not children() - before)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_who_loses_the_stage_loses_the_instance(
    by: signal.Signals,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another instance computes all of its requests anew, and none of its processes is left."""
    call_silent_who_is_stopped(monkeypatch)
    before = children()
    llm = load(models["two"], tmp_path, **beside_another())
    pids = pids_of(llm)
    assert set(pids) == {"p", "a0", "a1"}
    found, run = serve_until(llm, 9, lambda: os.kill(pids["p"], by), tmp_path / "runs")
    assert found == expected["two"]
    why = f"was ended by signal {by}" if by == signal.SIGKILL else SILENT
    assert run["lost"] == {"x": f"ProcessLost: process of group p (pid {pids['p']}) {why}"}
    check_nothing_left(llm, ["x"])
    wait_until(lambda: not any(map(psutil.pid_exists, pids.values())))
    with pytest.raises(JaxinferError, match="instance x was lost, load the model again"):
        serve(llm)
    del llm
    gc.collect()
    wait_until(lambda: not children() - before)


@pytest.mark.slow
@pytest.mark.long
def test_a_new_sampler_is_not_waited_for_where_a_lender_is_stopped(
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss is noticed only when the other instance has gone on beside it."""
    noticed, waits = threading.Event(), []
    silent: list[Process] = []

    def says_something(process: Process, patience: float) -> bool:
        while not process._connection.poll(0.1):
            if noticed.is_set() and process.peer.pid == stopped:  # type: ignore[attr-defined]
                silent.append(process)
                return False
        return True

    monkeypatch.setattr(Process, "_says_something", says_something)
    monkeypatch.setattr(Cluster, "read_ahead", 4)
    llm = load(models["two"], tmp_path, **beside_another())
    stopped = pids_of(llm)["a0"]
    made = [
        request
        for number, r in enumerate(REQUESTS)
        for request in llm.make_requests(str(number), list(r.prompt), r.params)
    ]
    greedy, drawn = made[::2], made[1::2]
    steps = Counter[str]()

    def stream() -> Iterator[RequestState]:
        yield from greedy
        os.kill(stopped, signal.SIGSTOP)
        yield from drawn

    def on_step(done: StepDone) -> None:
        steps[done.instance] += len(waits) > 1
        if steps["y"] == 5 and not noticed.is_set():
            noticed.set()
            wait_until(lambda: silent)
            silent[0].wait_until_told()  # Else the run may end before.

    send = Process.send

    def send_and_note(process: Process, message: Any) -> None:
        send(process, message)
        if isinstance(message, Prepare):
            waits.append(message.wait)

    monkeypatch.setattr(Process, "send", send_and_note)
    too_late = Timer(HANG_S, noticed.set)
    too_late.start()
    found: dict[str, Any] = {}

    def take(output: Any) -> None:
        found[output.request_id] = output.outputs[0].token_ids

    llm.run(stream(), take, progress=False, run_dir=tmp_path / "runs", on_step=on_step)
    assert too_late.is_alive()
    too_late.cancel()
    assert waits == [True, False]
    run = Ran.last(tmp_path / "runs").record.run
    assert [each["without"] for each in run["restarts"]] == [[1]]
    assert [found[str(i)] for i in range(len(REQUESTS))] == [d.tokens for d in expected["two"]]
    check_nothing_left(llm)


@pytest.mark.slow
@pytest.mark.long
def test_a_host_that_vanishes_is_not_waited_for(
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker's processes are all stopped, so that no connection to them breaks off."""
    monkeypatch.setenv("JAXINFER_KEY", KEY)
    monkeypatch.setattr(process_module, "SILENCE_S", 4.0)
    with listening() as (address, server):
        sections = apart([None, None])
        sections["groups"]["a0"] |= {"process": None, "host": address}
        llm = load(models["two"], tmp_path, **sections)
        there = [server, *jobs(server)]

        def let_all(go_on: bool) -> None:
            for process in there:
                with suppress(psutil.Error):
                    process.resume() if go_on else process.suspend()

        too_late = Timer(100, let_all, [True])
        too_late.start()
        found, run = serve_until(llm, 9, lambda: let_all(False), tmp_path / "runs")
        assert too_late.is_alive()
        too_late.cancel()
        let_all(True)
        assert (found, run["lost"]) == (expected["two"], {})
        assert [each["without"] for each in run["restarts"]] == [[1]]
        check_nothing_left(llm)
        wait_until(lambda: not jobs(server))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("draws", [1, 20])
def test_attention_processes_die_at_any_moment(
    draws: int,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills come within 10 ms after some step or move was asked for; the other process is next."""
    call_silent_who_is_stopped(monkeypatch)
    before, rng = children(), random.Random(0)
    for number in range(draws):
        llm = load(models["two"], tmp_path, **apart([None, None]))
        counts: Counter[type] = Counter()
        with told(lambda kind, counts=counts: counts.update([kind])):
            assert serve_once(llm, tmp_path / "runs")[0] == expected["two"]
        kinds = rng.choice((Launch, Move)), Launch  # There are few moves to what is left.
        for group, kind in zip(rng.sample(["a0", "a1"], 2), kinds, strict=True):
            share = rng.uniform(0, 0.5)
            by = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
            left = 1 + int(share * counts[kind])
            kill = Timer(rng.uniform(0, 0.01), os.kill, (pids_of(llm)[group], by))

            def strike(said: type, kind: type = kind, kill: Timer = kill) -> None:
                nonlocal left
                left -= said is kind
                if left == 0:
                    left = -1
                    kill.start()

            with told(strike):
                found, run = serve_once(llm, tmp_path / "runs")
            assert left < 0
            assert (found, run["lost"]) == (expected["two"], {}), (number, group)
            assert [each["error"] for each in run["restarts"]] in ([], [None])
            check_nothing_left(llm)
        del llm
        free_executables()
        wait_until(lambda: not children() - before)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("draws", [1, pytest.param(40, marks=pytest.mark.timeout(1800))])
def test_a_stage_with_attention_groups_dies_at_any_moment(
    draws: int,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kill comes within 10 ms after some step or move was asked for."""
    call_silent_who_is_stopped(monkeypatch)
    before, rng, noticed = children(), random.Random(1), 0
    sections = beside_another() | {"system": "scatter:ScatterFirst"}
    for number in range(draws):
        llm = load(models["two"], tmp_path, **sections)
        pids = pids_of(llm)
        by = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
        kill = Timer(rng.uniform(0, 0.01), os.kill, (pids["p"], by))
        kind, share = rng.choice((Launch, Move)), rng.uniform(0, 0.5)
        run = serve_struck(llm, tmp_path / "runs", expected["two"], kind, share, kill.start)
        why = "was ended by signal 9" if by == signal.SIGKILL else SILENT
        lost = f"ProcessLost: process of group p (pid {pids['p']}) {why}"
        assert run["lost"] in ({}, {"x": lost})
        noticed += bool(run["lost"])
        check_nothing_left(llm, run["lost"])
        if run["lost"]:
            wait_until(lambda pids=pids: not any(map(psutil.pid_exists, pids.values())))
        del llm
        free_executables()
        wait_until(lambda: not children() - before)
    assert noticed or draws == 1


def test_what_cannot_be_run_is_refused_before_a_process_is_started(
    models: dict[str, Path], tmp_path: Path
) -> None:
    before = children()
    for group, options, message in (
        ("a0", {"mesh": {"x": 1}}, r"groups\.a0\.mesh: leave it out, each device of an attention"),
        ("a0", {"process": None}, r"group p has a process of its own, must a0 have, too"),
    ):
        sections = apart([None])
        sections["groups"][group] |= options
        with pytest.raises(JaxinferError, match=message):
            load(models["two"], tmp_path, **sections)
    assert children() == before
