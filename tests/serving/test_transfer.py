"""Hand-offs by themselves: what is sent, when, between which pages, and who has them then."""

from typing import Any

import pytest
from scenarios import RULES
from serving_checks import make_kv, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.instance import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Leg, MoveSlices
from jaxinfer.serving.transfer import HandOffs


class Notes:
    """A world that only notes which transfers start."""

    def __init__(self) -> None:
        self.time = 5.0
        self.started: list[Transfer] = []

    def now(self) -> float:
        return self.time

    def start_transfer(self, transfer: Transfer) -> None:
        self.started.append(transfer)


class Place:
    """Three instances of 20 pages of two tokens, and the hand-offs between them."""

    def __init__(self, seats: int = 8, caching: bool = False, **options: Any) -> None:
        opts = InstanceOptions(seats, 4, watermark=0.0, **options)
        self.pools = {
            name: new_instance(name, make_kv(20, 2, [(0, 1), (2,)], caching), opts)
            for name in "ABC"
        }
        self.world = Notes()
        self.hand_offs = HandOffs(self.world, self.pools)  # type: ignore[arg-type]

    def request(self, *legs: Leg, computed: int = 6, output: int = 0, name: str = "r") -> Any:
        """One that runs in its first leg's instance: 8 prompt tokens and at most 5 others."""
        request = RequestState(name, 8, 5)
        request.output_token_ids = [0] * output
        request.legs = list(legs)
        request.computed = request.launched = computed
        here = self.pools[legs[0].instance]
        request.hold = here.kv.reserve(max(computed, 1))
        here.taking_part.add(request)
        return request

    def sent(self) -> list[tuple[str, str, int, int]]:
        return [(t.source, t.dest, t.start, t.stop) for t in self.world.started]

    def in_use(self, name: str) -> int:
        """Pages per slice that are not free."""
        return 20 - self.pools[name].kv.num_free


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


CHUNKS = (Leg("A", 8, "per_chunk"), Leg("B"))


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


def a_batch(*requests: Any, count: int = 2, samples: bool = False) -> Batch:
    """Two more tokens for each."""
    rows = []
    for request in requests:
        row = Row(request, request.launched, count, samples, False, 0, request.hold)
        request.launched += count
        request.pending += samples
        rows.append(row)
    return Batch("A", rows, 0, 1, 0)


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


# Slices of KV heads.

MOVE = MoveSlices("r", ((0, 1, (1,)),))


def test_full_pages_of_slices_move_while_the_request_goes_on() -> None:
    """And the rest once nothing uses the pages."""
    place = Place()
    request = place.request(Leg("A"), computed=5)
    request.sent = 2
    request.hold.pin()
    place.hand_offs.ask_slice_move(request, MOVE)
    assert (request.slice_copy, request.slice_move) == (MOVE, None)
    request.hold.grow(7)
    request.computed = request.launched = 7
    assert request.slices == [[0, 1], [2, 1]]
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (request.slice_copy, request.slice_move) == (None, MOVE)
    assert place.sent() == [("A", "A", 0, 4)]
    request.hold.unpin()
    place.hand_offs.start_slice_move(request)
    assert place.sent() == [("A", "A", 0, 4), ("A", "A", 4, 7)]
    assert [t.slice_move for t in place.world.started] == [MOVE, MOVE]
    assert (request.sent, request.hold.users) == (2, 2)
    place.hand_offs.done(place.world.started[1], 7.0)
    assert (request.slices, request.slice_move) == ([[0], [2, 1]], None)
    assert [shard.num_free_pages for shard in place.pools["A"].shards] == [40 - 4, 20 - 8]
    assert place.hand_offs.num_slice_moves == 1


def test_slices_whose_pages_are_all_full_do_not_pause() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=6)
    place.hand_offs.ask_slice_move(request, MOVE)
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (request.slices, request.slice_copy, request.slice_move) == ([[0], [2, 1]], None, None)
    assert place.sent() == [("A", "A", 0, 6)]


def test_a_short_request_pauses_for_its_slices() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=1)
    request.hold.pin()
    place.hand_offs.ask_slice_move(request, MOVE)
    assert (request.slice_copy, request.slice_move, place.sent()) == (None, MOVE, [])
    request.hold.unpin()
    place.hand_offs.start_slice_move(request)
    assert place.sent() == [("A", "A", 0, 1)]


def test_one_move_of_a_request_at_a_time() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=5)
    for _ in range(2):  # While it goes on, and while it pauses.
        place.hand_offs.ask_slice_move(request, MoveSlices("r", ((1, 0, (2,)),)))
    assert place.hand_offs.num_at_once == 1
    request.hold.pin()
    place.hand_offs.done(place.world.started[0], 6.0)
    place.hand_offs.ask_slice_move(request, MOVE)
    assert (place.hand_offs.num_at_once, place.hand_offs.num_slice_moves) == (2, 1)


def test_a_leg_that_ends_gives_up_the_slices_on_their_way() -> None:
    """Their pages come free once nobody writes there; the request may be back by then."""
    place = Place()
    request = place.request(Leg("A", 5), Leg("A"), computed=5)
    hold, shards = request.hold, place.pools["A"].kv.shards
    place.hand_offs.ask_slice_move(request, MOVE)
    place.hand_offs.end_leg(request)
    assert place.pools["A"].admit(request)
    assert (request.hold, request.slice_copy) == (hold, None)
    place.hand_offs.ask_slice_move(request, MOVE)
    assert place.hand_offs.num_at_once == 1
    assert shards[1].num_free_pages == 20 - 6
    place.hand_offs.done(place.world.started[0], 6.0)
    assert (request.slices, request.slice_move) == ([[0, 1], [2]], None)
    assert shards[1].num_free_pages == 20 - 3


def test_slices_on_their_way_are_not_taken_for_those_of_another_instance() -> None:
    place = Place()
    request = place.request(Leg("A", 5), Leg("B"), computed=5)
    place.hand_offs.ask_slice_move(request, MOVE)
    place.hand_offs.end_leg(request)
    assert place.pools["B"].admit(request)
    place.hand_offs.pull(request)
    place.hand_offs.done(place.world.started[1], 6.0)
    place.hand_offs.ask_slice_move(request, MOVE)
    place.hand_offs.done(place.world.started[0], 7.0)
    assert (request.slice_copy, place.in_use("A")) == (MOVE, 0)
    place.hand_offs.done(place.world.started[2], 8.0)
    assert request.slice_copy is None


def test_a_request_that_ends_frees_the_slices_on_their_way() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=5)
    place.hand_offs.ask_slice_move(request, MOVE)
    place.pools["A"].remove(request)
    request.hold.release()
    request.void_kv()
    assert place.in_use("A") > 0
    place.hand_offs.done(place.world.started[0], 6.0)
    assert [shard.num_free_pages for shard in place.pools["A"].shards] == [40, 20]


def test_slices_without_entries_move_without_a_transfer() -> None:
    place = Place()
    request = place.request(Leg("A"), computed=0)
    place.hand_offs.ask_slice_move(request, MOVE)
    assert (request.slices, request.slice_move, place.world.started) == ([[0], [2, 1]], None, [])


def test_slices_without_room_stay() -> None:
    place = Place()
    request = place.request(Leg("A"))
    place.pools["A"].kv.shards[1].pool.take(15)  # Two of 20 pages are left.
    place.hand_offs.ask_slice_move(request, MOVE)
    assert (request.slices, request.slice_move, place.world.started) == ([[0, 1], [2]], None, [])


def test_the_rest_of_slices_waits_for_a_chunk_on_its_way() -> None:
    place = Place()
    request = place.request(*CHUNKS, computed=5)
    place.hand_offs.send_chunk(request)
    place.hand_offs.ask_slice_move(request, MOVE)
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
        place.hand_offs.ask_slice_move(request, move)
    assert request.slice_move is None


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


@pytest.mark.parametrize(("lost", "started"), [("A", [None]), ("B", [None, MOVE])])
def test_slices_that_wait_for_a_chunk_to_a_lost_instance(lost: str, started: list[Any]) -> None:
    """They move at once, unless they were lost themselves."""
    place = Place()
    request = place.request(*CHUNKS, computed=1)
    place.hand_offs.send_chunk(request)
    place.hand_offs.ask_slice_move(request, MOVE)
    place.hand_offs.forget(lost)
    assert [t.slice_move for t in place.world.started] == started


def test_an_export_is_released_once() -> None:
    place = Place()
    request = place.request(Leg("A", 6))
    place.hand_offs.end_leg(request)
    place.hand_offs.release_export(request)
    place.hand_offs.release_export(request)
    assert (request.exported, place.pools["A"].num_exported, place.in_use("A")) == (None, 0, 0)
