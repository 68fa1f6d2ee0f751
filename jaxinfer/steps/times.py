"""Step times fitted to measured steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.serving.batch import Work
from jaxinfer.steps.shapes import StepLimits, StepShape

# One request's part of a step: KV entries before it, and computed tokens.
Part = tuple[int, int]


@dataclass(frozen=True)
class StepPoint:
    """A measured step.

    Attributes:
        parts: decodes first; a part of one token is a decode.
        stages: seconds of each pipeline stage.
    """

    parts: tuple[Part, ...]
    stages: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Total seconds of all stages."""
        return sum(self.stages)


def work_of_parts(parts: Iterable[Part]) -> Work:
    """Return the work of a step with these parts, in which only decodes sample."""
    parts = list(parts)
    contexts = [start + 1 for start, count in parts if count == 1]
    chunks = [part for part in parts if part[1] != 1]
    tokens, singles = sum(count for _, count in parts), len(contexts)
    return Work(tokens, singles, len(parts), singles, sum(contexts), chunks, singles)


def features(parts: Iterable[Part]) -> tuple[float, float, float]:
    """Return the numbers that decide a step's time, in addition to its shape.

    1, the pairs of chunk tokens and entries they see, and the entries that decodes see.
    """
    work = work_of_parts(parts)
    return 1.0, work.pairs, work.single_context


class StepTimes:
    """Seconds of one stage's steps: for each shape, linear in ``features``.

    Args:
        limits: limits that decide the shapes.
        coefficients: coefficients of each shape.
    """

    def __init__(self, limits: StepLimits, coefficients: Mapping[StepShape, Sequence[float]]):
        self._limits = limits
        self.coefficients = coefficients

    @classmethod
    def fit(cls, limits: StepLimits, points: Sequence[StepPoint], stage: int) -> "StepTimes":
        """Fit by least squares over the points of each shape; no coefficient is below zero."""
        by_shape: dict[StepShape, list[StepPoint]] = {}
        for point in points:
            by_shape.setdefault(shape_of(limits, point.parts), []).append(point)
        found = {}
        for shape, here in by_shape.items():
            x = np.array([features(point.parts) for point in here])
            y = np.array([point.stages[stage] for point in here])
            found[shape] = nonnegative(x, y)
        return cls(limits, found)

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step, alone on the machine."""
        shape = self._limits.smallest(work.singles, work.tokens, work.sampled)
        constant, per_pair, per_entry = self.coefficients[shape]
        return constant + per_pair * work.pairs + per_entry * work.single_context


def shape_of(limits: StepLimits, parts: Sequence[Part]) -> StepShape:
    """Return the bucket of a step with these parts."""
    work = work_of_parts(parts)
    return limits.smallest(work.singles, work.tokens, work.sampled)


def nonnegative(x: np.ndarray, y: np.ndarray) -> list[float]:
    """Fit by least squares without negative coefficients, so that time never falls with work.

    Args:
        x: [points, features].
        y: [points].
    """
    solved, *_ = np.linalg.lstsq(x, y, rcond=None)
    if (solved < 0).any():
        from scipy.optimize import nnls  # It is slow to load and seldom needed.

        # Pairs of tokens are counted in millions, so that all columns are of similar size for the
        # solver.
        size = np.maximum(np.linalg.norm(x, axis=0), 1)
        solved = nnls(x / size, y)[0] / size
    return [float(value) for value in solved]
