"""Aladdin: workers that open and close, losses, requests that are moved."""

from typing import Any

from aladdin_cases import Checked, burst, instance, make, serve, where
from fake_world import Timing
from serving_checks import make_requests

from jaxinfer.serving.instance_options import InstanceOptions


def test_a_burst_opens_workers_and_they_close_again() -> None:
    system = make(Checked, heartbeat_s=1, off_after_s=5)
    pool = [instance("a"), *(instance(name, role="off") for name in "bcd")]
    outcome = serve(system, pool, burst())
    assert set(where(outcome, 10)) == {"a", "b"}
    assert where(outcome, 10)[-2:] == ["a", "a"] or where(outcome, 10)[-2:] == ["b", "b"]
    assert system.report()["opened"] >= 1
    seconds = {i.name: i.role_seconds(outcome.world.now()) for i in pool}
    assert seconds["c"] == seconds["d"] == {"off": outcome.world.now()}
    assert 0 < seconds["b"]["on"] < outcome.world.now() / 2
    assert seconds["a"].get("off", 0) > 0
    started = [each for each in outcome.finished.values() if each.arrival == 40]
    assert all(each.metrics.token_times[0] <= 40 + 8 + 3 for each in started)


def test_who_is_busy_is_not_off() -> None:
    """A request that runs for longer than a worker may have nothing."""
    pool = [instance("a"), instance("b", role="off")]
    outcome = serve(make(Checked, heartbeat_s=1, off_after_s=5), pool, make_requests([(4, 40)]))
    (times,) = (each.metrics.token_times for each in outcome.finished.values())
    assert times[-1] > 15
    assert "off" not in pool[0].role_seconds(times[-1])


def test_without_heartbeats_nobody_is_off() -> None:
    outcome = serve(make(Checked), [instance("a", role="off")], make_requests([(3, 3)]))
    assert where(outcome, 1) == ["a"]


def test_all_may_be_off() -> None:
    """A worker opens at the first look, for what nobody would take, too."""
    for prompt in (3, 60):
        system = make(Checked, heartbeat_s=2)
        pool = [instance(name, role="off") for name in "ab"]
        outcome = serve(system, pool, make_requests([(prompt, 3)]))
        assert where(outcome, 1) == ["a"]
        assert system.report() == {"opened": 1, "moved": 0}


def test_who_is_lost_is_replaced_by_one_that_was_off() -> None:
    """The instance that was off is opened at the next heartbeat; the requests are not given up."""
    system = make(Checked, heartbeat_s=1)
    pool = [instance("a"), instance("b", role="off")]
    timing = Timing(in_order=True, lost={"a": 5.0})
    outcome = serve(system, pool, make_requests([(8, 9)] * 2), timing=timing)
    assert where(outcome, 2) == ["b", "b"]
    assert all(r.finish_reason == "length" for r in outcome.finished.values())


def test_requests_go_on_where_the_instance_for_prompts_is_lost() -> None:
    """The worker that is off is opened at the next heartbeat, as it is for a lost worker."""
    system = make(Checked, prefill=["p"], heartbeat_s=1, off_after_s=1)
    pool = [instance("p"), instance("a", role="off")]
    outcome = serve(
        system, pool, make_requests([(8, 9)]), timing=Timing(in_order=True, lost={"p": 1.0})
    )
    assert outcome.finished["r0"].finish_reason == "length"
    assert where(outcome, 1) == ["a"]


def test_requests_that_come_back_together_are_all_taken_off_the_books_first() -> None:
    """Two decodes lose the KV that was under way: neither counts on its worker any more when the
    other one is placed (checked by ``Checked``).
    """
    for seed in range(40):
        requests = make_requests([(1, 2), (1, 2)])
        timing = Timing(seed, 3, 6, lost={"p": 3.0})
        system = make(Checked, prefill=["p"], ttft_s=2.0, atgt_s=0.75, theta=0.25)
        pool = [instance(name, 30) for name in "pqde"]
        outcome = serve(system, pool, requests, timing=timing)
        assert all(r.finish_reason == "length" for r in outcome.finished.values())


class Moves(Checked):
    """Notes what it moves, and that it has not begun."""

    moved: list[str]

    def on_tick(self, cluster: Any) -> Any:
        actions = super().on_tick(cluster)
        for action in actions:
            if hasattr(action, "request"):
                waiting = [r for i in cluster.instances.values() for r in i.waiting]
                (request,) = [r for r in waiting if r.id == action.request]
                assert request.computed == 0
                assert request.first_token_at is None
                self.moved.append(action.request)
        return actions


def test_a_wrong_predictor_has_queued_requests_moved_and_none_that_runs() -> None:
    """Answers on one worker are ten times as long as predicted, and that on the other ends early:
    what waits at the first goes to the second.
    """
    lengths = [(2, 40), (2, 40), (2, 40), (2, 300), (9, 3), (9, 3)]
    requests = make_requests(lengths, [0.0] * 4 + [12.0, 12.0])
    for each, guess in zip(requests, (4, 4, 4, 300, 3, 3), strict=True):
        each.predicted = (guess, guess)
    system = make(Moves, heartbeat_s=1, ttft_s=60.0, atgt_s=3.0, theta=1.0)
    assert isinstance(system, Moves)
    system.moved = []
    pool = [instance("a", 400), instance("b", 400)]
    for each_instance in pool:
        each_instance.options = InstanceOptions(max_num_seqs=3, max_num_batched_tokens=16)
    outcome = serve(system, pool, requests, stop_at={"r3": 2})
    assert sorted(system.moved) == ["r4", "r5"]
    assert system.report()["moved"] == 2
    assert where(outcome, 6) == ["a", "a", "a", "b", "b", "b"]
    assert all(len(outcome.route_of(f"r{i}")) == 1 for i in range(6))
