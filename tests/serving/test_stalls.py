"""Ticks, stalls and losses in schedules by hand: who goes on, who is given up, and when."""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_world import FakeWorld, Timing
from schedules import TO_A, Plan, follow, moves, pool, serve, steps, times, unit
from serving_checks import Run, make_kv, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.serving import loop as loop_module
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.system import Action, Assignment, MoveSlices, Pause, Resume, SetRole, System
from jaxinfer.serving.views import ClusterView, Leg, StepView

# Ticks and stalls.


class Wakes(FakeWorld):
    """Notes what ticks are asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[float] = []

    def wake_at(self, time: float) -> None:
        self.asked.append(time)
        super().wake_at(time)


def test_ticks_end_with_the_last_request() -> None:
    for lengths, arrivals, asked in (
        ([], [], []),
        ([(4, 3)], [0.0], [0.5, 1, 1.5, 2, 2.5, 3]),
        ([(4, 1), (4, 1)], [0.0, 2.0], [0.5, 1, 1.5, 2, 2.5, 3]),  # Nobody is there in between.
    ):
        instances, requests = [pool("A")], make_requests(lengths, arrivals)
        world = Wakes(instances, requests)
        plan = Plan({"r0": TO_A, "r1": TO_A})
        ServingLoop(world, instances, plan, on_event=world.committed).run()
        assert world.asked == asked


@pytest.mark.parametrize("gap", [1.5, 2.0])
def test_so_many_idle_ticks_in_a_row_are_a_stall(
    gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of half a second may pass; the moment of the last event counts, too."""
    monkeypatch.setattr(loop_module, "MAX_IDLE_TICKS", 3)
    # Each takes a second, and waits after the one before; all together it is more than three.
    names = [f"r{i}" for i in range(4)]
    later = {name: i * (1 + gap) for i, name in enumerate(names)}
    plan = Plan(dict.fromkeys(names, TO_A), later=later)
    if gap == 1.5:
        outcome = serve(plan, [pool("A")], [(4, 1)] * 4)
        assert [times(outcome, name) for name in names] == [[1], [3.5], [6], [8.5]]
    else:
        with pytest.raises(JaxinferError, match="Plan has stalled: 3 requests are left"):
            serve(plan, [pool("A")], [(4, 1)] * 4)


def test_a_system_may_think_for_a_while() -> None:
    """A thousand ticks that change nothing are no stall."""
    outcome = serve(Plan({"r0": TO_A}, later={"r0": 500.0}), [pool("A")], [(4, 1)])
    assert times(outcome) == [501]


def test_a_stall_names_who_is_left() -> None:
    """The message names at most five requests, and how many the system has not routed."""
    legs = dict.fromkeys((f"r{i}" for i in range(9)), TO_A)
    later = {f"r{i}": 99.0 for i in range(1, 7)}
    never = pool("A", max_num_seqs=1)
    with pytest.raises(JaxinferError) as error:
        serve(Stalled(legs, later=later, ticks=False), [never], [(4, 9)] * 9)
    assert str(error.value) == (
        "Stalled has stalled: 9 requests are left (r0, r1, r2, r3, r4), 6 of them unrouted, "
        "and nothing is in flight"
    )


class Stalled(Plan):
    """Pauses r0, which has the only seat, after its first step."""

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        return (Pause("r0"),)


def crossing() -> tuple[list[tuple[Leg, ...]], list[Instance]]:
    """Instances have KV that the other has no room for: nine pages, of which eight are taken."""
    return [(Leg("A", 8), Leg("B")), (Leg("B", 8), Leg("A"))], [pool("A", 9), pool("B", 9)]


def test_the_latest_of_those_who_wait_for_each_other_is_recomputed() -> None:
    outcome = follow(*crossing(), [(8, 2), (8, 2)])
    assert outcome.route_of("r0") == [("A", 8), ("B", 1)]
    assert outcome.route_of("r1") == [("B", 8), ("A", 9)]
    assert moves(outcome) == ["2 r0 A>B 0-8"]
    assert times(outcome) == [2, 4]
    # Once r0 has left A: ten entries, the second token with the ninth.
    assert times(outcome, "r1") == [2, 6]


class Later(Plan):
    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        legs = (Leg("B"),) if cluster.now >= 5 else (Leg("A", 4),) if cluster.now == 0 else ()
        return [Assignment(r.id, legs) for r in waiting if legs]


def test_kv_is_kept_while_a_system_that_speaks_again_has_not_routed_it() -> None:
    """A leg at a time; the second is named at 5 s only."""
    outcome = serve(Later({}), [pool("A"), pool("B")], [(4, 2)])
    assert moves(outcome) == ["5 r0 A>B 0-4"]
    assert steps(outcome) == ["0-1 A r0:0+4", "6-7 B r0:4+1"]


class OneAtATime(System):
    """Names one leg; who has computed something goes on once r1 has ended."""

    def route(self, waiting, cluster: ClusterView):  # type: ignore[no-untyped-def]
        if any(r.id == "r1" for r in waiting):
            return [Assignment("r0", (Leg("A", 4),)), Assignment("r1", TO_A)]
        done = not cluster.instances["A"].num_requests
        return [Assignment(r.id, TO_A) for r in waiting if done]


def test_kv_that_nobody_routes_makes_room_where_the_system_speaks_no_more() -> None:
    outcome = serve(OneAtATime(), [pool("A", 7, max_num_seqs=2)], [(4, 2), (4, 2)])
    # r1 needs four pages, of which three are free.
    assert steps(outcome) == [
        "0-1 A r0:0+4",
        "1-2 A r1:0+4",
        "2-3 A r1:4+1",
        "3-4 A r0:0+4",
        "4-5 A r0:4+1",
    ]
    assert times(outcome) == [1, 5]


def test_kv_is_kept_while_a_paused_request_has_the_room_for_it() -> None:
    legs = {"r0": (Leg("A", 4), Leg("B")), "r1": (Leg("B"),)}
    plan = Plan(legs, {0.5: [Pause("r1")], 4.5: [Resume("r1")]})
    outcome = serve(plan, [pool("A"), pool("B", 5)], [(4, 2), (4, 2)])
    assert steps(outcome) == [
        "0-1 A r0:0+4",
        "0-1 B r1:0+4",
        "4.5-5.5 B r1:4+1",
        "6.5-7.5 B r0:4+1",
    ]
    assert moves(outcome) == ["5.5 r0 A>B 0-4"]


class HoldsBack(System):
    """Pauses r1 once its prompt is done, until r0 takes part in a step on B."""

    def route(self, waiting, cluster: ClusterView):  # type: ignore[no-untyped-def]
        legs = {"r0": (Leg("A", 8), Leg("B")), "r1": (Leg("B"),)}
        return [Assignment(r.id, legs[r.id]) for r in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        if step.instance == "A" or step.rows[0].start < 4:
            return ()
        return (Resume("r1") if step.rows[0].request.id == "r0" else Pause("r1"),)


def test_kv_is_dropped_for_the_same_in_the_cache_of_who_cannot_fetch_it() -> None:
    """B has three free pages for the nine of r0, but r1's eight are those of the same prompt."""
    opts = InstanceOptions(8, 4, 1, False, watermark=0.0)
    pools = [pool("A"), new_instance("B", make_kv(11, 1, caching=True), opts)]
    requests = make_requests([(8, 3), (8, 2)], shared=[8, 8])
    outcome = Run(HoldsBack(), pools, requests, unit()).verify()
    assert steps(outcome)[4:] == ["2-3 B r0:8+1", "3-4 B r1:8+1 r0:9+1"]
    assert moves(outcome) == []


class Refuses(System):
    """A request that has left A goes to an instance too small; r1 waits for A's other role."""

    def route(self, waiting, cluster: ClusterView):  # type: ignore[no-untyped-def]
        legs = {"r0": (Leg("tiny"),) if cluster.now else (Leg("A", 4),)}
        if cluster.instances["A"].role == "x":
            legs["r1"] = TO_A
        return [Assignment(r.id, legs[r.id]) for r in waiting if r.id in legs]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        return (SetRole("A", "x"),) if step.start == 0 else ()


def test_a_role_is_taken_when_the_last_request_is_refused() -> None:
    outcome = serve(Refuses(), [pool("A"), pool("tiny", 2)], [(4, 4), (4, 1)])
    assert outcome.ended == {"r0": 1, "r1": 2}
    assert outcome.finished["r0"].finish_reason == "error"


# Losses.


def lost(name: str, time: float, **timing: Any) -> Timing:
    return unit(lost={name: time}, **timing)


def test_a_role_that_a_lost_instance_was_to_take() -> None:
    plan = Plan({"r0": TO_A, "r1": (Leg("B"),)}, {0.5: [SetRole("B", "x")]})
    outcome = serve(plan, [pool("A"), pool("B")], [(4, 4), (4, 4)], timing=lost("B", 1.5))
    assert times(outcome) == [1, 2, 3, 4]
    assert outcome.finished["r1"].error == (
        "request 'r1': instance 'B' was lost, and the system has no other for it: killed"
    )


class Avoids(Plan):
    """A plan whose legs on a lost instance go to the first instance that is left."""

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        first = next(iter(cluster.instances))
        return [
            Assignment(
                a.request,
                tuple(leg if leg.instance in cluster.instances else Leg(first) for leg in a.legs),
            )
            for a in super().route(waiting, cluster)
        ]


def test_what_a_lost_instance_had_is_routed_before_those_who_have_waited() -> None:
    """r0 and r1 ran there; r2 has not been routed yet."""
    to_b = (Leg("B"),)
    plan = Avoids({"r0": to_b, "r1": to_b, "r2": to_b}, later={"r2": 3})
    outcome = serve(plan, [pool("A"), pool("B")], [(2, 3)] * 3, timing=lost("B", 1.25))
    assert ["r0", "r1", "r2"] in plan.asked[1:]
    assert plan.asked[-1] == ["r2"]
    assert steps(outcome)[:3] == [
        "0-1 B r0:0+2 r1:0+2",
        "1-2 B r0:2+1 r1:2+1",
        "1.25-2.25 A r0:0+3 r1:0+1",
    ]
    assert [times(outcome, name)[0] for name in ("r0", "r1", "r2")] == [1, 1, 4.25]


def test_a_loss_wakes_who_has_waited_behind_what_is_gone() -> None:
    """A has no pages for r2, which is first and has its KV on B; r3 behind it needs one."""
    legs = {
        "r0": TO_A,
        "r1": (Leg("B", 8), Leg("A")),
        "r2": (Leg("A"),),
    }
    plan = AvoidsA(legs, ticks=False)
    a = pool("A", 12, max_in_flight=2)
    outcome = serve(
        plan, [a, pool("B"), pool("C")], [(4, 6), (8, 4), (1, 1)], [0, 0, 3], timing=lost("B", 3.5)
    )
    # Launched at once, not with r0's next decode.
    assert "4-5 A r2:0+1" in steps(outcome)
    assert "3.5-4.5 C r1:0+4" in steps(outcome)


class AvoidsA(Plan):
    """A plan that sends all requests to C once B is lost."""

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        lost = "B" not in cluster.instances
        return [Assignment(r.id, (Leg("C"),) if lost else self.legs[r.id]) for r in waiting]


def test_the_rest_goes_on_when_who_cannot_is_given_up() -> None:
    """r0's KV is on A, nobody routes it, and it has the pages that r1 needs."""
    legs = {"r0": (Leg("A", 4), Leg("B")), "r1": TO_A}
    plan = OnlyFirst(legs)
    a = pool("A", 6)
    timing = lost("B", 1.5, transfers={"B": 9})
    outcome = serve(plan, [a, pool("B")], [(4, 4), (4, 2)], [0, 1], timing=timing)
    ended = {name: (r.finish_reason, times(outcome, name)) for name, r in outcome.finished.items()}
    # Given up after ten ticks, 0.5 s each, in which the system might have opened another instance.
    assert ended == {
        "r0": ("lost", [1]),
        "r1": ("length", [1.5 + 10 * 0.5 + 1, 1.5 + 10 * 0.5 + 2]),
    }


class OnlyFirst(Plan):
    """Routes nobody twice."""

    tick_interval = 0.5

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        return [Assignment(r.id, self.legs.pop(r.id)) for r in waiting if r.id in self.legs]


class Names(System):
    """Names the lost instance for r0 alone, or asks for it."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks

    def route(self, waiting, cluster: ClusterView):  # type: ignore[no-untyped-def]
        if self.asks and any(r.id == "r0" for r in waiting):
            assert cluster.instances["B"].num_requests >= 0
        return [Assignment(r.id, (Leg("B" if r.id == "r0" else "A"),)) for r in waiting]


@pytest.mark.parametrize("asks", [False, True])
def test_a_system_that_names_a_lost_instance_loses_who_was_to_go_there(asks: bool) -> None:
    """A name loses its one request; a look-up of the instance loses all that were asked about."""
    outcome = serve(
        Names(asks),
        [pool("A"), pool("B")],
        [(4, 4)] * 3,
        [0, 1.75, 1.75],
        timing=lost("B", 1.75),
    )
    reasons = [outcome.finished[name].finish_reason for name in ("r0", "r1", "r2")]
    assert reasons == (["lost"] * 3 if asks else ["lost", "length", "length"])
    assert outcome.finished["r0"].error == (
        "request 'r0': instance 'B' was lost, and the system has no other for it: killed"
    )


def test_the_last_loss_is_what_the_rest_is_told() -> None:
    plan = Avoids({"r0": TO_A, "r1": (Leg("B"),)}, ticks=False)
    timing = unit(lost={"A": 1.5, "B": 2.5})
    outcome = serve(plan, [pool("A"), pool("B")], [(4, 9)] * 2, timing=timing)
    for name in ("r0", "r1"):
        assert outcome.finished[name].error == (
            f"request {name!r}: instance 'B' was lost, and the system has no other for it: killed"
        )
    assert outcome.loop.assignments.losses.lost == {"A": "killed", "B": "killed"}
    assert outcome.loop.assignments.instances == {}


@pytest.mark.parametrize("asks", [False, True])
def test_who_comes_after_the_last_instance_is_lost_is_told_at_once(asks: bool) -> None:
    """Or after the one that the system asks for."""
    pools = [pool("B"), *([pool("A")] if asks else [])]
    system = Names(True) if asks else Plan({f"r{i}": (Leg("B"),) for i in range(3)}, ticks=False)
    lengths, arrivals = [(4, 9), (4, 1), (4, 1)], [2.0, 4.0, 9.0]
    outcome = serve(system, pools, lengths, arrivals, timing=lost("B", 1.0))
    reasons = [outcome.finished[f"r{i}"].finish_reason for i in range(3)]
    assert reasons == (["lost", "length", "length"] if asks else ["lost"] * 3)
    assert outcome.ended == {"r0": 2, "r1": 5 if asks else 4, "r2": 10 if asks else 9}


def test_who_has_nowhere_to_go_hears_of_the_last_loss() -> None:
    """C is left, but the system routes nobody twice."""
    plan = OnlyFirst({"r0": TO_A, "r1": (Leg("B"),)})
    timing = unit(lost={"A": 1.5, "B": 2.5})
    outcome = serve(plan, [pool(name) for name in "ABC"], [(4, 9)] * 2, timing=timing)
    assert [r.error and "instance 'B' was lost" in r.error for r in outcome.finished.values()] == [
        True,
        True,
    ]


def test_heads_that_waited_for_a_chunk_move_when_its_destination_is_lost() -> None:
    a = new_instance("A", make_kv(30, 1, [(0, 1), (2,)]), InstanceOptions(8, 4, 1, False))
    move = MoveSlices("r0", ((0, 1, (1,)),))
    plan = Avoids({"r0": (Leg("A", 12, "per_chunk"), Leg("B"))}, {1.5: [move]})
    outcome = serve(
        plan, [a, pool("B")], [(12, 2)], timing=lost("B", 3.5, transfers={"B": 9, "A": 0.25})
    )
    assert moves(outcome) == ["1 r0 A>B 0-4", "1.5 r0 A>A 0-4", "3.5 r0 A>A 4-8"]
    assert steps(outcome)[2:] == ["3.75-4.75 A r0:8+4", "4.75-5.75 A r0:12+1"]
