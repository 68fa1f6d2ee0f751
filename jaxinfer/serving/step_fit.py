"""Linear models of the times of steps and attention, and least squares in plain Python."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PrefillFit:
    """Cronus eq. 2: seconds of a prefill that runs alone, as a function of its length in tokens."""

    per_token: float
    constant: float

    def seconds(self, length: float) -> float:
        """Return the seconds of a prefill of ``length`` tokens."""
        return self.per_token * length + self.constant


@dataclass(frozen=True)
class MixedFit:
    """Cronus eq. 3: seconds of one iteration with a full chunk and decodes.

    A context is a number of KV entries before the iteration: those before the chunk, or those of
    all decodes together.
    """

    per_prefill_context: float
    per_decode_context: float
    constant: float

    def seconds(self, prefill_context: float, decode_context: float) -> float:
        """Return the seconds of one iteration."""
        return (
            self.per_prefill_context * prefill_context
            + self.per_decode_context * decode_context
            + self.constant
        )


@dataclass(frozen=True)
class DecodeFit:
    """Aladdin eq. 3: seconds of one iteration that has only decodes.

    The context is the number of KV entries that all decodes see together, including their own.
    """

    per_context: float
    per_sequence: float
    constant: float

    def seconds(self, context: float, sequences: float) -> float:
        """Return the seconds of one iteration."""
        return self.per_context * context + self.per_sequence * sequences + self.constant


@dataclass(frozen=True)
class StepFit:
    """Linear models of an instance's step times, in seconds.

    Attributes:
        decode: None if batches and contexts vary too little for a fit, as in an instance that runs
            one request at a time.
    """

    prefill: PrefillFit
    mixed: MixedFit
    decode: DecodeFit | None = None


class LeastSquares:
    """Ordinary least squares, one observation at a time.

    Args:
        size: number of coefficients.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self._xx = [[0.0] * size for _ in range(size)]
        self._xy = [0.0] * size

    def add(self, x: Sequence[float], y: float) -> None:
        """Add an observation of ``y`` at ``x``."""
        self.count += 1
        for i, a in enumerate(x):
            self._xy[i] += a * y
            for j, b in enumerate(x):
                self._xx[i][j] += a * b

    def solve(self) -> list[float] | None:
        """Return the coefficients, or None if the observations do not determine them."""
        size = len(self._xy)
        # Columns are scaled to equal length, so that the rank does not depend on units.
        length = [self._xx[i][i] ** 0.5 for i in range(size)]
        if not all(length):
            return None
        rows = [
            [
                *(self._xx[i][j] / length[i] / length[j] for j in range(size)),
                self._xy[i] / length[i],
            ]
            for i in range(size)
        ]
        for i in range(size):
            pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
            if abs(rows[pivot][i]) <= 1e-10:
                return None
            rows[i], rows[pivot] = rows[pivot], rows[i]
            for r in range(size):
                if r != i:
                    factor = rows[r][i] / rows[i][i]
                    rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
        return [rows[i][size] / rows[i][i] / length[i] for i in range(size)]


@dataclass(frozen=True)
class AttentionFit:
    """Hetis eqs. 3 and 4: seconds of one layer's decode attention in one shard of a stage.

    Attributes:
        per_pair: seconds per slice of KV heads, over all requests.
        per_entry: seconds per KV entry of each slice.
        constant: seconds added if there is any slice.
        exchange_per_pair: seconds per slice to send queries and receive outputs; 0 on the devices
            that have the layers.
        exchange: seconds added to such an exchange; 0 on the devices that have the layers.
    """

    per_pair: float
    per_entry: float
    constant: float
    exchange_per_pair: float = 0.0
    exchange: float = 0.0

    def seconds(self, pairs: float, entries: float) -> float:
        """Return the seconds of one layer; 0 without pairs."""
        return self.busy(pairs, entries) + self.exchange if pairs else 0.0

    def busy(self, pairs: float, entries: float) -> float:
        """Return the seconds for which one layer keeps the device and the link busy."""
        if not pairs:
            return 0.0
        each = self.per_pair + self.exchange_per_pair
        return each * pairs + self.per_entry * entries + self.constant

    def of_steps(self, count: int) -> "AttentionFit":
        """Return the fit of ``count`` steps that share all pairs and entries."""
        return replace(self, constant=count * self.constant, exchange=count * self.exchange)


def least_squares(
    points: Iterable[tuple[Sequence[float], float]], relative: bool
) -> list[float] | None:
    """Return coefficients of ``x`` for points ``(x, seconds)``; None if undetermined.

    Args:
        relative: whether to minimise the relative error instead of the error in seconds.
    """
    points = list(points)
    if not points or len(points) < len(points[0][0]):
        return None
    squares = LeastSquares(len(points[0][0]))
    for x, seconds in points:
        weight = 1 / seconds if relative else 1.0
        squares.add([value * weight for value in x], seconds * weight)
    return squares.solve()
