"""News of lost processes: what a run hears of starts and returns, and when."""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from jaxinfer import JaxinferError
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.runtime.processes.process import ProcessGone
from jaxinfer.runtime.processes.restart_groups import Restarted, RestartResult
from jaxinfer.runtime.processes.restarts import Restarts
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import GoesWithout, InstanceBack, InstanceLost


class News:
    """Stand in for Restarts: whether a restart is to be expected, and its outcome."""

    def __init__(self, expects: bool = True) -> None:
        self.expects = expects
        self.outcome: RestartResult | None = None
        self.lost: list[tuple[str, str]] = []
        self._hear: Callable[[Restarted], object] = lambda restarted: None

    def listen(self, hear: Callable[[Restarted], object]) -> None:
        self._hear = hear
        if self.outcome:
            hear(Restarted("g"))

    def tell(self, error: str | None = None) -> RestartResult:
        self.outcome = RestartResult("g", ["a"], "killed", 1.0, error)
        self._hear(Restarted("g"))
        return self.outcome

    def expect(self, instance: str, why: str) -> bool:
        self.lost.append((instance, why))
        return self.expects

    def goes_without(self, instance: str) -> tuple[tuple[int, ...], bool]:
        return (), False

    def take(self, group: str) -> RestartResult | None:
        outcome, self.outcome = self.outcome, None
        return outcome


def real_world(names: str, news: Any) -> RealWorld:
    silent: Any = SimpleNamespace(launch=lambda *args: None)
    return RealWorld(dict.fromkeys(names, silent), [], restarts=news)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_world_waits_for_who_returns(names: str) -> None:
    news = News()
    world = real_world(names, news)
    world.launch(Batch("a", [], 0, 0, 0))
    world._posted.put(Failed("a", ProcessLost("killed")))
    assert world.due_events() == [InstanceLost("a", "ProcessLost: killed", returns=True)]
    assert news.lost == [("a", "ProcessLost: killed")]
    assert (world.is_idle, world.returning) == (False, {"a"})
    begin = time.perf_counter()
    threading.Timer(0.2, news.tell).start()
    assert world.due_events() == [InstanceBack("a")]
    assert time.perf_counter() - begin > 0.1
    assert (world.is_idle, world.lost, world.returning) == (True, {}, set())
    assert [outcome.why for outcome in world.restarted] == ["killed"]
    assert world.due_events() == []


def test_one_that_cannot_be_started_is_lost_after_all() -> None:
    news = News()
    world = real_world("ab", news)
    world._posted.put(Failed("a", ProcessLost("killed")))
    assert world.due_events() == [InstanceLost("a", "ProcessLost: killed", returns=True)]
    news.tell("no room")
    assert world.due_events() == [InstanceLost("a", "no room")]
    assert (world.is_idle, world.lost, world.returning) == (True, {"a": "no room"}, set())


def test_where_there_is_no_other_that_ends_the_run() -> None:
    """A restart that fails ends the run, as does a loss after which none is to be expected."""
    news = News()
    world = real_world("a", news)
    world._posted.put(Failed("a", ProcessLost("killed")))
    assert world.due_events()
    news.tell("no room")
    with pytest.raises(JaxinferError, match=r"^no room$"):
        world.due_events()
    world = real_world("a", News(expects=False))
    world._posted.put(Failed("a", ProcessLost("killed")))
    with pytest.raises(JaxinferError, match=r"^killed$"):
        world.due_events()


def test_news_of_a_loss_that_no_run_has_noticed() -> None:
    """The instance keeps nothing: it has no KV."""
    news = News()
    news.tell()
    world = real_world("ab", news)
    world.add([RequestState("r", 1, 1, arrival=0.0)])
    found = world.due_events()
    assert found[:-1] == [InstanceLost("a", "killed", returns=True), InstanceBack("a")]
    assert news.lost == []  # It is not to be ended.


def test_what_was_launched_on_the_lost_one_is_no_failure_of_the_new_one() -> None:
    """The loop was busy with something else when the one was lost and the other ready."""
    news = News()
    world = real_world("ab", news)

    def launch(*args: Any) -> None:
        raise ProcessLost("killed")

    worker: Any = world._workers["a"]
    worker.launch = launch
    news.tell()
    world.launch(Batch("a", [], 0, 0, 0))
    assert world.due_events() == [
        InstanceLost("a", "ProcessLost: killed", returns=True),
        InstanceBack("a"),
    ]
    assert (world.lost, world.is_idle) == ({}, True)


def test_whoever_drains_a_world_does_not_wait_for_a_return() -> None:
    world = real_world("ab", News())
    world.launch(Batch("a", [], 0, 0, 0))
    world._posted.put(Failed("a", ProcessLost("killed")))
    world.drain()
    assert world.returning == {"a"}


class FakePipeline(PipelineWorker):
    """A pipeline that has lost an attention group's process and waits before it goes on."""

    def __init__(self, lost: Sequence[str] = ("a",), fails: str | None = None) -> None:
        self._gone, self._fails = list(lost), fails
        self.go = threading.Event()
        self.without, self.given_up = [], []

    @property
    def lost_lenders(self) -> list[str]:
        return self._gone

    @property
    def needs_all(self) -> bool:
        return False

    @property
    def lending(self) -> list[Any]:
        return []

    @property
    def pieces(self) -> list[Any]:
        return [None]

    def go_on(self) -> None:
        assert self.go.wait(20)
        if self._fails:
            raise ProcessGone(self._fails)
        self.without, self._gone = [2], []

    def give_up(self, why: Exception) -> None:
        self.given_up.append(str(why))


def lone(worker: FakePipeline, hear: Callable[[Any], None]) -> Restarts:
    config: Any = SimpleNamespace(groups={}, instances={})
    none: Any = None
    restarts = Restarts(config, none, {"x": worker})
    restarts.listen(hear)
    return restarts


def test_an_instance_goes_on_in_the_world_without_some_shards() -> None:
    worker = FakePipeline()
    world: Any = None

    def launch(*args: Any) -> None:
        raise ProcessLost("killed")

    worker.launch = launch  # type: ignore[method-assign]
    restarts = lone(worker, lambda news: None)
    world = RealWorld({"x": worker}, requests=(), restarts=restarts)
    world.launch(Batch("x", [], 0, 0, 0))
    assert world.due_events() == [InstanceLost("x", "ProcessLost: killed", returns=True)]
    worker.go.set()
    assert world.due_events() == [InstanceBack("x"), GoesWithout("x", (2,))]
    assert world.lost == {}
    (told,) = world.restarted
    assert (told.group, told.error, told.without) == ("a", None, (2,))


@pytest.mark.parametrize("fails", [None, "gone, too"])
def test_a_run_that_begins_while_an_instance_is_to_go_on_hears_of_it(fails: str | None) -> None:
    """Going on is begun once, and what comes of it is told once."""
    worker = FakePipeline(fails=fails)
    heard: list[Any] = []
    restarts = lone(worker, lambda news: None)
    assert restarts.expect("x", "killed")
    restarts.listen(heard.append)
    assert [(news.instance, str(news.error)) for news in heard] == [("x", "killed")]
    assert restarts.expect("x", "killed again")
    worker.go.set()
    wait_until(lambda: len(heard) == 2)
    restarts.listen(heard.append)
    assert heard[1:] == [Restarted("a")] * 2
    told = restarts.take("a")
    assert told
    assert (told.instances, told.why, told.error) == (["x"], "killed", fails)
    assert worker.given_up == ([fails] if fails else [])
    assert restarts.take("a") is None


def test_an_instance_that_has_lost_more_than_that_does_not_return() -> None:
    """Nor are its other processes left behind."""
    worker = FakePipeline([])
    assert not lone(worker, print).expect("x", "killed")
    assert worker.given_up == ["killed"]
