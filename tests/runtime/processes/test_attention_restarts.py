"""Attention groups whose processes are lost and started again: tokens, and who uses them again."""

import gc
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import process_cases
import pytest
from cluster_cases import load, roomy
from cluster_checks import Done, serve
from host_cases import KEY, jobs, listening
from process_cases import (
    SILENT,
    call_silent_who_is_stopped,
    check_nothing_left,
    children,
    serve_once,
    wait_until,
)
from scatter import of_two_devices, spread

from jaxinfer import LLM, JaxinferError
from jaxinfer.runtime.processes.homes import Home
from jaxinfer.runtime.processes.messages import Launch, Move
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.same_decisions import check_decisions


def restartable(times: int, *groups: str) -> dict[str, Any]:
    """A stage and two attention groups in a process each; the named ones may come back."""
    found = spread([None, None], 1, **roomy(16)) | {"ledger": True}
    for group in found["groups"].values():
        group["process"] = "own"
    for name in groups or ("a0",):
        found["groups"][name]["restart"] = times
    return found


def worker_of(llm: LLM) -> PipelineWorker:
    worker = llm.cluster.engines["x"].worker
    assert isinstance(worker, PipelineWorker)
    return worker


def pid_of(llm: LLM, group: str) -> int:
    (process,) = [each for each in worker_of(llm).processes if each.name == group]
    pid: int = process.peer.pid  # type: ignore[attr-defined]
    return pid


def home_of(llm: LLM, group: str = "a0") -> Home:
    restarts = llm.cluster.restarts
    assert restarts
    return restarts._homes[group]


def wait_for_news(home: Home) -> None:
    wait_until(lambda: home.news is not None)


def serve_with(
    llm: LLM, folder: Path, acts: dict[int, Callable[[], object]]
) -> tuple[list[Done], dict[str, Any], list[list[int]]]:
    """The requests, with something done when so many steps have ended; slices of each in shards."""
    slices: list[list[int]] = []

    def on_step(done: StepDone) -> None:
        tables = [row.hold.tables for row in done.batch.rows]
        slices.append([sum(len(each[n]) for each in tables) for n in range(len(tables[0]))])
        acts.get(len(slices), lambda: None)()

    found, run = serve_once(llm, folder, on_step)
    assert len(slices) > max(acts, default=0)
    return found, run, slices


def told(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Groups, instances, errors and shards of a run's restarts."""
    keys = "group", "instances", "error", "without"
    return [tuple(each[key] for key in keys) for each in run["restarts"]]


WITHOUT, BACK = ("a0", ["x"], None, [1]), ("a0", [], None, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "by", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_heads_lie_there_again(
    by: signal.Signals,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice in two runs, and once between them; the fourth loss is for good.

    The simulator decides alike on what each run has heard.
    """
    call_silent_who_is_stopped(monkeypatch)
    before = children()
    llm = load(models["two"], tmp_path, **restartable(3))
    runs, pids, back = tmp_path / "runs", [pid_of(llm, "a0")], partial(wait_for_news, home_of(llm))
    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids[0], by), 30: back})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT, BACK])
    why = f"was ended by signal {by}" if by == signal.SIGKILL else SILENT
    assert run["restarts"][1]["why"] == f"process of group a0 (pid {pids[0]}) {why}"
    lies_there = [each[1] > 0 for each in slices]
    assert any(lies_there[:9])
    assert not any(lies_there[12:30])
    assert any(lies_there[30:])
    assert run["metrics"]["late_compiles"] == 0
    pids.append(pid_of(llm, "a0"))

    os.kill(pids[1], by)
    back()
    found, run, slices = serve_with(llm, runs, {})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT, BACK])
    assert any(each[1] for each in slices[9:])
    pids.append(pid_of(llm, "a0"))

    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids[2], by), 30: back})
    assert (found, told(run)) == (expected["two"], [WITHOUT, BACK])
    assert any(each[1] for each in slices[30:])
    pids.append(pid_of(llm, "a0"))
    assert len({*pids}) == 4

    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids[3], by)})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT])
    assert not any(each[1] for each in slices[12:])
    for number in range(1, 5):
        assert check_decisions(runs / str(number)).difference is None
    check_nothing_left(llm)
    assert [shard.num_pages > 0 for shard in llm._runs.kv["x"].shards] == [True, False, True]
    del llm
    gc.collect()
    wait_until(lambda: children() <= before)


@pytest.mark.slow
def test_all_devices_of_a_group_are_lost_and_back_together(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    before = children()
    llm = load(models["two"], tmp_path, **of_two_devices(restartable(1)))
    runs, kill = tmp_path / "runs", partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL)
    acts = {9: kill, 30: partial(wait_for_news, home_of(llm))}
    found, run, slices = serve_with(llm, runs, acts)
    assert (found, run["lost"]) == (expected["two"], {})
    assert told(run) == [("a0", ["x"], None, [1, 2]), BACK]
    for device in (1, 2):
        assert any(each[device] for each in slices[:9])
        assert not any(each[device] for each in slices[12:30])
        assert any(each[device] for each in slices[30:])
    assert check_decisions(runs / "1").difference is None
    check_nothing_left(llm)
    del llm
    gc.collect()
    wait_until(lambda: children() <= before)


ALL = ("p and a0 and a1", ["x"], None, [])


@pytest.mark.slow
def test_the_stage_is_back_with_all_its_attention_groups(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Once it is lost alone, and once while the instance goes on without a group for good."""
    before = children()
    llm = load(models["two"], tmp_path, **of_two_devices(restartable(2, "p")))
    runs, pids = (
        tmp_path / "runs",
        {each.name: pid_of(llm, each.name) for each in worker_of(llm).processes},
    )
    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids["p"], signal.SIGKILL)})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [ALL])
    assert (
        run["restarts"][0]["why"] == f"process of group p (pid {pids['p']}) was ended by signal 9"
    )
    assert all(any(each[shard] for each in slices[20:]) for shard in range(4))
    assert not {*pids.values()} & {pid_of(llm, name) for name in pids}
    check_nothing_left(llm)

    acts = {
        9: partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL),
        24: partial(os.kill, pid_of(llm, "p"), signal.SIGKILL),
    }
    found, run, slices = serve_with(llm, runs, acts)
    assert (found, run["lost"]) == (expected["two"], {})
    assert told(run) == [("a0", ["x"], None, [1, 2]), ALL]
    assert not any(each[1] + each[2] for each in slices[12:24])
    assert any(each[1] + each[2] for each in slices[30:])
    for number in (1, 2):
        assert check_decisions(runs / str(number)).difference is None
    check_nothing_left(llm)
    with pytest.raises(
        JaxinferError, match=r"^process of group p \(pid \d+\) was ended by signal 9"
    ):
        serve_with(llm, runs, {9: partial(os.kill, pid_of(llm, "p"), signal.SIGKILL)})
    wait_until(lambda: children() <= before)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("group", ["a0", "q"])
def test_stages_in_two_processes_are_back_with_the_group_that_they_share(
    group: str, models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    before = children()
    sections = of_two_devices(restartable(1, "p", "a0"))
    del sections["groups"]["a1"]
    sections["groups"]["q"] = {"process": "own", "restart": 1}
    sections["instances"]["x"]["stages"] = [
        {"group": "p", "layers": 3, "attention": ["a0"]},
        {"group": "q", "layers": 1, "attention": [{"group": "a0", "num_pages": 12}]},
    ]
    llm = load(models["three"], tmp_path, **sections)
    acts = {9: partial(os.kill, pid_of(llm, group), signal.SIGKILL)}
    found, run, slices = serve_with(llm, tmp_path / "runs", acts)
    assert (found, run["lost"]) == (expected["three"], {})
    assert told(run) == [("p and q and a0", ["x"], None, [])]
    assert all(any(each[shard] for each in slices[20:]) for shard in range(6))
    assert check_decisions(tmp_path / "runs" / "1").difference is None
    check_nothing_left(llm)
    del llm, acts
    gc.collect()
    wait_until(lambda: children() <= before)


@pytest.mark.slow
def test_one_that_cannot_be_started(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The instance goes on without it for good, and no process is left of the attempts."""
    before = children()
    llm = load(models["two"], tmp_path, **restartable(2))
    llm.cluster.config.groups["a0"].environment["JAX_PLATFORMS"] = "nonsense"
    acts = {
        9: partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL),
        20: partial(wait_for_news, home_of(llm)),
    }
    found, run, _ = serve_with(llm, tmp_path / "runs", acts)
    assert (found, run["lost"]) == (expected["two"], {})
    went_on, failed = told(run)
    assert went_on == WITHOUT
    assert failed[:2] == ("a0", [])
    assert "nonsense" in failed[2]
    assert home_of(llm).left == 0
    assert check_decisions(tmp_path / "runs" / "1").difference is None
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    wait_until(lambda: len(children() - before) == 2)


@pytest.mark.slow
def test_one_of_another_host(
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker there starts another."""
    monkeypatch.setenv("JAXINFER_KEY", KEY)
    with listening() as (address, server):
        sections = restartable(1)
        sections["groups"]["a0"] |= {"process": None, "host": address}
        llm = load(models["two"], tmp_path, **sections)
        (job,) = jobs(server)
        acts = {9: job.kill, 30: partial(wait_for_news, home_of(llm))}
        found, run, slices = serve_with(llm, tmp_path / "runs", acts)
        assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT, BACK])
        why = f"process of group a0 (at {address}) was ended by signal 9"
        assert run["restarts"][1]["why"] == why
        assert any(each[1] for each in slices[30:])
        (after,) = jobs(server)
        assert after.pid != job.pid
        check_nothing_left(llm)
        del llm
        gc.collect()
        wait_until(lambda: not jobs(server))


@pytest.mark.slow
@pytest.mark.long
def test_the_stage_is_lost_while_one_is_started(models: dict[str, Path], tmp_path: Path) -> None:
    """Nobody needs the attention group any more, and none of its processes is left."""
    before = children()
    llm = load(models["two"], tmp_path, **restartable(9))
    pid = pid_of(llm, "p")
    acts = {
        9: partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL),
        14: partial(os.kill, pid, signal.SIGKILL),
    }
    with pytest.raises(JaxinferError, match=rf"^process of group p \(pid {pid}\) was ended by sig"):
        serve_with(llm, tmp_path / "runs", acts)
    wait_until(lambda: children() <= before)
    assert home_of(llm).left == 8


@dataclass
class Blow:
    """A kill within 10 ms after so many messages of a kind; the group is waited for some steps on.

    ``back`` counts the steps that use the group's pool since, ``shard``.
    """

    home: Home
    shard: int
    kind: type
    kill: Timer
    messages_left: int
    steps_left: int
    back: int = 0

    def hear(self, said: type) -> None:
        self.messages_left -= said is self.kind
        if self.messages_left == 0:
            self.messages_left = -1
            self.kill.start()

    def on_step(self, done: StepDone) -> None:
        if self.messages_left >= 0:
            return
        self.steps_left -= 1
        if self.steps_left == 0:
            self.kill.join()
            wait_for_news(self.home)
        if self.steps_left < 0:
            self.back += any(row.hold.tables[self.shard] for row in done.batch.rows)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("draws", [2, 40])
def test_attention_processes_die_at_any_moment_and_are_back_at_any_other(
    draws: int,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cluster is one, and loses either process in each of its runs, in which it is back."""
    call_silent_who_is_stopped(monkeypatch)
    before, rng, used = children(), random.Random(2), 0
    llm = load(models["two"], tmp_path, **restartable(999, "a0", "a1"))
    runs = tmp_path / "runs"
    counts: Counter[type] = Counter()
    with process_cases.told(lambda kind: counts.update([kind])):
        assert serve_once(llm, runs)[0] == expected["two"]
    for number in range(draws):
        group, kind = rng.choice(("a0", "a1")), rng.choice((Launch, Move))
        home = home_of(llm, group)
        (process,) = home.processes.values()
        by = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
        kill = Timer(rng.uniform(0, 0.01), os.kill, (process.peer.pid, by))  # type: ignore[attr-defined]
        left = 1 + int(rng.uniform(0, 0.5) * counts[kind])
        blow = Blow(home, 1 + int(group[1]), kind, kill, left, rng.randint(1, 12))
        with process_cases.told(blow.hear):
            found, run = serve_once(llm, runs, blow.on_step)
        assert (found, run["lost"]) == (expected["two"], {}), (number, group)
        assert blow.steps_left < 0
        assert [each["error"] for each in run["restarts"]] == [None, None], (number, group)
        assert check_decisions(runs / str(number + 2)).difference is None
        used += blow.back > 0
        check_nothing_left(llm)
        assert worker_of(llm).without == []
    assert used > draws / 2
    del llm, home, process, blow, kill
    gc.collect()
    wait_until(lambda: children() <= before)


def strike_group(
    worker: PipelineWorker, group: str, by: signal.Signals, lost: Counter[str]
) -> None:
    """Kill or stop the process of a group, if it is there."""
    for process in worker.processes:
        if process.name == group and not process.lost:
            lost[group] += 1
            os.kill(process.peer.pid, by)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("draws", [2, 20])
def test_any_process_dies_at_any_moment_and_all_are_back(
    draws: int,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two are lost in each run, the second as others are started, or back."""
    call_silent_who_is_stopped(monkeypatch)
    before, rng, lost = children(), random.Random(3), Counter[str]()
    llm = load(models["two"], tmp_path, **restartable(999, "p", "a0", "a1"))
    runs = tmp_path / "runs"
    for number in range(draws):
        by = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
        acts: dict[int, Callable[[], object]] = {}
        for step in rng.sample(range(1, 20), 2):
            group = rng.choice(("p", "p", "a0", "a1"))
            strike = partial(strike_group, worker_of(llm), group, by, lost)
            acts[step] = Timer(rng.uniform(0, 0.02), strike).start
        found, run, _ = serve_with(llm, runs, acts)
        assert (found, run["lost"]) == (expected["two"], {}), number
        assert {each["error"] for each in run["restarts"]} <= {None}, number
        assert check_decisions(runs / str(number + 1)).difference is None
        check_nothing_left(llm)
    assert len(lost) > 1
    assert serve_once(llm, runs)[0] == expected["two"]
    del llm, acts, strike
    gc.collect()
    wait_until(lambda: children() <= before)
