"""The fit of step times, against brute force."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.steps.times import nonnegative


def least_squares(x: np.ndarray, y: np.ndarray) -> float:
    """The least sum of squares with no coefficient below zero: of all sets of columns, the best.

    At the optimum, those that are not zero are a solution without the others.
    """
    found = [float(y @ y)]
    for count in range(1, x.shape[1] + 1):
        for kept in map(list, combinations(range(x.shape[1]), count)):
            solved, *_ = np.linalg.lstsq(x[:, kept], y, rcond=None)
            if (solved >= 0).all():
                found.append(float(((y - x[:, kept] @ solved) ** 2).sum()))
    return min(found)


@examples(200)
@given(st.integers(0, 10**6), st.integers(2, 12), st.sampled_from([1.0, 1e4, 1e8]))
def test_no_other_coefficients_fit_better(seed: int, points: int, pairs: float) -> None:
    """Columns as those of steps: 1, pairs of tokens in numbers up to millions, entries."""
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(points), rng.random((points, 2)) * (pairs, 1e3)])
    y = rng.normal(size=points) * 0.01 + rng.choice([0, 0.05])
    solved = nonnegative(x, y)
    assert min(solved) >= 0
    found = float(((y - x @ solved) ** 2).sum())
    assert found == pytest.approx(least_squares(x, y), rel=1e-6)


def test_a_feature_that_is_always_zero_costs_nothing() -> None:
    """Decodes alone have no pairs; their time falls by 1 over entries, which cannot be."""
    x = np.array([[1, 0, 10], [1, 0, 20], [1, 0, 30]], float)
    assert nonnegative(x, np.array([5.0, 4.0, 3.0])) == pytest.approx([4, 0, 0])
