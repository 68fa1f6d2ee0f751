"""Times of a layer, its attention, the head and the rest of a step, out of whole steps.

XLA fuses across operators, and small ones measure their launch. So steps are measured whole, of
the model with few layers and of the same with more: what more layers take is the layers' time, and
what is left is that of the step besides. Steps that only differ in what they attend to tell
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

# Attention is no less: the tables' readers refuse nothing at all.
_LEAST_S = 1e-9


@dataclass(frozen=True)
class Depths:
    """A step of two models that differ in their number of layers alone.

    Attributes:
        parts: decodes alone, or chunks alone.
        shallow_s, deep_s: seconds.
    """

    parts: tuple[Part, ...]
    shallow_s: float
    deep_s: float


@dataclass(frozen=True)
class AttentionPoint:
    """A layer's attention.

    Attributes:
        tokens: tokens of all chunks; ``key``: the entries that each of them sees, on average.
        decodes: rows; ``context``: the entries that each sees, its own included, on average.
    """

    tokens: int
    key: float
    decodes: int
    context: float
    seconds: float


@dataclass(frozen=True)
class Operators:
    """Seconds of the parts of a step, whose sum it takes.

    Attributes:
        layers: of one layer without what attention adds by what it sees, by the step's shape.
        steps: of a step besides layers and head: embedding, last norm, launches; by its shape.
        heads: logits and drawing a token, by rows.
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
        """Split whole steps, of which each shape has several.

        Args:
            depths: layers of the shallow and of the deep model.
            heads: as measured alone.
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
    """Seconds of a layer that attends to nothing: by least squares of the relative error."""
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
