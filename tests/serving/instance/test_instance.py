"""An instance by itself: what it counts, the roles it has, and the rows of its batches."""

import pytest
from instance_cases import add, make, names, running, waiting
from serving_checks import make_kv, new_instance

from jaxinfer.serving.batch import Row
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices


def test_default_limits() -> None:
    assert InstanceOptions() == InstanceOptions(64, 512, 2, True, "all", 4, 0.01)
    instance = new_instance("A", make_kv(301, 4))
    assert instance.options == InstanceOptions()
    assert instance.watermark_pages == 4  # 3.01, and one more for the rest.
    assert (instance.role, instance.fit) == ("", None)
    assert instance.taking_part.ready_group() is None


def test_one_made_of_pools_of_which_one_is_lost_leaves_that_closed() -> None:
    """The next run's, after a loss in the last one; it counts what is left."""
    kv = make_kv(20, 4, ((0,), (1,), ()))
    new_instance("A", kv).go_without((1, 2))
    again = new_instance("A", kv, InstanceOptions(watermark=0.1))
    assert [shard.num_pages for shard in again.shards] == [20, 0, 0]
    assert again.watermark_pages == 1
    again.go_without((2,))
    assert [shard.num_pages for shard in again.shards] == [20, 20, 0]
    assert again.watermark_pages == 2


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
