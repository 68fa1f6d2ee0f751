"""Plan files: a planner, a goal, and the common options of all candidates."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from jaxinfer.config.run_file import SHORT, apply_setting, as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.file_parts import REQUESTS, common_of, read_file
from jaxinfer.lab.plan.prefixes import best_hits
from jaxinfer.options.validation import ByName, Named, OptionError, Options, read_yaml, within
from jaxinfer.simulate.capacity import requests_for
from jaxinfer.simulate.read_targets import read_targets
from jaxinfer.simulate.targets import Criterion, Targets
from jaxinfer.workload.lengths import BenchRequest

T = TypeVar("T", bound=Options)
# Parts of a run file that a candidate sets; the rest is checked before any candidate.
_OF_CANDIDATES = ("engine", "groups", "instances", "links", "system", "simulate")
Per = Literal["cluster", "gpu", "usd", "watt"]
Cost = Literal["gpus", "usd", "watts"]


class Goal(Options):
    """The goal that decides which candidate is best.

    Attributes:
        maximise: Find the candidate with the largest rate that meets the targets: for the whole
            ``cluster``, per GPU, per dollar per hour, or per watt.
        minimise: Instead, find the cheapest cluster that meets the targets at ``rate``; the cost is
            the number of GPUs, dollars per hour, or watts.
        rate: Requests per second that the cluster must serve, for ``minimise``. They arrive as a
            Poisson process.
        slo, attainment, criterion: Targets, as for ``jaxinfer capacity``.
        seeds: Number of seeds for arrivals, the same for all candidates. They count from 0.
        fresh_seeds: Number of further seeds that check the best candidate. The best of many
            candidates is partly lucky.
        requests_per_gpu: Number of requests to simulate for each GPU of a candidate; by default,
            all requests of the workload.
        precision: Share by which a rate found may be too low.
        top: With ``maximise``, number of best candidates whose rate is searched in full.
        at_once: Number of candidates that are compared at a time. More of them keep more cores
            busy, but fewer are abandoned early.
    """

    maximise: Per | None = None
    minimise: Cost | None = None
    rate: float | None = Field(default=None, gt=0)
    slo: str
    attainment: float | None = None
    criterion: Criterion | None = None
    seeds: int = Field(default=1, ge=1)
    fresh_seeds: int = Field(default=3, ge=1)
    requests_per_gpu: int | None = Field(default=None, ge=1)
    precision: float = Field(default=0.02, ge=1e-6, lt=1)
    top: int = Field(default=1, ge=1)
    at_once: int = Field(default=8, ge=1)

    def model_post_init(self, context: object, /) -> None:
        """Refuse two goals, no goal, and a rate that is missing or unused."""
        if bool(self.maximise) == bool(self.minimise):
            raise JaxinferError("give either maximise or minimise")
        if self.minimise and self.rate is None:
            raise OptionError("rate is missing, and is what the cheapest cluster is to carry")
        if self.maximise and self.rate is not None:
            raise OptionError(f"rate is {self.rate:g}, and is for minimise: maximise finds one")


class Replan(Options):
    """Options for a placement that follows the load.

    Attributes:
        window_s: Length of the windows in which the load is measured, in seconds.
        shift: Plan again when a window's rate, mean prompt or mean output differs by more than this
            share from the load planned for.
        reload_gb_s, reload_s: Rate at which each GPU loads weights, in 10^9 bytes per second, or
            the seconds that loading takes.
        beside: Further run files to compare with, each under a name.
    """

    window_s: float = Field(gt=0)
    shift: float = Field(default=0.2, gt=0)
    reload_gb_s: float | None = Field(default=None, gt=0)
    reload_s: float | None = Field(default=None, ge=0)
    beside: Named[str] = Field(default_factory=dict)

    def model_post_init(self, context: object, /) -> None:
        """Refuse both reload options, neither of them, and reserved names."""
        if (self.reload_gb_s is None) == (self.reload_s is None):
            raise JaxinferError("give either reload_gb_s or reload_s")
        for name in ("replanned", "static", "oracle"):
            if name in self.beside:
                raise OptionError(f"beside.{name}: this name is taken, choose another one")


class Problem(Options):
    """A plan file.

    Attributes:
        planner: Planner's name, or ``my_module:MyPlanner``, and its options.
        goal: Measure of the best candidate.
        run: Common part of all candidates' run files, with the workload. If it has no model or no
            requests, they are taken from the planner's files, which must agree.
        prices: Dollars per hour of a GPU by name; by default those of a hardware file's nodes.
        replan: Options to plan again whenever the load has shifted.
    """

    planner: ByName
    goal: Goal
    run: dict[str, Any]
    replan: Replan | None = None
    prices: Named[float] = Field(default_factory=dict)

    def model_post_init(self, context: object, /) -> None:
        """Refuse invalid prices, and options that ``replan`` does not use."""
        for name, usd in self.prices.items():
            if not usd > 0:
                raise OptionError(f"prices.{name} is {usd:g}, must be above 0")
        if self.replan and "fresh_seeds" in self.goal.model_fields_set:
            raise OptionError(
                "goal.fresh_seeds: is for one placement that stays: leave it out beside replan"
            )
        self._take_from_files()

    def _take_from_files(self) -> None:
        """Complete ``run`` from the planner's run files.

        Raises:
            OptionError: it has no requests, and the files' differ.
        """
        files = self.planner.get("files") or self.planner.get("file")
        try:
            paths = [files] if isinstance(files, str) else list(files or ())
            for path in paths:
                read_file(path)
        except (JaxinferError, TypeError):
            return  # The planner reports what is wrong with them.
        model, workload = common_of(paths, self.run, with_times=bool(self.replan))
        taken = {"model": model, "workload": workload}
        taken = {name: value for name, value in taken.items() if value is not None}
        kept = {"model": self.run["model"]} if self.run.get("model") is not None else {}
        self.__dict__["run"] = {**self.run, **taken, **kept}

    @cached_property
    def work(self) -> Sequence[BenchRequest]:
        """The workload's requests; their arrival times are ignored.

        Raises:
            JaxinferError: there are no requests, or they cannot be read.
        """
        common = {name: value for name, value in self.run.items() if name not in _OF_CANDIDATES}
        try:
            config = as_run_file(common)
            workload = config.workload
            workload.arrivals.check_open()
            if workload.trace is None and workload.synthetic is None:
                raise OptionError("workload: needs a trace, or synthetic lengths")
            return config.requests(searched=True)
        except JaxinferError as error:
            raise within("run", error) from None

    def for_work(self, work: Sequence[BenchRequest], share: float) -> "Problem":
        """Return the problem for some of the requests, at this share of the goal's rate, if any."""
        goal = self.goal
        if goal.rate is not None:
            goal = goal.model_copy(update={"rate": goal.rate * share})
        found = Problem(
            planner=self.planner, goal=goal, run=self.run, prices=self.prices, replan=self.replan
        )
        found.__dict__["work"] = work  # The value that the cached property would compute.
        return found

    def served(self, gpus: int) -> Sequence[BenchRequest]:
        """Return the requests with which a candidate of ``gpus`` GPUs is simulated.

        Raises:
            JaxinferError: ``goal.requests_per_gpu`` asks for too many requests.
        """
        each = self.goal.requests_per_gpu
        return requests_for(gpus, self.work, each) if each else self.work

    @cached_property
    def _hits(self) -> dict[int, list[int]]:
        return {}

    def hits_of(self, work: Sequence[BenchRequest]) -> list[int]:
        """Return ``best_hits`` for the workload's first requests; computed once for each number."""
        if len(work) not in self._hits:
            self._hits[len(work)] = best_hits(work)
        return self._hits[len(work)]

    @cached_property
    def targets(self) -> Targets:
        """See ``Goal``."""
        goal = self.goal
        return read_targets(goal.slo, self.work, goal.attainment, goal.criterion)

    def run_file(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of a candidate's run file.

        Raises:
            JaxinferError: the candidate has requests of its own.
        """
        own = part.get("workload")
        if isinstance(own, Mapping) and (name := next((n for n in REQUESTS if n in own), None)):
            raise JaxinferError(
                f"workload.{name}: all candidates serve the same requests, those of run.workload"
            )
        return merge(self.run, part)


def merge(base: Mapping[str, Any], more: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Merge two mappings and their nested mappings; a value in ``more`` replaces that in ``base``.

    Args:
        where: position in a run file; a name that stands for options there merges with others.
    """
    found = dict(base)
    for key, value in more.items():
        mine, at = found.get(key), f"{where}{key}"
        if isinstance(mine, str) and (short := SHORT.get(at)):
            mine = {short: mine}
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            found[key] = merge(mine, value, f"{at}.")
        else:
            found[key] = value
    return found


def load_problem(path: str | Path, settings: Sequence[str] = ()) -> Problem:
    """Read a plan file, and apply settings such as ``goal.seeds=3``.

    Raises:
        JaxinferError: the file or a setting is wrong.
    """
    return load_options(Problem, "plan file", path, settings)


def load_options(kind: type[T], what: str, path: str | Path, settings: Sequence[str]) -> T:
    """Read a file of options, and apply the settings to it.

    Args:
        what: kind of the file, for messages.

    Raises:
        JaxinferError: the file or a setting is wrong.
    """
    try:
        data = read_yaml(Path(path))
        if not isinstance(data, dict):
            raise JaxinferError(f"must be a mapping of {', '.join(kind.model_fields)}")
        for setting in settings:
            apply_setting(data, setting)
        return kind.model_validate(data)
    except JaxinferError as error:
        text = str(error)
        raise JaxinferError(text if str(path) in text else f"{what} {path}: {text}") from None
