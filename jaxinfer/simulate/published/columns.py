"""Columns of a Parquet file of measured times, checked; of a point measured twice, the median."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxinfer.errors import JaxinferError, one_line

# An operator that takes longer than this many milliseconds was not given in milliseconds.
_LONGEST_MS = 60_000.0


class Measured:
    """Milliseconds at points of some axes.

    Attributes:
        path: of the file, for messages.
        points: rows of the axes' values, each once; ``ms``: the median time of each.
    """

    def __init__(self, path: Path, points: np.ndarray, ms: np.ndarray) -> None:
        self.path = path
        self.points, self.ms = _medians(points, ms)


def read_measured(
    path: Path, axes: Sequence[str], only: Mapping[str, object], some: Mapping[str, object]
) -> Measured:
    """Read the rows that are of some kind.

    Args:
        only: columns and the value that counts.
        some: the same of columns that a file may lack.

    Raises:
        JaxinferError: pyarrow is not installed, the file is no such table, or has no such row.
    """
    try:
        import pyarrow
        from pyarrow import compute, parquet
    except ImportError:
        raise JaxinferError(
            f"{path}: Parquet takes pyarrow, which is not installed: pip install "
            "'jaxinfer[parquet]'"
        ) from None
    try:
        table = parquet.read_table(path)
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror or one_line(error)}") from None
    except pyarrow.ArrowException as error:
        raise JaxinferError(f"{path}: {one_line(error)}") from None
    if missing := [name for name in (*axes, *only, "latency") if name not in table.column_names]:
        raise JaxinferError(f"{path}: lacks the column {missing[0]}")
    wanted = dict(only) | {name: some[name] for name in some if name in table.column_names}
    for name, value in wanted.items():
        kept = table.filter(compute.equal(table[name], pyarrow.scalar(value)))
        if not kept.num_rows:
            there = ", ".join(sorted(str(each) for each in compute.unique(table[name]).to_pylist()))
            raise JaxinferError(f"{path}: nothing with {name} {value}; there is {there}")
        table = kept
    columns = [table[name].to_numpy().astype(float) for name in axes]
    ms = table["latency"].to_numpy().astype(float)
    if not (np.isfinite(ms).all() and ms.min() > 0 and ms.max() < _LONGEST_MS):
        raise JaxinferError(
            f"{path}: latency goes from {ms.min():g} to {ms.max():g}, must be milliseconds greater "
            f"than 0 and below {_LONGEST_MS:g}"
        )
    return Measured(path, np.stack(columns, 1), ms)


def _medians(points: np.ndarray, ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each point once, in their order, with the median of its times."""
    order = np.lexsort((ms, *points.T[::-1]))
    points, ms = points[order], ms[order]
    first = np.flatnonzero(np.r_[True, (points[1:] != points[:-1]).any(1)])
    last = np.r_[first[1:], len(ms)] - 1
    # Of an even number of times, the mean of both in the middle.
    return points[first], (ms[(first + last) // 2] + ms[(first + last + 1) // 2]) / 2
