"""How long steps take: measured on an idle machine, and fitted."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.runtime.step_inputs import StepLimits, StepShape
from jaxinfer.runtime.worker import Failed, Worker
from jaxinfer.serving.page_pool import KVShards
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import Batch, Row, StepDone

# One request's part of a step: KV entries before it, and tokens computed.
Part = tuple[int, int]


@dataclass(frozen=True)
class Point:
    """One measured step.

    Attributes:
        parts: decodes first; a part of one token is a decode.
        stages: seconds of each pipeline stage.
    """

    parts: tuple[Part, ...]
    stages: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of all stages, one after the other."""
        return sum(self.stages)


def features(parts: Iterable[Part]) -> tuple[float, float, float]:
    """What a step's time goes by, beside its shape.

    1, the pairs of chunk tokens and entries they see, and the entries that decodes see.
    """
    pairs = entries = 0.0
    for start, count in parts:
        if count == 1:
            entries += start + 1
        else:
            pairs += count * (start + (count + 1) / 2)
    return 1.0, pairs, entries


class StepTimes:
    """Seconds of one stage's steps: for each shape, linear in ``features``.

    Args:
        limits: decides the shapes.
        coefficients: of each shape.
    """

    def __init__(self, limits: StepLimits, coefficients: Mapping[StepShape, Sequence[float]]):
        self._limits = limits
        self.coefficients = coefficients

    @classmethod
    def fit(cls, limits: StepLimits, points: Sequence[Point], stage: int) -> "StepTimes":
        """Least squares over the points of each shape; no coefficient is below zero."""
        by_shape: dict[StepShape, list[Point]] = {}
        for point in points:
            by_shape.setdefault(shape_of(limits, point.parts), []).append(point)
        found = {}
        for shape, here in by_shape.items():
            x = np.array([features(point.parts) for point in here])
            y = np.array([point.stages[stage] for point in here])
            found[shape] = _nonnegative(x, y)
        return cls(limits, found)

    def seconds(self, batch: Batch) -> float:
        """Of this batch, alone on the machine."""
        parts = [(row.start, row.count) for row in batch.rows]
        weights = self.coefficients[self._limits.shape_for(batch)]
        return float(np.dot(weights, features(parts)))


def shape_of(limits: StepLimits, parts: Sequence[Part]) -> StepShape:
    """The bucket of a step with these parts, of which decodes sample."""
    singles = sum(count == 1 for _, count in parts)
    return limits.smallest(singles, sum(count for _, count in parts), singles)


def _nonnegative(x: np.ndarray, y: np.ndarray) -> list[float]:
    """Least squares in which time never falls with work: columns that would are left out."""
    kept = list(range(x.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(x[:, kept], y, rcond=None)
        negative = [column for column, value in zip(kept, solved, strict=True) if value < 0]
        if not negative:
            break
        kept.remove(negative[-1])
    result = np.zeros(x.shape[1])
    result[kept] = solved
    return [float(value) for value in result]


def measure(worker: Worker, kv: KVShards, todo: Iterable[tuple[Part, ...]]) -> Iterator[Point]:
    """Run each step once.

    Args:
        kv: empty pools.
    """
    for parts in todo:
        batch = _batch(kv, parts)
        # The first run after another shape pays for memory that the others have.
        times = [_run(worker, batch) for _ in range(2)][1]
        for row in batch.rows:
            row.hold.release()
        yield Point(parts, times)


def _run(worker: Worker, batch: Batch) -> tuple[float, ...]:
    posted: SimpleQueue[StepDone | Failed] = SimpleQueue()
    worker.launch(batch, 0.0, posted.put)
    done = posted.get()
    if isinstance(done, Failed):
        raise done.error
    return tuple(end - start for start, end in done.stages)


def _batch(kv: KVShards, parts: Sequence[Part]) -> Batch:
    rows = []
    for number, (start, count) in enumerate(parts):
        decodes = count == 1
        request = RequestState(
            f"profile {number}",
            prompt_len=max(start, 1) if decodes else start + count + 1,
            max_tokens=2,
            prompt_token_ids=[0] * (start + count + 1),
            payload=Sampling(SamplingParams(temperature=0), seed=0),
        )
        if decodes:
            request.output_token_ids.append(0)
        hold = kv.reserve(start + count)
        assert hold, (parts, kv.num_free)
        rows.append(Row(request, start, count, decodes, False, 0, hold))
    return Batch("profile", rows, 0, len(rows), 0)
