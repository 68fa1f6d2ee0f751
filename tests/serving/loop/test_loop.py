"""Single situations in the loop: deadlocks that must not be, late completions, changes of legs."""

from collections.abc import Sequence

import pytest
from fake_world import Timing
from loop_cases import Do, follow, tiny
from scenarios import RULES, Follow, Script
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.system import (
    Action,
    Assignment,
    MoveSlices,
    Pause,
    Reassign,
    Resume,
    SetRole,
    System,
)
from jaxinfer.serving.views import ClusterView, Leg, StepView

EVERY_RULE = pytest.mark.parametrize("rule", RULES)


@EVERY_RULE
@pytest.mark.parametrize("seed", range(8))
def test_full_source_pool_and_waiting_destination(rule: str, seed: int) -> None:
    legs = (Leg("A", 4, rule), Leg("B"))  # type: ignore[arg-type]
    pools = [tiny("A", 9), tiny("B", 9)]
    outcome = follow([legs] * 6, pools, [(4, 6)] * 6, seed)
    assert outcome.world.transfers


@EVERY_RULE
@pytest.mark.parametrize("spare", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_both_directions_through_pools_that_hold_one_request(
    rule: str, spare: int, seed: int
) -> None:
    there = (Leg("A", 3, rule), Leg("B", 8, rule), Leg("A"))  # type: ignore[arg-type]
    back = (Leg("B", 5, rule), Leg("A", 7, rule), Leg("B"))  # type: ignore[arg-type]
    pools = [tiny("A", 9 + spare), tiny("B", 9 + spare)]
    follow([there, back] * 4, pools, [(5, 5)] * 8, seed)


def test_a_stall_is_broken_while_arrivals_are_still_to_come() -> None:
    # Both pools are full of KV that the other side has no room for; r2 comes much later.
    routes = [(Leg("A", 8), Leg("B")), (Leg("B", 8), Leg("A")), (Leg("A"),)]
    scripts = {f"r{i}": Script(8, 2, 0.0, None, legs, 2) for i, legs in enumerate(routes)}
    requests = make_requests([(8, 2)] * 3, [0.0, 0.0, 1000.0])
    outcome = Run(Follow(scripts), [tiny("A", 9), tiny("B", 9)], requests).verify()
    ends = {name: r.metrics.token_times[-1] for name, r in outcome.finished.items()}
    assert max(ends["r0"], ends["r1"]) < 100


@EVERY_RULE
def test_a_leg_that_goes_on_past_the_prompt(rule: str) -> None:
    legs = (Leg("A", 9, rule), Leg("B"))  # type: ignore[arg-type]
    outcome = follow([legs], [tiny("A", 20), tiny("B", 20, 3)], [(4, 9)])
    assert outcome.route_of("r0") == [("A", 9), ("B", 3)]


@EVERY_RULE
@pytest.mark.parametrize("until", [4, 5])
def test_a_request_that_ends_on_its_first_token_moves_nothing(rule: str, until: int) -> None:
    legs = (Leg("A", until, rule), Leg("B"))  # type: ignore[arg-type]
    pools = [tiny("A", 20, max_num_batched_tokens=100), tiny("B", 20)]
    outcome = follow([legs] * 2, pools, [(4, 1), (4, 9)], stop_at={"r1": 1})
    # By segments, it leaves before anyone knows that the token is a stop.
    along = outcome.world.sent_along if rule == "per_segment" else []
    assert outcome.world.transfers == along
    assert {t.request.id for t in along} <= {"r1"}
    assert [outcome.finished[r].finish_reason for r in ("r0", "r1")] == ["length", "stop"]


def test_empty_legs_are_dropped() -> None:
    legs = (Leg("A", 3), Leg("B", 3), Leg("B", 2), Leg("C"), Leg("A"), Leg("B", 9))
    pools = [tiny("A", 20), tiny("B", 20), tiny("C", 20)]
    outcome = follow([legs], pools, [(5, 4)])
    assert outcome.route_of("r0") == [("A", 3), ("C", 5)]


def test_two_legs_in_one_place_move_nothing() -> None:
    legs = (Leg("A", 2), Leg("A", 5, "per_chunk"), Leg("A"))
    outcome = follow([legs] * 3, [tiny("A", 9)], [(5, 5)] * 3)
    assert not outcome.world.transfers


def test_nobody_loses_work_to_those_that_came_later() -> None:
    """r1's third leg needs two pages more. They come free when r0, which decodes, has ended."""
    r1 = (Leg("A", 2), Leg("A", 3), Leg("A"))
    pools = [
        tiny("A", 5, max_num_batched_tokens=2, max_in_flight=1, launch_ahead=False),
        tiny("B", 3, max_num_batched_tokens=1, max_in_flight=1, launch_ahead=False),
    ]
    scripts = {
        "r0": Script(1, 2, 0.0, None, (Leg("B", 1), Leg("A")), 1),
        "r1": Script(5, 1, 0.0, None, r1, 1),
    }
    requests = make_requests([(1, 2), (5, 1)])
    outcome = Run(Follow(scripts), pools, requests, Timing(0, 1, max_transfer=4)).verify()
    assert [outcome.finished[name].metrics.num_preemptions for name in ("r0", "r1")] == [0, 0]


def ahead(
    late: Sequence[tuple[float, tuple[int, int]]], pages: int, first: tuple[int, int], seats: int
) -> Outcome:
    """r0 goes chunk by chunk from A to B, where the late ones come in meanwhile."""
    scripts = {"r0": Script(*first, 0.0, None, (Leg("A", first[0], "per_chunk"), Leg("B")), 2)}
    for i, (time, length) in enumerate(late, 1):
        scripts[f"r{i}"] = Script(*length, time, None, (Leg("B"),), 1)
    pools = [tiny("A", 20, max_num_batched_tokens=1), tiny("B", pages, max_num_seqs=seats)]
    lengths, arrivals = [first, *(length for _, length in late)], [0.0, *(t for t, _ in late)]
    return Run(Follow(scripts), pools, make_requests(lengths, arrivals)).verify()


def test_growth_takes_back_what_was_reserved_ahead() -> None:
    outcome = ahead([(2, (1, 10))], pages=12, first=(8, 4), seats=8)
    assert outcome.finished["r1"].metrics.num_preemptions == 0
    assert len([start for *_, start, _ in outcome.transfers_of("r0") if start == 0]) > 1


@pytest.mark.parametrize("seed", range(6))
def test_growth_waits_for_an_import_rather_than_lose_the_oldest(seed: int) -> None:
    scripts = {
        "r0": Script(4, 4, 1.0, None, (Leg("A", 4), Leg("B")), 2),
        "r1": Script(1, 9, 0.0, None, (Leg("B"),), 1),
    }
    requests = make_requests([(4, 4), (1, 9)], [1.0, 0.0])
    pools, timing = [tiny("A", 9), tiny("B", 10)], Timing(seed, max_transfer=30)
    outcome = Run(Follow(scripts), pools, requests, timing).verify()
    assert outcome.finished["r1"].metrics.num_preemptions == 0


def test_nothing_is_reserved_ahead_of_those_who_wait() -> None:
    outcome = ahead([(0, (1, 8)), (0.5, (10, 1))], pages=10, first=(6, 2), seats=8)
    admitted = outcome.finished["r2"].metrics.first_scheduled
    assert admitted is not None
    assert admitted <= min(t.requested for t in outcome.world.transfers)


def test_a_seat_taken_since_the_reservation_is_waited_for() -> None:
    outcome = ahead([(2, (1, 15))], pages=40, first=(6, 2), seats=1)
    ends = {name: r.metrics.token_times[-1] for name, r in outcome.finished.items()}
    assert ends["r1"] < ends["r0"]


def test_a_step_launched_ahead_of_a_stop_is_discarded() -> None:
    a = tiny("A", 20, max_in_flight=3, launch_ahead=True)
    outcome = follow([(Leg("A"),)], [a], [(3, 9)], stop_at={"r0": 2})
    assert sum(n for _, n in outcome.route_of("r0")) > 3 + 1  # Positions past the end ran.


def test_no_step_is_launched_past_max_tokens() -> None:
    a = tiny("A", 20, max_in_flight=3, launch_ahead=True)
    outcome = follow([(Leg("A"),)], [a], [(3, 9)])
    assert outcome.route_of("r0") == [("A", 11)]


def test_what_fits_nowhere_is_refused_wherever_it_is_sent() -> None:
    for system in (
        Follow({"r0": Script(3, 9, 0, None, (Leg("A", 3), Leg("B")), 2)}),
        Do(Reassign("r0", (Leg("B"),))),
    ):
        outcome = Run(system, [tiny("A", 20), tiny("B", 10)], make_requests([(3, 9)])).verify()
        error = outcome.finished["r0"].error
        assert error == (
            "request 'r0' needs 11 pages of 1 tokens (3 prompt + 9 output tokens) "
            "on instance 'B', which has 10"
        )


@pytest.mark.parametrize("action", [SetRole("AA", "x"), Reassign("r0", (Leg("AA"),))])
def test_an_unknown_instance_is_one_line_with_a_suggestion(action: Action) -> None:
    with pytest.raises(JaxinferError) as error:
        Run(Do(action), [tiny("A", 20)], make_requests([(3, 9)])).verify()
    assert str(error.value) == "Do names instance 'AA': did you mean 'A'?"


def test_routing_to_an_unknown_instance() -> None:
    with pytest.raises(JaxinferError, match=r"instance 'gpu0': known: A$"):
        follow([(Leg("gpu0"),)], [tiny("A", 20)], [(3, 9)])


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("leave", [False, True])
def test_heads_move_while_a_chunk_is_on_its_way(after: int, leave: bool) -> None:
    move = MoveSlices("r0", ((0, 1, (1,)),))
    actions = (move, Reassign("r0", (Leg("B"),))) if leave else (move,)
    system = Do(*actions, after=after, legs=(Leg("A", 9, "per_chunk"), Leg("B")))
    kv, opts = make_kv(30, 1, [(0, 1), (2,)]), InstanceOptions(16, 3, max_in_flight=1)
    run = Run(system, [new_instance("A", kv, opts), tiny("B", 30)], make_requests([(9, 5)]))
    outcome = run.verify()
    kinds = [bool(t.slice_move) for t in outcome.world.transfers]
    assert kinds[:2] == [False, True]


def test_tokens_are_drawn_while_full_pages_move() -> None:
    """Tokens wait while the rest moves: less than a page, and what has been drawn meanwhile."""
    move = MoveSlices("r0", ((0, 1, (1,)),))
    kv, opts = make_kv(30, 4, [(0, 1), (2,)]), InstanceOptions(2, 16, launch_ahead=False)
    timing = Timing(transfers={"A": 10})
    run = Run(Do(move, after=2), [new_instance("A", kv, opts)], make_requests([(9, 30)]), timing)
    outcome = run.verify()
    full, rest = outcome.world.transfers
    assert (full.start, full.stop, rest.start) == (0, 8, 8)
    assert rest.stop == outcome.finished["r0"].prompt_len + 1 + 10
    starts = [step.start for step in outcome.world.steps]
    during = [s for s in starts if full.requested <= s < rest.requested]
    assert len(during) == rest.requested - full.requested == 10
    assert not [s for s in starts if rest.requested <= s < rest.requested + 10]


@pytest.mark.parametrize("max_transfer", [3, 30])
def test_growth_waits_for_heads_that_move(max_transfer: int) -> None:
    kv = KVShards([Shard(PagePool(27, 1), (0, 1)), Shard(PagePool(60, 1), (2,))])
    a = new_instance("A", kv, InstanceOptions(8, 8, watermark=0.0))
    lengths = [(1, 12), (4, 5)]
    system = Do(MoveSlices("r1", ((0, 1, (1,)),)), after=4)
    timing = Timing(max_transfer=max_transfer)
    outcome = Run(system, [a], make_requests(lengths, [0.0, 1.0]), timing).verify()
    assert outcome.world.transfers
    assert outcome.finished["r0"].metrics.num_preemptions == 0


@pytest.mark.parametrize("arrival", [6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
def test_pages_that_come_free_are_for_who_waits_for_them(arrival: float) -> None:
    """A request r0 needs four pages of one shard to go on, and r1 two to begin."""
    opts = InstanceOptions(2, 1, 2, False, 1, 1, watermark=0.0)
    a = new_instance("A", make_kv(4, 8, [(0, 1), (2, 3)]), opts)
    system = Do(MoveSlices("r0", ((0, 1, (0, 1)),)), after=2)
    run = Run(system, [a], make_requests([(1, 9), (1, 1)], [0.0, arrival]))
    run.max_steps = 20
    outcome = run.verify()
    assert outcome.finished["r1"].metrics.num_preemptions <= 1


def test_chunks_follow_a_change_of_destination() -> None:
    pools = [tiny(name, 20, max_num_batched_tokens=3) for name in "ABC"]
    legs = (Leg("A", 15, "per_chunk"), Leg("B"))
    change = Reassign("r0", (Leg("A", 15, "per_chunk"), Leg("C")))
    run = Run(Do(change, after=1, legs=legs), pools, make_requests([(15, 4)]))
    outcome = run.verify()
    assert outcome.route_of("r0") == [("A", 15), ("C", 3)]
    moved = outcome.transfers_of("r0")
    assert moved[0][1] == "B"
    assert next(start for _, dest, start, _ in moved if dest == "C") == 0


class WhileImporting(Do):
    """Asks for the impossible once the KV is on its way."""

    tick_interval = 1.0

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        b = cluster.instances["B"]
        return self.actions if b.num_requests > len(b.waiting) + len(b.running) else ()


@pytest.mark.parametrize("target", ["B", "tiny"])
def test_other_legs_while_the_kv_is_on_its_way(target: str) -> None:
    legs = (Leg("A", 3), Leg("B"))
    system = WhileImporting(Reassign("r0", (Leg("B", 4), Leg(target))), after=0, legs=legs)
    pools = [tiny("A", 20), tiny("B", 20), tiny("tiny", 4)]
    run = Run(system, pools, make_requests([(3, 9)]), Timing(seed=1, max_transfer=30))
    outcome = run.verify()
    assert bool(outcome.finished["r0"].error) == (target == "tiny")
    assert outcome.world.transfers


class StartElsewhere(System):
    """Lets r1 be admitted on A while paused, and acts on it before it has computed anything."""

    def __init__(self, action: Action) -> None:
        self.actions: Sequence[Action] = (action, Resume("r1"))

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        return [Assignment(r.id, (Leg("B" if r.id == "r2" else "A"),)) for r in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        if cluster.instances["B"].num_requests:
            return (Pause("r1"),)
        now, self.actions = self.actions, ()
        return now


@pytest.mark.parametrize(
    ("action", "place"),
    [(Reassign("r1", (Leg("B"),)), "B"), (MoveSlices("r1", ((0, 1, (0, 1)),)), "A")],
)
def test_a_request_without_kv_needs_no_transfer(action: Action, place: str) -> None:
    kv = make_kv(20, 4, [(0, 1), (2,)])
    pools = [new_instance("A", kv, InstanceOptions(max_num_seqs=1, watermark=0.0)), tiny("B", 30)]
    requests = make_requests([(3, 8), (3, 2), (3, 20)], [0.0, 1.0, 0.0])
    outcome = Run(StartElsewhere(action), pools, requests).verify()
    assert outcome.route_of("r1") == [(place, 4)]
    assert not outcome.world.transfers


def test_cutting_short_without_new_legs_asks_the_system_again() -> None:
    outcome = Run(
        Do(Reassign("r0", ()), after=2), [tiny("A", 20)], make_requests([(3, 9)])
    ).verify()
    assert not outcome.world.transfers
