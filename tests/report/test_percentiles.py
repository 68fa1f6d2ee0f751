"""Percentiles of a stream against numpy's of all values."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.report.percentiles import Percentiles

VALUES = st.lists(st.floats(1e-8, 1e8), min_size=1, max_size=40)


@given(parts=st.lists(VALUES, min_size=1, max_size=4), percent=st.floats(0, 100))
def test_exact_up_to_the_limit(parts: list[list[float]], percent: float) -> None:
    values = np.concatenate(parts)
    found = Percentiles(exact=len(values))
    for part in parts:
        found.add(part)
    assert found.percentile(percent) == np.percentile(values, percent)


@given(parts=st.lists(VALUES, min_size=1, max_size=4), percent=st.floats(0, 100))
def test_close_beyond_it(parts: list[list[float]], percent: float) -> None:
    values = np.concatenate(parts)
    found = Percentiles(exact=len(values) - 1)
    for part in parts:
        found.add(part)
    assert found.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=6e-4)


def test_of_nothing() -> None:
    assert Percentiles().percentile(50) is None


def test_zeros_and_many_values() -> None:
    found = Percentiles(exact=1000)
    values = np.random.default_rng(0).lognormal(-3, 1, 200_000)
    for part in np.split(values, 20):
        found.add(part)
    found.add([0.0])
    for percent in (1, 50, 99, 99.9):
        assert found.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=1e-3)
    assert found.percentile(0) == pytest.approx(0, abs=1e-8)


def test_counting_takes_no_room_beside_the_values() -> None:
    """All values that were kept are counted with the first one too many: 8 MiB of them."""
    found = Percentiles(exact=2**20)
    values = np.random.default_rng(0).lognormal(-3, 1, 2**20)
    found.add(values)
    tracemalloc.start()
    found.add([1.0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert found.percentile(50) == pytest.approx(np.percentile(values, 50), rel=6e-4)
