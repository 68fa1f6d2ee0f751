"""KV that goes by chunks and segments, and pages reserved ahead for it."""

import pytest
from transfer_cases import CHUNKS, Place, a_batch

from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg


def test_each_chunk_goes_once_the_last_has_landed() -> None:
    place = Place()
    request = place.request(*CHUNKS, computed=3)
    place.hand_offs.send_chunk(request)
    place.hand_offs.send_chunk(request)
    assert place.sent() == [("A", "B", 0, 3)]
    assert place.pools["B"].kv.reserved == {request.incoming: request.drop_incoming}
    request.computed = request.launched = 6
    place.hand_offs.send_chunk(request)  # The first is still on its way.
    assert len(place.world.started) == 1
    place.hand_offs.done(place.world.started[0], 6.0)
    assert request.metrics.received is None
    place.hand_offs.send_chunk(request)
    assert place.sent() == [("A", "B", 0, 3), ("A", "B", 3, 6)]
    place.hand_offs.done(place.world.started[1], 7.0)
    place.hand_offs.send_chunk(request)  # Nothing is new.
    assert len(place.world.started) == 2
    incoming = request.incoming
    request.computed = request.launched = 8
    place.hand_offs.end_leg(request)
    assert place.sent()[2:] == [("A", "B", 6, 8)]
    assert (request.hold, request.incoming, incoming.num_pages) == (incoming, None, 4)
    assert place.pools["B"].kv.reserved == {}


def test_what_has_all_been_sent_arrives_when_the_leg_ends() -> None:
    place = Place()
    request = place.request(*CHUNKS, computed=8)
    place.hand_offs.send_chunk(request)
    place.hand_offs.done(place.world.started[0], 6.0)
    place.hand_offs.end_leg(request)
    assert list(place.pools["B"].running) == ["r"]
    assert (len(place.world.started), place.in_use("A")) == (1, 0)


def test_the_last_chunk_on_its_way_is_waited_for() -> None:
    place = Place()
    request = place.request(*CHUNKS, computed=8)
    place.hand_offs.send_chunk(request)
    place.hand_offs.end_leg(request)
    assert list(place.pools["B"].importing) == ["r"]
    place.hand_offs.done(place.world.started[0], 6.0)
    assert list(place.pools["B"].running) == ["r"]
    assert len(place.world.started) == 1


def test_pages_reserved_ahead_grow_with_what_is_known() -> None:
    """A leg that goes on past the prompt outgrows them."""
    place = Place()
    request = place.request(Leg("A", 11, "per_chunk"), Leg("B"), computed=8)
    place.hand_offs.send_chunk(request)
    assert request.incoming.num_pages == 4
    place.hand_offs.done(place.world.started[0], 6.0)
    request.output_token_ids = [0, 0, 0]
    assert request.hold.grow(10)
    request.computed = request.launched = 10
    place.hand_offs.send_chunk(request)
    assert (place.sent()[1:], request.incoming.num_pages) == ([("A", "B", 8, 10)], 5)


def test_no_chunk_goes_where_the_pages_cannot_grow() -> None:
    place = Place()
    request = place.request(Leg("A", 11, "per_chunk"), Leg("B"), computed=8)
    place.hand_offs.send_chunk(request)
    place.hand_offs.done(place.world.started[0], 6.0)
    place.pools["B"].kv.reserve(32)
    request.output_token_ids = [0, 0, 0]
    request.hold.grow(10)
    request.computed = request.launched = 10
    place.hand_offs.send_chunk(request)
    assert len(place.world.started) == 1
    assert request.sent == 8


@pytest.mark.parametrize(
    "legs",
    [
        (Leg("A", 8), Leg("B")),
        (Leg("A", 8, "at_end"), Leg("B")),
        (Leg("A", 8, "per_chunk"), Leg("A")),
        (Leg("A", 8, "per_chunk"),),
    ],
)
def test_chunks_that_stay(legs: tuple[Leg, ...]) -> None:
    place = Place()
    request = place.request(*legs)
    place.hand_offs.send_chunk(request)
    assert (place.sent(), request.incoming) == ([], None)


def test_a_leg_by_segments_sends_by_chunks_what_did_not_go_along() -> None:
    place = Place()
    request = place.request(Leg("A", 8, "per_segment"), Leg("B"), computed=3)
    place.hand_offs.send_chunk(request)
    assert place.sent() == [("A", "B", 0, 3)]


def test_segments_go_along_with_their_step() -> None:
    place = Place()
    segments = Leg("A", 8, "per_segment")
    along = place.request(segments, Leg("B"))
    others = [
        place.request(*CHUNKS, name="chunks"),
        place.request(segments, name="no leg after"),
        place.request(segments, Leg("A"), name="stays"),
    ]
    along.sent = 4
    batch = a_batch(along, *others)
    place.hand_offs.send_along(batch)
    (transfer,) = batch.transfers
    assert place.sent() == []  # The world finds it in the batch.
    assert (transfer.source, transfer.dest, transfer.start, transfer.stop) == ("A", "B", 4, 8)
    assert (transfer.source_hold, transfer.dest_hold) == (along.hold, along.incoming)
    assert (along.sent, along.transfers, place.hand_offs.moving) == (8, 1, [transfer])


@pytest.mark.parametrize(
    ("output", "samples", "goes"), [(4, True, False), (3, True, True), (4, False, True)]
)
def test_what_ends_with_a_step_does_not_go_along(output: int, samples: bool, goes: bool) -> None:
    """A request has at most five output tokens; the one of the step itself is the last."""
    place = Place()
    request = place.request(Leg("A", 20, "per_segment"), Leg("B"), output=output)
    batch = a_batch(request, samples=samples)
    place.hand_offs.send_along(batch)
    assert bool(batch.transfers) == goes


def test_pages_reserved_elsewhere_are_given_up() -> None:
    place = Place()
    request = place.request(*CHUNKS)
    place.hand_offs.send_chunk(request)
    request.legs[1] = Leg("C")
    place.hand_offs.end_leg(request)
    assert (request.incoming, request.sent, list(place.pools["C"].waiting)) == (None, 0, [request])
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (place.in_use("B"), place.pools["B"].kv.reserved) == (0, {})


def test_a_late_chunk_to_an_earlier_destination_is_not_waited_for() -> None:
    place = Place()
    request = place.request(Leg("A", 8, "per_chunk"), Leg("B"))
    place.hand_offs.send_chunk(request)
    request.legs = [Leg("A", 6, "at_end"), Leg("C")]
    place.hand_offs.end_leg(request)
    late, wanted = place.world.started
    assert (late.dest, wanted.dest, wanted.start) == ("B", "C", 0)
    place.hand_offs.done(wanted, 6.0)
    assert list(place.pools["C"].running) == ["r"]
    assert (place.pools["A"].num_exported, place.in_use("A")) == (0, 3)
    place.hand_offs.done(late, 7.0)
    assert (place.in_use("A"), place.in_use("B"), request.transfers) == (0, 0, 0)


@pytest.mark.parametrize("limit", ["seats", "transfers", "pages"])
def test_pages_reserved_ahead_where_there_is_no_room_any_more(limit: str) -> None:
    place = Place(seats=1 if limit == "seats" else 8, max_transfers_in_flight=1)
    request = place.request(*CHUNKS, computed=8)
    place.hand_offs.send_chunk(request)
    place.hand_offs.done(place.world.started[0], 6.0)
    request.output_token_ids = [0]
    b = place.pools["B"]
    other = RequestState("o", 3, 3)
    if limit == "seats":
        b.taking_part.add(other)
    elif limit == "transfers":
        b.importing["o"] = other
    else:
        b.kv.reserve(32)  # The ninth token needs a fifth page.
    place.hand_offs.end_leg(request)
    assert (request.incoming, request.hold, request.sent) == (None, None, 0)
    assert (list(b.waiting), b.kv.reserved) == ([request], {})
