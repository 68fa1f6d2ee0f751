"""Pairs of token and KV head of each device, against the batch and the holds themselves."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.models.layers import PagedBatch
from jaxinfer.runtime.spread.spread_inputs import (
    PageTables,
    SpreadInputs,
    build_spread_inputs,
    empty_spread_inputs,
    pair_shapes,
    unpack,
)
from jaxinfer.runtime.stage.step_inputs import build_inputs, row_starts
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState
from jaxinfer.steps.shapes import StepLimits

PAGE = 4
# The stage is the second of its instance, whose first has one shard.
STAGE, FIRST = 1, 1


class Spread:
    """An instance and steps of it, as they may follow one another: requests grow and move."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.heads = self.draw(st.integers(1, 5))
        self.devices = self.draw(st.integers(1, 3))
        slices = tuple(range(STAGE * self.heads, (STAGE + 1) * self.heads))
        pools = [PagePool(3000, PAGE) for _ in range(self.devices)]
        shards = [Shard(pool, slices if not i else (), STAGE) for i, pool in enumerate(pools)]
        self.kv = KVShards([Shard(PagePool(3000, PAGE)), *shards])
        self.limits = StepLimits(8, 40, max_pages=20, page_size=PAGE)
        self.requests = [self._request(i) for i in range(self.draw(st.integers(1, 8)))]
        numbers = range(FIRST, FIRST + self.devices)
        self.tables = [PageTables(number, self.heads) for number in numbers]

    def _request(self, number: int) -> tuple[RequestState, Any]:
        at = [self.draw(st.integers(0, self.devices - 1)) for _ in range(self.heads)]
        placement = [[0]] + [
            [STAGE * self.heads + head for head, where in enumerate(at) if where == device]
            for device in range(self.devices)
        ]
        hold = self.kv.reserve(self.draw(st.integers(1, 20)), placement=placement)
        assert hold
        request = RequestState(f"r{number}", 60, 9, prompt_token_ids=range(100, 160))
        return request, hold

    def batch(self) -> Batch:
        """A batch of requests, each with a token or a chunk; some have heads elsewhere by now."""
        rows, left = [], 40
        for request, hold in self.requests:
            if not left or not self.draw(st.booleans()):
                continue
            self._move(hold)
            start = self.draw(st.integers(0, 20))
            count = self.draw(st.one_of(st.just(1), st.integers(1, min(left, 20))))
            left -= count
            assert hold.grow(start + count)
            rows.append(Row(request, start, count, self.draw(st.booleans()), False, 0, hold))
        return Batch("x", rows, 0, len(rows), 0)

    def _move(self, hold: Any) -> None:
        source, dest = (FIRST + self.draw(st.integers(0, self.devices - 1)) for _ in range(2))
        pieces = tuple(piece for piece in hold.tables[source] if self.draw(st.booleans()))
        if source != dest and pieces:
            moves = [(source, dest, pieces)]
            assert hold.copy_slices(moves)
            hold.take_copies(moves)


@examples(60)
@given(st.data())
def test_each_pair_is_where_its_head_lies(data: st.DataObject) -> None:
    spread = Spread(data)
    padded = spread.heads + data.draw(st.integers(0, 2))
    for _ in range(3):
        batch = spread.batch()
        if not batch.rows:
            continue
        shape = spread.limits.shape_for(batch)
        heads = spread.heads, padded
        inputs = build_spread_inputs(batch, shape, spread.limits, {}, spread.tables, heads)
        assert inputs.pairs in pair_shapes(shape, spread.heads)
        like = empty_spread_inputs(shape, inputs.pairs, spread.limits, padded, spread.devices)
        assert inputs.layout.shape == like.layout.shape
        plain = build_inputs(batch, shape, spread.limits, {}, 0)
        np.testing.assert_array_equal(inputs.token_T, plain.token_T)
        np.testing.assert_array_equal(inputs.position_T, plain.batch.position_T)
        np.testing.assert_array_equal(inputs.sample_row_S, plain.sample_row_S)
        check_pairs(spread, batch, inputs, padded)


def check_pairs(spread: Spread, batch: Batch, inputs: SpreadInputs, padded: int) -> None:
    """Checks that heads of tokens come out where they went in, and see their own pages."""
    R = inputs.pairs.tokens
    cut_WR = inputs.layout[: spread.devices * R].reshape(-1, R)
    place_TK = inputs.layout[cut_WR.size :].reshape(-1, padded)
    nobody = np.full_like(place_TK, cut_WR.size)
    for at, row in zip(row_starts(batch), batch.rows, strict=True):
        for device in range(spread.devices):
            for piece, pages in row.hold.tables[FIRST + device].items():
                head = piece % spread.heads
                for i in range(row.count):
                    place = place_TK[at + i, head]
                    assert place // R == device
                    assert cut_WR[device, place % R] == (at + i) * padded + head
                    nobody[at + i, head] = place
                packed = inputs.tables[device]
                assert packed is not None
                found = unpack(packed, inputs.pairs, spread.limits)
                first = place_TK[at, head] % R
                check_pages(found, first, row, pages)
    # No other pair has a place.
    np.testing.assert_array_equal(place_TK, nobody)
    for device, packed in enumerate(inputs.tables):
        mine = sum(len(row.hold.tables[FIRST + device]) * row.count for row in batch.rows)
        assert (packed is None) == (mine == 0)
        assert inputs.counts[device] == mine
        if packed is not None:
            found = unpack(packed, inputs.pairs, spread.limits)
            assert (found.page_T > 0).sum() == mine
            singles = sum(len(r.hold.tables[FIRST + device]) for r in batch.rows if r.count == 1)
            assert (found.decode_length_S > 0).sum() == singles
            assert found.chunk_row_C1[-1] == mine


def check_pages(found: PagedBatch, first: int, row: Row, pages: list[int]) -> None:
    """A head of one row, whose pairs follow one another."""
    position = np.arange(row.start, row.start + row.count)
    where = slice(first, first + row.count)
    np.testing.assert_array_equal(found.page_T[where], np.array(pages)[position // PAGE])
    np.testing.assert_array_equal(found.offset_T[where], position % PAGE)
    if row.count == 1:
        table, there = found.decode_table_SM, first
        assert found.decode_length_S[first] == row.start + 1
    else:
        (there,) = np.flatnonzero(
            (found.chunk_row_C1[:-1] == first) & (np.diff(found.chunk_row_C1) == row.count)
        )
        table = found.chunk_table_CM
        assert found.chunk_start_C[there] == row.start
    np.testing.assert_array_equal(table[there, : len(pages)], pages)
    assert not table[there, len(pages) :].any()
