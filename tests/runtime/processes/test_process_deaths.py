"""Processes that die or stop at any moment of a run: the other ends it, and nothing is left."""

import gc
import os
import random
import signal
import threading
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import psutil
import pytest
from cluster_cases import Pair, Side, free_executables, load, set_system
from cluster_checks import REQUESTS, Done
from process_cases import (
    SILENT,
    SYSTEMS,
    apart,
    call_silent_who_is_stopped,
    check_nothing_left,
    children,
    pid_of,
    serve_once,
    serve_struck,
    told,
)
from waiting import wait_until

from jaxinfer import LLM
from jaxinfer.runtime.kv.kv_messages import Offer, Place, Pull
from jaxinfer.runtime.processes.messages import Launch
from jaxinfer.serving.world import StepDone

KINDS = (Launch, Offer, Pull, Place)
RULES = ("on_demand", "at_end", "per_chunk", "per_segment")


@dataclass(frozen=True)
class Moment:
    """Right after so large a share of the messages of one kind that a run takes."""

    apart: str
    rule: str
    kind: type
    share: float
    by: signal.Signals


def moments(victim: str, count: int) -> list[Moment]:
    """Kinds, rules and signals in all pairs; the other instance is in a process too, or here."""
    rng = random.Random(victim + str(count))
    return [
        Moment(
            "ab" if number % 5 < 3 else victim,
            RULES[number % len(RULES)],
            rng.choice(KINDS),
            rng.uniform(0, 0.8),
            signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL,
        )
        for number in range(count)
    ]


def die(llm: LLM, victim: str, moment: Moment, expected: list[Done], folder: Path) -> bool:
    """Kill a process in a run, check the outcome, and return whether the run has noticed."""
    set_system(llm, SYSTEMS[llm.config.system["name"]] | {"hand_off": moment.rule})
    pid = pid_of(llm, victim)
    strike = partial(os.kill, pid, moment.by)
    run = serve_struck(llm, folder, expected, moment.kind, moment.share, strike)
    assert set(run["lost"]) <= {victim}
    why = "was ended by signal 9" if moment.by == signal.SIGKILL else SILENT
    for line in run["lost"].values():
        assert line == f"ProcessLost: process of group {victim} (pid {pid}) {why}"
    check_nothing_left(llm, run["lost"])
    return bool(run["lost"])


def open_files() -> int:
    return psutil.Process().num_fds()


WHO = list(product(("cronus", "disaggregated"), "ab"))
MOMENTS = 10
# A cluster is loaded for each moment: slow tests have six, with every rule and signal.
FEW = [
    pytest.param(*who, range(i, MOMENTS, 8), marks=pytest.mark.slow) for i, who in enumerate(WHO)
]
ALL = [pytest.param(*who, range(MOMENTS), marks=pytest.mark.long) for who in WHO]


@pytest.mark.parametrize(("system", "victim", "numbers"), [*FEW, *ALL], ids=str)
def test_at_any_moment(
    system: str,
    victim: str,
    numbers: range,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call_silent_who_is_stopped(monkeypatch)
    noticed = 0
    for number in numbers:
        moment = moments(victim, MOMENTS)[number]
        gc.collect()
        before = children(), threading.active_count(), open_files()
        pair = Pair("two", Side(1, 8), Side(2, 16), apart=moment.apart)
        sections = apart(pair, system) | {"verify_transfers": number % 2 == 0}
        llm = load(models["two"], tmp_path, **sections)
        noticed += die(llm, victim, moment, expected["two"], tmp_path / str(number))
        del llm
        gc.collect()
        wait_until(lambda before=before: children() <= before[0])
        wait_until(lambda before=before: threading.active_count() <= before[1])
        wait_until(lambda before=before: gc.collect() >= 0 and open_files() <= before[2])
    free_executables()
    # The others came when the victim had done all that it had to.
    assert noticed or numbers != range(MOMENTS)


@dataclass
class Blow:
    """A process is killed after the n-th message of the moment's kind, and is back steps later.

    ``steps_after`` counts those of the victim that have ended since; ``waiting``: prompt tokens of
    the requests of which no step had ended by then.
    """

    llm: LLM
    victim: str
    moment: Moment
    messages_left: int
    steps_left: int
    steps_after: int = 0
    waiting: int = 0
    seen: set[str] = field(default_factory=set)

    def hear(self, kind: type) -> None:
        self.messages_left -= kind is self.moment.kind
        if self.messages_left == 0:
            self.messages_left = -1
            os.kill(pid_of(self.llm, self.victim), self.moment.by)

    def on_step(self, done: StepDone) -> None:
        self.seen |= {row.request.id for row in done.batch.rows}
        if self.messages_left >= 0:
            return
        self.steps_left -= 1
        if self.steps_left == 0:
            restarts = self.llm.cluster.restarts
            assert restarts
            wait_until(lambda: restarts._homes[self.victim].news is not None)
            left = (r for number, r in enumerate(REQUESTS) if str(number) not in self.seen)
            self.waiting = sum(len(request.prompt) for request in left)
        self.steps_after += self.steps_left < 0 and done.instance == self.victim


@pytest.mark.parametrize(
    ("system", "victim"),
    [
        pytest.param(*who, marks=pytest.mark.slow if i == 2 else pytest.mark.long)
        for i, who in enumerate(WHO)
    ],
)
def test_at_any_moment_and_back_at_any_other(
    system: str,
    victim: str,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cluster is one, and loses the same process in each of its runs."""
    call_silent_who_is_stopped(monkeypatch)
    gc.collect()
    before = children(), threading.active_count(), open_files()
    pair = Pair("two", Side(1, 8), Side(2, 16), apart="ab")
    sections = apart(pair, system) | {"verify_transfers": True}
    sections["groups"][victim]["restart"] = 99
    llm = load(models["two"], tmp_path, **sections)
    within = 0
    budget = llm.config.engine.max_num_batched_tokens
    given_at_most = 2 * budget + max(len(request.prompt) for request in REQUESTS)
    for number, moment in enumerate(moments(victim, 5)):
        set_system(llm, SYSTEMS[system] | {"hand_off": moment.rule})
        blow = Blow(llm, victim, moment, 1 + 2 * number, 1 + 4 * number)
        with told(blow.hear):
            found, run = serve_once(llm, tmp_path / str(number), blow.on_step)
        assert found == expected["two"]
        assert blow.steps_left < 0
        assert run["lost"] == {}
        assert [restart["error"] for restart in run["restarts"]] == [None]
        # Who stands in for the lost one has been given what fills two steps, or a prompt more.
        # What waits besides comes by the one that is back; two steps may have been under way.
        if blow.waiting > given_at_most:
            within += 1
            assert blow.steps_after > 2
        check_nothing_left(llm)
    assert within
    del llm, blow
    gc.collect()
    wait_until(lambda: children() <= before[0])
    wait_until(lambda: threading.active_count() <= before[1])
    wait_until(lambda: gc.collect() >= 0 and open_files() <= before[2])
    free_executables()
