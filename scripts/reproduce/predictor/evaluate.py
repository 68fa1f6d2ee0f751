"""Accuracies of predicted classes on examples not trained on, with intervals.

Shape suffixes: N examples.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

# Quantile of the normal distribution for 95 %.
_Z = 1.959964

# Returns classes of examples to predict, from examples to train on (both are indices).
Predictor = Callable[[np.ndarray, np.ndarray], np.ndarray]


def held_out(predict: Predictor, count: int, folds: int, seed: int) -> np.ndarray:
    """Predict each example's class from the other folds' examples."""
    order = np.random.default_rng(seed).permutation(count)
    found_N = np.full(count, -1)
    for test in np.array_split(order, folds):
        found_N[test] = predict(np.setdiff1d(order, test), test)
    return found_N


def most_frequent(classes: Sequence[int] | np.ndarray) -> int:
    """Return the majority class; of equal ones, the lowest."""
    counts = Counter(map(int, classes))
    return min(counts, key=lambda each: (-counts[each], each))


def table_by_length(
    length_N: np.ndarray, class_N: np.ndarray, asked: np.ndarray, rows: int
) -> np.ndarray:
    """Predict the majority class of each quantile of the prompts' lengths."""
    edges = np.unique(np.quantile(length_N, np.arange(1, rows) / rows))
    row_N = np.searchsorted(edges, length_N, side="right")
    overall = most_frequent(class_N)
    of_row = {int(row): most_frequent(class_N[row_N == row]) for row in set(row_N.tolist())}
    found = np.searchsorted(edges, asked, side="right")
    return np.asarray([of_row.get(int(row), overall) for row in found])


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share."""
    share, square = right / count, _Z * _Z / count
    centre = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / 4 / count)
    return centre - half, centre + half


def paired_bootstrap(
    right_N: np.ndarray, other_N: np.ndarray, seed: int, draws: int = 4000
) -> tuple[float, float]:
    """Return the interval of 95 % for the difference of two accuracies on the same examples."""
    gain_N = right_N.astype(float) - other_N.astype(float)
    drawn = np.random.default_rng(seed).integers(len(gain_N), size=(draws, len(gain_N)))
    low, high = np.quantile(gain_N[drawn].mean(1), [0.025, 0.975])
    return float(low), float(high)
