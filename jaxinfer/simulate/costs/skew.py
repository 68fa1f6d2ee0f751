"""Slowdown of attention by decodes of unequal lengths, as LLMServingSim's profiler fits it.

A table of attention has batches whose decodes all see the same context. ``skew_fit.csv`` has a
share alpha for each kind of batch. The time of such a batch is that of its mean context, plus alpha
times the difference to the time of its largest context. Columns: pc, n_label, skew_rate_label,
kv_big_label, kp_label, alpha. In a label such as ``n<=128``, ``sr<=15%``, ``kvB<=16k`` or
``kp<=512``, the number is the upper limit of the kind; ``>`` means everything above.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

from jaxinfer.errors import JaxinferError
from jaxinfer.simulate.costs.table_files import read_rows

_LABELS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
_UNITS = {"": 1.0, "k": 1024.0, "%": 0.01}
_Kind = tuple[float, ...]


class Skew:
    """Shares alpha by kinds of batches; 0 for a kind that was not fitted.

    Args:
        shares: alpha by the tokens of the chunk and the upper limits of rows, rate, largest context
            and entries before the chunk, in this order.
    """

    def __init__(self, shares: Mapping[_Kind, float]) -> None:
        self._shares = shares
        self._axes = [sorted(set(values)) for values in zip(*shares, strict=True)]

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Tell whether a folder such as ``tp1`` has a file of shares."""
        return any(folder.glob("skew_fit.csv*"))

    @classmethod
    def read(cls, folder: Path) -> "Skew":
        """Read ``skew_fit.csv`` of a folder such as ``tp1``.

        Raises:
            JaxinferError: the file is missing, or a label cannot be read.
        """
        shares = {}
        for row, (pc,) in read_rows(folder, "skew_fit", ("pc",), (*_LABELS, "alpha")):
            try:
                share = float(row["alpha"])
            except ValueError:
                raise JaxinferError(
                    f"{folder}: skew_fit.csv has the alpha {row['alpha']!r}, must be a number"
                ) from None
            kind = pc, *(_most(folder, row[name]) for name in _LABELS)
            shares[kind] = min(max(share, 0.0), 1.0)
        if not shares:
            raise JaxinferError(f"{folder}: skew_fit.csv has no rows")
        return cls(shares)

    def share(self, chunk: float, n: float, rate: float, most: float, before: float) -> float:
        """Return alpha for a batch: that of its kind, at the nearest measured size of its chunk.

        Args:
            rate: (mean - smallest) / (largest - smallest) of the contexts.
            most: largest context.
            before: number of entries before the chunk.
        """
        chunks = self._axes[0]
        alike = [c for c in chunks if bool(c) == bool(chunk)]
        if not alike:
            return 0.0
        kind = [min(alike, key=lambda c: abs(math.log(c / chunk)) if chunk else 0.0)]
        for x, axis in zip((n, rate, most, before), self._axes[1:], strict=True):
            kind.append(axis[min(bisect_left(axis, x), len(axis) - 1)])
        return self._shares.get(tuple(kind), 0.0)


def _most(folder: Path, label: str) -> float:
    found = re.fullmatch(r"\w+(<=|=|>)(\d+)([k%]?)", label)
    if not found:
        raise JaxinferError(f"{folder}: skew_fit.csv has the label {label!r}, which says no size")
    return math.inf if found[1] == ">" else int(found[2]) * _UNITS[found[3]]
