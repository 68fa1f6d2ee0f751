"""A lost instance: who is routed anew, with which KV, and what a system may ask for."""

from typing import Any

import pytest
from fake_world import FakeWorld, Timing
from serving_checks import make_kv, new_instance

from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.features.losses import AliveInstances, LostInstance, detach
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.transfer import HandOffs
from jaxinfer.serving.views import Leg


class Cluster:
    """Instances A, B and C of 20 pages; B is the one that is lost."""

    def __init__(self) -> None:
        opts = InstanceOptions(watermark=0.0)
        self.pools = {name: new_instance(name, make_kv(20, 2), opts) for name in "ABC"}
        self.hand_offs = HandOffs(FakeWorld([], [], Timing()), self.pools)
        self.live: list[RequestState] = []

    def request(self, *legs: Leg, runs: bool = False, exported: str | None = None) -> Any:
        """Four of eight prompt tokens computed, in its hold where it runs or exported."""
        request = RequestState(f"r{len(self.live)}", 8, 5)
        request.legs = list(legs)
        if runs or exported:
            request.computed = request.launched = 4
        if runs:
            request.hold = self.pools[legs[0].instance].kv.reserve(4)
            self.pools[legs[0].instance].taking_part.add(request)
        elif legs:
            self.pools[legs[0].instance].waiting.append(request)
        if exported:
            hold = self.pools[exported].kv.reserve(4)
            assert hold
            request.exported = exported, hold
            self.pools[exported].num_exported += 1
        self.live.append(request)
        return request

    def lose_b(self) -> list[RequestState]:
        return detach(self.pools["B"], self.pools, self.live, self.hand_offs)


def test_asking_for_a_lost_instance_is_told_apart_from_a_typo() -> None:
    a = new_instance("A", make_kv(4, 4))
    alive = AliveInstances({"A": a}, {"B": "killed"})
    assert alive["A"] is a
    assert list(alive) == ["A"]
    with pytest.raises(LostInstance) as lost:
        alive["B"]
    assert lost.value.args == ("B",)
    with pytest.raises(KeyError, match="'D'"):
        alive["D"]


def test_only_those_who_had_something_there_are_routed_anew_in_their_order() -> None:
    cluster = Cluster()
    elsewhere = cluster.request(Leg("A"), runs=True)
    ran = cluster.request(Leg("B"), runs=True)
    waited = cluster.request(Leg("B"))
    exported = cluster.request(Leg("C"), exported="B")
    unrouted = cluster.request()
    assert cluster.lose_b() == [ran, waited, exported]
    for request in (ran, waited, exported):
        assert (request.computed, request.launched, request.legs) == (0, 0, [])
        assert (request.hold, request.exported, request.epoch) == (None, None, 1)
    assert [cluster.pools[name].num_requests for name in "ABC"] == [1, 0, 0]
    assert (elsewhere.computed, elsewhere.epoch, unrouted.epoch) == (4, 0, 0)


def test_kv_elsewhere_is_kept_and_sent_again() -> None:
    """Exported by A, half of it on its way to B: another destination needs all of it."""
    cluster = Cluster()
    request = cluster.request(Leg("A", 4), Leg("B"), runs=True)
    cluster.hand_offs.end_leg(request)
    assert BatchBuilder(cluster.pools["B"]).admit() is None
    assert cluster.pools["B"].take_admitted_imports() == [request]
    request.sent = 2
    assert cluster.lose_b() == [request]
    assert (request.computed, request.sent, request.epoch) == (4, 0, 0)
    assert (request.exported[0], request.hold, request.legs) == ("A", None, [])
    assert cluster.pools["A"].num_exported == 1


def test_pages_for_what_was_on_its_way_come_free() -> None:
    """The pages at C of KV on its way from B are free for others, and so is its seat."""
    cluster = Cluster()
    request, c = cluster.request(Leg("C"), exported="B"), cluster.pools["C"]
    assert BatchBuilder(c).admit() is None
    assert (list(c.importing), c.kv.num_free) == ([request.id], 16)
    assert cluster.lose_b() == [request]
    assert (c.importing, c.kv.num_free, request.hold) == ({}, 20, None)


def test_legs_from_the_lost_instance_on_are_dropped() -> None:
    cluster = Cluster()
    request = cluster.request(Leg("A", 6), Leg("C", 7), Leg("B", 8), Leg("A"), runs=True)
    assert cluster.lose_b() == []
    assert request.legs == [Leg("A", 6), Leg("C", 7)]
    assert list(cluster.pools["A"].running) == [request.id]


def test_pages_reserved_ahead_there_are_given_up_and_those_elsewhere_kept() -> None:
    cluster = Cluster()
    holds = []
    for dest in "BC":
        request = cluster.request(Leg("A", 8, "per_chunk"), Leg(dest), runs=True)
        request.incoming = cluster.pools[dest].reserve_ahead(request, request.legs[1])
        request.sent = 4
        holds.append(request.incoming)
    assert cluster.lose_b() == []
    there, elsewhere = cluster.live
    assert (there.incoming, there.sent, holds[0].released) == (None, 0, True)
    assert (elsewhere.incoming, elsewhere.sent, holds[1].released) == (holds[1], 4, False)


def test_a_move_of_heads_ends_with_its_instance() -> None:
    """Else the request would be left out of all steps elsewhere."""
    cluster = Cluster()
    request = cluster.request(Leg("B"), runs=True)
    request.slice_copy = request.slice_move = MoveSlices(request.id, ((0, 1, (0,)),))
    cluster.lose_b()
    assert (request.slice_copy, request.slice_move) == (None, None)


def test_pages_of_a_step_that_never_ends_are_free_for_the_next_run() -> None:
    cluster = Cluster()
    request, kv = cluster.request(Leg("B"), runs=True), cluster.pools["B"].kv
    request.hold.pin()
    cluster.lose_b()
    assert (kv.num_free, kv.shards[0].pool.num_pinned, kv.shards[0].num_pairs) == (20, 0, 0)


def test_what_is_on_its_way_is_forgotten() -> None:
    cluster = Cluster()
    request = cluster.request(Leg("A", 8, "per_chunk"), Leg("B"), runs=True)
    request.incoming = cluster.pools["B"].reserve_ahead(request, request.legs[1])
    here, there = ("A", request.hold), ("B", request.incoming)
    cluster.hand_offs._note(request, here, there, 0, 4)
    cluster.lose_b()
    assert cluster.hand_offs.moving == []
    assert (request.transfers, request.hold.users, request.legs) == (
        0,
        0,
        [Leg("A", 8, "per_chunk")],
    )
