"""Starts of attention groups' lost processes: when a run hears of them, and uses them again."""

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_restarts import FakeProcess, FakeWorker
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import AttentionConfig, StageConfig
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.kv.outcome import ProcessLost
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.runtime.processes.restart_groups import PoolRestart, RestartResult, WorkerRestart
from jaxinfer.runtime.processes.restarts import Restarts
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import GoesWithout, InstanceBack, InstanceLost


class FakePipeline(PipelineWorker):
    """An instance with one attention group's process, whose pool is shard 1."""

    def __init__(self, lender: FakeProcess) -> None:
        self.there: list[Any] = [lender]
        self.instance, self.without, self.given_up, self.coming = "x", [], False, {}
        self.taken: list[Any] = []
        self.sampler, self.lends = PLAIN_SAMPLER, ["a"]
        self.stage = FakeWorker(FakeProcess(name="p"))
        plan = SimpleNamespace(num_pages=9, layers=Layers(0, 2, 2))
        self.stage.stages = [SimpleNamespace(plan=plan)]

    @property
    def pieces(self) -> Any:
        return [self.stage]

    @property
    def lending(self) -> list[Any]:
        return self.there

    processes = lending

    @property
    def needs_all(self) -> bool:
        return False

    @property
    def lost_lenders(self) -> list[str]:
        return [each.name for each in self.there if each.lost]

    def go_on(self) -> None:
        self.there, self.without = [], sorted({*self.without, 1})

    def launch(self, *args: Any) -> None:
        for each in [self.stage.process, *self.there]:
            if each.lost:
                raise ProcessLost(each.lost)

    def give_up(self, why: Exception) -> None:
        self.given_up = True

    def begin_again(self, lenders: Sequence[Any] = ()) -> None:
        self.there, self.without, self.given_up = list(lenders), [], False

    def take_back(self, process: Any, pools: Any) -> None:
        self.there, self.without = [process], [n for n in self.without if n != 1]
        self.taken.append(process)


class Lent:
    """A cluster whose attention group may be started again so often; ``go`` lets it be ready.

    Args:
        of_stage: how often its stage may be, which is ready at once.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        restart: int,
        error: str | None = None,
        of_stage: int = 0,
    ) -> None:
        self.go, self.error = threading.Event(), error
        self.lender = FakeProcess(name="a")
        self.worker = FakePipeline(self.lender)
        self.started: list[FakeProcess] = []
        stage = StageConfig(group="p", attention=(AttentionConfig(group="a"),))
        config = ClusterConfig(
            groups={
                "p": GroupConfig(process="own", restart=of_stage),
                "a": GroupConfig(process="own", restart=restart),
            },
            instances={"x": InstanceConfig(stages=(stage,), enable_prefix_caching=False)},
        )
        monkeypatch.setattr(PoolRestart, "get_ready", self._get_ready)
        monkeypatch.setattr(WorkerRestart, "get_ready", _make_ready)
        others: Any = SimpleNamespace(
            begin_again=self._begin, side_of=lambda name: SimpleNamespace(pieces=())
        )
        self.restarts = Restarts(config, others, {"x": self.worker})
        self.world = self.new_world()

    def new_world(self) -> RealWorld:
        return RealWorld({"x": self.worker}, [], restarts=self.restarts)

    def _begin(self, group: str, part: ClusterConfig) -> FakeProcess:
        assert ([*part.groups], [*part.instances]) == ([group], ["x"] if group == "p" else [])
        self.started.append(FakeProcess(name=group))
        return self.started[-1]

    def _get_ready(self, processes: Mapping[str, Any]) -> None:
        assert [*processes.values()] == self.started[-1:]
        assert self.go.wait(HANG_S)
        if self.error:
            raise JaxinferError(self.error)

    def hear(self, count: int = 1) -> list[Any]:
        """So many events, as they come."""
        found: list[Any] = []
        while len(found) < count:
            found += self.world.due_events()
        return found

    def is_done(self) -> bool:
        home = self.restarts._homes["a"]
        return not home.starting and home.news is not None


def _make_ready(home: Any, processes: Mapping[str, Any]) -> None:
    home.fresh, home.prepared = processes, {"x": PLAIN_SAMPLER}


LOST = InstanceLost("x", "ProcessLost: killed", returns=True)
LESS = [LOST, InstanceBack("x"), GoesWithout("x", (1,), returns=True)]


def test_an_instance_goes_on_without_it_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss is told twice: of the going on, and of the return; the last one once."""
    cluster = Lent(monkeypatch, 1)
    cluster.lender.die("killed")
    cluster.world.launch(Batch("x", [], 0, 0, 0))
    assert cluster.hear(3) == LESS
    assert not cluster.world.is_idle
    cluster.go.set()
    assert cluster.hear() == [GoesWithout("x")]
    assert (cluster.worker.taken, cluster.world.is_idle) == (cluster.started, True)
    kept = [(r.group, r.instances, r.why, r.error, r.without) for r in cluster.world.restarted]
    assert kept == [
        ("a", ["x"], "ProcessLost: killed", None, (1,)),
        ("a", [], "killed", None, ()),
    ]
    cluster.started[0].die("killed")
    cluster.world.launch(Batch("x", [], 0, 0, 0))
    assert cluster.hear(3) == [LOST, InstanceBack("x"), GoesWithout("x", (1,))]
    assert (len(cluster.started), cluster.world.is_idle) == (1, True)


def test_one_that_is_ready_first_waits_until_the_lost_one_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was lost between two runs: the next one finds out by a step."""
    cluster = Lent(monkeypatch, 1)
    cluster.go.set()
    cluster.lender.die("killed")
    wait_until(cluster.is_done)
    assert cluster.restarts.take("a") is None
    cluster.world = cluster.new_world()
    assert cluster.world.due_events() == []
    assert cluster.worker.taken == []
    cluster.world.launch(Batch("x", [], 0, 0, 0))
    assert cluster.hear(4) == [*LESS, GoesWithout("x")]
    assert (cluster.worker.without, cluster.world.is_idle) == ([], True)


def test_a_run_that_begins_meanwhile_knows_of_the_return(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Lent(monkeypatch, 1)
    cluster.lender.die("killed")
    cluster.worker.go_on()
    cluster.world = cluster.new_world()
    assert cluster.world.due_events() == [GoesWithout("x", (1,), returns=True)]
    cluster.go.set()
    assert cluster.hear() == [GoesWithout("x")]


def test_one_that_nobody_has_missed_does_not_bring_back_what_is_lost_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shard 2 is another group's; who waits for it would wait for ever."""
    cluster = Lent(monkeypatch, 1)
    cluster.worker.without = [2]
    cluster.world = cluster.new_world()
    cluster.lender.die("killed")
    assert cluster.world.due_events() == []
    cluster.go.set()
    wait_until(cluster.is_done)
    assert cluster.world.is_idle
    assert cluster.world.due_events() == []
    cluster.world.launch(Batch("x", [], 0, 0, 0))
    *_, less, back = cluster.hear(4)
    assert less == GoesWithout("x", (1, 2), returns=True)
    assert back == GoesWithout("x", (2,))


def test_a_return_is_promised_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for between the start's end and its news, by which requests without room would fail."""
    cluster = Lent(monkeypatch, 1)
    told: list[Any] = []
    asked = threading.Thread(target=lambda: told.append(cluster.restarts.goes_without("x")))

    def ask_and_note(*args: Any) -> RestartResult:
        asked.start()
        asked.join(0.2)
        return RestartResult(*args)

    cluster.lender.die("killed")
    cluster.worker.go_on()
    monkeypatch.setattr("jaxinfer.runtime.processes.restarts.RestartResult", ask_and_note)
    cluster.go.set()
    wait_until(cluster.is_done)
    asked.join()
    assert told == [((1,), True)]


def test_one_that_cannot_be_started_is_done_without_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Lent(monkeypatch, 2, "no room")
    cluster.lender.die("killed")
    cluster.worker.go_on()
    cluster.world = cluster.new_world()
    assert cluster.world.due_events() == [GoesWithout("x", (1,), returns=True)]
    cluster.go.set()
    assert cluster.hear() == [GoesWithout("x", (1,))]
    (told,) = cluster.world.restarted
    assert told == RestartResult("a", [], "killed", told.seconds, "no room")
    assert (cluster.world.lost, cluster.world.is_idle) == ({}, True)
    assert [process.closed for process in cluster.started] == [True, True]


def test_none_is_started_for_an_instance_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Lent(monkeypatch, 1)
    cluster.worker.give_up(ProcessLost("killed"))
    cluster.lender.die("killed")
    assert not cluster.restarts._homes["a"].starting
    assert cluster.started == []


def test_one_that_is_started_as_the_stage_is_lost_returns_with_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own start comes to nothing, of which nobody hears; later, it may return alone again."""
    cluster = Lent(monkeypatch, 9, of_stage=1)
    cluster.lender.die("killed")
    cluster.worker.go_on()
    cluster.world = cluster.new_world()
    assert cluster.world.due_events() == [GoesWithout("x", (1,), returns=True)]
    cluster.worker.stage.process.die("gone")
    assert cluster.hear() == [InstanceLost("x", "ProcessLost: gone", returns=True)]
    assert [each.name for each in cluster.started] == ["a"]
    cluster.go.set()
    assert cluster.hear() == [InstanceBack("x")]
    assert [each.name for each in cluster.started] == ["a", "p", "a"]
    alone, stage, lender = cluster.started
    assert (cluster.worker.stage.process, cluster.worker.there) == (stage, [lender])
    assert (cluster.worker.taken, bool(alone.given_up)) == ([], True)
    told = [(each.group, each.instances, each.error) for each in cluster.world.restarted]
    assert told == [("p and a", ["x"], None)]
    lender.die("killed")
    cluster.world.launch(Batch("x", [], 0, 0, 0))
    assert cluster.hear(4) == [*LESS, GoesWithout("x")]
    assert cluster.restarts._homes["a"].left == 7
    stage.die("gone")
    cluster.world.launch(Batch("x", [], 0, 0, 0))
    with pytest.raises(JaxinferError, match=r"^gone$"):
        cluster.hear()
