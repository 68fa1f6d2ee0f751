"""Percentiles of a stream against numpy's of all values."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.report.percentiles import StreamPercentiles

VALUES = st.lists(st.floats(1e-8, 1e8), min_size=1, max_size=40)


@given(parts=st.lists(VALUES, min_size=1, max_size=4), percent=st.floats(0, 100))
def test_exact_up_to_the_limit(parts: list[list[float]], percent: float) -> None:
    values = np.concatenate(parts)
    found = StreamPercentiles(exact=len(values))
    for part in parts:
        found.add(part)
    assert found.percentile(percent) == np.percentile(values, percent)


@given(parts=st.lists(VALUES, min_size=1, max_size=4), percent=st.floats(0, 100))
def test_close_beyond_it(parts: list[list[float]], percent: float) -> None:
    values = np.concatenate(parts)
    found = StreamPercentiles(exact=len(values) - 1)
    for part in parts:
        found.add(part)
    assert found.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=6e-4)


@given(st.lists(VALUES, max_size=4), VALUES, st.integers(0, 80))
def test_single_values_count_as_others_do(
    parts: list[list[float]], single: list[float], exact: int
) -> None:
    values = [*np.concatenate([*parts, single])]
    both = [StreamPercentiles(exact) for _ in range(2)]
    both[0].add(values)
    for part in parts:
        both[1].add(part)
    for value in single:
        both[1].append(value)
    percents = [0, 12.5, 50, 100]
    assert both[1].percentiles(percents) == both[0].percentiles(percents)
    assert both[1].percentiles(percents) == [both[1].percentile(p) for p in percents]
    assert both[1].mean == pytest.approx(np.mean(values))


def test_many_single_values() -> None:
    found = StreamPercentiles(exact=3000)
    for number in range(1, 5002):
        found.append(float(number))
    assert found.mean == 2501
    assert found.percentile(50) == pytest.approx(2501, rel=6e-4)
    found.append(2501.0)
    assert found.mean == 2501


def test_single_values_do_not_pile_up() -> None:
    """200,000 would take 6 MB; the bins take 0.3."""
    tracemalloc.start()
    found = StreamPercentiles(exact=0)
    for number in range(200_000):
        found.append(number + 0.5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert found.percentile(50) == pytest.approx(100_000, rel=6e-4)


def test_what_has_come_stays_as_more_comes() -> None:
    """Values stay beyond the 1024 that there is room for at first."""
    values = np.random.default_rng(0).lognormal(-3, 1, 9_000)
    found = StreamPercentiles()
    for part in np.split(values, [700, 1500, 6000]):
        found.add(part)
    for percent in (0, 1, 50, 99, 100):
        assert found.percentile(percent) == np.percentile(values, percent)


def test_of_nothing() -> None:
    assert StreamPercentiles().percentile(50) is None
    assert StreamPercentiles().percentiles([1, 2]) == [None, None]
    assert StreamPercentiles().mean is None


def test_zeros_and_many_values() -> None:
    found = StreamPercentiles(exact=1000)
    values = np.random.default_rng(0).lognormal(-3, 1, 200_000)
    for part in np.split(values, 20):
        found.add(part)
    found.add([0.0])
    for percent in (1, 50, 99, 99.9):
        assert found.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=1e-3)
    assert found.percentile(0) == pytest.approx(0, abs=1e-8)


def test_counting_takes_no_room_beside_the_values() -> None:
    """Values that were kept are counted with the first one too many: 8 MiB of them."""
    found = StreamPercentiles(exact=2**20)
    values = np.random.default_rng(0).lognormal(-3, 1, 2**20)
    found.add(values)
    tracemalloc.start()
    found.add([1.0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert found.percentile(50) == pytest.approx(np.percentile(values, 50), rel=6e-4)
