"""Slices of KV heads that move between the devices of an instance."""

from typing import Any

import pytest
from transfer_cases import CHUNKS, Place

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.views import Leg

MOVE = MoveSlices("r", ((0, 1, (1,)),))


def test_full_pages_of_slices_move_while_the_request_goes_on() -> None:
    """And the rest once nothing uses the pages."""
    place = Place()
    request = place.request(Leg("A"), computed=5)
    request.sent = 2
    request.hold.pin()
    place.hand_offs.slices.ask(request, MOVE)
    assert (request.slice_copy, request.slice_move) == (MOVE, None)
    request.hold.grow(7)
    request.computed = request.launched = 7
    assert request.slices == [[0, 1], [2, 1]]
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (request.slice_copy, request.slice_move) == (None, MOVE)
    assert place.sent() == [("A", "A", 0, 4)]
    request.hold.unpin()
    place.hand_offs.slices.send_rest(request)
    assert place.sent() == [("A", "A", 0, 4), ("A", "A", 4, 7)]
    assert [t.slice_move for t in place.world.started] == [MOVE, MOVE]
    assert (request.sent, request.hold.users) == (2, 2)
    place.hand_offs.done(place.world.started[1], 7.0)
    assert (request.slices, request.slice_move) == ([[0], [2, 1]], None)
    assert [shard.num_free_pages for shard in place.pools["A"].shards] == [40 - 4, 20 - 8]
    assert place.hand_offs.slices.num_begun == 1


def test_slices_whose_pages_are_all_full_do_not_pause() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=6)
    place.hand_offs.slices.ask(request, MOVE)
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (request.slices, request.slice_copy, request.slice_move) == ([[0], [2, 1]], None, None)
    assert place.sent() == [("A", "A", 0, 6)]


def test_a_short_request_pauses_for_its_slices() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=1)
    request.hold.pin()
    place.hand_offs.slices.ask(request, MOVE)
    assert (request.slice_copy, request.slice_move, place.sent()) == (None, MOVE, [])
    request.hold.unpin()
    place.hand_offs.slices.send_rest(request)
    assert place.sent() == [("A", "A", 0, 1)]


def test_one_move_of_a_request_at_a_time() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=5)
    for _ in range(2):  # While it goes on, and while it pauses.
        place.hand_offs.slices.ask(request, MoveSlices("r", ((1, 0, (2,)),)))
    assert place.hand_offs.slices.num_at_once == 1
    request.hold.pin()
    place.hand_offs.done(place.world.started[0], 6.0)
    place.hand_offs.slices.ask(request, MOVE)
    assert (place.hand_offs.slices.num_at_once, place.hand_offs.slices.num_begun) == (2, 1)


def test_a_leg_that_ends_gives_up_the_slices_on_their_way() -> None:
    """The pages come free once nobody writes there; the request may be back by then."""
    place = Place()
    request = place.request(Leg("A", 5), Leg("A"), computed=5)
    hold, shards = request.hold, place.pools["A"].kv.shards
    place.hand_offs.slices.ask(request, MOVE)
    place.hand_offs.end_leg(request)
    assert place.pools["A"].admit(request)
    assert (request.hold, request.slice_copy) == (hold, None)
    place.hand_offs.slices.ask(request, MOVE)
    assert place.hand_offs.slices.num_at_once == 1
    assert shards[1].num_free_pages == 20 - 6
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (request.slices, request.slice_move) == ([[0, 1], [2]], None)
    assert shards[1].num_free_pages == 20 - 3


def test_slices_on_their_way_are_not_taken_for_those_of_another_instance() -> None:
    place = Place()
    request = place.request(Leg("A", 5), Leg("B"), computed=5)
    place.hand_offs.slices.ask(request, MOVE)
    place.hand_offs.end_leg(request)
    assert place.pools["B"].admit(request)
    place.hand_offs.pull(request)
    place.hand_offs.done(place.world.started[1], 6.0)
    place.hand_offs.slices.ask(request, MOVE)
    place.hand_offs.done(place.world.started[0], 7.0)
    assert (request.slice_copy, place.in_use("A")) == (MOVE, 0)
    place.hand_offs.done(place.world.started[2], 8.0)
    assert request.slice_copy is None


def test_a_request_that_ends_frees_the_slices_on_their_way() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=5)
    place.hand_offs.slices.ask(request, MOVE)
    place.pools["A"].remove(request)
    request.hold.release()
    request.void_kv()
    assert place.in_use("A") > 0
    place.hand_offs.done(place.world.started[0], 6.0)
    assert [shard.num_free_pages for shard in place.pools["A"].shards] == [40, 20]


def test_slices_without_entries_move_without_a_transfer() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=0)
    place.hand_offs.slices.ask(request, MOVE)
    assert (request.slices, request.slice_move, place.world.started) == ([[0], [2, 1]], None, [])


def test_slices_without_room_stay() -> None:
    place = Place()
    request = place.request(Leg("A"))
    place.pools["A"].kv.shards[1].pool.take(15)  # Two of 20 pages are left.
    place.hand_offs.slices.ask(request, MOVE)
    assert (request.slices, request.slice_move, place.world.started) == ([[0, 1], [2]], None, [])


def test_the_rest_of_slices_waits_for_a_chunk_on_its_way() -> None:
    place = Place()
    request = place.request(*CHUNKS, computed=5)
    place.hand_offs.send_chunk(request)
    place.hand_offs.slices.ask(request, MOVE)
    chunk, full = place.world.started
    place.hand_offs.done(full, 6.0)
    assert len(place.world.started) == 2
    place.hand_offs.done(chunk, 6.0)
    assert [t.slice_move for t in place.world.started] == [None, MOVE, MOVE]


@pytest.mark.parametrize("caching", [False, True])
def test_slices_that_cannot_move(caching: bool) -> None:
    place = Place(caching=caching)
    request = place.request(Leg("A"))
    move = MOVE if caching else MoveSlices("r", ((1, 0, (1,)),))
    why = "not possible with prefix caching" if caching else "the slices are not there to move"
    with pytest.raises(JaxinferError, match=why):
        place.hand_offs.slices.ask(request, move)
    assert request.slice_move is None


@pytest.mark.parametrize(("lost", "started"), [("A", [None]), ("B", [None, MOVE])])
def test_slices_that_wait_for_a_chunk_to_a_lost_instance(lost: str, started: list[Any]) -> None:
    """Such slices move at once, unless they were lost themselves."""
    place = Place()
    request = place.request(*CHUNKS, computed=1)
    place.hand_offs.send_chunk(request)
    place.hand_offs.slices.ask(request, MOVE)
    place.hand_offs.forget(lost)
    assert [t.slice_move for t in place.world.started] == started
