"""Derives attention times for numbers of heads that a table lacks from numbers that it has."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxinfer.simulate.published.columns import (
    MeasuredPoints,
    NoRowsError,
    read_measured,
    values_of,
)

_HEADS = "num_heads", "num_key_value_heads"


def read_attention(
    path: Path,
    axes: Sequence[str],
    only: Mapping[str, object],
    some: Mapping[str, object],
    other_heads: bool,
) -> MeasuredPoints:
    """Read times of attention, whose first axis is the number of sequences.

    Args:
        only: required values, among them the numbers of heads; see ``read_measured``.
        other_heads: whether other numbers of heads may stand for one that the table lacks: a
            fraction of the heads with proportionally more sequences, which is the same work, or
            else the mean of the next smaller and larger numbers of query heads.

    Raises:
        NoRowsError: see ``read_measured``; or the table has no such other heads either.
        JaxinferError: see ``read_measured``.
    """
    others = {name: value for name, value in only.items() if name not in _HEADS}
    there = values_of(path, _HEADS, others) if other_heads else set()
    wanted = (int(str(only["num_heads"])), int(str(only["num_key_value_heads"])))
    if not there or wanted in there:
        return read_measured(path, axes, only, some)

    def read(queries: int, keys: int) -> MeasuredPoints:
        heads = {"num_heads": queries, "num_key_value_heads": keys}
        return read_measured(path, axes, {**only, **heads}, some)

    queries, keys = wanted
    for part in range(2, keys + 1):
        if queries % part == keys % part == 0 and (queries // part, keys // part) in there:
            found = read(queries // part, keys // part)
            points = found.points / np.array([part] + [1] * (len(axes) - 1))
            whole = points[:, 0] >= 1
            return MeasuredPoints(path, points[whole], found.ms[whole])
    alike = [each for each, of in there if of == keys]
    below = max((each for each in alike if each < queries), default=0)
    above = min((each for each in alike if each > queries), default=0)
    if not below or not above:
        raise NoRowsError(
            f"{path}: has neither {queries} query heads with {keys} KV heads, nor parts of them, "
            "nor numbers of query heads on both sides"
        )
    low, high = (read(each, keys).by_point() for each in (below, above))
    both = [at for at in low if at in high]
    share = (queries - below) / (above - below)
    ms = [(1 - share) * low[at] + share * high[at] for at in both]
    return MeasuredPoints(path, np.array(both), np.array(ms))
