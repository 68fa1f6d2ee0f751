"""One instance by itself: what it counts, whom it takes in, and who makes room for whom."""

from typing import Any

import pytest
from serving_checks import make_kv, make_requests, new_instance

from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import CountedPages, Shard
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Leg, MoveSlices


def make(pages: int = 20, page_size: int = 2, grouped: bool = False, **options: Any) -> Instance:
    opts = InstanceOptions(**({"watermark": 0.0} | options))
    return new_instance("A", make_kv(pages, page_size), opts, groups_decodes=grouped)


def running(
    instance: Instance, name: str, prompt_len: int = 4, computed: int = 4, output: int = 1
) -> Any:
    """A request that runs; by default it is to decode its second token."""
    request = RequestState(name, prompt_len, 9)
    request.legs = [Leg("A")]
    request.output_token_ids = [0] * output
    request.computed = request.launched = computed
    request.hold = instance.kv.reserve(computed)
    assert request.hold
    instance.taking_part.add(request)
    return request


def add(
    instance: Instance, request: RequestState, count: int, rows: list[Row] | None = None
) -> Row | None:
    """The request's row in a batch that has others so far; None where it waits."""
    batch = BatchBuilder(instance)
    batch.rows = rows or []
    return batch.rows[-1] if batch.add(request, count) else None


def group(instance: Instance, budget: int = 99) -> BatchBuilder:
    """A batch that has begun with those that go together."""
    batch = BatchBuilder(instance)
    batch.budget = budget
    batch.add_group()
    assert batch.budget == budget - batch.grouped
    return batch


def remove(instance: Instance, name: str) -> RequestState:
    request = instance.running[name]
    instance.taking_part.remove(request)
    return request


def waiting(instance: Instance, name: str, prompt_len: int = 4, *legs: Leg) -> RequestState:
    request = RequestState(name, prompt_len, 9)
    request.legs = list(legs) or [Leg("A")]
    instance.waiting.append(request)
    return request


def exported_at(place: str, instance: Instance, request: RequestState, computed: int = 4) -> None:
    """Its KV waits at another instance, or here."""
    kv = instance.kv if place == "A" else make_kv(20, 2)
    hold = kv.reserve(computed)
    assert hold
    request.exported = place, hold
    request.computed = request.launched = computed
    instance.num_exported += place == "A"


def names(requests: Any) -> list[str]:
    return [request.id for request in requests]


def test_default_limits() -> None:
    assert InstanceOptions() == InstanceOptions(64, 512, 2, True, "all", 4, 0.01)
    instance = new_instance("A", make_kv(301, 4))
    assert instance.options == InstanceOptions()
    assert instance.watermark_pages == 4  # 3.01, and one more for the rest.
    assert (instance.role, instance.fit) == ("", None)
    assert instance.taking_part.ready_group() is None


def test_what_a_system_sees() -> None:
    instance = new_instance("A", make_kv(10, 4, [(0, 1), (2,)]), InstanceOptions(8, 77))
    running(instance, "r")
    instance.importing["i"] = RequestState("i", 1, 1)
    waiting(instance, "w")
    assert instance.num_requests == 3
    assert (instance.num_free_pages, [shard.num_free_pages for shard in instance.shards]) == (
        9,
        [18, 9],
    )
    assert (instance.page_size, instance.max_num_batched_tokens) == (4, 77)
    assert names(instance.running.values()) == ["r"]


def test_idle_is_who_runs_and_imports_nothing() -> None:
    instance = make()
    waiting(instance, "w")
    assert instance.is_idle
    instance.importing["i"] = RequestState("i", 1, 1)
    assert not instance.is_idle
    instance.importing.clear()
    running(instance, "r")
    assert not instance.is_idle


@pytest.mark.parametrize("left", ["waiting", "importing", "running", "exported", None])
def test_a_role_is_taken_once_nothing_of_the_old_one_is_left(left: str | None) -> None:
    instance = make()
    assert not instance.take_role_when_drained(1.0)
    instance.next_role = "decode"
    assert instance.draining
    if left == "waiting":
        waiting(instance, "r")
    elif left == "importing":
        instance.importing["r"] = RequestState("r", 1, 1)
    elif left == "running":
        running(instance, "r")
    elif left == "exported":
        instance.num_exported = 1
    assert instance.take_role_when_drained(3.0) == (left is None)
    assert (instance.role, instance.draining) == (("", True) if left else ("decode", False))
    had = {"": 8.0} if left else {"": 3.0, "decode": 5.0}
    assert instance.role_seconds(8.0) == had
    assert not instance.take_role_when_drained(9.0)


def test_seconds_of_roles_that_come_back_add_up() -> None:
    instance = make()
    for role, now in (("prefill", 1.0), ("decode", 4.0), ("prefill", 6.0), ("prefill", 7.0)):
        instance.next_role = role
        assert instance.take_role_when_drained(now)
    assert instance.role_seconds(10.0) == {"": 1.0, "prefill": 7.0, "decode": 2.0}


def test_a_batch_says_how_the_instance_is() -> None:
    instance = make(max_num_seqs=2, max_in_flight=1)
    waiting(instance, "a", 5)
    waiting(instance, "b", 3)
    waiting(instance, "c", 3)
    batch = instance.next_batch()
    assert batch
    assert (batch.instance, batch.num_waiting, batch.num_running) == ("A", 1, 2)
    assert (batch.pages_in_use, batch.grouped, batch.grouped_context) == (5, 0, 0)
    assert instance.in_flight == 1
    assert instance.next_batch() is None  # One in flight at most.


def test_nothing_to_do_is_no_batch() -> None:
    instance = make()
    assert instance.next_batch() is None
    assert instance.in_flight == 0


# Rows.


def test_a_row_of_a_prompt_and_the_next_ahead() -> None:
    instance = make()
    request = running(instance, "r", 6, 2, 0)
    row = add(instance, request, 3)
    assert row == Row(request, 2, 3, False, False, 0, request.hold)
    assert (request.launched, request.pending, request.computed) == (5, 0, 2)
    row = add(instance, request, 1)
    assert row == Row(request, 5, 1, True, False, 0, request.hold)
    row = add(instance, request, 1)
    assert row == Row(request, 6, 1, True, True, 0, request.hold)
    assert (request.launched, request.pending, request.hold.users) == (7, 2, 3)


def test_a_full_page_is_filled_before_another_is_taken() -> None:
    instance = make()
    request = running(instance, "r", 4, 3, 0)
    assert add(instance, request, 1)
    assert request.hold.num_pages == 2
    assert add(instance, request, 1)
    assert request.hold.num_pages == 3


@pytest.mark.parametrize("why", ["no pages", "paused", "slices move", "pending"])
def test_who_gets_no_row(why: str) -> None:
    instance = make(launch_ahead=False)
    request = running(instance, "r")
    if why == "no pages":
        request.hold = None
    elif why == "paused":
        request.paused = True
    elif why == "slices move":
        request.slice_move = MoveSlices("r", ((0, 1, (0,)),))
    else:
        request.pending = 1
    assert not add(instance, request, 1)
    assert request.launched == 4


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


def ahead(instance: Instance, name: str) -> RequestState:
    """Two pages are reserved for it, which is still elsewhere."""
    request = RequestState(name, 4, 9)
    request.incoming = instance.reserve_ahead(request, Leg("A"))
    assert request.incoming
    return request


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


@pytest.mark.parametrize("why", ["takes none", "no tokens", "computed", "has pages"])
def test_who_starts_without_cached_pages(why: str) -> None:
    instance, request = cached_instance()
    if why == "takes none":
        request.takes_cached = False
    elif why == "no tokens":
        request.prompt_token_ids = ()
    elif why == "computed":
        request.computed = 1
    else:
        request.hold = instance.kv.reserve(2)
    assert instance.cached_prefix(request, Leg("A")) == []
    assert make().cached_prefix(request, Leg("A")) == []


def test_pages_are_kept_once_they_are_full() -> None:
    instance = new_instance("A", make_kv(20, 2, caching=True))
    (request,) = make_requests([(7, 2)], shared=[7])
    request.hold = instance.kv.reserve(7)
    assert request.hold
    for computed, kept in ((1, 0), (2, 1), (3, 1), (6, 3), (7, 3)):
        request.computed = computed
        instance.keep_prefix(request)
        assert (request.hold.num_hashed, len(request.hold.cached)) == (kept, kept)


# Decodes together.


def counted(pages: int, **options: Any) -> Instance:
    """Return an instance as a simulation has it."""
    kv = KVShards([Shard(CountedPages(pages + 1, 2))])
    opts = InstanceOptions(**({"watermark": 0.0, "max_in_flight": 1} | options))
    return new_instance("A", kv, opts, groups_decodes=True)


def test_nobody_decodes_together_unless_asked_to() -> None:
    instance = make()
    running(instance, "a")
    assert group(instance).grouped == 0
    assert instance.taking_part.ready_group() is None


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_in_flight_have_groups_of_their_own_unless_launched_ahead(ahead: bool) -> None:
    """Two decodes go together; a third one joins them, or goes by itself until they are back."""
    instance = counted(99, max_in_flight=3, launch_ahead=ahead)
    a, b = running(instance, "a"), running(instance, "b")
    counts = [group(instance).grouped]
    c = running(instance, "c", computed=4)
    counts += [group(instance).grouped, group(instance).grouped]
    assert counts == ([2, 3, 3] if ahead else [2, 1, 0])
    for end in (1.0, 2.0):
        assert instance.taking_part.commit_group(end) == ([], [])
    assert group(instance).grouped == 3
    instance.taking_part.by_id()
    assert [len(r.output_token_ids) for r in (a, b, c)] == ([3, 3, 2] if ahead else [2, 2, 2])


@pytest.mark.parametrize(("pages", "together"), [(9, 3), (8, 0)])
def test_the_pages_just_suffice(pages: int, together: int) -> None:
    """Three decodes at the end of their second page: one page each."""
    instance = counted(pages)
    requests = [running(instance, name) for name in "abc"]
    assert instance.kv.num_free == pages - 6
    batch = group(instance)
    assert batch.grouped == together
    assert instance.kv.num_free == (0 if together else 2)
    assert len(instance.taking_part.ungrouped()) == 3 - together
    assert instance.num_preemptions == 0
    formed = batch.batch()
    assert (formed.grouped_context if formed else None) == (15 if together else None)
    assert [r.hold.num_pages for r in requests] == [3 if together else 2] * 3


@pytest.mark.parametrize(("budget", "together"), [(4, 3), (3, 0)])
def test_the_budget_just_suffices_for_the_group_and_all_others(budget: int, together: int) -> None:
    instance = counted(99)
    other = running(instance, "first", 9, 2, 0)
    for name in "abc":
        running(instance, name)
    assert group(instance, budget).grouped == together
    if together:
        assert instance.taking_part.ungrouped() == [other]
    else:
        assert names(instance.taking_part.ungrouped()) == ["first", "a", "b", "c"]


def test_room_for_others_is_left_by_the_group() -> None:
    instance = counted(9)
    running(instance, "prompt", 4, 2, 0)
    for name in "ab":
        running(instance, name)
    # Four free pages less one: two for the group and one for the other.
    assert instance.kv.num_free == 4
    instance.kv.reserve(2)
    assert group(instance).grouped == 2
    crowded = counted(9)
    running(crowded, "prompt", 4, 2, 0)
    for name in "ab":
        running(crowded, name)
    crowded.kv.reserve(4)
    assert group(crowded).grouped == 0


def test_a_batch_counts_the_group_anew_each_time() -> None:
    instance = counted(99, max_in_flight=3)
    running(instance, "a")
    batches = [instance.next_batch() for _ in range(3)]
    assert [(b.grouped, b.grouped_context, b.work.decodes) for b in batches if b] == [
        (1, 5, 1),
        (1, 6, 1),
        (1, 7, 1),
    ]
    request = instance.running["a"]
    assert (request.launched, request.pending) == (7, 3)
    request.paused = True
    instance.taking_part.leave_group(request)
    instance.in_flight = 0
    assert instance.next_batch() is None


def test_the_group_is_spared_when_others_need_room() -> None:
    """The pages are as good as full: a chunk may not evict who decodes in the same step. It waits,
    with the pages that it has, for those who came later.
    """
    instance = counted(6)
    chunk = running(instance, "chunk", 9, 2, 0)
    for name in "ab":
        running(instance, name, computed=3, prompt_len=3)
    assert instance.kv.num_free == 1
    batch = instance.next_batch()
    assert batch
    assert (batch.grouped, batch.rows) == (2, [])
    assert names(instance.running.values()) == ["chunk", "a", "b"]
    assert (chunk.computed, instance.num_preemptions) == (2, 0)


def test_those_who_end_together_end_in_the_order_of_admission() -> None:
    instance = counted(99)
    # Admitted in this order; the group takes the first one in last.
    requests = [running(instance, "r2", computed=11, output=8)]
    requests += [running(instance, name, computed=10, output=7) for name in ("r0", "r1")]
    requests[0].paused = True
    first = instance.next_batch()
    assert first
    assert first.grouped == 2
    instance.taking_part.commit_group(1.0)
    instance.in_flight = 0
    requests[0].paused = False
    assert group(instance).grouped == 3
    ended, left = instance.taking_part.commit_group(2.0)
    assert (names(ended), left) == (["r2", "r0", "r1"], [])


def test_who_leaves_the_group_keeps_its_place() -> None:
    instance = counted(99)
    requests = [running(instance, name) for name in "abc"]
    running(instance, "prompt", 9, 2, 0)
    assert group(instance).grouped == 3
    instance.taking_part.leave_group(requests[1])
    assert names(instance.taking_part.ungrouped()) == ["b", "prompt"]
    instance.taking_part.leave_group(requests[0])
    assert names(instance.taking_part.ungrouped()) == ["a", "b", "prompt"]
    assert isinstance(instance.next_batch(), Batch)


def test_of_groups_that_are_back_the_largest_goes_on() -> None:
    """One of one request and one of two, each of a step in flight; all go together from then on."""
    instance = counted(99, max_in_flight=3, launch_ahead=False)
    first = running(instance, "a")
    assert group(instance).grouped == 1
    for name in "bc":
        running(instance, name)
    assert group(instance).grouped == 2
    for end in (1.0, 2.0):
        instance.taking_part.commit_group(end)
    ready = instance.taking_part.ready_group()
    assert ready
    assert (len(ready), first in ready) == (2, False)
    assert names(instance.taking_part.ungrouped()) == ["a"]
    assert group(instance).grouped == 3


def test_entries_of_who_has_joined_a_group_are_counted_at_once() -> None:
    """Two entries of a prompt and four of each decode, before and after the group's first step."""
    instance = counted(99)
    running(instance, "prompt", 9, 2, 0)
    for name in "ab":
        running(instance, name)
    assert instance.kv_entries == 2 + 4 + 4
    assert group(instance).grouped == 2
    assert instance.kv_entries == 2 + 4 + 4
    instance.taking_part.commit_group(1.0)
    assert instance.kv_entries == 2 + 5 + 5


def test_steps_of_several_groups_end_in_the_order_of_their_launch() -> None:
    instance = counted(99, max_in_flight=3, launch_ahead=False)
    for name in "ab":
        running(instance, name)
        assert group(instance).grouped == 1
    for end, times in ((1.0, [[1.0], []]), (2.0, [[1.0], [2.0]])):
        instance.taking_part.commit_group(end)
        assert [r.metrics.token_times for r in instance.running.values()] == times
