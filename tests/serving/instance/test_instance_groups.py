"""Decodes that go together at an instance."""

from typing import Any

import pytest
from instance_cases import group, make, names, running, waiting
from serving_checks import new_instance

from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import CountedPages, Shard
from jaxinfer.serving.views import Leg


def counted(pages: int, **options: Any) -> Instance:
    """Return an instance as a simulation has it."""
    kv = KVShards([Shard(CountedPages(pages + 1, 2))])
    opts = InstanceOptions(**({"watermark": 0.0, "max_in_flight": 1} | options))
    return new_instance("A", kv, opts, groups_decodes=True)


def commit(instance: Instance, end: float) -> list[Row]:
    """End the oldest step that has a group and nothing else, and return what rows it has."""
    return instance.taking_part.commit_group(Batch("A", [], 0, 0, 0, grouped=1), end)


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
        assert commit(instance, end) == []
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
    instance.taking_part.by_id()
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
    commit(instance, 1.0)
    instance.in_flight = 0
    requests[0].paused = False
    assert group(instance).grouped == 3
    assert names([row.request for row in commit(instance, 2.0)]) == ["r2", "r0", "r1"]


def test_rows_of_a_step_are_in_the_order_of_admission_but_for_prompts() -> None:
    """b and d decode in a group, a and e to where their legs end; c is a prompt, f comes in."""
    instance = counted(99)
    a = running(instance, "a")
    b = running(instance, "b")
    running(instance, "c", 9, 2, 0)
    d, e = running(instance, "d"), running(instance, "e")
    for request in (a, e):
        request.legs = [Leg("A", 6), Leg("B")]
    waiting(instance, "f", 1)
    batch = instance.next_batch()
    assert batch
    assert (batch.grouped, names([row.request for row in batch.rows])) == (2, ["a", "e", "c", "f"])
    for request in (d, b):
        instance.taking_part.leave_group(request)
    rows = instance.taking_part.commit_group(batch, 1.0)
    assert names([row.request for row in rows]) == ["a", "b", "d", "e", "c", "f"]


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
    """The groups have one request and two, each a step in flight; all go together from then on."""
    instance = counted(99, max_in_flight=3, launch_ahead=False)
    first = running(instance, "a")
    assert group(instance).grouped == 1
    for name in "bc":
        running(instance, name)
    assert group(instance).grouped == 2
    for end in (1.0, 2.0):
        commit(instance, end)
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
    commit(instance, 1.0)
    assert instance.kv_entries == 2 + 5 + 5


def test_steps_of_several_groups_end_in_the_order_of_their_launch() -> None:
    instance = counted(99, max_in_flight=3, launch_ahead=False)
    for name in "ab":
        running(instance, name)
        assert group(instance).grouped == 1
    for end, times in ((1.0, [[1.0], []]), (2.0, [[1.0], [2.0]])):
        commit(instance, end)
        assert [r.metrics.token_times for r in instance.running.values()] == times
