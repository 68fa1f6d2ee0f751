"""Reads and checks a file of measured times; a point measured twice gets its median."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxinfer.errors import JaxinferError, one_line

# Options of the run file that select the rows of a table.
_CHOSEN_BY = {
    "gemm_dtype": "weight_dtype",
    "moe_dtype": "weight_dtype",
    "kv_cache_dtype": "kv_cache_dtype",
}
# A longer time than this many milliseconds is probably in another unit.
_LONGEST_MS = 60_000.0


class NoRowsError(JaxinferError):
    """A table has none of the rows that were asked for."""


class MeasuredPoints:
    """Milliseconds at points of some axes.

    Attributes:
        path: path of the file, for messages.
        points: one row of axis values per point.
        ms: median time of each point.
    """

    def __init__(self, path: Path, points: np.ndarray, ms: np.ndarray) -> None:
        self.path = path
        self.points, self.ms = _medians(points, ms)

    def by_point(self) -> dict[tuple[float, ...], float]:
        """Return the median times, by point."""
        return dict(zip(map(tuple, self.points.tolist()), self.ms.tolist(), strict=True))


def read_measured(
    path: Path, axes: Sequence[str], only: Mapping[str, object], some: Mapping[str, object]
) -> MeasuredPoints:
    """Read the rows that match some conditions.

    Args:
        only: column -> the value that it must have.
        some: column -> the value that it must have, if the file has the column.

    Raises:
        NoRowsError: no row matches.
        JaxinferError: pyarrow is not installed, or the file is not such a table.
    """
    table = _table(path)
    if missing := [name for name in (*axes, *only, "latency") if name not in table]:
        raise JaxinferError(f"{path}: lacks the column {missing[0]}")
    wanted = dict(only) | {name: some[name] for name in some if name in table}
    kept = np.ones(len(table["latency"]), bool)
    for name, value in wanted.items():
        left = kept & (table[name] == value)
        if not left.any():
            there = ", ".join(sorted({str(each) for each in table[name][kept].tolist()}))
            by = f" (by {_CHOSEN_BY[name]})" if name in _CHOSEN_BY else ""
            raise NoRowsError(f"{path}: no rows with {name} {value}{by}; there are {there}")
        kept = left
    columns = [table[name][kept].astype(float) for name in axes]
    ms = table["latency"][kept].astype(float)
    if not (np.isfinite(ms).all() and ms.min() > 0 and ms.max() < _LONGEST_MS):
        raise JaxinferError(
            f"{path}: latency goes from {ms.min():g} to {ms.max():g}, must be milliseconds greater "
            f"than 0 and below {_LONGEST_MS:g}"
        )
    return MeasuredPoints(path, np.stack(columns, 1), ms)


def values_of(path: Path, names: Sequence[str], only: Mapping[str, object]) -> set[tuple[int, ...]]:
    """Return the values that columns of integers have in the rows with the values in ``only``."""
    table = _table(path)
    if missing := [name for name in (*names, *only) if name not in table]:
        raise JaxinferError(f"{path}: lacks the column {missing[0]}")
    kept = np.ones(len(table[names[0]]), bool)
    for name, value in only.items():
        kept &= table[name] == value
    return set(zip(*(table[name][kept].astype(int).tolist() for name in names), strict=True))


def _table(path: Path) -> Mapping[str, np.ndarray]:
    return _parquet(path) if path.suffix == ".parquet" else _arrays(path)


def _parquet(path: Path) -> Mapping[str, np.ndarray]:
    """Return the columns of a Parquet file, as aiconfigurator publishes it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise JaxinferError(
            f"{path}: Parquet takes pyarrow, which is not installed: pip install 'pyarrow>=17'"
        ) from None
    try:
        table = parquet.read_table(path)
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror or one_line(error)}") from None
    except pyarrow.ArrowException as error:
        raise JaxinferError(f"{path}: {one_line(error)}") from None
    return {name: table[name].to_numpy() for name in table.column_names}


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    """Return the columns of a shipped file: arrays of numbers and of words."""
    try:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise JaxinferError(f"{path}: {one_line(error)}") from None


def _medians(points: np.ndarray, ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each point once, in order, with the median of its times."""
    order = np.lexsort((ms, *points.T[::-1]))
    points, ms = points[order], ms[order]
    first = np.flatnonzero(np.r_[True, (points[1:] != points[:-1]).any(1)])
    last = np.r_[first[1:], len(ms)] - 1
    # For an even number of times, the mean of the middle two.
    return points[first], (ms[(first + last) // 2] + ms[(first + last + 1) // 2]) / 2
