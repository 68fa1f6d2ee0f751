"""Steps as two halves in turn: what is cut, and the closed form of their time against events."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import make_requests

from jaxinfer.serving.batch import Batch, Row, ShardWork, Work, shard_work
from jaxinfer.serving.features.half_batches import (
    FittedStage,
    LayerTimes,
    as_a_whole,
    by_fits,
    choice,
    halve,
    in_turn,
    split,
)
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.step_fit import AttentionFit


def rows_of(counts: Sequence[tuple[int, int]]) -> list[Row]:
    """Return rows of requests with ``start`` KV entries and ``count`` tokens, without pages."""
    hold: Any = None
    requests = make_requests([(9, 9)] * len(counts))
    return [
        Row(request, start, count, True, False, 0, hold)
        for request, (start, count) in zip(requests, counts, strict=True)
    ]


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 60)), min_size=1, max_size=12))
@examples(200)
def test_halves_have_all_rows_in_order_and_nearly_the_same_tokens(
    counts: list[tuple[int, int]],
) -> None:
    rows = rows_of(counts)
    halves = split(rows, 2)
    for half in halves:
        numbers = [rows.index(row) for row in half]
        assert numbers == sorted(numbers)
    assert sorted(rows.index(row) for half in halves for row in half) == list(range(len(rows)))
    tokens = [sum(row.count for row in half) for half in halves]
    assert abs(tokens[0] - tokens[1]) <= max(row.count for row in rows)
    if len(rows) > 1:
        assert all(halves)


def test_decodes_are_halved_by_their_entries_and_chunks_by_their_tokens() -> None:
    """A chunk of 4 tokens weighs as much as four decodes; those with the most entries go first."""
    rows = rows_of([(10, 1), (900, 1), (20, 1), (800, 1), (0, 4), (30, 1), (40, 1)])
    first, second = split(rows, 2)
    # 4 tokens; then 900, 800, 40 and 30 on the other side; then 20 here, and 10 there.
    assert [row.start for row in first] == [20, 0]
    assert [row.start for row in second] == [10, 900, 800, 30, 40]
    pair = split(rows_of([(10, 1), (900, 1), (20, 1), (870, 1)]), 2)
    assert [[row.start for row in half] for half in pair] == [[10, 900], [20, 870]]


def by_events(layers: int, halves: Sequence[LayerTimes]) -> float:
    """Devices do what they are given in order: one half's layer, then the other's."""
    primary, back = 0.0, [0.0, 0.0]
    free = [0.0] * len(halves[0].others)
    for _ in range(layers):
        for number, half in enumerate(halves):
            sent = max(primary, back[number]) + half.dense
            primary = back[number] = sent + half.own
            for device, (busy, trip) in enumerate(half.others):
                if busy:
                    free[device] = max(sent, free[device]) + busy
                    back[number] = max(back[number], free[device] + trip)
    return max(back)


def drawn(rng: random.Random) -> LayerTimes:
    others = [
        (rng.random() * rng.choice((0.1, 1, 3)), rng.random() * rng.choice((0, 0.1, 1, 3)))
        for _ in range(rng.randint(1, 3))
    ]
    return LayerTimes(rng.random(), rng.random() * rng.choice((0, 0.1, 1)), others)


def test_the_closed_form_is_that_of_events() -> None:
    """Never less for equal halves, and half a layer more at most; unequal ones within 7 %."""
    rng = random.Random(0)
    for _ in range(3000):
        layers, half = rng.choice((1, 4, 10, 80)), drawn(rng)
        each = in_turn(2, half, half) - in_turn(1, half, half)
        more = in_turn(layers, half, half) - by_events(layers, [half, half])
        assert -1e-9 <= more <= each / 2
        share = rng.uniform(0.5, 1)
        others = [(share * busy, trip) for busy, trip in half.others]
        other = LayerTimes(share * half.dense, share * half.own, others)
        exact = by_events(layers, [half, other])
        assert in_turn(layers, half, other) == pytest.approx(exact, rel=0.07)
        exact = by_events(layers, [other, half])
        assert in_turn(layers, other, half) == pytest.approx(exact, rel=0.07)


@pytest.mark.parametrize(
    ("exchange", "layer", "end"),
    [
        # Both halves' 4 + 1; the last one's 3 elsewhere outlasts its own attention by 2.
        (0.0, 10.0, 2.0),
        (2.0, 10.0, 4.0),
        # 4 + 3 and the exchange; the second half is 5 behind the first one.
        (3.0, 10.0, 5.0),
        (4.0, 11.0, 5.0),
        (30.0, 37.0, 5.0),
    ],
)
def test_an_exchange_hides_behind_the_other_half(exchange: float, layer: float, end: float) -> None:
    half = LayerTimes(4.0, 1.0, [(3.0, exchange), (0.0, 0.0)])
    assert in_turn(1, half, half) == layer + end
    assert in_turn(6, half, half) == 6 * layer + end == by_events(6, [half, half])
    whole = LayerTimes(4.0, 2.0, [(6.0, exchange)])
    assert as_a_whole(6, whole) == 6 * (10.0 + exchange)


def test_a_device_that_is_always_busy_sets_the_pace() -> None:
    half = LayerTimes(1.0, 0.5, [(2.0, 0.5), (7.0, 0.0)])
    assert in_turn(6, half, half) == 6 * 14.0 + 1.0 == by_events(6, [half, half])


OWN, FAR = AttentionFit(0.25, 0.5, 1.0), AttentionFit(0.5, 1.0, 2.0, 0.5, 20.0)


def dense(tokens: float) -> float:
    return max(50.0, 1.0 * tokens)


def stage(number: int, layers: int) -> list[Shard]:
    return [
        Shard(PagePool(9, 4), (2 * number, 2 * number + 1), number, "a", OWN, layers, dense),
        Shard(PagePool(9, 4), (), number, "w", FAR, layers),
    ]


def work(tokens: int, *shards: ShardWork) -> Work:
    return Work(tokens, tokens, tokens, tokens, 0, [], shards=shards)


@pytest.mark.parametrize(("tokens", "pays"), [(50, False), (60, True)])
def test_by_fits_weights_that_are_read_twice_weigh_against_an_exchange(
    tokens: int, pays: bool
) -> None:
    """A whole step of 10 layers takes 10 * (50 + 52) or 10 * (60 + 52); 32 + 20 is elsewhere.

    Halves take 2 * (50 + 1.75) each, and 17 + 20 - 1.75 at the end: 1,070.25. The second stage has
    all heads at home. It is not cut: its weights would be read twice.
    """
    nothing = ShardWork()
    whole = work(tokens, ShardWork(2, 1), ShardWork(10, 20), nothing, nothing)
    half = work(tokens // 2, ShardWork(1, 1), ShardWork(5, 10), nothing, nothing)
    found = by_fits([*stage(0, 10), *stage(1, 2)])(whole, [half, half])
    assert found is pays
    # Likewise where the second stage reaches out, and nothing is won where none does.
    for each in (whole, half):
        each.shards = [*each.shards[2:], *each.shards[:2]]
    found = by_fits([*stage(0, 2), *stage(1, 10)])(whole, [half, half])
    assert found is pays
    whole.shards = [nothing] * 4
    assert not by_fits([*stage(0, 10), *stage(1, 2)])(whole, [half, half])


def test_a_chunk_reads_what_it_sees_once() -> None:
    """A chunk takes 3 tokens of each of 2 heads, and 2 * 13 entries, as so many pairs would."""
    far = FittedStage(stage(0, 10), 0)
    chunk = ShardWork(chunks=[(10, 3, 2)])
    times = far.layer(work(3, ShardWork(1, 5), chunk))
    assert times == LayerTimes(50.0, 0.25 + 2.5 + 1, [(6.0 + 26 + 2, 20.0)])
    assert times.elsewhere == 54.0
    assert far.layer(work(3, ShardWork(1, 5), ShardWork())).elsewhere == 0.0


def test_only_a_step_of_several_rows_is_cut_where_that_pays() -> None:
    kv = KVShards(stage(0, 10))
    rows = rows_of([(3, 1), (4, 1), (0, 2)])
    for row, placement in zip(rows, ([[0], [1]], [[], [0, 1]], [[0, 1], []]), strict=True):
        hold = kv.reserve(5, placement=placement)
        assert hold
        row.hold = hold
    asked: list[Sequence[Work]] = []

    def pays(whole: Work, halves: Sequence[Work]) -> bool:
        asked.append(halves)
        return len(asked) > 1

    batch = Batch("A", rows, 0, 3, 0)
    batch.work.shards = shard_work(rows)
    halve(batch, kv.shards, pays)
    assert (batch.halves, batch.work.halves) == ((), ())
    halve(batch, kv.shards, pays)
    assert batch.halves == [[rows[2]], rows[:2]]
    assert list(batch.work.halves) == asked[1]
    assert [half.tokens for half in batch.work.halves] == [2, 2]
    assert [list(half.shards) for half in batch.work.halves] == [
        [ShardWork(chunks=[(0, 2, 2)]), ShardWork()],
        [ShardWork(1, 4), ShardWork(3, 4 + 10)],
    ]
    # One row, and rows that are at home.
    for some in (rows[:1], [rows[2], rows[2]]):
        other = Batch("A", some, 0, 1, 0)
        other.work.shards = shard_work(some)
        halve(other, kv.shards, pays)
        assert not other.halves
    assert len(asked) == 2


def test_the_choice_is_that_of_the_option() -> None:
    none = work(0)
    assert choice("never", pytest.fail) is None
    assert choice("by_time", by_fits([])) is not None
    always = choice("always", pytest.fail)
    assert always
    assert always(none, [none, none])
