"""Derives times of a layer, its attention, the head and the rest of a step from whole steps.

XLA fuses operators, and the time of small ones would mostly be that of their launch. Steps are
therefore measured as a whole, for the model with few layers and with more. The difference is the
layers' time, and the rest is that of the step. Steps that differ only in their contexts separate
attention from the rest of a layer.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from jaxinfer.steps.shapes import StepLimits, StepShape
from jaxinfer.steps.times import Part, features, nonnegative, shape_of, work_of_parts

# Attention takes at least this, because readers of the tables refuse 0.
_LEAST_S = 1e-9


@dataclass(frozen=True)
class Depths:
    """A step of two models that differ only in their number of layers.

    Attributes:
        parts: only decodes, or only chunks.
        shallow_s: seconds of the shallow model.
        deep_s: seconds of the deep model.
    """

    parts: tuple[Part, ...]
    shallow_s: float
    deep_s: float


@dataclass(frozen=True)
class AttentionPoint:
    """A layer's attention.

    Attributes:
        tokens: number of tokens of all chunks.
        key: mean number of entries that each of them sees.
        decodes: number of rows.
        context: mean number of entries that each of them sees, including its own.
    """

    tokens: int
    key: float
    decodes: int
    context: float
    seconds: float


@dataclass(frozen=True)
class Operators:
    """Seconds of the parts of a step, which add up to the whole.

    Attributes:
        layers: seconds of one layer, without attention that depends on its context, by the step's
            shape.
        steps: seconds of a step without layers and head (embedding, last norm, launches), by its
            shape.
        heads: seconds of logits and sampling, by rows.
    """

    layers: Mapping[StepShape, float]
    steps: Mapping[StepShape, float]
    heads: Mapping[int, float]
    attention: Sequence[AttentionPoint]

    @classmethod
    def split(
        cls,
        limits: StepLimits,
        points: Sequence[Depths],
        depths: tuple[int, int],
        heads: Mapping[int, float],
    ) -> "Operators":
        """Split whole steps; each shape must have several.

        Args:
            depths: numbers of layers of the shallow and of the deep model.
            heads: seconds of heads, measured separately.
        """
        shallow, deep = depths
        by_shape: dict[StepShape, list[Depths]] = defaultdict(list)
        for point in points:
            by_shape[shape_of(limits, point.parts)].append(point)
        layers, steps, attention = {}, {}, []
        for shape, here in by_shape.items():
            each = np.array([(p.deep_s - p.shallow_s) / (deep - shallow) for p in here])
            each = np.maximum(each, _LEAST_S)
            layers[shape] = constant = min(_constant(here, each), float(each.min()))
            rest = median(p.deep_s - deep * s for p, s in zip(here, each, strict=True))
            steps[shape] = max(rest - heads[shape.rows], 0.0)
            attention += [
                _point(point.parts, max(float(seconds) - constant, _LEAST_S))
                for point, seconds in zip(here, each, strict=True)
            ]
        return cls(layers, steps, heads, attention)


def _constant(points: Sequence[Depths], each_s: np.ndarray) -> float:
    """Return the seconds of a layer that attends to nothing, by least squares of
    relative errors.
    """
    x = np.array([features(point.parts) for point in points])
    constant, *_ = nonnegative(x / each_s[:, None], np.ones(len(points)))
    return constant


def _point(parts: Sequence[Part], seconds: float) -> AttentionPoint:
    work = work_of_parts(parts)
    tokens = sum(count for _, count in work.chunks)
    key = sum(count * (start + count / 2) for start, count in work.chunks) / max(tokens, 1)
    context = work.single_context / max(work.singles, 1)
    return AttentionPoint(tokens, key, work.singles, context, seconds)


def write_operators(folder: Path, operators: Operators) -> None:
    """Write the files that ``simulate/costs/measured_steps.py`` reads, in microseconds."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "dense.csv", ("layer", "tokens"), _dense(operators))
    heads = (("head", rows, seconds) for rows, seconds in operators.heads.items())
    _write(folder / "per_sequence.csv", ("layer", "sequences"), heads)
    columns = ("prefill_chunk", "prefill_key", "n_decode", "kv_decode")
    rows = ((p.tokens, p.key, p.decodes, p.context, p.seconds) for p in operators.attention)
    _write(folder / "attention.csv", columns, rows)


def _dense(operators: Operators) -> Iterator[tuple[str, int, float]]:
    for name, by_shape in (("layer", operators.layers), ("step", operators.steps)):
        for shape, seconds in sorted(by_shape.items()):
            yield name if shape.chunks else f"decode_{name}", shape.tokens, seconds


def _write(path: Path, columns: Sequence[str], rows: Iterator[tuple[object, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*columns, "time_us"])
        for *at, seconds in rows:
            assert isinstance(seconds, float)
            table.writerow([*at, round(seconds * 1e6, 4)])
