"""Whole schedules by hand: who is in which step, from when to when, and what goes over.

A step takes a second, and so does a transfer, unless said otherwise.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_world import FakeWorld, Step, Timing
from scenarios import Follow, Script
from serving_checks import Outcome, Run, make_kv, make_requests

from jaxinfer.errors import JaxinferError
from jaxinfer.serving import loop as loop_module
from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.system import (
    Action,
    Assignment,
    ClusterView,
    Leg,
    MoveSlices,
    Pause,
    Reassign,
    Resume,
    SetRole,
    StepView,
    System,
)

Actions = dict[float, Sequence[Action]]


def unit(**timing: Any) -> Timing:
    """A second for each, and no ties."""
    return Timing(in_order=True, **timing)


def pool(name: str, pages: int = 50, page_size: int = 1, **options: Any) -> Instance:
    """Four tokens in a step, one step at a time, and no watermark, unless said otherwise."""
    defaults = {"max_num_batched_tokens": 4, "max_in_flight": 1, "launch_ahead": False}
    opts = InstanceOptions(**(defaults | {"watermark": 0.0} | options))
    return Instance(name, make_kv(pages, page_size), opts)


class Plan(System):
    """Legs by request, and actions at given times: half seconds, at which no step ends.

    Requests of ``later`` are routed from then on only.
    """

    def __init__(
        self,
        legs: dict[str, tuple[Leg, ...]],
        actions: Actions | None = None,
        later: dict[str, float] | None = None,
        ticks: bool = True,
    ) -> None:
        self.legs, self.actions, self.later = legs, actions or {}, later or {}
        self.tick_interval = 0.5 if ticks else None
        self.asked: list[list[str]] = []

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        self.asked.append([r.id for r in waiting])
        return [
            Assignment(r.id, self.legs[r.id])
            for r in waiting
            if cluster.now >= self.later.get(r.id, 0)
        ]

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        return self.actions.pop(cluster.now, ())


def serve(
    system: System,
    instances: Sequence[Instance],
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float] | None = None,
    **run: Any,
) -> Outcome:
    run.setdefault("timing", unit())
    return Run(system, instances, make_requests(lengths, arrivals), **run).verify()


def follow(legs: Sequence[tuple[Leg, ...]], *rest: Any, **run: Any) -> Outcome:
    """All legs are named at once, without ticks."""
    scripts = {f"r{i}": Script(1, 1, 0, None, each, len(each)) for i, each in enumerate(legs)}
    return serve(Follow(scripts), *rest, **run)


def steps(outcome: Outcome) -> list[str]:
    """Start, end, instance and rows of each step, e.g. ``0-1 A r0:0+4``."""

    def text(step: Step) -> str:
        rows = " ".join(f"{r.request.id}:{r.start}+{r.count}" for r in step.batch.rows)
        return f"{step.start:g}-{step.end:g} {step.batch.instance} {rows}"

    return [text(step) for step in outcome.world.steps]


def moves(outcome: Outcome) -> list[str]:
    """When asked for, which request, from where to where, and which entries."""
    return [
        f"{t.requested:g} {t.request.id} {t.source}>{t.dest} {t.start}-{t.stop}"
        for t in outcome.world.transfers
    ]


def times(outcome: Outcome, name: str = "r0") -> list[float]:
    return outcome.finished[name].metrics.token_times


TO_A = (Leg("A"),)


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
        False, True, True, False, True]  # fmt: skip
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
    """On demand; meanwhile A goes on with the next request."""
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
    """Whatever comes after it is dropped, be it too small for the request."""
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


def test_a_change_of_mind_about_the_next_instance() -> None:
    """Pages reserved there are given back; the late chunk to B holds nobody up."""
    legs = (Leg("A", 6, "per_chunk"), Leg("B"))
    change = Reassign("r0", (Leg("A", 6, "per_chunk"), Leg("C")))
    timing = unit(transfers={"B": 9, "C": 1})
    outcome = serve(Plan({"r0": legs}, {1.5: [change]}), [pool(name) for name in "ABC"],
                    [(6, 2)], timing=timing)  # fmt: skip
    assert steps(outcome) == ["0-1 A r0:0+4", "1-2 A r0:4+2", "3-4 C r0:6+1"]
    assert moves(outcome) == ["1 r0 A>B 0-4", "2 r0 A>C 0-6"]


def test_the_same_next_instance_keeps_what_has_been_sent() -> None:
    legs = (Leg("A", 6, "per_chunk"), Leg("B"))
    change = Reassign("r0", (Leg("A", 5, "per_chunk"), Leg("B")))
    outcome = serve(Plan({"r0": legs}, {1.5: [change]}), [pool("A"), pool("B")], [(9, 2)])
    assert moves(outcome) == ["1 r0 A>B 0-4", "2 r0 A>B 4-6"]


def test_a_request_on_its_way_arrives_before_it_is_sent_on() -> None:
    """Its destination, not its source, has the KV then."""
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
    a = Instance("A", make_kv(20, 1, [(0, 1), (2,)]), InstanceOptions(8, 4, 1, False))
    move = MoveSlices("r0", 0, 1, (1,))
    outcome = serve(Plan({"r0": TO_A}, {0.5: [move, move]}), [a], [(6, 2)])
    assert steps(outcome) == ["0-1 A r0:0+4", "2-3 A r0:4+2", "3-4 A r0:6+1"]
    assert moves(outcome) == ["1 r0 A>A 0-4"]


def test_heads_without_room_to_move_do_not_hold_their_request_up() -> None:
    """They wait for the chunk on its way to B; then there is no room, and the next step starts."""
    a = Instance("A", make_kv(20, 1, [(0, 1), (2,)]), InstanceOptions(8, 4, 1, False))
    plan = Plan(
        {"r0": (Leg("A", 12, "per_chunk"), Leg("B"))}, {1.5: [MoveSlices("r0", 0, 1, (1,))]}
    )
    outcome = serve(plan, [a, pool("B")], [(12, 2)], timing=unit(transfers={"B": 4}))
    assert moves(outcome) == ["1 r0 A>B 0-4", "6 r0 A>B 4-12"]
    assert steps(outcome)[1:] == ["1-2 A r0:4+4", "5-6 A r0:8+4", "10-11 B r0:12+1"]


# Roles.


def test_a_role_is_taken_when_the_last_pages_have_been_fetched() -> None:
    roles: list[tuple[float, str, bool]] = []

    def watch(loop: ServingLoop) -> None:
        a = loop.instances["A"]
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


def test_a_stall_names_who_is_left() -> None:
    """At most five of them, and how many the system has not routed."""
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
    """Each has the KV that the other has no room for: nine pages, of which eight are taken."""
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
    """One leg at a time; the second is named at 5 s only."""
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
    pools = [pool("A"), Instance("B", make_kv(11, 1, caching=True), opts)]
    requests = make_requests([(8, 3), (8, 2)], shared=[8, 8])
    outcome = Run(HoldsBack(), pools, requests, unit()).verify()
    assert steps(outcome)[4:] == ["2-3 B r0:8+1", "3-4 B r1:8+1 r0:9+1"]
    assert moves(outcome) == []


class Refuses(System):
    """What has left A goes to an instance that is too small; r1 waits for A's other role."""

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
    """As planned, but what would go to a lost instance goes to the first that is left."""

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
    assert steps(outcome)[:3] == ["0-1 B r0:0+2 r1:0+2", "1-2 B r0:2+1 r1:2+1",
                                  "1.25-2.25 A r0:0+3 r1:0+1"]  # fmt: skip
    assert [times(outcome, name)[0] for name in ("r0", "r1", "r2")] == [1, 1, 4.25]


def test_a_loss_wakes_who_has_waited_behind_what_is_gone() -> None:
    """On A, r2 is first: its KV is on B, and A has not the pages. r3 behind it needs one."""
    legs = {
        "r0": TO_A,
        "r1": (Leg("B", 8), Leg("A")),
        "r2": (Leg("A"),),
    }
    plan = AvoidsA(legs, ticks=False)
    a = pool("A", 12, max_in_flight=2)
    outcome = serve(plan, [a, pool("B"), pool("C")], [(4, 6), (8, 4), (1, 1)], [0, 0, 3],
                    timing=lost("B", 3.5))  # fmt: skip
    # Launched at once, not with r0's next decode.
    assert "4-5 A r2:0+1" in steps(outcome)
    assert "3.5-4.5 C r1:0+4" in steps(outcome)


class AvoidsA(Plan):
    """What was on B goes on at C."""

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
    assert ended == {"r0": ("lost", [1]), "r1": ("length", [2.5, 3.5])}


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
    """By name, that is one request; where it asks for the instance, all that it was asked about."""
    outcome = serve(
        Names(asks), [pool("A"), pool("B")], [(4, 4)] * 3, [0, 1.75, 1.75],
        timing=lost("B", 1.75),
    )  # fmt: skip
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
    assert outcome.loop.lost == {"A": "killed", "B": "killed"}
    assert outcome.loop.instances == {}


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
        True, True]  # fmt: skip


def test_heads_that_waited_for_a_chunk_move_when_its_destination_is_lost() -> None:
    a = Instance("A", make_kv(30, 1, [(0, 1), (2,)]), InstanceOptions(8, 4, 1, False))
    move = MoveSlices("r0", 0, 1, (1,))
    plan = Avoids({"r0": (Leg("A", 12, "per_chunk"), Leg("B"))}, {1.5: [move]})
    outcome = serve(plan, [a, pool("B")], [(12, 2)], timing=lost("B", 3.5, transfers={"B": 9}))
    assert moves(outcome) == ["1 r0 A>B 0-4", "3.5 r0 A>A 0-8"]
    assert steps(outcome)[2:] == ["4.5-5.5 A r0:8+4", "5.5-6.5 A r0:12+1"]
