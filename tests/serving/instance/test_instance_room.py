"""Room at an instance: who makes it, for whom, and what is waited for."""

from typing import Any

import pytest
from instance_cases import add, ahead, make, names, running, waiting

from jaxinfer.serving.batch import Row
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.views import Leg

# Room: nine pages of two tokens, of which three requests have two each and others the rest.


def crowd(**options: Any) -> tuple[Instance, list[Any]]:
    instance = make(6, **options)
    return instance, [running(instance, name) for name in "abc"]


def test_the_latest_makes_room_and_goes_to_the_head_of_the_queue() -> None:
    instance, (a, b, c) = crowd()
    other = waiting(instance, "w")
    row = add(instance, a, 1)
    assert row
    assert (names(instance.running.values()), names(instance.waiting)) == (["a", "b"], ["c", "w"])
    assert (c.hold, c.computed, c.launched, c.epoch) == (None, 0, 0, 1)
    assert (c.metrics.num_preemptions, instance.num_preemptions) == (1, 1)
    assert (b.epoch, other.epoch, a.hold.num_pages, instance.kv.num_free) == (0, 0, 3, 1)
    assert names(instance.taking_part.ungrouped()) == ["a", "b"]


def test_who_has_a_row_in_the_batch_is_spared() -> None:
    instance, (a, _, c) = crowd()
    assert add(instance, a, 1, [Row(c, 4, 1, True, False, 0, c.hold)])
    assert (names(instance.running.values()), names(instance.waiting)) == (["a", "c"], ["b"])


def test_the_last_one_left_makes_room_itself() -> None:
    instance, (a, b, c) = crowd()
    rows = [Row(r, 3, 1, True, False, 0, r.hold) for r in (a, b)]
    assert not add(instance, c, 1, rows)
    assert (names(instance.running.values()), c.hold) == (["a", "b"], None)


def test_as_many_leave_as_it_takes() -> None:
    instance, (a, _, _) = crowd()
    a.hold.grow(4)
    a.output_token_ids = [0] * 5
    assert add(instance, a, 5)  # Nine tokens: three more pages.
    assert (names(instance.running.values()), names(instance.waiting)) == (["a"], ["b", "c"])


@pytest.mark.parametrize("why", ["pinned", "exported", "slices move"])
def test_pages_that_come_back_are_waited_for(why: str) -> None:
    instance, (a, b, c) = crowd()
    if why == "pinned":
        c.hold.pin()
        instance.preempt(c)
    elif why == "exported":
        instance.num_exported = 1
    else:
        b.slice_move = MoveSlices("b", ((0, 1, (0,)),))
    before = instance.num_preemptions
    assert not add(instance, a, 1)
    assert instance.num_preemptions == before
    assert (a.launched, a.pending) == (4, 0)


@pytest.mark.parametrize("exported", [False, True])
def test_the_latest_reservation_is_taken_back_first(exported: bool) -> None:
    instance = make(6)
    a = running(instance, "a")
    first, second = ahead(instance, "first"), ahead(instance, "second")
    instance.num_exported = exported
    assert add(instance, a, 1)
    assert first.incoming
    assert second.incoming is None
    assert list(instance.kv.reserved) == [first.incoming]
    assert (instance.kv.num_free, instance.num_preemptions) == (1, 0)


def test_an_import_on_its_way_is_waited_for_by_the_last_one_that_runs() -> None:
    instance = make(6)
    a = running(instance, "a")
    coming = RequestState("i", 8, 1)
    coming.hold = instance.kv.reserve(8)
    instance.importing["i"] = coming
    assert not add(instance, a, 1)
    assert (instance.num_preemptions, names(instance.running.values())) == (0, ["a"])


def test_an_import_on_its_way_keeps_nobody_else_from_making_room() -> None:
    instance, (a, _, _) = crowd()
    instance.importing["i"] = RequestState("i", 1, 1)
    assert add(instance, a, 1)
    assert (names(instance.running.values()), names(instance.waiting)) == (["a", "b"], ["c"])


@pytest.mark.parametrize("place", ["running", "importing", "waiting", "nowhere"])
def test_remove_from_wherever_it_is(place: str) -> None:
    instance = make()
    others = [running(instance, "r"), waiting(instance, "w")]
    instance.importing["i"] = RequestState("i", 1, 1)
    request = RequestState("x", 1, 1)
    request.legs = [Leg("A")]
    if place == "running":
        instance.taking_part.add(request)
    elif place == "importing":
        instance.importing["x"] = request
    elif place == "waiting":
        instance.waiting.append(request)
    instance.remove(request)
    assert instance.num_requests == 3
    assert names(instance.taking_part.ungrouped()) == ["r"]
    assert (others[0].hold.released, names(instance.waiting)) == (False, ["w"])
