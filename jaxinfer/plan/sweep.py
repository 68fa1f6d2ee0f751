"""A grid or a list of points over run files: each run once, one table and its pictures."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.validation import Named, OptionError, Options, did_you_mean, shown
from jaxinfer.errors import JaxinferError
from jaxinfer.plan.candidate import Candidate
from jaxinfer.plan.kept import Kept, contents, key_of
from jaxinfer.plan.planners.any_system import Axes, grid
from jaxinfer.plan.problem import merge
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.pictures import save_picture

# What a host takes for a run, and what is no number.
_NOT_OF_THE_RUN = (
    "instances", "compiles", "compile_s", "late_compiles", "loop_s", "launching_s", "peak_rss_mib",
)  # fmt: skip
FIGURES = (
    "requests_s",
    *(f.name for f in fields(RunMetrics) if f.init and f.name not in _NOT_OF_THE_RUN),
)
Figures = Mapping[str, Any]


class Sweep(Options):
    """A sweep file.

    Attributes:
        files: paths of run files, each with axes of its own: dotted keys, and lists of values.
        axes: of all files.
        points: dotted keys and one value of each, for what is no grid; each goes with all
            combinations of the axes.
        run: what all points have in common, their workload too.
        x, y: of the pictures, one for each y: an axis of all files with numbers, or a key of all
            points, by default the last one, and figures. Each file, with its values of the others,
            is a line.
    """

    files: Named[Axes] = Field(min_length=1)
    axes: Axes = Field(default_factory=dict)
    points: tuple[dict[str, Any], ...] = Field(default=({},), strict=False, min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)
    x: str | None = None
    y: tuple[str, ...] = Field(default=("ttft_p99", "tbt_p99"), strict=False)

    def model_post_init(self, context: object, /) -> None:
        """Refuse keys that have values twice, and pictures of what is not there."""
        named = {name for point in self.points for name in point}
        for own in self.files.values():
            if twice := named & (self.axes | own).keys():
                raise OptionError(f"points: {min(twice)} is an axis, too")
        if self.x is not None:
            for own in self.files.values():
                axes = self.values_of(own)
                if self.x not in axes:
                    raise OptionError(
                        f"x is {self.x}, must be one of axes: {did_you_mean(self.x, axes)}"
                    )
                if not _are_numbers(axes[self.x]):
                    raise OptionError(f"x is {self.x}, whose values are {shown(axes[self.x])}: "
                                      "must be an axis of numbers")  # fmt: skip
        for name in self.y:
            if name not in FIGURES:
                raise OptionError(f"y: no figure {name!r}: {did_you_mean(name, FIGURES)}")

    def values_of(self, own: Axes) -> Axes:
        """Of the keys that all points of a file have, the values.

        Args:
            own: the file's axes.
        """
        shared = set.intersection(*(set(point) for point in self.points))
        names = [name for name in self.points[0] if name in shared]
        listed = {name: [point[name] for point in self.points] for name in names}
        return listed | self.axes | own

    def candidates(self) -> Iterator[Candidate]:
        """All points, in the files' order.

        Raises:
            JaxinferError: a file cannot be read, or a key leads nowhere.
        """
        return grid(self.files, self.axes, self.points)

    def data(self, point: Candidate) -> dict[str, Any]:
        """What a point's run file holds; the axes win over what all have in common."""
        return merge(self.run, point.part)


class Map(Protocol):
    """``map``, or a pool's."""

    def __call__(
        self, call: Callable[[dict[str, Any]], Figures], asked: Sequence[dict[str, Any]], /
    ) -> Iterator[Figures]:
        """The figures of each, in their order."""


def figures_of(metrics: RunMetrics) -> dict[str, Any]:
    """Those of the run, the same whenever it is repeated on a modelled cluster."""
    served = metrics.requests - metrics.failed
    found = {name: getattr(metrics, name) for name in FIGURES[1:]}
    return {"requests_s": served / metrics.wall_s if metrics.wall_s else None, **found}


def simulate_point(data: dict[str, Any]) -> Figures:
    """Of a run file, on a modelled cluster; ``refused`` says why it cannot be."""
    from jaxinfer.simulate.run import simulate

    try:
        config = as_run_file(data)
        return figures_of(simulate(config, config.requests()))
    except JaxinferError as error:
        return {"refused": str(error)}


def run_point(data: dict[str, Any]) -> Figures:
    """Of a run file, run for real in this process."""
    from jaxinfer.llm import LLM
    from jaxinfer.measure import measure

    llm: LLM | None = None
    try:
        config = as_run_file(data)
        llm = LLM.from_config(config, progress=False)
        work = config.requests()
        return figures_of(measure(llm, work, "workload", None, progress=False))
    except JaxinferError as error:
        return {"refused": str(error)}
    finally:
        del llm
        gc.collect()  # What it had of the devices is free only now.


def sweep_rows(
    sweep: Sweep,
    kept: Kept,
    map_points: Map = map,
    call: Callable[[dict[str, Any]], Figures] = simulate_point,
    on_point: Callable[[Candidate, Figures], None] = lambda *args: None,
) -> list[dict[str, Any]]:
    """Each point's axes and figures; those that are kept already are not run again."""
    points = list(sweep.candidates())
    asked = [sweep.data(point) for point in points]
    keys = [key_of(call.__name__, data, contents(data)) for data in asked]
    known = {key: kept.get(key) for key in keys}
    missing = {key: data for key, data in zip(keys, asked, strict=True) if known[key] is None}
    fresh = iter(map_points(call, list(missing.values()))) if missing else iter(())
    rows = []
    for point, key in zip(points, keys, strict=True):
        if known[key] is None:
            known[key] = next(fresh)
            if "refused" not in known[key]:  # Of what may be mended elsewhere.
                kept.add(key, known[key])
        on_point(point, known[key])
        rows.append({**point.axes, "refused": None, **known[key]})
    return rows


def clusters(sweep: Sweep) -> list[ClusterConfig]:
    """Those of all points that can be."""
    found = []
    for point in sweep.candidates():
        try:
            found.append(as_run_file(sweep.data(point)).cluster())
        except JaxinferError:
            continue  # Its row will say why.
    return found


def x_axis(sweep: Sweep) -> str | None:
    """The key that pictures are over, if there is one with numbers."""
    if sweep.x:
        return sweep.x
    numbers = [
        name for name in sweep.values_of({})
        if all(_are_numbers(sweep.values_of(own)[name]) for own in sweep.files.values())
    ]  # fmt: skip
    return numbers[-1] if numbers else None


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def draw(folder: Path, kind: str, sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """A picture for each y; none without an axis of numbers."""
    from matplotlib.figure import Figure

    x = x_axis(sweep)
    if x is None:
        return []
    axes_of_points = dict.fromkeys(name for p in sweep.candidates() for name in p.axes)
    others = [name for name in axes_of_points if name != x]
    written = []
    for y in sweep.y:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.get(y) is not None:
                named = [str(row[name]) for name in others if row.get(name) is not None]
                lines.setdefault(", ".join(named), []).append((row[x], row[y]))
        if not lines:
            continue
        figure = Figure((5.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for (label, line), marker in zip(lines.items(), "os^vDP*Xd<>ph" * len(lines), strict=False):
            axes.plot(*zip(*sorted(line), strict=True), marker=marker, ms=4, lw=1.2, label=label)
        values = [value for line in lines.values() for _, value in line]
        if min(values) > 0 and max(values) > 30 * min(values):  # An overload would hide the rest.
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, None)
        rate = y.endswith(("requests_s", "tok_s"))
        seconds = y.endswith(("_mean", "_p50", "_p90", "_p99", "_s")) and not rate
        axes.set(xlabel=x, ylabel=f"{y}, s" if seconds else y)
        axes.legend(frameon=False, fontsize="small")
        path = folder / f"{y}.{kind}"
        save_picture(figure, path)
        written.append(path)
    return written
