"""Runs each point of a sweep with each seed, and makes the table of the sweep."""

import gc
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from scipy import stats

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.files.contents import contents
from jaxinfer.files.kept import KeptResults, key_of
from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.sweep.sweep_file import FIGURES, Sweep
from jaxinfer.options.validation import OptionError
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.simulate.capacity import enough_requests

Figures = Mapping[str, Any]
# For a figure's mean over the seeds, half of its 95 % interval.
HALF = "_ci95"


class PointRun(NamedTuple):
    """One run of a point.

    Attributes:
        data: contents of the point's run file.
        seed: seed of all random parts of the workload; None keeps the seeds of the run file.
        folder: gets the run's files, if given.
    """

    data: Mapping[str, Any]
    seed: int | None = None
    folder: str | None = None


class MapPoints(Protocol):
    """``map``, or the ``map`` of a pool of processes."""

    def __call__(
        self, call: Callable[[PointRun], Figures], asked: Sequence[PointRun], /
    ) -> Iterator[Figures]:
        """Return the figures of each run, in order."""


def figures_of(metrics: RunMetrics) -> dict[str, Any]:
    """Return those figures of a simulated run that are equal in every repetition."""
    served = metrics.requests - metrics.failed
    found = {name: getattr(metrics, name) for name in FIGURES[1:]}
    return {"requests_s": served / metrics.wall_s if metrics.wall_s else None, **found}


def _enough(config: RunFile, figures: Figures) -> dict[str, Any]:
    """Return the number of requests needed, if random arrivals were too few for a rate."""
    rate, e2e = figures["requests_s"], figures["e2e_mean"]
    if config.workload.arrivals.kind not in ("poisson", "gamma") or not rate or not e2e:
        return {}
    enough = enough_requests(rate * e2e)
    return {"enough_requests": enough} if figures["requests"] < enough else {}


def seeded(config: RunFile, seed: int | None) -> RunFile:
    """Return the run file with this seed for all random parts of its workload, if one is given."""
    if seed is None:
        return config
    drawn = config.workload.drawn.items()
    return config.with_workload(
        **{name: part.model_copy(update={"seed": seed}) for name, part in drawn}
    )


def simulate_point(asked: PointRun) -> Figures:
    """Return the figures of a simulated run, or ``refused`` with the reason why it is invalid."""
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
    """Return the figures of a real run in this process."""
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
        gc.collect()  # The memory that it had on the devices is free only now.


def check(sweep: Sweep, real: bool) -> None:
    """Check that at least one point of a sweep can be run, before any is.

    Raises:
        JaxinferError: no point can be run, or the seeds change nothing.
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
    """Yield the run files of valid points; ``refuse`` is called with the errors of others."""
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
    """Run each point, except runs in the cache, and return the points' axes and figures.

    Args:
        on_point: called with each run of a point.
        folders: gets a folder for each run, named by the number of the point and the seed; equal
            points share that of the first one.
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
        if asked.folder:  # The file of a killed run.
            shutil.rmtree(asked.folder, ignore_errors=True)
    fresh = iter(map_points(call, list(missing.values()))) if missing else iter(())
    rows = []
    for point, of_point in zip(points, keys, strict=True):
        found = []
        for key in of_point:
            if known[key] is None:
                known[key] = next(fresh)
                if "refused" not in known[key]:  # Errors that another run may not have.
                    kept.add(key, known[key])
            on_point(point, known[key])
            found.append(known[key])
        where = _where(folders, runs[of_point[0]])
        rows.append({**point.axes, "refused": None, **_together(found), **where})
    return rows


def _where(folders: Path | None, asked: PointRun) -> Figures:
    """Return the folder of a point's runs, for the table, from one of them."""
    if not folders or not asked.folder:
        return {}
    return {"folder": f"{folders.name}/{Path(asked.folder).relative_to(folders).parts[0]}"}


def _kept(kept: KeptResults, key: str, asked: PointRun) -> Any:
    """Return the cached figures of a run, if its folder still exists."""
    if asked.folder and not (Path(asked.folder) / "1" / "run.json").is_file():
        return None
    return kept.get(key)


def _together(found: Sequence[Figures]) -> Figures:
    """Return means over the seeds, each with half of its 95 % interval by Student's t."""
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
    """Return half of the 95 % interval of a mean, by Student's t; None for fewer than 2 values."""
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / len(values) ** 0.5
    return float(stats.t.ppf(0.975, len(values) - 1)) * error


def clusters(sweep: Sweep) -> list[ClusterConfig]:
    """Return the clusters of all valid points."""
    found = []
    for config in _run_files(sweep):
        try:
            found.append(config.cluster())
        except JaxinferError:
            continue  # Its row will say why.
    return found
