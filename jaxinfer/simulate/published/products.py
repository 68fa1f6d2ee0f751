"""Times of matrix products of any size, interpolated between measured ones."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.simulate.published.columns import MeasuredPoints

# Curves of time over m.
Curve = Mapping[float, float]
# A pair of n and k that was measured at fewer values of m than this has no curve.
_FEWEST = 8
# Width of a product that costs only its launch and the quantization of its input.
_NARROW = 64.0


class ProductTimes:
    """Milliseconds of ``[m, k] x [k, n]``, in one format.

    Times between measured k, and then between measured n, follow power laws (lines over
    logarithms). Beyond the largest size they grow in proportion; below the smallest they are
    constant.

    Args:
        measured: times by m, n and k.
    """

    def __init__(self, measured: MeasuredPoints) -> None:
        self._path = measured.path
        self._curves: dict[tuple[float, float], dict[float, float]] = {}
        for (m, n, k), ms in zip(measured.points.tolist(), measured.ms.tolist(), strict=True):
            if m >= 1:
                self._curves.setdefault((n, k), {})[m] = ms
        self._curves = {at: c for at, c in self._curves.items() if len(c) >= _FEWEST}
        self._n = sorted({n for n, _ in self._curves})

    def curve(self, n: float, k: float) -> Curve:
        """Return the milliseconds of products of this n and k, by m.

        Raises:
            JaxinferError: there are too few measurements.
        """
        found = self._over_n(n, k)
        if not found:
            raise JaxinferError(
                f"{self._path}: no products near n = {n:g}, k = {k:g} at {_FEWEST} sizes of m"
            )
        return found

    def _over_n(self, n: float, k: float) -> Curve:
        if (n, k) in self._curves:
            return self._curves[n, k]
        curves = {each: curve for each in _around(self._n, n) if (curve := self._over_k(each, k))}
        return _between(curves, n)

    def _over_k(self, n: float, k: float) -> Curve:
        ks = sorted(each for at, each in self._curves if at == n)
        return _between({each: self._curves[n, each] for each in _around(ks, k)}, k)


def without_scaling(times: ProductTimes, plain: ProductTimes, n: float, k: float) -> Curve:
    """Return a product's milliseconds by m, without the time to quantize its input.

    That time is how much longer a narrow product takes in 8 bits than in bfloat16.

    Args:
        times: products in 8 bits.
        plain: products in bfloat16.
    """
    curve, narrow, without = times.curve(n, k), times.curve(_NARROW, k), plain.curve(_NARROW, k)
    found = {}
    for m, ms in curve.items():
        if m in narrow and m in without:
            off = max(narrow[m] - without[m], 0.0)
            # A product is not faster than a narrow one.
            found[m] = max(ms - off, min(without[m], ms))
    return found


def _around(values: Sequence[float], x: float) -> list[float]:
    """Return the value itself, its neighbours on both sides, or the value at the nearer end."""
    i = bisect_left(values, x)
    if i < len(values) and values[i] == x:
        return [x]
    return list(values[max(i - 1, 0) : i + 1])


def _between(curves: Mapping[float, Curve], x: float) -> Curve:
    """Return the curve at x, from one or two measured curves."""
    if not curves:
        return {}
    if len(curves) == 1:
        ((at, curve),) = curves.items()
        return {m: ms * max(x / at, 1.0) for m, ms in curve.items()}
    (a, low), (b, high) = sorted(curves.items())
    share = np.log(x / a) / np.log(b / a)
    both = [m for m in low if m in high]
    if len(both) < _FEWEST:
        return {}
    return {m: float(low[m] ** (1 - share) * high[m] ** share) for m in both}
