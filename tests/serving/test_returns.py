"""A lost instance that is started again, in schedules by hand: who waits for it, and until when."""

from dataclasses import replace

import pytest
from schedules import TO_A, follow, moves, pool, serve, steps, times, unit
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.system import Assignment, SetRole, System
from jaxinfer.serving.views import ClusterView, Leg
from jaxinfer.systems.least_loaded import LeastLoaded

TO_B = (Leg("B"),)


def again(name: str) -> Instance:
    return pool(name)


def test_who_has_nowhere_else_to_go_waits() -> None:
    """r0 has one of three tokens; its five known ones are computed anew, four in a step."""
    outcome = follow(
        [TO_A, TO_A],
        [pool("A")],
        [(4, 3), (4, 1)],
        [0, 3],
        timing=unit(lost={"A": (1.5, 5.5)}),
        renew=again,
    )
    assert steps(outcome)[:2] == ["0-1 A r0:0+4", "1-2 A r0:4+1"]
    assert steps(outcome)[2:] == [
        "5.5-6.5 A r0:0+4",
        "6.5-7.5 A r0:4+1 r1:0+3",
        "7.5-8.5 A r0:5+1 r1:3+1",
    ]
    assert (times(outcome), times(outcome, "r1")) == ([1, 7.5, 8.5], [8.5])
    assert (outcome.loop.assignments.losses.lost, outcome.loop.assignments.losses.returning) == (
        {},
        set(),
    )


def without(seconds: int | None, *requests: tuple[int, int]) -> tuple[Outcome, list[Instance]]:
    """A with three shards, of two slices; lost at 1.5, and at 5.5 back without two for a time."""
    opts = replace(pool("A").options, watermark=0.1)
    instances = [new_instance("A", make_kv(20, 1, ((0,), (1,), ())), opts) for _ in "ab"]
    timing = unit(lost={"A": (1.5, 5.5)}, without={"A": ((1, 2), seconds)})
    legs = [TO_A] * len(requests)
    found = follow(legs, instances[:1], requests, timing=timing, renew=lambda name: instances[1])
    return found, instances


def test_one_that_is_back_without_a_shard() -> None:
    """r0's two slices lay in two shards, and both lie in the one that is left."""
    outcome, instances = without(None, (4, 3))
    assert outcome.ended == {"r0": 8.5}
    assert [shard.num_pages for shard in instances[1].kv.shards] == [20, 0, 0]
    # Two slices of 20 pages each, then of 10 each.
    assert [each.watermark_pages for each in instances] == [2, 1]


@pytest.mark.parametrize("seconds", [3, None])
def test_who_has_no_room_without_a_shard_waits_where_that_is_to_return(seconds: int | None) -> None:
    """r0 needs 6 pages of each slice, r1 12: more than two slices have in the shard of 20."""
    outcome, instances = without(seconds, (4, 3), (9, 4))
    assert outcome.ended["r0"] == 8.5
    if seconds is None:
        assert outcome.finished["r1"].error == (
            "request 'r1' needs 12 pages of 1 tokens (9 prompt + 4 output tokens) on instance 'A', "
            "which has 10"
        )
        return
    # A step has four tokens: those of r1 come after r0's last, or beside it.
    assert steps(outcome)[-1] == "13.5-14.5 A r1:11+1"
    assert outcome.finished["r1"].error is None
    assert [shard.num_pages for shard in instances[1].kv.shards] == [20, 20, 20]
    assert (instances[1].watermark_pages, instances[1].num_pages) == (2, 20)
    assert outcome.loop.assignments.losses.regaining == set()


def test_one_that_cannot_be_started_fails_who_has_waited() -> None:
    """Requests that come after the failure to start fail at once."""
    timing = unit(lost={"A": (1.5, 4.5)}, fail_to_start=["A"])
    outcome = follow([TO_A] * 3, [pool("A")], [(4, 3)] * 3, [0, 3, 6], timing=timing, renew=again)
    assert outcome.ended == {"r0": 4.5, "r1": 4.5, "r2": 6}
    for name in ("r0", "r1", "r2"):
        assert outcome.finished[name].error == (
            f"request {name!r}: instance 'A' was lost, and the system has no other for it: "
            "not started"
        )


def test_who_names_an_instance_that_is_lost_for_good_waits_while_another_is_started() -> None:
    timing = unit(lost={"A": 1.5, "B": (1.25, 4.5)})
    outcome = follow([TO_A, TO_B], [pool("A"), pool("B")], [(4, 3)] * 2, timing=timing, renew=again)
    assert outcome.ended["r0"] == 4.5
    assert outcome.finished["r0"].finish_reason == "lost"
    assert outcome.finished["r1"].error is None


def test_a_run_does_not_wait_for_whom_nobody_needs() -> None:
    timing = unit(lost={"B": (1.5, 99)})
    outcome = follow([TO_A], [pool("A"), pool("B")], [(4, 4)], timing=timing, renew=again)
    assert (outcome.world.now(), list(outcome.loop.assignments.losses.lost)) == (4, ["B"])


def test_kv_that_was_to_be_fetched_is_kept_meanwhile() -> None:
    """The KV is sent to B once more, and not computed again."""
    legs = (Leg("A", 4), Leg("B"))
    timing = unit(lost={"B": (1.5, 4.5)})
    outcome = follow([legs], [pool("A"), pool("B")], [(4, 3)], timing=timing, renew=again)
    assert moves(outcome) == ["1 r0 A>B 0-4", "4.5 r0 A>B 0-4"]
    assert [text for text in steps(outcome) if " A " in text] == ["0-1 A r0:0+4"]
    assert times(outcome) == [1, 6.5, 7.5]


def least_loaded(lost: dict[str, tuple[float, ...]], arrivals: list[float]) -> Outcome:
    """A token each, on A, B and C."""
    pools = [pool(name) for name in "ABC"]
    lengths = [(4, 1)] * len(arrivals)
    system = LeastLoaded(LeastLoaded.Options())
    return serve(system, pools, lengths, arrivals, timing=unit(lost=lost), renew=again)


def test_one_that_is_back_takes_its_old_place() -> None:
    """The first of equal instances is taken: that is A, until it is lost, and from 5 on."""
    outcome = least_loaded({"A": (0.5, 5)}, [0, 2, 4, 6, 8])
    assert [outcome.route_of(f"r{i}")[-1][0] for i in range(5)] == ["B", "B", "B", "A", "A"]
    assert outcome.route_of("r0")[0] == ("A", 4)
    assert list(outcome.loop.assignments.instances) == ["A", "B", "C"]


def test_it_may_be_lost_again_and_again() -> None:
    outcome = least_loaded({"A": (0.5, 2, 2.5, 4, 4.5)}, [0, 2.25, 4.25, 6])
    assert [outcome.route_of(f"r{i}") for i in range(4)] == [
        [("A", 4), ("B", 4)],
        [("A", 4), ("B", 4)],
        [("A", 4), ("B", 4)],
        [("B", 4)],
    ]
    assert outcome.loop.assignments.losses.lost == {"A": "killed"}


class Drains(System):
    """B is to become a mere spare; who runs there goes on at A when B is lost."""

    tick_interval = 0.5

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        name = "B" if cluster.now < 1 else "A"
        return [Assignment(r.id, (Leg(name),)) for r in waiting]

    def on_tick(self, cluster: ClusterView) -> list[SetRole]:
        return [SetRole("B", "spare")] if cluster.now == 0.5 else []


def test_it_has_the_role_that_it_began_with_and_the_figures_of_the_one_before() -> None:
    begun: list[Instance] = []

    def renew(name: str) -> Instance:
        lost.num_preemptions = 3
        begun.append(new_instance(name, make_kv(50, 1), role="worker"))
        begun[0].follow(lost, 2.5)
        return begun[0]

    lost = new_instance("B", make_kv(50, 1), role="worker")
    outcome = serve(
        Drains(), [pool("A"), lost], [(4, 9)], timing=unit(lost={"B": (1.5, 2.5)}), renew=renew
    )
    (back,) = begun
    assert outcome.loop.assignments.instances["B"] is back
    assert (back.role, back.next_role, lost.next_role) == ("worker", None, "spare")
    assert (back.role_seconds(7.0), back.num_preemptions) == ({"worker": 7.0}, 3)


def test_a_world_that_has_nothing_more_after_all_ends_the_run() -> None:
    """The request that was said to be still to come has turned out to be none."""
    asked: list[float] = []

    class Promises:
        """A request is said to be still to come, until the first round has ended."""

        more = True

        def now(self) -> float:
            return 0.0

        def due_events(self) -> list[object]:
            asked.append(self.now())
            return []

        def arrivals_left(self) -> bool:
            return self.more

    world = Promises()
    loop = ServingLoop(world, [pool("A")], LeastLoaded(LeastLoaded.Options()))  # type: ignore[arg-type]
    for _ in loop.rounds():
        world.more = False
    assert len(asked) == 1


@pytest.mark.parametrize(("lost", "cached"), [({}, 6), ({"A": (3, 4)}, 0)])
def test_what_its_pages_held_is_not_there_any_more(
    lost: dict[str, tuple[float, ...]], cached: int
) -> None:
    """r1 begins as r0 did, and all full pages but the last token's may be shared."""

    def renew(name: str) -> Instance:
        return new_instance(name, make_kv(20, 2, caching=True))

    requests = make_requests([(8, 2)] * 2, [0, 5], shared=[8, 8])
    system = LeastLoaded(LeastLoaded.Options())
    outcome = Run(system, [renew("A")], requests, unit(lost=lost), renew=renew).verify()
    assert outcome.finished["r1"].metrics.num_cached_tokens == cached
