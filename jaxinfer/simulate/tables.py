"""Step times from tables of measured operators, interpolated, as Vidur does (section 4.2).

A folder has what LLMServingSim's profiler writes for one GPU and model: ``meta.yaml``, and for each
degree of tensor parallelism a folder such as ``tp1`` with times in microseconds of one layer's
operators. ``dense.csv``: layer, tokens, time_us; ``per_sequence.csv``: layer, sequences, time_us;
``attention.csv`` or ``attention.csv.gz``: prefill_chunk, kv_prefill, n_decode, kv_decode, time_us,
of batches with one chunk, and decodes that all see one context.
"""

import csv
import gzip
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path

import yaml

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.work import Work
from jaxinfer.simulate.hardware import ModelShape

# How often an operator runs in a layer; in a step, outside of layers.
PER_LAYER = {
    "layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1,
    "down_proj": 1,
}  # fmt: skip
# Those that not every profile has apart from others.
OPTIONAL = {"add": 1, "all_reduce": 2}
FIRST, LAST, PER_SEQUENCE = ("embedding",), ("final_layernorm",), ("lm_head", "sampler")
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class Curve:
    """A function of one number through measured points, linear between and beyond them."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self._x = sorted(points)
        self._y = [points[x] for x in self._x]

    def __call__(self, x: float) -> float:
        """The value at x."""
        if len(self._x) == 1:
            return self._y[0]
        i = min(max(bisect_right(self._x, x), 1), len(self._x) - 1)
        (a, b), (fa, fb) = self._x[i - 1 : i + 1], self._y[i - 1 : i + 1]
        return max(fa + (fb - fa) * (x - a) / (b - a), 0.0)


class Grid:
    """A function of several numbers, linear in each between the points of a grid.

    Where a corner of a cell was not measured, None; so it is outside of the grid.
    """

    def __init__(self, points: Mapping[tuple[float, ...], float]) -> None:
        self._points = points
        self.axes = [sorted({key[i] for key in points}) for i in range(len(next(iter(points))))]

    @property
    def is_full(self) -> bool:
        """Whether every point of the grid was measured."""
        return len(self._points) == prod(map(len, self.axes))

    def __call__(self, *at: float) -> float | None:
        """The value there."""
        sides = []
        for x, axis in zip(at, self.axes, strict=True):
            i = bisect_right(axis, x)
            if i == 0 or (i == len(axis) and x > axis[-1]):
                return None
            low, high = axis[i - 1], axis[min(i, len(axis) - 1)]
            share = (x - low) / (high - low) if high > low else 0.0
            sides.append([(low, 1 - share), (high, share)] if share else [(low, 1.0)])
        total = 0.0
        for corner in product(*sides):
            value = self._points.get(tuple(x for x, _ in corner))
            if value is None:
                return None
            weight = 1.0
            for _, share in corner:
                weight *= share
            total += weight * value
        return total


class TableStage:
    """One pipeline stage by its operators' tables.

    Args:
        folder: with ``meta.yaml``; ``kind``: the GPU's name.
        devices: the degree of tensor parallelism.
        layers: how many; ``first``, ``last``: with the embedding, with the head.
        step_s: seconds that the engine adds to each step; ``sequence_s``: for each sequence.

    Raises:
        JaxinferError: a table is missing or lacks an operator, or is of another model.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelShape,
        kind: str,
        devices: int,
        layers: int,
        first: bool,
        last: bool,
        step_s: float = 0.0,
        sequence_s: float = 0.0,
    ) -> None:
        _check_model(folder / "meta.yaml", model, kind)
        self._layers, self._step_s, self._sequence_s = layers, step_s, sequence_s
        try:
            self._read(folder / f"tp{devices}", first, last)
        except (KeyError, ValueError, TypeError, StopIteration) as error:
            raise JaxinferError(
                f"{folder}: not a profile: {type(error).__name__} {error}"
            ) from None

    def _read(self, folder: Path, first: bool, last: bool) -> None:
        dense = _curves(folder, "dense", "tokens")
        per_sequence = _curves(folder, "per_sequence", "sequences")
        self._per_step = [dense[name] for name in (*FIRST * first, *LAST * last)]
        every = PER_LAYER | {name: n for name, n in OPTIONAL.items() if name in dense}
        self._per_layer = [(dense[name], count) for name, count in every.items()]
        self._per_sequence = [per_sequence[name] for name in PER_SEQUENCE * last]
        rows = list(_rows(folder, "attention"))
        grid = {
            tuple(float(row[name]) for name in ATTENTION): float(row["time_us"]) for row in rows
        }
        self._attention = Grid(grid)
        self._chunks = Grid({key[:2]: t for key, t in grid.items() if key[0] and not key[2]})
        self._decodes = Grid({key[2:]: t for key, t in grid.items() if key[2] and not key[0]})
        if not (self._chunks.is_full and self._decodes.is_full):
            raise JaxinferError(f"{folder}: attention.csv lacks points of its grid")

    def seconds(self, work: Work) -> float:
        """Of one step."""
        tokens = work.tokens
        layer = sum(count * curve(tokens) for curve, count in self._per_layer)
        layer += self._attend(work)
        micros = self._layers * layer + sum(curve(tokens) for curve in self._per_step)
        if work.sampled:
            micros += sum(curve(work.sampled) for curve in self._per_sequence)
        return micros * 1e-6 + self._step_s + self._sequence_s * work.sequences

    def _attend(self, work: Work) -> float:
        """The largest chunk together with all decodes; other chunks beside it."""
        n = work.singles
        context = work.single_context / n if n else 0.0
        chunks = sorted(work.chunks, key=lambda chunk: chunk[1])
        total = 0.0
        if chunks and n:
            start, count = chunks[-1]
            together = self._attention(count, start, n, context)
            if together is not None:
                total += together
                n, chunks = 0, chunks[:-1]
        for start, count in chunks:
            total += _alone(self._chunks, count, start)
        return total + (_alone(self._decodes, n, context) if n else 0.0)


def _alone(grid: Grid, count: float, context: float) -> float:
    """Beyond a full grid's edges as at its edges, in proportion."""
    counts, contexts = grid.axes
    found = grid(
        min(max(count, counts[0]), counts[-1]), min(max(context, contexts[0]), contexts[-1])
    )
    assert found is not None, (count, context)
    return found * max(count / counts[-1], 1.0) * max(context / contexts[-1], 1.0)


def _check_model(path: Path, model: ModelShape, kind: str) -> None:
    """Refuse tables of a model with other sizes, or of another GPU."""
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
        sizes = dict(meta["engine_effective"]["hf_overrides"])
        measured = str(meta.get("hardware", kind))
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        raise JaxinferError(f"{path}: does not say what was profiled") from None
    if measured.replace("-", "").lower() not in kind.replace("-", "").lower():
        raise JaxinferError(f"{path}: profiled on {measured}, the group has {kind}")
    for name, size in sizes.items():
        ours = getattr(model, name) if name in ModelShape.model_fields else size
        if size != ours and name != "num_hidden_layers":
            raise JaxinferError(f"{path}: profiled with {name} {size}, the model has {ours}")


def _curves(folder: Path, name: str, axis: str) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = defaultdict(dict)
    for row in _rows(folder, name):
        points[row["layer"]][float(row[axis])] = float(row["time_us"])
    wanted = PER_SEQUENCE if name == "per_sequence" else (*PER_LAYER, *FIRST, *LAST)
    missing = [operator for operator in wanted if operator not in points]
    if missing:
        raise JaxinferError(f"{folder}: {name}.csv lacks {', '.join(missing)}")
    return {operator: Curve(found) for operator, found in points.items()}


def _rows(folder: Path, name: str) -> Iterator[dict[str, str]]:
    plain, packed = folder / f"{name}.csv", folder / f"{name}.csv.gz"
    try:
        if plain.is_file():
            with plain.open(newline="", encoding="utf-8") as file:
                yield from csv.DictReader(file)
        else:
            with gzip.open(packed, "rt", newline="", encoding="utf-8") as file:
                yield from csv.DictReader(file)
    except OSError as error:
        raise JaxinferError(f"{plain}: {error.strerror or error}") from None
