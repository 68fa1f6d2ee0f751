"""Admission at an instance: of whom, with which pages of its own or of a prefix cache."""

import pytest
from instance_cases import exported_at, make, names, remove, running, waiting
from serving_checks import make_kv, make_requests, new_instance

from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg

# Admission.


def test_admission_in_order_with_pages_for_what_is_known() -> None:
    instance = make(max_num_seqs=2)
    first, second, third = (waiting(instance, name, 5) for name in "abc")
    assert BatchBuilder(instance).admit() is first
    assert first.hold
    assert (first.hold.num_pages, first.computed) == (3, 0)
    assert BatchBuilder(instance).admit() is second
    assert BatchBuilder(instance).admit() is None
    assert (names(instance.running.values()), list(instance.waiting)) == (["a", "b"], [third])


def test_an_import_takes_a_seat() -> None:
    instance = make(max_num_seqs=2)
    running(instance, "r")
    assert (instance.has_seat, instance.can_import) == (True, True)
    instance.importing["i"] = RequestState("i", 1, 1)
    assert (instance.has_seat, instance.can_import) == (False, False)
    waiting(instance, "w")
    assert BatchBuilder(instance).admit() is None


def test_imports_at_once() -> None:
    instance = make(max_transfers_in_flight=2)
    requests = [waiting(instance, name) for name in "abc"]
    for request in requests:
        exported_at("B", instance, request)
    plain = waiting(instance, "d")
    assert BatchBuilder(instance).admit() is None
    assert names(instance.importing.values()) == ["a", "b"]
    assert names(instance.take_admitted_imports()) == ["a", "b"]
    assert instance.take_admitted_imports() == []
    assert (list(instance.waiting), instance.running) == ([requests[2], plain], {})
    assert not instance.can_import
    assert [r.hold.num_pages if r.hold else 0 for r in requests] == [2, 2, 0]
    assert requests[0].computed == 4  # Its entries are elsewhere, and are not forgotten.


def test_imports_are_admitted_on_the_way_to_the_next_that_can_run() -> None:
    instance = make()
    exported_at("B", instance, waiting(instance, "a"))
    plain = waiting(instance, "b")
    assert BatchBuilder(instance).admit() is plain
    assert names(instance.take_admitted_imports()) == ["a"]


def test_a_limit_of_what_is_to_compute_does_not_hold_imports_back() -> None:
    """Seven tokens are left of the import, and three of the other: at most three."""
    instance = make()
    exported_at("B", instance, waiting(instance, "a", 9), computed=2)
    plain = waiting(instance, "b", 3)
    assert BatchBuilder(instance).admit(3) is plain
    assert names(instance.take_admitted_imports()) == ["a"]


def test_kv_that_is_here_is_taken_as_it_is() -> None:
    instance = make(2)
    request = waiting(instance, "a")
    exported_at("A", instance, request)
    hold = request.exported[1] if request.exported else None
    assert instance.kv.num_free == 0
    assert BatchBuilder(instance).admit() is request
    assert (request.hold, request.exported, instance.num_exported) == (hold, None, 0)
    assert (request.computed, names(instance.running.values())) == (4, ["a"])


@pytest.mark.parametrize(("prompt_len", "until", "need"), [(4, None, 6), (4, 6, 3), (4, 99, 6)])
def test_who_never_fits(prompt_len: int, until: int | None, need: int) -> None:
    """Twelve entries at the longest, or up to the leg's end."""
    request = RequestState("x", prompt_len, 9)
    leg = Leg("A", until)
    assert make(need).never_holds(request, leg) is None
    assert make(need - 1).never_holds(request, leg) == (
        f"request 'x' needs {need} pages of 2 tokens (4 prompt + 9 output tokens) on instance "
        f"'A', which has {need - 1}"
    )


def test_reserving_ahead() -> None:
    instance = make()
    request = RequestState("x", 4, 9)
    request.incoming = hold = instance.reserve_ahead(request, Leg("A", 3))
    assert hold
    assert (hold.num_pages, instance.kv.num_free) == (2, 18)
    (give_back,) = instance.kv.reserved.values()
    give_back()
    assert (request.incoming, hold.released, instance.kv.num_free) == (None, True, 20)
    assert instance.kv.reserved == {}


@pytest.mark.parametrize("why", ["waiting", "imports", "seats", "pages"])
def test_nothing_is_reserved_ahead_where_there_is_no_room_to_spare(why: str) -> None:
    instance = make(5, max_num_seqs=2, max_transfers_in_flight=1)
    other = running(instance, "r")
    if why == "waiting":
        waiting(instance, "w")
    elif why == "imports":
        instance.importing["i"] = remove(instance, "r")
    elif why == "seats":
        running(instance, "s")
    request = RequestState("x", 8 if why == "pages" else 2, 9)
    assert instance.reserve_ahead(request, Leg("A")) is None
    assert (instance.kv.reserved, other.hold.released) == ({}, False)


# Prefix caching.


def cached_instance() -> tuple[Instance, RequestState]:
    """Page size 2; the pages of tokens 0 to 7 are cached and idle."""
    instance = new_instance("A", make_kv(20, 2, caching=True), InstanceOptions(watermark=0.0))
    (first,) = make_requests([(8, 2)], shared=[8])
    first.legs = [Leg("A")]
    first.hold = instance.kv.reserve(8)
    first.computed = 8
    instance.keep_prefix(first)
    assert first.hold
    assert first.hold.num_hashed == 4
    first.hold.release()
    (request,) = make_requests([(8, 2)], shared=[8])
    request.legs = [Leg("A")]
    return instance, request


@pytest.mark.parametrize(("until", "found"), [(None, 3), (8, 3), (7, 3), (6, 2), (1, 0)])
def test_the_last_known_token_is_left_to_compute(until: int | None, found: int) -> None:
    instance, request = cached_instance()
    assert len(instance.cached_prefix(request, Leg("A", until))) == found


def test_cached_pages_are_counted_as_computed() -> None:
    instance, request = cached_instance()
    assert instance.pages_to_take(request, Leg("A")) == 4  # All idle: they count as free.
    instance.waiting.append(request)
    assert BatchBuilder(instance).admit() is request
    assert (request.computed, request.launched, request.metrics.num_cached_tokens) == (6, 6, 6)
    other = make_requests([(8, 2)], shared=[8])[0]
    other.legs = [Leg("A")]
    assert instance.pages_to_take(other, Leg("A")) == 1


@pytest.mark.parametrize("why", ["takes none", "no tokens"])
def test_who_starts_without_cached_pages(why: str) -> None:
    instance, request = cached_instance()
    if why == "takes none":
        request.takes_cached = False
    else:
        request.prompt_token_ids = ()
    assert instance.cached_prefix(request, Leg("A")) == []
    assert instance.cached_tokens(request) == 0
    assert make().cached_prefix(request, Leg("A")) == []


@pytest.mark.parametrize("takes_cached", [True, False])
def test_cached_pages_need_not_be_sent(takes_cached: bool) -> None:
    """Also for a request whose prompt is reported on: it has been computed elsewhere."""
    instance, request = cached_instance()
    request.takes_cached = takes_cached
    request.computed = 8
    request.exported = ("B", make_kv(20, 2).reserve(8))
    instance.waiting.append(request)
    assert instance.admit(request)
    assert instance.take_admitted_imports() == [request]
    assert (request.computed, request.sent, request.metrics.num_cached_tokens) == (8, 6, None)


def test_pages_are_kept_once_they_are_full() -> None:
    instance = new_instance("A", make_kv(20, 2, caching=True))
    (request,) = make_requests([(7, 2)], shared=[7])
    request.hold = instance.kv.reserve(7)
    assert request.hold
    for computed, kept in ((1, 0), (2, 1), (3, 1), (6, 3), (7, 3)):
        request.computed = computed
        instance.keep_prefix(request)
        assert (request.hold.num_hashed, len(request.hold.cached)) == (kept, kept)
