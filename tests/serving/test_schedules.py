"""Whole schedules by hand: who is in which step, from when to when, and what goes over."""

from typing import Any

import pytest
from schedules import TO_A, Plan, follow, moves, pool, serve, steps, times, unit
from serving_checks import make_kv, new_instance

from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.system import MoveSlices, Pause, Reassign, Resume, SetRole
from jaxinfer.serving.views import Leg

# One instance.


def test_chunks_beside_decodes() -> None:
    outcome = follow([TO_A] * 3, [pool("A")], [(6, 3), (3, 2), (1, 1)], [0, 0, 1])
    assert steps(outcome) == [
        "0-1 A r0:0+4",
        "1-2 A r0:4+2 r1:0+2",
        "2-3 A r0:6+1 r1:2+1 r2:0+1",
        "3-4 A r0:7+1 r1:3+1",
    ]
    assert [times(outcome, r) for r in ("r0", "r1", "r2")] == [[2, 3, 4], [3, 4], [3]]
    metrics = outcome.finished["r1"].metrics
    assert (metrics.arrival, metrics.first_scheduled) == (0, 1)
    assert list(outcome.finished) == ["r2", "r0", "r1"]


def test_steps_launched_ahead() -> None:
    """Two in flight: a decode is launched before its input has reached the host."""
    a = pool("A", max_in_flight=2, launch_ahead=True)
    outcome = follow([TO_A] * 2, [a], [(3, 4), (2, 1)], [0, 0.5])
    assert steps(outcome) == [
        "0-1 A r0:0+3",
        "1-2 A r0:3+1",
        "2-3 A r0:4+1 r1:0+2",
        "3-4 A r0:5+1",
    ]
    assert [row.input_pending for step in outcome.world.steps for row in step.batch.rows] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert times(outcome) == [1, 2, 3, 4]


def test_without_launching_ahead_another_request_fills_the_second_stage() -> None:
    """Two stages of a second each: a request's next step waits for its token."""
    a = pool("A", max_in_flight=2)
    timing = unit(stages={"A": 2})
    outcome = follow([TO_A] * 2, [a], [(4, 2), (4, 2)], timing=timing)
    assert steps(outcome) == [
        "0-2 A r0:0+4",
        "1-3 A r1:0+4",
        "2-4 A r0:4+1",
        "3-5 A r1:4+1",
    ]


def test_a_preempted_request_is_recomputed_with_what_it_had() -> None:
    """Eight pages for two requests that grow to seven each."""
    outcome = follow([TO_A] * 2, [pool("A", 8)], [(3, 5), (3, 5)])
    assert steps(outcome) == [
        "0-1 A r0:0+3 r1:0+1",
        "1-2 A r0:3+1 r1:1+2",
        "2-3 A r0:4+1",  # r1's fourth entry would be the ninth.
        "3-4 A r0:5+1",
        "4-5 A r0:6+1",
        "5-6 A r1:0+4",
        "6-7 A r1:4+1",
        "7-8 A r1:5+1",
        "8-9 A r1:6+1",
    ]
    assert times(outcome, "r1") == [2, 6, 7, 8, 9]
    assert outcome.finished["r1"].metrics.first_scheduled == 0
    assert [r.metrics.num_preemptions for r in outcome.finished.values()] == [0, 1]


def test_a_row_of_who_has_stopped_takes_nobodys_token() -> None:
    """r0 stops with its second token, while its next row is in flight ahead of r1's."""
    a = pool("A", max_in_flight=2, launch_ahead=True)
    outcome = follow([TO_A] * 2, [a], [(2, 9), (2, 4)], stop_at={"r0": 2})
    assert steps(outcome)[2:4] == ["2-3 A r0:3+1 r1:3+1", "3-4 A r1:4+1"]
    assert outcome.ended == {"r0": 2, "r1": 4}


# Hand-offs: six prompt tokens on A, the second token on B.


@pytest.mark.parametrize(
    ("rule", "moved", "last"),
    [
        ("on_demand", ["2 r0 A>B 0-6"], "3-4 B r0:6+1"),
        ("at_end", ["2 r0 A>B 0-6"], "3-4 B r0:6+1"),
        ("per_chunk", ["1 r0 A>B 0-4", "2 r0 A>B 4-6"], "3-4 B r0:6+1"),
        ("per_segment", ["0 r0 A>B 0-4", "1 r0 A>B 4-6"], "2-3 B r0:6+1"),
    ],
)
def test_hand_offs_to_an_instance_with_room(rule: Any, moved: list[str], last: str) -> None:
    # By segments, what the step computed is there at its end.
    timing = unit(transfers={"B": 0}) if rule == "per_segment" else unit()
    legs = (Leg("A", 6, rule), Leg("B"))
    outcome = follow([legs], [pool("A"), pool("B")], [(6, 2)], timing=timing)
    assert steps(outcome) == ["0-1 A r0:0+4", "1-2 A r0:4+2", last]
    assert moves(outcome) == moved
    metrics = outcome.finished["r0"].metrics
    assert (metrics.cut, metrics.received) == (6, 2 if rule == "per_segment" else 3)
    assert times(outcome) == [2, float(last[2])]


def test_the_second_instance_fetches_when_it_has_a_seat() -> None:
    """The fetch is on demand; meanwhile A goes on with the next request."""
    legs = (Leg("A", 4), Leg("B"))
    b = pool("B", max_num_seqs=1)
    outcome = follow([legs] * 2, [pool("A"), b], [(4, 3), (4, 2)])
    assert steps(outcome) == [
        "0-1 A r0:0+4",
        "1-2 A r1:0+4",
        "2-3 B r0:4+1",
        "3-4 B r0:5+1",
        "5-6 B r1:4+1",
    ]
    assert moves(outcome) == ["1 r0 A>B 0-4", "4 r1 A>B 0-4"]


def test_transfers_in_flight_are_limited() -> None:
    legs = (Leg("A", 1), Leg("B"))
    b = pool("B", max_transfers_in_flight=2)
    timing = unit(transfers={"B": 5})
    outcome = follow([legs] * 3, [pool("A"), b], [(1, 2)] * 3, timing=timing)
    assert moves(outcome) == ["1 r0 A>B 0-1", "1 r1 A>B 0-1", "6 r2 A>B 0-1"]


def test_an_open_leg_hands_nothing_on() -> None:
    """A later leg is dropped, be it too small for the request."""
    legs = (Leg("A", None, "per_chunk"), Leg("B", 9), Leg("tiny"))
    outcome = follow([legs], [pool("A"), pool("B"), pool("tiny", 2)], [(6, 3)])
    assert moves(outcome) == []
    assert outcome.route_of("r0") == [("A", 8)]


def test_legs_past_the_end_are_in_place_of_an_open_one() -> None:
    legs = (Leg("A", 3), Leg("B", 3), Leg("B", 4, "at_end"), Leg("A", 99))
    outcome = follow([legs], [pool("A"), pool("B")], [(5, 2)])
    assert steps(outcome) == ["0-1 A r0:0+3", "2-3 B r0:3+1", "4-5 A r0:4+1", "5-6 A r0:5+1"]
    assert moves(outcome) == ["1 r0 A>B 0-3", "3 r0 B>A 0-4"]


@pytest.mark.parametrize("order", [("per_segment", "on_demand"), ("on_demand", "per_segment")])
def test_any_leg_may_send_along(order: tuple[Any, Any]) -> None:
    """Whichever rule the other requests have."""
    legs = [(Leg("A", 2, rule), Leg("B")) for rule in order]
    outcome = follow(legs, [pool("A"), pool("B")], [(2, 2)] * 2)
    assert [t.request.id for t in outcome.world.sent_along] == [f"r{order.index('per_segment')}"]


# Actions.


def test_a_paused_request_keeps_its_pages_and_goes_on_where_it_was() -> None:
    plan = Plan({"r0": TO_A, "r1": TO_A}, {1.5: [Pause("r0")], 4.5: [Resume("r0")]})
    outcome = serve(plan, [pool("A")], [(2, 4), (1, 4)])
    assert steps(outcome) == [
        "0-1 A r0:0+2 r1:0+1",
        "1-2 A r0:2+1 r1:1+1",  # Launched before the pause.
        "2-3 A r1:2+1",
        "3-4 A r1:3+1",
        "4.5-5.5 A r0:3+1",
        "5.5-6.5 A r0:4+1",
    ]


def test_what_the_system_does_to_who_is_gone_does_nothing() -> None:
    plan = Plan({"r0": TO_A, "r1": TO_A}, {1.5: [Pause("r1"), Reassign("r1", (Leg("A", 9),))]})
    outcome = serve(plan, [pool("A")], [(1, 3), (1, 1)])
    assert times(outcome) == [1, 2, 3]


@pytest.mark.parametrize("legs", [(Leg("B"),), ()])
def test_who_waits_is_sent_elsewhere(legs: tuple[Leg, ...]) -> None:
    """r1 has no seat on A; without legs, the system is asked again."""
    plan = Plan({"r0": TO_A, "r1": TO_A}, {1.5: [Reassign("r1", legs)]})
    outcome = serve(plan, [pool("A", max_num_seqs=1), pool("B")], [(4, 4), (2, 1)])
    if legs:
        assert steps(outcome)[2] == "1.5-2.5 B r1:0+2"
        assert plan.asked == [["r0", "r1"]]
    else:
        assert steps(outcome)[-1] == "4-5 A r1:0+2"
        assert plan.asked == [["r0", "r1"], ["r1"]]


def test_an_action_for_a_lost_instance_leaves_the_others_of_its_answer() -> None:
    """r0 keeps running at A; r1, which waits there, goes to B."""
    there = [Reassign("r0", (Leg("C"),)), SetRole("C", "spare"), Reassign("r1", (Leg("B"),))]
    plan = Plan({"r0": TO_A, "r1": TO_A}, actions={3.5: there})
    pools = [pool("A", max_num_seqs=1), pool("B"), pool("C")]
    outcome = serve(plan, pools, [(2, 12), (2, 4)], timing=unit(lost={"C": 1.0}))
    assert [outcome.route_of(name) for name in ("r0", "r1")] == [[("A", 13)], [("B", 5)]]


def test_a_leg_cut_short_keeps_what_is_in_flight() -> None:
    """The step under way is still A's; the next leg starts behind it."""
    plan = Plan({"r0": TO_A}, {0.5: [Reassign("r0", (Leg("B"),))]})
    outcome = serve(plan, [pool("A"), pool("B")], [(6, 2)])
    assert steps(outcome) == ["0-1 A r0:0+4", "2-3 B r0:4+2", "3-4 B r0:6+1"]
    assert moves(outcome) == ["1 r0 A>B 0-4"]


def test_other_legs_that_begin_where_it_is() -> None:
    plan = Plan({"r0": TO_A}, {0.5: [Reassign("r0", (Leg("A", 5, "at_end"), Leg("B")))]})
    outcome = serve(plan, [pool("A"), pool("B")], [(6, 2)])
    assert steps(outcome) == ["0-1 A r0:0+4", "1-2 A r0:4+1", "3-4 B r0:5+1", "4-5 B r0:6+1"]


def test_other_legs_that_end_where_the_step_in_flight_does() -> None:
    """Entries in flight count as reached: A is not to compute a fifth."""
    plan = Plan({"r0": TO_A}, {0.5: [Reassign("r0", (Leg("A", 3), Leg("A", 4), Leg("B")))]})
    outcome = serve(plan, [pool("A"), pool("B")], [(6, 2)])
    assert steps(outcome)[1] == "2-3 B r0:4+2"


def test_other_legs_while_two_steps_are_in_flight() -> None:
    """A leg to the end of the first one would leave the second one's entries with nobody."""
    plan = Plan({"r0": TO_A}, {0.5: [Reassign("r0", (Leg("A", 4), Leg("B")))]})
    outcome = serve(plan, [pool("A", max_in_flight=2), pool("B")], [(10, 1)])
    assert steps(outcome) == ["0-1 A r0:0+4", "1-2 A r0:4+4", "3-4 B r0:8+2"]
    assert moves(outcome) == ["2 r0 A>B 0-8"]


def test_a_change_of_mind_about_the_next_instance() -> None:
    """Pages reserved there are given back; the late chunk to B holds nobody up."""
    legs = (Leg("A", 6, "per_chunk"), Leg("B"))
    change = Reassign("r0", (Leg("A", 6, "per_chunk"), Leg("C")))
    timing = unit(transfers={"B": 9, "C": 1})
    outcome = serve(
        Plan({"r0": legs}, {1.5: [change]}), [pool(name) for name in "ABC"], [(6, 2)], timing=timing
    )
    assert steps(outcome) == ["0-1 A r0:0+4", "1-2 A r0:4+2", "3-4 C r0:6+1"]
    assert moves(outcome) == ["1 r0 A>B 0-4", "2 r0 A>C 0-6"]


def test_the_same_next_instance_keeps_what_has_been_sent() -> None:
    legs = (Leg("A", 6, "per_chunk"), Leg("B"))
    change = Reassign("r0", (Leg("A", 5, "per_chunk"), Leg("B")))
    outcome = serve(Plan({"r0": legs}, {1.5: [change]}), [pool("A"), pool("B")], [(9, 2)])
    assert moves(outcome) == ["1 r0 A>B 0-4", "2 r0 A>B 4-6"]


def test_a_request_on_its_way_arrives_before_it_is_sent_on() -> None:
    """The destination, not the source, has the KV then."""
    plan = Plan({"r0": (Leg("A", 4), Leg("B"))}, {2.5: [Reassign("r0", (Leg("C"),))]})
    timing = unit(transfers={"B": 3, "C": 1})
    outcome = serve(plan, [pool(name) for name in "ABC"], [(4, 2)], timing=timing)
    assert moves(outcome) == ["1 r0 A>B 0-4", "4 r0 B>C 0-4"]
    assert steps(outcome)[-1] == "5-6 C r0:4+1"


def test_a_refused_change_of_legs_ends_the_request_at_once() -> None:
    plan = Plan({"r0": TO_A, "r1": TO_A}, {1.5: [Reassign("r0", (Leg("A", 5), Leg("tiny")))]})
    outcome = serve(plan, [pool("A", 12), pool("tiny", 9)], [(6, 6), (6, 6)])
    ended = outcome.finished["r0"]
    assert (ended.finish_reason, ended.output_token_ids) == ("error", [])
    assert ended.error == (
        "request 'r0' needs 11 pages of 1 tokens (6 prompt + 6 output tokens) on instance "
        "'tiny', which has 9"
    )
    assert list(outcome.finished) == ["r0", "r1"]


def test_heads_move_once_the_step_in_flight_has_ended() -> None:
    a = new_instance("A", make_kv(20, 1, [(0, 1), (2,)]), InstanceOptions(8, 4, 1, False))
    move = MoveSlices("r0", ((0, 1, (1,)),))
    outcome = serve(Plan({"r0": TO_A}, {0.5: [move, move]}), [a], [(6, 2)])
    assert steps(outcome) == ["0-1 A r0:0+4", "2-3 A r0:4+2", "3-4 A r0:6+1"]
    assert moves(outcome) == ["1 r0 A>A 0-4"]


def test_heads_without_room_to_move_do_not_hold_their_request_up() -> None:
    """The copies would need as many pages as there are; nothing waits for those."""
    a = new_instance("A", make_kv(20, 1, [(0, 1), (2,)]), InstanceOptions(8, 4, 1, False))
    plan = Plan(
        {"r0": (Leg("A", 12, "per_chunk"), Leg("B"))}, {1.5: [MoveSlices("r0", ((0, 1, (1,)),))]}
    )
    outcome = serve(plan, [a, pool("B")], [(12, 2)], timing=unit(transfers={"B": 4}))
    assert moves(outcome) == ["1 r0 A>B 0-4", "3 r0 A>B 4-12"]
    assert steps(outcome)[1:] == ["1-2 A r0:4+4", "2-3 A r0:8+4", "7-8 B r0:12+1"]


# Roles.


def test_a_role_is_taken_when_the_last_pages_have_been_fetched() -> None:
    roles: list[tuple[float, str, bool]] = []

    def watch(loop: ServingLoop) -> None:
        a = loop.assignments.instances["A"]
        if not roles or roles[-1][1:] != (a.role, a.draining):
            roles.append((loop.world.now(), a.role, a.draining))

    plan = Plan({"r0": (Leg("A", 4), Leg("B"))}, {0.5: [SetRole("A", "decode")]})
    timing = unit(transfers={"B": 3})
    serve(plan, [pool("A"), pool("B")], [(4, 2)], timing=timing, watch=watch)
    assert [role for _, *role in roles] == [["", False], ["", True], ["decode", False]]
    assert [time for time, *_ in roles][1:] == [0.5, 4]


def test_a_role_is_taken_by_who_has_nothing_to_do() -> None:
    plan = Plan({"r0": TO_A}, {0.5: [SetRole("B", "x")]})
    b = pool("B")
    serve(plan, [pool("A"), b], [(4, 2)])
    assert (b.role, b.draining) == ("x", False)
