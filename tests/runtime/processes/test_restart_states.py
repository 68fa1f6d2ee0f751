"""Starts of lost processes, and none: attempts, samplers, plans."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.kv.kv_messages import Drop, OpenEnd
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes import restarts as module
from jaxinfer.runtime.processes.messages import FollowOn, Launch, Left, Loaded, Prepare
from jaxinfer.runtime.processes.pipeline_worker import PipelineSide, PipelineWorker
from jaxinfer.runtime.processes.process_group import AnotherProcess
from jaxinfer.runtime.processes.remote_worker import NobodyThere
from jaxinfer.runtime.processes.restarts import (
    Restarted,
    RestartResult,
    Restarts,
    _as_planned,
    _check_same,
)
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import InstanceBack, InstanceLost

# Processes.


class FakeProcess:
    def __init__(self, lost: str | None = None, name: str = "g") -> None:
        self.lost, self.given_up, self.closed = lost, [], False
        self.name, self.asking = name, threading.Lock()
        self.peer = SimpleNamespace(clock_offset=0.0)
        self.workers: dict[str, Any] = {}
        self.ends: dict[int, Any] = {}
        self.sent: list[Any] = []
        self.on_loss: list[Callable[[str], None]] = []
        self.told = threading.Event()
        self.told.set()

    def die(self, why: str) -> None:
        self.lost = why
        for worker in self.workers.values():
            worker.on_loss(ProcessLost(why))
        for hear in list(self.on_loss):
            hear(why)

    def send(self, message: Any) -> None:
        if self.lost:
            raise ProcessLost(self.lost)
        self.sent.append(message)

    def give_up(self, why: str) -> None:
        self.given_up.append(why)

    def wait_until_told(self) -> None:
        assert self.told.wait(HANG_S)

    def ask(self, message: Any) -> Any:
        self.send(message)
        return iter([Left("", 0)])

    def close(self) -> None:
        self.closed = True


class FakeWorker:
    """Notes what it is asked for."""

    def __init__(self, process: FakeProcess) -> None:
        self.process, self.sampler = process, PLAIN_SAMPLER
        self.prepared: list[Any] = []
        self.stages: list[Any] = []
        self.pieces = [self]

    def begin_again(self) -> None:
        pass

    def prepare(self, sampler: Any, wait: bool) -> Any:
        self.prepared.append((sampler, wait))
        raise NobodyThere("gone again")
        yield

    def move_to(self, process: FakeProcess) -> None:
        self.process = process


class Cluster:
    """Group g, with instances x and y, in a process that may be started again so often.

    ``attempts`` says what becomes of each start: it is ready, or fails with a line; ``go`` has it
    wait before.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        restart: int,
        attempts: Sequence[str | None] = (),
        lost: str | None = None,
    ) -> None:
        self.started: list[FakeProcess] = []
        self.heard: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self._attempts = iter(attempts)
        group = GroupConfig(devices=2, tensor_parallel_size=1, process="own", restart=restart)
        instances = {name: InstanceConfig(group="g", num_pages=9) for name in "xy"}
        config = ClusterConfig(groups={"g": group}, instances=instances)
        self.process = FakeProcess(lost)
        self.workers = {name: FakeWorker(self.process) for name in "xy"}
        monkeypatch.setattr(module, "_get_ready", self._get_ready)
        others: Any = SimpleNamespace(
            begin_again=self._begin,
            side_of=lambda name: SimpleNamespace(pieces=()),
        )
        workers: Any = self.workers
        self.restarts = Restarts(config, others, workers)
        self.restarts.listen(self._hear)

    def _hear(self, news: Restarted | Failed) -> None:
        if isinstance(news, Restarted):
            self.heard.append(news.group)

    def _begin(self, group: str, part: Any) -> FakeProcess:
        self.started.append(FakeProcess())
        return self.started[-1]

    def _get_ready(self, home: Any, process: Any) -> Any:
        assert self.go.wait(HANG_S)
        if line := next(self._attempts):
            raise JaxinferError(line)
        return dict.fromkeys(self.workers, PLAIN_SAMPLER)

    def wait_for_news(self, count: int = 1) -> None:
        wait_until(lambda: len(self.heard) >= count)


@pytest.mark.parametrize("restart", [1, 2])
def test_one_that_is_lost_is_started_again_and_in_use_when_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, restart: int
) -> None:
    cluster = Cluster(monkeypatch, restart, [None])
    cluster.go.clear()
    cluster.process.die("killed")
    assert cluster.restarts.expect("x", "a step failed")
    cluster.go.set()
    cluster.wait_for_news()
    assert cluster.restarts.expect("y", "a step failed")
    assert cluster.process.given_up == cluster.started[0].given_up == []
    assert cluster.workers["x"].process is cluster.process
    outcome = cluster.restarts.take("g")
    assert outcome
    assert outcome == RestartResult("g", ["x", "y"], "killed", outcome.seconds)
    assert {worker.process for worker in cluster.workers.values()} == {cluster.started[0]}
    assert cluster.restarts.take("g") is None
    assert cluster.restarts._homes["g"].left == restart - 1


def test_a_failure_in_a_process_that_is_there_ends_it_if_it_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, 1, [None])
    assert cluster.restarts.expect("x", "it hangs")
    assert cluster.process.given_up == ["instance x: it hangs"]
    cluster.process.die("instance x: it hangs")
    cluster.wait_for_news()
    assert cluster.restarts.take("g")
    assert not cluster.restarts.expect("x", "it hangs")
    assert not cluster.restarts.expect("unknown", "")
    assert cluster.started[0].given_up == []
    cluster.started[0].die("it hangs")
    time.sleep(0.05)
    assert cluster.heard == ["g"]


def test_one_whose_loss_has_still_to_be_told_is_started_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the loop would wait for a return that nobody has begun."""
    cluster = Cluster(monkeypatch, 1, [None])
    cluster.process.lost = "killed"
    assert cluster.restarts.expect("x", "a step failed")
    cluster.wait_for_news()
    cluster.process.die("killed")
    outcome = cluster.restarts.take("g")
    assert outcome
    assert outcome.error is None
    assert (len(cluster.started), cluster.heard) == (1, ["g"])


def test_none_is_started_before_all_have_been_told_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the rest would take it for the loss of the new one."""
    cluster = Cluster(monkeypatch, 1, [None])
    cluster.process.lost = "killed"
    cluster.process.told.clear()
    assert cluster.restarts.expect("x", "a step failed")
    time.sleep(0.05)
    assert cluster.started == []
    cluster.process.told.set()
    cluster.wait_for_news()
    assert len(cluster.started) == 1


def test_each_attempt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 3, ["no room", None])
    cluster.process.die("killed")
    cluster.wait_for_news()
    outcome = cluster.restarts.take("g")
    assert outcome
    assert outcome.error is None
    assert [process.closed for process in cluster.started] == [True, False]
    assert cluster.restarts._homes["g"].left == 1


def test_the_last_attempt_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, ["no room", "no device"])
    cluster.process.die("killed")
    cluster.wait_for_news()
    outcome = cluster.restarts.take("g")
    assert outcome
    assert (outcome.why, outcome.error) == ("killed", "no device")
    assert cluster.workers["x"].process is cluster.process
    assert not cluster.restarts.expect("x", "")


@pytest.mark.parametrize(("restart", "error"), [(2, None), (1, "killed again")])
def test_one_that_is_lost_before_anybody_has_taken_it(
    monkeypatch: pytest.MonkeyPatch, restart: int, error: str | None
) -> None:
    """The run that expects it hears what has come of it in the end."""
    cluster = Cluster(monkeypatch, restart, [None, None])
    cluster.process.die("killed")
    cluster.wait_for_news()
    cluster.started[0].die("killed again")
    cluster.wait_for_news(2)
    outcome = cluster.restarts.take("g")
    assert outcome
    assert (outcome.why, outcome.error) == ("killed again", error)


def test_one_that_was_lost_while_the_cluster_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 1, [None], lost="killed")
    wait_until(lambda: cluster.restarts._homes["g"].news is not None)
    news: list[Restarted] = []
    cluster.restarts.listen(news.append)
    assert news == [Restarted("g")]


def test_a_sampler_that_is_asked_for_when_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 1, [None])
    cluster.process.die("killed")
    cluster.wait_for_news()
    wanted = PLAIN_SAMPLER._replace(top=3)
    cluster.workers["y"].sampler = wanted
    assert cluster.restarts.take("g")
    assert [worker.prepared for worker in cluster.workers.values()] == [[], [(wanted, False)]]


def test_a_run_that_begins_while_one_is_started_is_told_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run hears before it launches anything: a system may wait for what never comes, else."""
    cluster = Cluster(monkeypatch, 1, [None])
    cluster.go.clear()
    cluster.process.die("killed")
    restarts: Any = cluster.restarts
    workers: Any = cluster.workers
    world = RealWorld(workers, [], restarts=restarts)
    assert world.due_events() == [
        InstanceLost(name, "ProcessLost: killed", returns=True) for name in "xy"
    ]
    assert (world.is_idle, world.returning) == (False, {"x", "y"})
    cluster.go.set()
    assert world.due_events() == [InstanceBack("x"), InstanceBack("y")]
    assert (world.is_idle, world.lost) == (True, {})


def test_a_loss_is_told_of_although_nobody_has_anything_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, 1, [None])
    cluster.go.clear()
    restarts: Any = cluster.restarts
    workers: Any = cluster.workers
    world = RealWorld(workers, [], restarts=restarts)
    assert world.due_events() == []
    cluster.process.die("killed")
    assert [event.returns for event in world.due_events()] == [True, True]
    cluster.go.set()


def test_what_is_closed_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor keeps what it has just begun to start."""
    cluster = Cluster(monkeypatch, 2, [None])
    begin = cluster.restarts._others.begin_again

    def close_and_begin(*args: Any) -> Any:
        cluster.restarts.close()
        return begin(*args)

    cluster.restarts._others.begin_again = close_and_begin  # type: ignore[method-assign]
    cluster.process.die("killed")
    wait_until(lambda: any(process.closed for process in cluster.started))
    wait_until(lambda: not cluster.restarts._homes["g"].starting)
    cluster.started[0].die("killed")
    assert len(cluster.started) == 1


class Limits(NamedTuple):
    token_buckets: Sequence[int]


LIMITS = Limits((8,))


@dataclass(frozen=True)
class Facts:
    """The part of StageFacts that matters here."""

    options: str
    layers: Layers
    num_pages: int = 40
    kv_bytes: int = 400
    memory_bytes: int = 10**6
    devices: tuple[str, ...] = ("H100",)
    pool_pages: tuple[int, ...] = (40,)
    attention: tuple[Any, ...] = ()
    limits: Limits = LIMITS


def test_a_pipeline_is_started_again_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage that has lost its neighbour ends, too; both get what the lost ones had."""
    layers = {"s0": Layers(0, 3, 8), "s1": Layers(3, 8, 8)}
    loaded = {
        name: Loaded({"x": [Facts("", piece)]}, {"x": [[0]]}, {"x": f"address of {name}"})  # type: ignore[list-item]
        for name, piece in layers.items()
    }
    old: dict[str, Any] = {name: FakeProcess(name=name) for name in layers}
    new: dict[str, Any] = {}
    parts: dict[str, Any] = {}

    def begin(group: str, part: Any) -> Any:
        assert group not in new
        parts[group], new[group] = part, FakeProcess(name=group)
        return new[group]

    monkeypatch.setattr(module, "wait_until_loaded", lambda process: loaded[process.name])
    groups = {name: GroupConfig(process="own", restart=1) for name in layers}
    stages = tuple(StageConfig(group=name, layers=p.stop - p.start) for name, p in layers.items())
    config = ClusterConfig(groups=groups, instances={"x": InstanceConfig(stages=stages)})
    worker = PipelineWorker("x", [(old[name], loaded[name]) for name in layers], [None])
    side = PipelineSide([AnotherProcess(process) for process in old.values()], worker.first_stages)
    form: Any = "form"
    for stage in (0, 1):
        side.open(OpenEnd(7 + stage, "x", stage, form, True, False), print)
    others: Any = SimpleNamespace(begin_again=begin, side_of=lambda name: side)
    restarts = Restarts(config, others, {"x": worker})
    heard: list[Any] = []
    restarts.listen(heard.append)
    posted: list[Any] = []
    worker.launch(Batch("x", [], 0, 0, 0), 0.0, posted.append)
    worker.sampler = PLAIN_SAMPLER._replace(top=3)
    old["s1"].die("killed")
    assert {str(failed.error) for failed in posted} == {"killed"}
    assert old["s0"].given_up
    assert restarts.expect("x", "killed")
    wait_until(lambda: Restarted("s0 and s1") in heard)
    with pytest.raises(ProcessLost, match="killed"):
        worker.launch(Batch("x", [], 0, 0, 0), 0.0, posted.append)
    told = restarts.take("s0 and s1")
    assert told
    assert told == RestartResult("s0 and s1", ["x"], "killed", told.seconds)
    assert [part.instances["x"].stages[0].layers for part in parts.values()] == [3, 5]
    ahead = [Prepare("x", worker.sampler)]
    ends = [OpenEnd(7 + stage, "x", 0, form, True, False) for stage in (0, 1)]
    assert new["s0"].sent == [*ahead, ends[0]]
    assert new["s1"].sent == [FollowOn("x", "address of s0", None), *ahead, ends[1]]
    worker.launch(Batch("x", [], 0, 0, 0), 0.0, posted.append)
    assert [type(process.sent[-1]) for process in new.values()] == [Launch] * 2
    side.do(Drop(8, 1, "host"))
    assert new["s1"].sent[-1] == Drop(8, 1, "host")
    old["s0"].die("late")
    assert worker.pieces[0].process is new["s0"]
    new["s0"].die("killed again")
    assert not restarts.expect("x", "killed again")


# Plans.


def test_what_went_by_memory_and_speed_is_as_it_was() -> None:
    """Two stages of two segments each, of three and five layers."""
    bounds = [0, 2, 3, 6, 8]
    facts = [Facts("", Layers(a, b, 8)) for a, b in pairwise(bounds)]
    group = GroupConfig(devices=2, tensor_parallel_size=1)
    stages = (StageConfig(group="g"), StageConfig(group="g"))
    config = ClusterConfig(
        groups={"g": group}, instances={"x": InstanceConfig(stages=stages, segments=2)}
    )
    worker: Any = SimpleNamespace(stages=[SimpleNamespace(plan=plan) for plan in facts])
    planned = _as_planned(config, {"x": worker}).instances["x"]
    assert planned.num_pages == 40
    assert [stage.layers for stage in planned.stages] == [3, 5]
    worker.stages[0].plan = Facts("", Layers(0, 2, 8), num_pages=41)
    assert _as_planned(config, {"x": worker}).instances["x"].num_pages is None


def test_another_plan_is_refused() -> None:
    """More pages and other memory do not matter: the loop goes by what it knows."""
    layers = Layers(0, 8, 8)
    before: Any = Facts("auto", layers)
    more: Any = Facts("40", layers, num_pages=41, kv_bytes=410, memory_bytes=1)
    _check_same("x", before, more)
    for other in (
        Facts("", layers, num_pages=39),
        Facts("", Layers(0, 7, 8)),
        Facts("", layers, devices=("A10",)),
    ):
        now: Any = other
        with pytest.raises(JaxinferError, match=r"^instances\.x has another plan than before"):
            _check_same("x", before, now)
