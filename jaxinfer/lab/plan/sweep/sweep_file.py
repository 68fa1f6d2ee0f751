"""A sweep file: a grid or a list of points over run files, the seeds, and what to draw."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field

from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.file_parts import with_workload
from jaxinfer.lab.plan.planners.any_system import Axes, check_axes, grid
from jaxinfer.lab.plan.problem import merge
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean, shown
from jaxinfer.report.metrics import RunMetrics

# Figures that depend on the host, and figures that are no numbers.
_NOT_OF_THE_RUN = (
    "instances",
    "slice_moves",
    "beyond",
    "compiles",
    "compile_s",
    "late_compiles",
    "loop_s",
    "launching_s",
    "peak_rss_mib",
)
FIGURES = (
    "requests_s",
    *(f.name for f in fields(RunMetrics) if f.init and f.name not in _NOT_OF_THE_RUN),
)
# With more seeds, intervals become hardly narrower, and figures fill the memory.
MOST_SEEDS = 10_000


class Sweep(Options):
    """A sweep file.

    Attributes:
        files: Run files, each with its own axes. Their model and workload are used unless ``run``
            has others.
        axes: Axes for all files: dotted keys with lists of values.
        points: Combinations of values that form no grid: dotted keys with one value each; each
            combination is used with all values of the axes.
        run: Options for all run files. Its model and workload replace those of the files.
        seeds: Seeds of all random parts of workloads: a list of seeds, or their number. Each point
            is run with each seed, in place of those in its run file.
        x: Axis of the sweep that is the x axis of the pictures; by default, the last axis with
            numbers. It must be an axis of all files, or a key of all points. Each combination of a
            file and the values of the other axes is a line.
        y: Figures to draw, each in its own picture.
    """

    files: Named[Axes] = Field(min_length=1)
    axes: Axes = Field(default_factory=dict)
    points: tuple[dict[str, Any], ...] = Field(default=({},), strict=False, min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)
    seeds: (
        Annotated[int, Field(ge=1, le=MOST_SEEDS)]
        | Annotated[tuple[int, ...], Field(strict=False)]
        | None
    ) = None
    x: str | None = None
    y: tuple[str, ...] = Field(default=("ttft_p99", "tbt_p99"), strict=False)

    @property
    def all_seeds(self) -> tuple[int | None, ...]:
        """The seeds of the sweep; None alone keeps the seeds of the run files."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds or (None,)

    def model_post_init(self, context: object, /) -> None:
        """Refuse keys on which a value is given twice, and pictures without data."""
        if isinstance(self.seeds, tuple) and (
            not self.seeds or len(set(self.seeds)) < len(self.seeds)
        ):
            raise OptionError(f"seeds is {list(self.seeds)}, must have one or more, none twice")
        check_axes(self.files, self.axes)
        for number, point in enumerate(self.points):
            if repr(point) in map(repr, self.points[:number]):
                raise OptionError(f"points: {shown(point)} is there twice")
        for where, keyed in self._keyed():
            if self.seeds is not None and any(_has_seed(*each) for each in keyed):
                raise OptionError(
                    f"{where}: sets seeds of the workload, and so does seeds: leave out one"
                )
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
                    raise OptionError(
                        f"x is {self.x}, whose values are {shown(axes[self.x])}: "
                        "must be an axis of numbers"
                    )
        for name in self.y:
            if name not in FIGURES:
                raise OptionError(f"y: no figure {name!r}: {did_you_mean(name, FIGURES)}")

    def _keyed(self) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
        """Yield all keys of points with their values, by their position."""
        named = {"axes": self.axes} | {f"files.{file}": own for file, own in self.files.items()}
        for where, axes in named.items():
            yield where, [(key, value) for key, values in axes.items() for value in values]
        yield "points", [each for point in self.points for each in point.items()]

    def values_of(self, own: Axes) -> Axes:
        """Return the values of the keys that all points of a file have.

        Args:
            own: the file's axes.
        """
        shared = set.intersection(*(set(point) for point in self.points))
        names = [name for name in self.points[0] if name in shared]
        listed = {name: [point[name] for point in self.points] for name in names}
        return listed | self.axes | own

    def candidates(self) -> Iterator[Candidate]:
        """Yield the points of the sweep, in the files' order.

        Raises:
            JaxinferError: a file cannot be read, or a key names no option.
        """
        return grid(self.files, self.axes, self.points, with_workload, self.run)

    def data(self, point: Candidate) -> dict[str, Any]:
        """Return the contents of a point's run file; axes take precedence over common options."""
        return merge(self.run, point.part)


def _has_seed(key: str, value: Any) -> bool:
    """Tell whether a key or its value is a seed of a workload's random part."""
    *path, last = key.split(".")
    within = isinstance(value, Mapping) and any(
        _has_seed(f"{key}.{n}", v) for n, v in value.items()
    )
    return within or (last == "seed" and path[:1] == ["workload"])


def varied(sweep: Sweep) -> list[str]:
    """Return the keys in which points vary, without that of the pictures' x axis."""
    names = dict.fromkeys(name for point in sweep.candidates() for name in point.axes)
    return [name for name in names if name != x_axis(sweep)]


def x_axis(sweep: Sweep) -> str | None:
    """Return the key of the pictures' x axis, if there is one with numbers."""
    if sweep.x:
        return sweep.x
    numbers = [
        name
        for name in sweep.values_of({})
        if all(_are_numbers(sweep.values_of(own)[name]) for own in sweep.files.values())
    ]
    return numbers[-1] if numbers else None


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
