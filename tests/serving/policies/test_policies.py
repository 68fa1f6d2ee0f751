"""Steps: decodes first, under the budget, admissions above the watermark."""

import pytest
from serving_checks import make_kv, make_requests, new_instance

from jaxinfer.serving.admission import latest
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.policies import Policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg


def queue(instance: Instance, *lengths: tuple[int, int]) -> list[RequestState]:
    requests = make_requests(lengths)
    for request in requests:
        request.legs = [Leg(instance.name)]
        instance.waiting.append(request)
    return requests


def step(instance: Instance) -> list[tuple[str, int, int]]:
    """Form a batch and commit it as if it ran at once: (request, start, count) of its rows."""
    batch = instance.next_batch()
    if not batch:
        return []
    instance.in_flight -= 1
    for row in batch.rows:
        row.hold.unpin()
        row.request.computed = row.start + row.count
        if row.samples:
            row.request.pending -= 1
            row.request.output_token_ids.append(0)
    return rows_of(batch)


def rows_of(batch: Batch | None) -> list[tuple[str, int, int]]:
    return [(r.request.id, r.start, r.count) for r in batch.rows] if batch else []


def make(pages: int, **options: float | str) -> Instance:
    return new_instance("A", make_kv(pages, 4), InstanceOptions(**options))  # type: ignore[arg-type]


def test_decodes_first_then_running_prefills_then_admissions() -> None:
    a = make(100, max_num_batched_tokens=6, max_num_seqs=8)
    queue(a, (4, 5), (9, 5), (3, 5))
    assert step(a) == [("r0", 0, 4), ("r1", 0, 2)]
    assert step(a) == [("r0", 4, 1), ("r1", 2, 5)]
    assert step(a) == [("r0", 5, 1), ("r1", 7, 2), ("r2", 0, 3)]
    assert step(a) == [("r0", 6, 1), ("r1", 9, 1), ("r2", 3, 1)]


def test_a_budget_of_one_token_serves_the_oldest_first() -> None:
    a = make(100, max_num_batched_tokens=1)
    queue(a, (2, 3), (1, 1))
    rows = [step(a) for _ in range(6)]
    assert rows == [[("r0", i, 1)] for i in range(4)] + [[("r1", 0, 1)], []]


def running(instance: Instance, name: str, prompt_len: int, computed: int) -> RequestState:
    """Return a request as it is after a pause or a hand-off; decodes have one token."""
    request = RequestState(name, prompt_len, 5)
    request.legs = [Leg(instance.name)]
    request.output_token_ids = [0] * (computed >= prompt_len)
    request.computed = request.launched = computed
    request.hold = instance.kv.reserve(computed)
    instance.taking_part.add(request)
    return request


def test_decodes_come_before_prompts_admitted_earlier_and_those_in_their_order() -> None:
    a = make(100, max_num_batched_tokens=6)
    for name, prompt_len, computed in (("p", 9, 2), ("d", 4, 4), ("q", 9, 5), ("e", 3, 3)):
        running(a, name, prompt_len, computed)
    assert step(a) == [("d", 4, 1), ("e", 3, 1), ("p", 2, 4)]
    assert step(a) == [("d", 5, 1), ("e", 4, 1), ("p", 6, 3), ("q", 5, 1)]


def test_a_budget_that_decodes_use_up_admits_nobody() -> None:
    a = make(100, max_num_batched_tokens=2)
    for name in ("d", "e", "f"):
        running(a, name, 4, 4)
    running(a, "p", 9, 2)
    queue(a, (3, 3))
    assert step(a) == [("d", 4, 1), ("e", 4, 1)]
    assert (len(a.waiting), len(a.running)) == (1, 4)
    b = make(100, max_num_batched_tokens=3)
    for name in ("d", "e", "f"):
        running(b, name, 4, 4)
    queue(b, (3, 3))
    assert step(b) == [("d", 4, 1), ("e", 4, 1), ("f", 4, 1)]
    assert (len(b.waiting), len(b.running)) == (1, 3)


def test_chunks_in_flight_count_as_done() -> None:
    """The next chunk follows the one in flight, up to the leg's end and no further."""
    a = make(100, max_num_batched_tokens=6, max_in_flight=3)
    running(a, "p", 9, 0)
    assert [rows_of(a.next_batch()) for _ in range(2)] == [[("p", 0, 6)], [("p", 6, 3)]]
    assert rows_of(a.next_batch()) == [("p", 9, 1)]
    b = make(100, max_num_batched_tokens=6, max_in_flight=3)
    running(b, "p", 5, 0).legs = [Leg("A", 4), Leg("B")]
    assert rows_of(b.next_batch()) == [("p", 0, 4)]
    assert b.next_batch() is None


def test_decodes_of_the_group_take_their_part_of_the_budget() -> None:
    options = InstanceOptions(max_num_batched_tokens=6)
    a = new_instance("A", make_kv(100, 4), options, groups_decodes=True)
    for name in ("d", "e", "f"):
        running(a, name, 4, 4)
    queue(a, (9, 3))
    batch = a.next_batch()
    assert batch
    assert (batch.grouped, batch.grouped_context, rows_of(batch)) == (3, 15, [("r0", 0, 3)])
    assert batch.work.tokens == 6


def test_seats() -> None:
    a = make(100, max_num_batched_tokens=100, max_num_seqs=2)
    queue(a, (2, 3), (2, 3), (2, 3))
    assert [name for name, *_ in step(a)] == ["r0", "r1"]
    assert len(a.waiting) == 1


def test_the_watermark_holds_only_where_something_runs() -> None:
    a = make(10, watermark=0.25)
    assert a.watermark_pages == 3
    queue(a, (29, 2), (1, 1))
    assert [name for name, *_ in step(a)] == ["r0"]  # 8 of 10 pages: idle instances may.
    assert not any(name == "r1" for name, *_ in step(a))
    b = make(10, watermark=0.25)
    queue(b, (24, 2), (4, 2), (1, 2))
    assert [name for name, *_ in step(b)] == ["r0", "r1"]  # 3 pages are left free.


def test_growth_preempts_the_latest_and_it_returns_to_the_head() -> None:
    a = make(4, watermark=0.0, max_num_batched_tokens=100)
    first, second, third = queue(a, (4, 9), (8, 2), (8, 1))
    assert [name for name, *_ in step(a)] == ["r0", "r1"]
    assert step(a) == [("r0", 4, 1)]  # Takes the last page; r1 gets no third one.
    assert [r.id for r in a.waiting] == ["r1", "r2"]
    assert (second.epoch, second.computed, second.hold) == (1, 0, None)
    assert second.metrics.num_preemptions == a.num_preemptions == 1
    assert first.metrics.num_preemptions == third.metrics.num_preemptions == 0


def test_growth_waits_for_pinned_or_exported_pages_instead_of_preempting() -> None:
    for attribute in ("pinned", "exported"):
        a = make(3, watermark=0.0, max_num_batched_tokens=100)
        queue(a, (4, 9), (4, 9))
        step(a)
        other = a.kv.reserve(4)
        assert other
        if attribute == "pinned":
            other.pin()
            other.release()
        else:
            a.num_exported = 1
        assert step(a) == []
        assert a.num_preemptions == 0


def test_what_was_preempted_in_its_output_is_recomputed_in_chunks() -> None:
    a = make(100, max_num_batched_tokens=6)
    (request,) = queue(a, (4, 20))
    request.output_token_ids = [0] * 12
    assert [step(a) for _ in range(4)] == [
        [("r0", 0, 6)],
        [("r0", 6, 6)],
        [("r0", 12, 4)],
        [("r0", 16, 1)],
    ]


def test_launch_ahead() -> None:
    for ahead, second in ((True, [("r0", 4, 1)]), (False, [])):
        a = make(10, launch_ahead=ahead, max_in_flight=3)
        queue(a, (4, 3))
        first = a.next_batch()
        assert first
        assert [row.input_pending for row in first.rows] == [False]
        batch = a.next_batch()
        assert rows_of(batch) == second
        if batch:
            assert batch.rows[0].input_pending
            assert batch.rows[0].samples
            assert rows_of(a.next_batch()) == [("r0", 5, 1)]
            assert a.next_batch() is None  # Three in flight; and the last token needs no step.


def test_a_chunk_may_have_to_wait_for_the_last_one() -> None:
    for chunks, rows in (("all", [("r0", 4, 4)]), (1, [])):
        a = make(10, max_num_batched_tokens=4, max_in_flight=4, chunks_in_flight=chunks)
        (request,) = queue(a, (9, 3))
        assert rows_of(a.next_batch()) == [("r0", 0, 4)]
        assert rows_of(a.next_batch()) == rows
        request.computed = request.launched = 8
        assert rows_of(a.next_batch()) == [("r0", 8, 1)]
        assert rows_of(a.next_batch()) == [("r0", 9, 1)]  # A decode waits for no chunk.


@pytest.mark.parametrize("until", [1, 3, 4, 5, 9])
def test_who_computes_the_last_prompt_position_samples(until: int) -> None:
    a = make(10, max_num_batched_tokens=100)
    (request,) = queue(a, (4, 3))
    request.legs = [Leg("A", until), Leg("B")]
    batch = a.next_batch()
    assert batch
    assert rows_of(batch) == [("r0", 0, min(4, until))]
    assert batch.rows[0].samples == (until >= 4)


def test_policies_are_replaceable() -> None:
    shortest = Policies(order=lambda waiting: min(waiting, key=lambda r: r.prompt_len))
    a = new_instance("A", make_kv(100, 4), InstanceOptions(max_num_batched_tokens=100), shortest)
    queue(a, (5, 1), (2, 1), (3, 1))
    assert [name for name, *_ in step(a)] == ["r1", "r2", "r0"]
    closed = Policies(admit=lambda instance, request, leg: False)
    b = new_instance("B", make_kv(100, 4), policies=closed)
    queue(b, (5, 1))
    assert b.next_batch() is None
    assert latest(make_requests([(1, 1), (2, 2)])).id == "r1"
