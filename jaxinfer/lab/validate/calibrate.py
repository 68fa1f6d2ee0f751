"""Fits a GPU's efficiencies (``roofline.Efficiency``) to measured steps.

The fit minimises squared relative errors of the roofline's times. Efficiencies that the points do
not determine are left unchanged.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field
from rich.table import Table
from scipy.optimize import least_squares

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile
from jaxinfer.config.site import model_site
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path, why_not
from jaxinfer.options.validation import Options, did_you_mean
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.costs.model import StageCost
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage

# Numbers that can be fitted; the last ones are given up first.
NAMES = ("flops", "bandwidth", "step_s", "sequence_s")
# Limits of 1 / flops, 1 / bandwidth and the engine's seconds.
_LOWER, _UPPER = np.array([1.0, 1.0, 0.0, 0.0]), np.array([1e3, 1e3, np.inf, np.inf])
# A number must change the steps' times by at least this share in a way that the others cannot.
_TELLS = 0.05
# Weight with which numbers stay at their start while it is unknown which ones the points determine.
_PULL = 0.01

# Largest number of tokens, and largest context, of a step.
_MOST = 10**7

StageFor = Callable[[KernelEfficiency], StageCost]


class MeasuredStep(Options):
    """A measured step: a chunk of a prompt together with decodes.

    Attributes:
        chunk_tokens: tokens of the chunk; 0 for no chunk.
        chunk_context: KV entries before the chunk.
        decodes: number of rows of one token.
        decode_context: mean number of KV entries that each of them sees, including its own.
        seconds: duration of the step.
    """

    chunk_tokens: int = Field(ge=0, le=_MOST)
    chunk_context: int = Field(ge=0, le=_MOST)
    decodes: int = Field(ge=0, le=_MOST)
    decode_context: float = Field(ge=0, le=_MOST)
    seconds: float = Field(gt=0, le=1e4)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a step without tokens."""
        if not self.chunk_tokens and not self.decodes:
            raise JaxinferError("an empty step: chunk_tokens and decodes are 0")
        if self.seconds < 1e-7:
            raise JaxinferError(f"seconds is {self.seconds}: no step takes less than 1e-7")

    @property
    def work(self) -> Work:
        """The step's work.

        The chunk's last token is sampled, and a single token counts as a decode.
        """
        single, chunk = self.chunk_tokens == 1, self.chunk_tokens > 1
        rows, tokens = self.decodes + single + chunk, self.decodes + self.chunk_tokens
        seen = round(self.decodes * self.decode_context) + single * (self.chunk_context + 1)
        chunks = [(self.chunk_context, self.chunk_tokens)] * chunk
        return Work(tokens, self.decodes + single, rows, rows, seen, chunks, self.decodes)


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        fitted: names of the numbers that were fitted to the points; the other numbers are
            unchanged.
        mape: mean of the absolute relative errors.
        worst: largest relative error, with its sign.
        worst_point: point with this error.
        points: number of points.
    """

    efficiency: KernelEfficiency
    fitted: tuple[str, ...]
    mape: float
    worst: float
    worst_point: MeasuredStep
    points: int


def read_points(path: str | Path) -> list[MeasuredStep]:
    """Read points from a CSV file that has ``MeasuredStep``'s attributes among its columns.

    Raises:
        JaxinferError: the file cannot be read, lacks a column, has no row, or has a wrong value.
    """
    points = []
    try:
        with data_path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [
                name for name in MeasuredStep.model_fields if name not in (reader.fieldnames or ())
            ]
            if missing:
                raise JaxinferError(f"{path} line 1: no column {', '.join(missing)}")
            for row in reader:
                cells = {name: (row[name] or "").strip() for name in MeasuredStep.model_fields}
                try:
                    points.append(MeasuredStep.model_validate(cells, strict=False))
                except JaxinferError as error:
                    raise JaxinferError(f"{path} line {reader.line_num}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = why_not(path, error) if isinstance(error, OSError) else error
        raise JaxinferError(f"{path}: {reason}") from None
    if not points:
        raise JaxinferError(f"{path}: a header and no points")
    return points


class _Problem:
    """Relative errors as a function of numbers in which a step's time is piecewise linear.

    These are 1 / flops, 1 / bandwidth, and the engine's seconds, in units that make them as large
    as the steps.
    """

    def __init__(
        self, stage_for: StageFor, points: Sequence[MeasuredStep], fixed: KernelEfficiency
    ) -> None:
        self._stage_for, self._works = stage_for, [point.work for point in points]
        self._measured = np.array([point.seconds for point in points])
        rows = np.array([work.sequences for work in self._works])
        engine = [np.mean((n / self._measured) ** 2) ** -0.5 for n in (1.0, rows)]
        self._units = np.array([1.0, 1.0, *engine])
        numbers = [1 / fixed.flops, 1 / fixed.bandwidth, fixed.step_s, fixed.sequence_s]
        self._fixed = np.array(numbers) / self._units

    def efficiency(self, numbers: np.ndarray) -> KernelEfficiency:
        """Return the efficiency with these numbers."""
        flops, bandwidth, *engine = (float(x) for x in numbers * self._units)
        return KernelEfficiency(1 / flops, 1 / bandwidth, *engine)

    def errors(self, numbers: np.ndarray) -> np.ndarray:
        """Return the error of each point, relative to the measured time."""
        stage = self._stage_for(self.efficiency(numbers))
        return np.array([stage.seconds(work) for work in self._works]) / self._measured - 1

    def solve(self, free: list[int], pull: float) -> np.ndarray:
        """Return the best numbers; only those at ``free`` move, with a penalty of ``pull``."""
        bounds, fixed = (_LOWER[free], _UPPER[free]), self._fixed[free]
        weight = pull * len(self._works) ** 0.5

        def numbers(x: np.ndarray) -> np.ndarray:
            found = self._fixed.copy()
            found[free] = x
            return found

        def residuals(x: np.ndarray) -> np.ndarray:
            return np.concatenate([self.errors(numbers(x)), weight * (x - fixed)])

        # The limit of an operator changes from part to part, so there may be several minima.
        starts = [[1 / f, 1 / b, *self._fixed[2:]] for f, b in product((0.25, 0.8), repeat=2)]
        tries = [
            least_squares(residuals, np.clip(start, *bounds), bounds=bounds, method="dogbox")
            for start in (fixed, *np.array(starts)[:, free])
        ]
        return numbers(min(tries, key=lambda found: found.cost).x)

    def told(self) -> list[int]:
        """Return the numbers that the points determine, as many as can be distinguished.

        The smaller effect of a step up and a step down decides: points that only show that a GPU is
        not slower do not show how fast it is.
        """
        at, effects = self.solve(list(range(len(NAMES))), _PULL), []
        for step in np.diag([at[0], at[1], 1.0, 1.0]):
            up = (self.errors(at + step / 4) - self.errors(at)) * 4
            down = (self.errors(at) - self.errors(at - step / 5)) * 5
            effects.append(np.minimum(up, down))
        products = np.array(effects) @ np.array(effects).T / len(self._works)
        for size in range(len(NAMES), 1, -1):
            for some in combinations(range(len(NAMES)), size):
                # The inverse has each number's effect, minus what the others can replace.
                own = np.linalg.inv(products[np.ix_(some, some)] + 1e-9 * np.eye(size)).diagonal()
                if np.all(own <= _TELLS**-2):
                    return list(some)
        return [int(np.argmax(products.diagonal()[:2]))]


def calibrate(
    stage_for: StageFor, points: Sequence[MeasuredStep], fixed: KernelEfficiency
) -> Calibration:
    """Return the efficiencies at which a stage's times are closest to the points.

    Args:
        fixed: efficiencies for numbers that the points do not determine.
    """
    problem = _Problem(stage_for, points, fixed)
    told = problem.told()
    numbers = problem.solve(told, 0.0)
    errors = problem.errors(numbers)
    worst = int(np.argmax(np.abs(errors)))
    fitted, mape = tuple(NAMES[i] for i in told), float(np.mean(np.abs(errors)))
    found = problem.efficiency(numbers)
    return Calibration(found, fitted, mape, float(errors[worst]), points[worst], len(points))


def as_yaml(group: str, calibration: Calibration, options: SimulateOptions) -> str:
    """Return the whole section ``simulate`` of a run file, with the efficiencies of a group."""
    section = options.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    values = {name: float(f"{x:.4g}") for name, x in asdict(calibration.efficiency).items()}
    groups = section.setdefault("groups", {})
    groups[group] = groups.get(group, {}) | values
    return yaml.safe_dump({"simulate": section}, default_flow_style=None, sort_keys=False).strip()


def calibration_table(
    points: Sequence[MeasuredStep], calibration: Calibration, predicted: Sequence[float]
) -> Table:
    """Return a table of the 20 points with the largest errors, with a summary of all above."""
    kept = [name for name in NAMES if name not in calibration.fitted]
    title = f"mean error of {calibration.points} points: {calibration.mape:.1%}"
    if kept:
        title += f"; not told by them, so left as it was: {', '.join(kept)}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("chunk", "after", "decodes", "context", "measured (ms)", "predicted", "error"):
        table.add_column(column, justify="right")
    rows = [(s / point.seconds - 1, s, point) for s, point in zip(predicted, points, strict=True)]
    for error, s, point in sorted(rows, key=lambda row: -abs(row[0]))[:20]:
        counts = point.chunk_tokens, point.chunk_context, point.decodes, point.decode_context
        times = (f"{1000 * value:.2f}" for value in (point.seconds, s))
        table.add_row(*(f"{count:g}" for count in counts), *times, f"{error:+.1%}")
    return table


def calibrate_group(config: RunFile, group: str, path: str | Path) -> tuple[Calibration, Table]:
    """Calibrate a group's GPU on steps measured on an instance of one stage.

    Raises:
        JaxinferError: there is no such instance, its times come from tables, or a file is wrong.
    """
    resolved = resolve(config)
    cluster, costs = resolved.cluster, config.simulate.of(group)
    if group not in cluster.groups:
        raise JaxinferError(f"no group {group!r}: {did_you_mean(group, cluster.groups)}")
    if kind := costs.measured:
        raise JaxinferError(f"groups.{group}: its times come from {kind}, not from efficiencies")
    # Links between instances do not matter here.
    site = model_site(replace(resolved, pairs=()))
    model_cluster(site)  # This refuses a model that does not fit.
    alone = (stages for stages in site.stages.values() if [s.group.name for s in stages] == [group])
    part = next((stage.part for (stage,) in alone), None)
    if part is None:
        raise JaxinferError(f"groups.{group}: no instance of one stage stands on it")
    if part.flow:
        raise JaxinferError(
            f"groups.{group}: efficiencies are of devices with equal parts: leave out layout and "
            "mesh, and have no more devices than KV heads"
        )
    points = read_points(path)

    def stage_for(efficiency: KernelEfficiency) -> RooflineStage:
        return RooflineStage.of(part, costs.model_copy(update=asdict(efficiency)))

    fixed = KernelEfficiency(costs.flops, costs.bandwidth, costs.step_s, costs.sequence_s)
    stage = stage_for((found := calibrate(stage_for, points, fixed)).efficiency)
    return found, calibration_table(points, found, [stage.seconds(p.work) for p in points])
