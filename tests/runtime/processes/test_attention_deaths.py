"""Attention groups and their stage, whose processes die at any moment and come back."""

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

import process_cases
import pytest
from attention_restarts import Return, home_of, restartable, serve_with, worker_of
from cluster_cases import load
from cluster_checks import Done
from process_cases import (
    call_silent_who_is_stopped,
    check_nothing_left,
    children,
    serve_once,
    wait_until,
)

from jaxinfer.lab.validate.same_decisions import check_decisions
from jaxinfer.runtime.processes.messages import Launch, Move
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.serving.world import StepDone


@dataclass
class Blow:
    """A group is killed within 10 ms of the n-th message of a kind, and awaited some steps later.

    ``back`` counts the steps that use the group's pool since, ``shard``.
    """

    returns: Return
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
            self.returns()
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
    returns = {group: Return(home_of(llm, group)) for group in ("a0", "a1")}
    counts: Counter[type] = Counter()
    with process_cases.told(lambda kind: counts.update([kind])):
        assert serve_once(llm, runs)[0] == expected["two"]
    for number in range(draws):
        group, kind = rng.choice(("a0", "a1")), rng.choice((Launch, Move))
        (process,) = home_of(llm, group).processes.values()
        by = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
        kill = Timer(rng.uniform(0, 0.01), os.kill, (process.peer.pid, by))  # type: ignore[attr-defined]
        left = 1 + int(rng.uniform(0, 0.5) * counts[kind])
        blow = Blow(returns[group], 1 + int(group[1]), kind, kill, left, rng.randint(1, 12))
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
    del llm, returns, process, blow, kill
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
