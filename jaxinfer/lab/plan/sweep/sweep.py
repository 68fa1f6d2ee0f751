"""A grid or a list of points over run files: each run with each seed, and their table."""

import gc
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field
from scipy import stats

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.files.contents import contents
from jaxinfer.files.kept import KeptResults, key_of
from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.file_parts import with_workload
from jaxinfer.lab.plan.planners.any_system import Axes, check_axes, grid
from jaxinfer.lab.plan.problem import merge
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean, shown
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.simulate.capacity import enough_requests

# What a host takes for a run, and what is no number.
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
Figures = Mapping[str, Any]
# Beyond, an interval is no narrower for any use, and figures fill the memory.
MOST_SEEDS = 10_000
# Of a figure's mean over the seeds, half of its 95 % interval.
HALF = "_ci95"


class PointRun(NamedTuple):
    """A run of a point.

    Attributes:
        data: what its run file holds.
        seed: of all in its workload that is drawn, in place of what stands there; None leaves that.
        folder: gets the run's files, if given.
    """

    data: Mapping[str, Any]
    seed: int | None = None
    folder: str | None = None


class Sweep(Options):
    """A sweep file.

    Attributes:
        files: Run files, each with axes of its own. Their model and workload are used unless
            ``run`` has others.
        axes: Axes for all files: dotted keys with lists of values.
        points: Combinations of values that form no grid: dotted keys with one value each; each
            combination is used with all values of the axes.
        run: Options for all run files. Its model and workload replace those of the files.
        seeds: Seeds of all random parts of workloads: a list, or how many. Each point is run with
            each seed, in place of those in its run file.
        x: Axis that pictures have as their x axis; by default the last axis with numbers. It is an
            axis of all files, or a key of all points. Each file, with its values of the others, is
            a line.
        y: Figures to draw, one picture for each.
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
        """Seeds of the sweep; None alone for those of the run files."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds or (None,)

    def model_post_init(self, context: object, /) -> None:
        """Refuse keys that have values twice, and pictures of what is not there."""
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
        """Yield all keys that points have, with their values, by where they stand."""
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
        """Points of the sweep, in the files' order.

        Raises:
            JaxinferError: a file cannot be read, or a key leads nowhere.
        """
        return grid(self.files, self.axes, self.points, with_workload, self.run)

    def data(self, point: Candidate) -> dict[str, Any]:
        """Return the contents of a point's run file; the axes win over what all have in common."""
        return merge(self.run, point.part)


def _has_seed(key: str, value: Any) -> bool:
    """Tell whether a key or its value is a seed of what a workload draws."""
    *path, last = key.split(".")
    within = isinstance(value, Mapping) and any(
        _has_seed(f"{key}.{n}", v) for n, v in value.items()
    )
    return within or (last == "seed" and path[:1] == ["workload"])


class MapPoints(Protocol):
    """``map``, or a pool's."""

    def __call__(
        self, call: Callable[[PointRun], Figures], asked: Sequence[PointRun], /
    ) -> Iterator[Figures]:
        """The figures of each, in their order."""


def figures_of(metrics: RunMetrics) -> dict[str, Any]:
    """Return the figures of a run, the same whenever it is repeated on a modelled cluster."""
    served = metrics.requests - metrics.failed
    found = {name: getattr(metrics, name) for name in FIGURES[1:]}
    return {"requests_s": served / metrics.wall_s if metrics.wall_s else None, **found}


def _enough(config: RunFile, figures: Figures) -> dict[str, Any]:
    """``enough_requests``, where random arrivals were fewer than tell a rate."""
    rate, e2e = figures["requests_s"], figures["e2e_mean"]
    if config.workload.arrivals.kind not in ("poisson", "gamma") or not rate or not e2e:
        return {}
    enough = enough_requests(rate * e2e)
    return {"enough_requests": enough} if figures["requests"] < enough else {}


def seeded(config: RunFile, seed: int | None) -> RunFile:
    """The run file with this seed of all that is drawn in its workload; the same for None."""
    if seed is None:
        return config
    drawn = config.workload.drawn.items()
    return config.with_workload(
        **{name: part.model_copy(update={"seed": seed}) for name, part in drawn}
    )


def simulate_point(asked: PointRun) -> Figures:
    """The figures of a run on a modelled cluster; ``refused`` says why it cannot be."""
    from jaxinfer.simulate.run import simulate

    try:
        config = seeded(as_run_file(asked.data), asked.seed)
        metrics = simulate(config, config.requests(), asked.folder)
        found = figures_of(metrics)
        if metrics.beyond:
            found["beyond_measured"] = True
        return found | _enough(config, found)
    except JaxinferError as error:
        return {"refused": str(error)}


def run_point(asked: PointRun) -> Figures:
    """The figures of a real run in this process."""
    from jaxinfer.lab.measure import measure
    from jaxinfer.llm import LLM

    llm: LLM | None = None
    try:
        config = seeded(as_run_file(asked.data), asked.seed)
        llm = LLM.from_config(config, progress=False)
        work = config.requests()
        found = figures_of(measure(llm, work, "workload", asked.folder, progress=False))
        return found | _enough(config, found)
    except JaxinferError as error:
        return {"refused": str(error)}
    finally:
        del llm
        gc.collect()  # What it had of the devices is free only now.


def check(sweep: Sweep, real: bool) -> None:
    """Look for what keeps all points from being run, before any is.

    Raises:
        JaxinferError: none of them can be, or the seeds change nothing.
    """
    from jaxinfer.simulate.run import prepare

    refused: list[JaxinferError] = []
    for config in _run_files(sweep, refused.append):
        try:
            if real:
                resolve(config)
                config.require_model()
                config.workload.check_real()
            else:
                prepare(config)
            config.requests()
            break
        except JaxinferError as error:
            refused.append(error)
    else:
        raise JaxinferError(f"none of {len(refused)} points is valid; for example: {refused[0]}")
    if sweep.seeds is not None and not any(c.workload.drawn for c in _run_files(sweep)):
        raise OptionError(
            "seeds: no point's workload has anything that is drawn: give synthetic lengths, "
            "arrivals of kind poisson, gamma or ramp, or a predictor with an accuracy below 1"
        )


def _run_files(
    sweep: Sweep, refuse: Callable[[JaxinferError], None] = lambda error: None
) -> Iterator[RunFile]:
    """Points that can be run; ``refuse`` hears why another one cannot."""
    for point in sweep.candidates():
        try:
            config = as_run_file(sweep.data(point))
        except JaxinferError as error:
            refuse(error)
        else:
            yield config


def sweep_rows(
    sweep: Sweep,
    kept: KeptResults,
    map_points: MapPoints = map,
    call: Callable[[PointRun], Figures] = simulate_point,
    on_point: Callable[[Candidate, Figures], None] = lambda *args: None,
    folders: Path | None = None,
) -> list[dict[str, Any]]:
    """Axes and figures of each point; what is kept already is not run again.

    Args:
        on_point: called with each run of a point.
        folders: gets a folder for each run, by the number of the point and the seed; points that
            are equal have that of the first of them.
    """
    points, seeds = list(sweep.candidates()), sweep.all_seeds
    runs: dict[str, PointRun] = {}
    keys: list[list[str]] = []
    for number, point in enumerate(points, 1):
        data = sweep.data(point)
        what = call.__name__, data, contents(data)
        keys.append([key_of(*what, *([] if seed is None else [seed])) for seed in seeds])
        for key, seed in zip(keys[-1], seeds, strict=True):
            own = folders / f"{number:04d}" if folders else None
            if own and seed is not None:
                own = own / f"seed{seed}"
            runs.setdefault(key, PointRun(data, seed, str(own) if own else None))
    known = {key: _kept(kept, key, asked) for key, asked in runs.items()}
    missing = {key: asked for key, asked in runs.items() if known[key] is None}
    for asked in missing.values():
        if asked.folder:  # Of a run that was killed.
            shutil.rmtree(asked.folder, ignore_errors=True)
    fresh = iter(map_points(call, list(missing.values()))) if missing else iter(())
    rows = []
    for point, of_point in zip(points, keys, strict=True):
        found = []
        for key in of_point:
            if known[key] is None:
                known[key] = next(fresh)
                if "refused" not in known[key]:  # Of what may be mended elsewhere.
                    kept.add(key, known[key])
            on_point(point, known[key])
            found.append(known[key])
        where = _where(folders, runs[of_point[0]])
        rows.append({**point.axes, "refused": None, **_together(found), **where})
    return rows


def _where(folders: Path | None, asked: PointRun) -> Figures:
    """The folder of a point's runs, for the table, by one of them."""
    if not folders or not asked.folder:
        return {}
    return {"folder": f"{folders.name}/{Path(asked.folder).relative_to(folders).parts[0]}"}


def _kept(kept: KeptResults, key: str, asked: PointRun) -> Any:
    """The figures kept of a run whose folder is there, too."""
    if asked.folder and not (Path(asked.folder) / "1" / "run.json").is_file():
        return None
    return kept.get(key)


def _together(found: Sequence[Figures]) -> Figures:
    """Means over the seeds, each with half of its 95 % interval by Student's t."""
    refused = next((figures for figures in found if figures.get("refused")), None)
    if refused or len(found) == 1:
        return refused or found[0]
    rows: dict[str, Any] = {}
    for name in dict.fromkeys(name for figures in found for name in figures):
        values = [v for figures in found if (v := figures.get(name)) is not None]
        if name in ("enough_requests", "beyond_measured"):
            rows[name] = max(values)
            continue
        rows[name] = statistics.fmean(values) if values else None
        rows[name + HALF] = half_interval(values)
    return rows


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean, by Student's t; None of fewer than two values."""
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / len(values) ** 0.5
    return float(stats.t.ppf(0.975, len(values) - 1)) * error


def clusters(sweep: Sweep) -> list[ClusterConfig]:
    """Return the clusters of all points that can be."""
    found = []
    for config in _run_files(sweep):
        try:
            found.append(config.cluster())
        except JaxinferError:
            continue  # Its row will say why.
    return found


def varied(sweep: Sweep) -> list[str]:
    """The keys that points have, but for that of the pictures' x."""
    names = dict.fromkeys(name for point in sweep.candidates() for name in point.axes)
    return [name for name in names if name != x_axis(sweep)]


def x_axis(sweep: Sweep) -> str | None:
    """The key that pictures are over, if there is one with numbers."""
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
