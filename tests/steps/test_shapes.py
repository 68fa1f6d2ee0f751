"""Buckets of steps: tables by hand, and that the smallest one that fits is taken."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.request_state import RequestState
from jaxinfer.steps.shapes import StepLimits, StepShape


def limits(seqs: int, tokens: int, given: tuple[int, ...] | None = None) -> StepLimits:
    return StepLimits(seqs, tokens, max_pages=8, page_size=16, given_buckets=given)


@pytest.mark.parametrize(
    ("seqs", "tokens", "rows", "buckets", "chunks"),
    [
        (64, 512, [4, 16, 64], [128, 512], 64),
        (256, 4096, [4, 16, 64, 256], [64, 256, 1024, 4096], 256),
        (15, 255, [15], [255], 15),
        (16, 256, [4, 16], [64, 256], 16),
        (3, 100, [3], [100], 3),
        # No more rows than tokens, and two tokens at least for a chunk.
        (64, 23, [5, 23], [23], 11),
        (8, 1, [1], [1], 0),
    ],
)
def test_each_step_down_has_a_quarter(
    seqs: int, tokens: int, rows: list[int], buckets: list[int], chunks: int
) -> None:
    found = limits(seqs, tokens)
    assert (found.row_buckets, found.token_buckets, found.max_chunks) == (rows, buckets, chunks)


def test_a_micro_batch_of_decodes_has_a_bucket() -> None:
    """Two parts of 64 rows have 32 each; four have 16, which there is anyway."""
    buckets = {
        parts: StepLimits(64, 512, max_pages=8, page_size=16, parts=parts).row_buckets
        for parts in (1, 2, 3, 4)
    }
    assert buckets == {
        1: [4, 16, 64],
        2: [4, 16, 32, 64],
        3: [4, 16, 22, 64],
        4: [4, 16, 64],
    }


def test_given_buckets_take_the_place_of_the_ladder() -> None:
    """Buckets below a step full of decodes are never the smallest fit, so none is compiled."""
    found = limits(16, 300, (8, 20, 90, 300))
    assert found.token_buckets == [8, 20, 90, 300]
    assert found.shapes() == [(16, 300, 16), (16, 90, 16), (16, 20, 16), (16, 16, 0), (4, 4, 0)]
    assert found.smallest(2, 3, 2) == (16, 20, 16)
    assert found.smallest(2, 21, 2) == (16, 90, 16)


def test_the_largest_come_first() -> None:
    found = limits(64, 512).shapes()
    assert found == [(64, 512, 64), (64, 128, 64), (64, 64, 0), (16, 16, 0), (4, 4, 0)]
    # A bucket as wide as all rows is one for chunks as well.
    assert limits(64, 256).shapes()[:3] == [(64, 256, 64), (64, 64, 64), (64, 64, 0)]
    assert limits(1, 1).shapes() == [(1, 1, 0)]


@pytest.mark.parametrize(
    ("singles", "tokens", "samples", "shape"),
    [
        (1, 1, 1, (4, 4, 0)),
        (4, 4, 4, (4, 4, 0)),
        (5, 5, 5, (16, 16, 0)),
        (17, 17, 3, (64, 64, 0)),
        # Rows are for all that samples; prompts' last tokens alone need none.
        (3, 3, 5, (16, 16, 0)),
        (2, 2, 0, (4, 4, 0)),
        (0, 0, 0, (4, 4, 0)),
        # With a chunk there is room for all rows, however few there are.
        (0, 2, 0, (64, 128, 64)),
        (1, 128, 2, (64, 128, 64)),
        (1, 129, 2, (64, 512, 64)),
        (0, 512, 1, (64, 512, 64)),
    ],
)
def test_the_smallest_that_fits(
    singles: int, tokens: int, samples: int, shape: tuple[int, int, int]
) -> None:
    assert limits(64, 512).smallest(singles, tokens, samples) == shape


@given(
    seqs=st.integers(1, 300),
    budget=st.integers(1, 3000),
    data=st.data(),
)
def test_no_other_shape_that_fits_is_smaller(seqs: int, budget: int, data: st.DataObject) -> None:
    """The shape is the smallest with chunks where there is one, else of those without."""
    found = limits(seqs, budget)
    singles = data.draw(st.integers(0, min(seqs, budget)))
    chunked = data.draw(st.booleans()) and budget - singles >= 2 and singles < seqs
    tokens = data.draw(st.integers(singles + 2, budget)) if chunked else max(singles, 1)
    singles = singles if chunked else tokens
    samples = data.draw(st.integers(0, singles + chunked))
    shape = found.smallest(singles, tokens, samples)
    fits = [
        s
        for s in found.shapes()
        if s.tokens >= tokens and s.rows >= samples and bool(s.chunks) == chunked
    ]
    assert shape == min(fits)


def test_a_batch_has_the_shape_of_its_work() -> None:
    hold: Any = SimpleNamespace(kv=SimpleNamespace(is_spread=False))
    rows = [
        Row(RequestState(str(count), 100, 1), start, count, samples, False, 0, hold)
        for start, count, samples in ((120, 1, True), (3, 1, False), (5, 200, True))
    ]
    full = limits(64, 512)
    assert full.shape_for(Batch("i", rows, 0, 0, 0)) == StepShape(64, 512, 64)
    assert full.shape_for(Batch("i", rows[:2], 0, 0, 0)) == StepShape(4, 4, 0)
