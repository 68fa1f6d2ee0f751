"""Step times from curves of whole steps, as a benchmark of an engine measures them.

A CSV file has the points, in any order, in these columns; other columns are ignored:

    phase      ``prompt`` or ``decode``
    tokens     tokens of a step of prompts; also of decodes, if curves are ``by_tokens``
    batch      rows of a step of decodes, if curves are ``by_batch_and_context``
    context    mean KV entries that each of these rows sees, including its own
    seconds    duration of the step

If a point occurs several times, its mean is used. A curve is linear between points, and continues
beyond them as in ``PiecewiseLinear``. A chunk of a prompt takes as long as a prompt of the same
length, whatever is before it.

The time of decodes ``by_tokens`` depends on their number. The time of decodes
``by_batch_and_context`` is interpolated between the nearest batch sizes, at their mean context. A
batch size that was measured at one context grows with its entries like the nearest batch size that
was measured at several.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.config.step_costs import CurveCosts
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear, along

# The columns that give the place of a point, by decode's kind.
_AXES = {"by_tokens": ("tokens",), "by_batch_and_context": ("batch", "context")}
_Points = dict[tuple[float, ...], float]


class CurveStage:
    """Step times of a pipeline stage.

    Args:
        costs: costs of all layers.
        share: this stage's share of the costs.

    Attributes:
        read: contents of the file, as JSON values.
        measured: largest measured value of each quantity of a step.

    Raises:
        JaxinferError: the file cannot be read, or has no points of a phase.
    """

    def __init__(self, costs: CurveCosts, share: float = 1.0) -> None:
        path, axes = data_path(costs.file), _AXES[costs.decode]
        prompts, decodes = _read(path, axes)
        self._share, self._factor = share, costs.mixed_factor
        self._prompt = PiecewiseLinear({tokens: seconds for (tokens,), seconds in prompts.items()})
        self._decode: Callable[[int, int], float]
        if costs.decode == "by_tokens":
            curve = PiecewiseLinear({tokens: seconds for (tokens,), seconds in decodes.items()})
            self._decode = lambda rows, entries: curve(rows)
        else:
            try:
                self._decode = BatchCurves({(b, c): y for (b, c), y in decodes.items()})
            except JaxinferError as error:
                raise JaxinferError(f"{path}: {error}") from None
        # One row with the smallest context.
        least = self._decode(1, math.ceil(min(at[-1] for at in decodes)))
        self._shared = least if costs.share_weights else 0.0
        self.read: dict[str, object] = {
            "file": costs.file,
            "prompt_tokens": [self._prompt.x[0], self._prompt.x[-1]],
            "decode": {
                axis: [min(values), max(values)]
                for axis, values in zip(axes, zip(*decodes, strict=True), strict=True)
            },
        }
        ends = [max(values) for values in zip(*decodes, strict=True)]
        prompt = "tokens" if self._factor else "prompt tokens"
        self.measured = {prompt: self._prompt.x[-1]}
        self.measured |= dict(zip(("decodes", "entries per decode"), ends, strict=False))

    @classmethod
    def of(cls, part: StagePart, costs: SimulateOptions) -> Self:
        """Make the stage from a run file's options, which must have ``curves``."""
        assert costs.curves
        return cls(costs.curves, part.share)

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        rows, tokens = work.singles, work.tokens - work.singles
        if rows and tokens and self._factor:
            return self._share * self._factor * self._prompt(work.tokens)
        found = self._prompt(tokens) if tokens else 0.0
        if rows:
            decodes = self._decode(rows, work.single_context)
            found += max(decodes - self._shared, 0.0) if tokens else decodes
        return self._share * found


class BatchCurves:
    """Seconds of a step of decodes, by its rows and the total number of KV entries that they see.

    Args:
        points: times by batch and mean context.

    Raises:
        JaxinferError: no batch was measured at several contexts.
    """

    def __init__(self, points: Mapping[tuple[float, float], float]) -> None:
        measured: defaultdict[float, dict[float, float]] = defaultdict(dict)
        for (batch, context), seconds in points.items():
            measured[batch][batch * context] = seconds
        several = [batch for batch, found in measured.items() if len(found) > 1]
        if not several:
            raise JaxinferError(
                "no batch was measured at several contexts: give it some, or decode: by_tokens"
            )
        curves = {batch: PiecewiseLinear(measured[batch]) for batch in several}
        # For each batch, a curve over its entries, and its additional time.
        self._levels: list[tuple[PiecewiseLinear, float]] = []
        for batch in sorted(measured):
            curve = curves[min(several, key=lambda other: (abs(other - batch), other))]
            (entries, seconds), *more = measured[batch].items()
            self._levels.append((curve, 0.0 if more else seconds - curve(entries)))
        # Only its places are used; its values are not.
        self._batches = PiecewiseLinear(dict.fromkeys(sorted(measured), 0.0))

    def __call__(self, rows: int, entries: int) -> float:
        """Return the seconds of a step whose rows together see this number of entries."""
        i, j = self._batches.ends(rows)
        context = entries / rows
        found = self._level(i, context)
        if i == j:
            return max(found, 0.0)
        a, b = self._batches.x[i], self._batches.x[j]
        return along(rows, a, b, found, self._level(j, context))

    def _level(self, number: int, context: float) -> float:
        curve, more = self._levels[number]
        return curve(self._batches.x[number] * context) + more


def _read(path: Path, axes: tuple[str, ...]) -> tuple[_Points, _Points]:
    """Return points of prompts by tokens, and points of decodes by ``axes``."""
    found: dict[str, defaultdict[tuple[float, ...], list[float]]] = {
        "prompt": defaultdict(list),
        "decode": defaultdict(list),
    }
    for line, row in _rows(path):
        phase = row["phase"]
        if phase not in found:
            raise JaxinferError(f"{path}, line {line}: phase is {phase!r}, not prompt or decode")
        names = ("tokens",) if phase == "prompt" else axes
        try:
            values = [float(row.get(name) or "") for name in (*names, "seconds")]
        except ValueError:
            values = []
        if not values or not all(0 < value < math.inf for value in values):
            raise JaxinferError(
                f"{path}, line {line}: {', '.join(names)} and seconds of a {phase} must be numbers "
                "greater than 0"
            )
        found[phase][tuple(values[:-1])].append(values[-1])
    for phase, points in found.items():
        if not points:
            raise JaxinferError(f"{path}: has no points of phase {phase}")
    prompt, decode = (
        {at: fmean(seconds) for at, seconds in found[phase].items()} for phase in found
    )
    return prompt, decode


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            for name in ("phase", "seconds"):
                if name not in (reader.fieldnames or ()):
                    raise JaxinferError(f"{path}: lacks the column {name}")
            for row in reader:
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JaxinferError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
