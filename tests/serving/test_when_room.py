"""Hand-offs as soon as there is room, a rule that a cut leg is given, and prompts' own budget."""

from typing import Any

import pytest
from schedules import Plan, follow, pool, serve, steps, unit
from serving_checks import make_kv, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.system import Budget, Reassign
from jaxinfer.serving.transfer import HandOffs
from jaxinfer.serving.views import Leg


def full_steps(rule: Any) -> list[tuple[str, float]]:
    """The time when r0's KV leaves A for B, whose steps a long prompt fills until 6."""
    legs = [(Leg("A", 4, rule), Leg("B")), (Leg("B"),)]
    outcome = follow(legs, [pool("A"), pool("B")], [(4, 3), (24, 1)])
    return [(t.request.id, t.requested) for t in outcome.world.transfers]


def test_kv_comes_beside_steps_whose_tokens_are_all_taken() -> None:
    """The request is admitted on demand in the step that the prompt does not fill."""
    assert full_steps("when_room") == [("r0", 1.0)]
    assert full_steps("at_end") == [("r0", 1.0)]
    assert full_steps("on_demand") == [("r0", 6.0)]


def test_kv_comes_ahead_of_those_that_wait() -> None:
    """B has four seats' pages for r1 and r0; r2, which waits, needs more than there are."""
    legs = [(Leg("A", 4, "when_room"), Leg("B")), (Leg("B"),), (Leg("B"),)]
    pools = [pool("A"), pool("B", 16)]
    lengths = [(4, 3), (6, 5), (12, 2)]
    sent = [t.requested for t in follow(legs, pools, lengths).world.transfers]
    assert sent == [1.0]
    legs[0] = (Leg("A", 4, "at_end"), Leg("B"))
    pools = [pool("A"), pool("B", 16)]
    (sent_later,) = [t.requested for t in follow(legs, pools, lengths).world.transfers]
    assert sent_later > 1.0


def test_it_waits_for_room_and_is_first_then() -> None:
    """B's one seat is r1's until 4; r2, too, has waited for it, since before r0."""
    legs = [(Leg("A", 4, "when_room"), Leg("B")), (Leg("B"),), (Leg("B"),)]
    pools = [pool("A"), pool("B", max_num_seqs=1)]
    outcome = follow(legs, pools, [(4, 3), (4, 4), (4, 1)])
    assert [(t.request.id, t.requested) for t in outcome.world.transfers] == [("r0", 4.0)]
    ended = {r.id: r.metrics.token_times[-1] for r in outcome.finished.values()}
    assert ended["r0"] < ended["r2"]


@pytest.mark.parametrize(("rule", "sent"), [("on_demand", 6.0), ("when_room", 2.0)])
def test_a_cut_leg_is_handed_on_by_the_rule_of_the_action(rule: Any, sent: float) -> None:
    """r0 decodes at A; at 1.5, with a step under way, it is to go to B, whose steps are full."""
    system = Plan(
        {"r0": (Leg("A"),), "r1": (Leg("B"),)},
        {1.5: [Reassign("r0", (Leg("B"),), rule)]},
    )
    outcome = serve(system, [pool("A"), pool("B")], [(4, 9), (24, 1)])
    assert [(t.start, t.stop, t.requested) for t in outcome.world.transfers] == [(0, 5, sent)]


@pytest.mark.parametrize("rule", ["at_end", "when_room", "per_chunk"])
def test_a_leg_cut_before_anything_was_computed_leaves_nothing_to_send(rule: Any) -> None:
    there = new_instance("B", make_kv(9, 4))
    (request,) = make_requests([(4, 3)])
    request.legs = [Leg("B")]
    request.incoming = there.reserve_ahead(request, Leg("B")) if rule == "per_chunk" else None
    world: Any = None
    HandOffs(world, {"B": there}).start_leg(request, rule)
    assert list(there.waiting) == [request]
    assert (len(there.importing), there.kv.num_in_use) == (0, 0)


def test_no_rule() -> None:
    system = Plan({"r0": (Leg("A"),)}, {0.5: [Reassign("r0", (Leg("A"),), "soon")]})  # type: ignore[arg-type]
    with pytest.raises(JaxinferError, match="'r0' a leg with hand_off 'soon', must be one of"):
        serve(system, [pool("A")], [(4, 9)])


def test_a_budget_of_prompts_leaves_decodes_alone() -> None:
    """Prompts get two of four tokens a step from 1.5 on, and all again from 3.5 on."""
    system = Plan(
        {"r0": (Leg("A"),), "r1": (Leg("A"),)},
        {1.5: [Budget("A", 2)], 3.5: [Budget("A", None)]},
    )
    outcome = serve(system, [pool("A")], [(4, 9), (20, 1)])
    assert steps(outcome)[:5] == [
        "0-1 A r0:0+4",
        "1-2 A r0:4+1 r1:0+3",
        "2-3 A r0:5+1 r1:3+2",
        "3-4 A r0:6+1 r1:5+2",
        "4-5 A r0:7+1 r1:7+3",
    ]


@pytest.mark.parametrize("limit", [0, -1, 1.5, "4"])
def test_what_is_no_budget(limit: Any) -> None:
    system = Plan({"r0": (Leg("A"),)}, {0.5: [Budget("A", limit)]})
    with pytest.raises(JaxinferError, match="prompt tokens, must be 1 or more, or None"):
        serve(system, [pool("A")], [(4, 9)], timing=unit())
