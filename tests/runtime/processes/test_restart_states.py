"""Starts of lost processes, and none: attempts, samplers."""

import time
from typing import Any

import pytest
from fake_restarts import Cluster
from waiting import wait_until

from jaxinfer.runtime.processes.restart_groups import Restarted, RestartResult
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.world import InstanceBack, InstanceLost


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
