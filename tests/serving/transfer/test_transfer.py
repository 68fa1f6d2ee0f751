"""Hand-offs by themselves: what is sent, when, between which pages, and who has them then."""

from typing import Any

import pytest
from scenarios import RULES
from transfer_cases import CHUNKS, Place

from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.views import Leg


def test_on_demand_the_kv_stays_until_it_is_fetched() -> None:
    place = Place()
    request = place.request(Leg("A", 6), Leg("B"))
    hold = request.hold
    request.slice_move = MoveSlices("r", ((0, 1, (0,)),))
    place.hand_offs.end_leg(request)
    a, b = place.pools["A"], place.pools["B"]
    assert (list(a.running), a.num_exported, list(b.waiting)) == ([], 1, [request])
    assert (request.exported, request.hold, request.slice_move) == (("A", hold), None, None)
    assert (request.metrics.cut, request.legs) == (6, [Leg("B")])
    assert (place.sent(), place.in_use("A"), place.in_use("B")) == ([], 3, 0)


def test_the_cut_is_where_the_first_leg_ended() -> None:
    place = Place()
    request = place.request(Leg("A", 3), Leg("A", 5), Leg("B"), computed=3)
    place.hand_offs.end_leg(request)
    assert BatchBuilder(place.pools["A"]).admit() is request
    request.computed = request.launched = 5
    place.hand_offs.end_leg(request)
    assert (request.metrics.cut, request.exported[0]) == (3, "A")


def test_a_leg_that_computed_nothing_leaves_nothing() -> None:
    place = Place()
    request = place.request(Leg("A", 1), Leg("B"), computed=0)
    place.hand_offs.end_leg(request)
    assert (request.exported, request.hold, request.metrics.cut) == (None, None, None)
    assert (place.pools["A"].num_exported, place.in_use("A")) == (0, 0)


def test_without_another_leg_nobody_has_the_request() -> None:
    place = Place()
    request = place.request(Leg("A", 6))
    place.hand_offs.end_leg(request)
    assert request.exported[0] == "A"
    assert not any(pool.num_requests for pool in place.pools.values())


@pytest.mark.parametrize("rule", RULES)
def test_who_sends_when_the_leg_ends(rule: Any) -> None:
    place = Place()
    request = place.request(Leg("A", 6, rule), Leg("B"))
    source = request.hold
    place.hand_offs.end_leg(request)
    b = place.pools["B"]
    if rule not in ("at_end", "when_room"):
        assert (place.sent(), list(b.waiting), b.importing) == ([], [request], {})
        return
    assert (list(b.waiting), list(b.importing.values())) == ([], [request])
    assert b.kv.reserved == {}
    (transfer,) = place.world.started
    assert place.hand_offs.moving == [transfer]
    assert (transfer.request, transfer.epoch, transfer.requested) == (request, 0, 5.0)
    assert (transfer.source_hold, transfer.dest_hold) == (source, request.hold)
    assert (transfer.start, transfer.stop, transfer.slice_move) == (0, 6, None)
    assert (source.users, request.hold.users, request.sent, request.transfers) == (1, 1, 6, 1)
    # All eight prompt tokens have their pages there.
    assert request.hold.num_pages == 4


def test_an_epoch_goes_with_its_transfers() -> None:
    place = Place()
    request = place.request(Leg("A", 6, "at_end"), Leg("B"))
    request.epoch = 3
    place.hand_offs.end_leg(request)
    assert place.world.started[0].epoch == 3


@pytest.mark.parametrize(("output", "received"), [(0, None), (1, 9.0), (2, None)])
def test_arrival(output: int, received: float | None) -> None:
    place = Place()
    request = place.request(Leg("A", 6, "at_end"), Leg("B"), output=output)
    source = request.hold
    place.hand_offs.end_leg(request)
    place.hand_offs.done(place.world.started[0], 9.0)
    a, b = place.pools["A"], place.pools["B"]
    assert (list(b.running), b.importing, a.num_exported) == (["r"], {}, 0)
    assert (request.exported, request.sent, request.transfers) == (None, 0, 0)
    assert (source.released, request.hold.users, place.in_use("A")) == (True, 0, 0)
    assert request.metrics.received == received
    assert not place.hand_offs.moving


def test_a_second_hand_off_does_not_count_for_the_first_token() -> None:
    place = Place()
    request = place.request(
        Leg("A", 8, "at_end"), Leg("B", 9, "at_end"), Leg("C"), computed=8, output=1
    )
    place.hand_offs.end_leg(request)
    place.hand_offs.done(place.world.started[0], 7.0)
    request.computed = request.launched = 9
    request.output_token_ids.append(0)
    place.hand_offs.end_leg(request)
    place.hand_offs.done(place.world.started[1], 11.0)
    assert list(place.pools["C"].running) == ["r"]
    assert (request.metrics.received, request.metrics.cut) == (7.0, 8)


@pytest.mark.parametrize("first", [False, True])
def test_who_goes_first_joins_at_the_head(first: bool) -> None:
    place = Place()
    waiting = RequestState("w", 3, 3)
    waiting.legs = [Leg("B")]
    place.pools["B"].waiting.append(waiting)
    request = place.request(Leg("B"))
    request.goes_first = first
    place.hand_offs.start_leg(request)
    assert list(place.pools["B"].waiting) == ([request, waiting] if first else [waiting, request])


def test_kv_that_is_here_already_goes_to_the_head_and_moves_nothing() -> None:
    place = Place()
    a = place.pools["A"]
    waiting = RequestState("w", 3, 3)
    waiting.legs = [Leg("A")]
    a.waiting.append(waiting)
    request = place.request(Leg("A", 6, "at_end"), Leg("A"))
    hold = request.hold
    place.hand_offs.end_leg(request)
    assert [r.id for r in a.waiting] == ["r", "w"]
    assert BatchBuilder(a).admit() is request
    assert (request.hold, request.exported, a.num_exported) == (hold, None, 0)
    assert (request.computed, place.sent()) == (6, [])


def test_no_room_at_the_end_is_on_demand() -> None:
    place = Place()
    place.pools["B"].kv.reserve(36)  # 18 of 20 pages; the request needs four.
    request = place.request(Leg("A", 6, "at_end"), Leg("B"))
    place.hand_offs.end_leg(request)
    assert (place.sent(), list(place.pools["B"].waiting)) == ([], [request])


# Ends.


def test_a_transfer_of_an_older_epoch_only_frees_its_pages() -> None:
    place = Place()
    request = place.request(*CHUNKS)
    source = request.hold
    place.hand_offs.send_chunk(request)
    dest = request.incoming
    place.pools["A"].preempt(request)
    assert (source.users, dest.users, request.transfers) == (1, 1, 0)
    request.output_token_ids = [0]
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (source.users, dest.users, request.transfers) == (0, 0, 0)
    assert (request.metrics.received, place.in_use("A"), place.in_use("B")) == (None, 0, 0)


@pytest.mark.parametrize(("lost", "left"), [("A", ["BC"]), ("B", []), ("C", ["AB"])])
def test_transfers_of_a_lost_instance_are_forgotten(lost: str, left: list[str]) -> None:
    place = Place()
    one = place.request(*CHUNKS)
    other = place.request(Leg("B", 8, "per_chunk"), Leg("C"), name="other")
    for request in (one, other):
        place.hand_offs.send_chunk(request)
    place.hand_offs.forget(lost)
    assert [t.source + t.dest for t in place.hand_offs.moving] == left
    assert one.hold.users == one.transfers == ("AB" in left)
    assert other.hold.users == other.transfers == ("BC" in left)


def test_an_export_is_released_once() -> None:
    place = Place()
    request = place.request(Leg("A", 6))
    place.hand_offs.end_leg(request)
    place.hand_offs.release_export(request)
    place.hand_offs.release_export(request)
    assert (request.exported, place.pools["A"].num_exported, place.in_use("A")) == (None, 0, 0)
