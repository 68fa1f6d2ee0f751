"""Finds the smallest number of workers that meets the targets, and their GPUs.

Follows Aladdin, sections 4 and 5; with several kinds of workers, it finds the cheapest mix. Eq. 6
chooses a worker's size from its fitted step times, and gives a first estimate of their number. The
smallest number is found by simulation; it is exact if an additional worker never lowers the rate.
Eq. 7 predicts the number from those at lower rates.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxinfer.config.costs import GroupCosts
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file, put_option
from jaxinfer.config.site import model_site
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Axis, Candidate, Search
from jaxinfer.lab.plan.file_parts import read_file, without_requests
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Named, OptionError, Options, within
from jaxinfer.papers.aladdin.sizing import (
    MeanRequest,
    MostTokens,
    WorkerCount,
    cheapest_mix,
    fewest,
    fit_workers,
    most_tokens,
)
from jaxinfer.simulate.cluster import fit_instance, model_cluster
from jaxinfer.simulate.targets import Targets, limits

# A part of a run file, and the group of each instance in it.
Part = Mapping[str, Any]
Kinds = Mapping[str, str]


class AladdinPlannerOptions(Options):
    """Options of ``AladdinPlanner``.

    Attributes:
        file: Run file with one worker, or with one worker of each kind to mix. Each worker is an
            instance on its own group; numbers of workers are ignored.
        most: Largest number of workers of each size or kind.
        sizes: Sizes of a worker, in GPUs, each with its step times (``{}``: those of the file). By
            default, the size in the file.
        size: Size to use: that of the paper's equation 6 (``eq6``), or the one that is cheapest
            when simulated (``all``).
        rates: Rates to which the line of equation 7 is fitted, from the smallest number of workers
            at each rate. The goal's rate then gets the number on that line, or the next one that
            meets the targets.
    """

    file: str
    most: int = Field(default=64, ge=1)
    sizes: Named[GroupCosts] = Field(default_factory=dict)
    size: Literal["eq6", "all"] = "eq6"
    rates: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)

    def model_post_init(self, context: object, /) -> None:
        """Refuse sizes that are not numbers of GPUs."""
        for name in self.sizes:
            if not (name.isdecimal() and int(name) > 0):
                raise OptionError(f"sizes.{name}: must be a number of GPUs")


class AladdinPlanner:
    """Finds the fewest workers by trying one size after another, or finds the cheapest mix."""

    Options = AladdinPlannerOptions

    def __init__(self, options: AladdinPlannerOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the cheapest cluster.

        Raises:
            JaxinferError: the goal or the file does not suit this planner, or nothing meets the
                targets.
        """
        goal = problem.goal
        if goal.minimise is None:
            raise JaxinferError("goal: this planner finds the fewest workers, minimise: gpus")
        if goal.requests_per_gpu:
            raise JaxinferError(
                "goal.requests_per_gpu: this planner needs the same requests for all clusters; "
                "give run.workload as many"
            )
        try:
            base = without_requests(read_file(self._options.file), problem.run)
        except JaxinferError as error:
            raise within("planner.file", error) from None
        kinds = _kinds(base, self._options.file)
        if len(kinds) > 1:
            return self._mix(problem, search, base, kinds)
        tried: list[Candidate] = []
        best, limit = None, math.inf
        for size in self._sizes(problem, search, base, kinds):
            most = self._options.most
            if best:
                # It is cheaper than the best.
                most = min(most, math.ceil(limit / size.cost - 1e-9) - 1)
            if most and (found := self._fewest(problem, search, size, most, tried)):
                best, limit = found, search.costs(found).amount(goal.minimise)
        return search.best([best] if best else tried)

    def _sizes(
        self, problem: Problem, search: Search, base: Part, kinds: Kinds
    ) -> list["WorkerSize"]:
        """Return the sizes to try, the best by eq. 6 first."""
        ((instance, group),) = kinds.items()
        found = []
        for number, costs in (self._options.sizes or {"": GroupCosts()}).items():
            part = dict(base)
            if number:
                put_option(part, f"groups.{group}.devices", int(number))
                put_option(part, f"groups.{group}.tensor_parallel_size", int(number))
            for key, value in costs.model_dump(mode="json", exclude_unset=True).items():
                put_option(part, f"simulate.groups.{group}.{key}", value)
            where = f"planner.sizes.{number}" if number else "planner.file"
            found.append(_size(part, instance, group, problem, search, where))
        # The sort is stable: of equal ones, the first comes first.
        found.sort(key=lambda each: -each.most.least)
        return found if self._options.size == "all" else found[:1]

    def _fewest(
        self,
        problem: Problem,
        search: Search,
        size: "WorkerSize",
        most: int,
        tried: list[Candidate],
    ) -> Candidate | None:
        """Return the fewest workers of a size, or those of eq. 7; None if ``most`` are too few."""
        if not self._options.rates:
            count = fewest(lambda n: _keeps(search, size.candidate(n), tried), size.guess, most)
            return size.candidate(count) if count else None
        found = []
        for rate in self._options.rates:
            keeps = partial(_keeps_at, search, size, rate)
            if count := fewest(keeps, size.guess_at(rate), self._options.most):
                found.append((rate, count))
        line = fit_workers(found)
        count = line.workers(problem.goal.rate or 0.0)
        if count > self._options.most:
            raise JaxinferError(
                f"planner.most is {self._options.most}, eq. 7 tells {count} workers"
            )
        candidates = (size.candidate(n, line) for n in range(count, most + 1))
        return next((each for each in candidates if _keeps(search, each, tried)), None)

    def _mix(self, problem: Problem, search: Search, base: Part, kinds: Kinds) -> Candidate:
        if self._options.sizes or self._options.rates:
            given = "sizes" if self._options.sizes else "rates"
            raise OptionError(f"planner.{given}: is for one kind of workers, the file has several")
        sizes = {
            name: _size(
                _with_counts(base, kinds, {name: 1}), name, group, problem, search, "planner.file"
            )
            for name, group in kinds.items()
        }
        # Other workers would be refused, whatever their size, because no iteration is short enough.
        able = {name: size for name, size in sizes.items() if size.rate}
        if not able:
            raise OptionError("planner.file: no worker's iterations keep goal.slo's tpot, by eq. 6")
        tried: list[Candidate] = []
        usd = problem.goal.minimise == "usd"
        prices = {name: size.cost for name, size in able.items()} if usd else {}

        def candidate(counts: Sequence[int]) -> Candidate:
            by_name = dict.fromkeys(kinds, 0) | dict(zip(able, counts, strict=True))
            part = _with_counts(base, kinds, by_name, prices)
            return Candidate(by_name, part, (repr(base), *counts))

        best = cheapest_mix(
            lambda counts: _keeps(search, candidate(counts), tried),
            [size.cost for size in able.values()],
            [size.rate for size in able.values()],
            problem.goal.rate or 0.0,
            self._options.most,
        )
        return search.best([candidate(best)] if best else tried)


class WorkerSize:
    """Workers of one size, or of one kind.

    Args:
        part: part of a run file.
        group: name of the part's group.
        instance: name of the part's instance.

    Attributes:
        gpus: number of GPUs of a worker.
        cost: cost of a worker, in the unit to minimise.
        most: output tokens per second and GPU of such workers, by eq. 6.
        rate: requests per second that a worker can serve, by eq. 6.
    """

    def __init__(
        self, part: Part, instance: str, group: str, problem: Problem, search: Search
    ) -> None:
        self._part, self._group, self._instance = part, group, instance
        self.most = MostTokens(0.0, 0.0)
        costs, goal = search.costs(self.candidate(1)), problem.goal
        self.gpus, self.cost = costs.gpus, costs.amount(goal.minimise or "gpus")
        config = as_run_file(problem.run_file(self.candidate(1).part))
        cluster = model_cluster(model_site(resolve(config)))
        (modelled,) = cluster.instances.values()
        fit = fit_instance(modelled, config.simulate.fit == "relative").decode
        if fit is None:
            raise JaxinferError("eq. 6: max_num_seqs must be 2 or more")
        mean, atgt_s = MeanRequest.of(problem.work), _between_tokens(problem.targets)
        self.most = most_tokens(fit, self.gpus, modelled.num_tokens, mean, atgt_s)
        self.rate = self.gpus * self.most.least / mean.output
        self.guess = self.guess_at(goal.rate or 0.0)

    def guess_at(self, rate: float) -> float:
        """Return how many workers a rate needs, by eq. 6."""
        return math.ceil(rate / self.rate) if self.rate else math.inf

    def candidate(
        self, count: int, line: WorkerCount | None = None, rate: float | None = None
    ) -> Candidate:
        """Return the candidate with this number of workers.

        Args:
            line: eq. 7, if it chose the number.
            rate: requests per second, if not the goal's.
        """
        part = dict(self._part)
        put_option(part, f"groups.{self._group}.replicas", count)
        put_option(part, f"instances.{self._instance}.replicas", count)
        axes: dict[str, Axis] = {"workers": count}
        if self.most.least:
            axes = {"gpus_per_worker": self.gpus} | axes
            axes["eq6_by_memory"] = round(self.most.by_memory, 1)
            axes["eq6_by_target"] = round(self.most.by_target, 1)
        if line:
            axes["eq7_per_rate"] = round(line.per_rate, 4)
            axes["eq7_constant"] = round(line.constant, 3)
        return Candidate(axes, part, (repr(self._part), count, rate))


def _size(
    part: Part, instance: str, group: str, problem: Problem, search: Search, where: str
) -> WorkerSize:
    try:
        return WorkerSize(part, instance, group, problem, search)
    except JaxinferError as error:
        raise OptionError(f"{where}: {error}") from None


def _keeps(
    search: Search, candidate: Candidate, tried: list[Candidate], rate: float | None = None
) -> bool:
    tried.append(candidate)
    (score,) = search.scores([candidate], rate)
    if score.refused:
        raise JaxinferError(f"{candidate}: {score.refused}")
    return bool(score.rate) and not score.given_up


def _keeps_at(search: Search, size: WorkerSize, rate: float, count: int) -> bool:
    return _keeps(search, size.candidate(count, rate=rate), [], rate)


def _kinds(base: Mapping[str, Any], path: str) -> dict[str, str]:
    """Return the workers' instances, and the group of each."""
    groups, instances = base.get("groups") or {}, base.get("instances") or {}
    found = {
        str(name): str(each.get("group")) if isinstance(each, dict) else str(each)
        for name, each in (instances.items() if isinstance(instances, dict) else ())
    }
    if not found or sorted(found.values()) != sorted(map(str, groups)):
        raise OptionError(
            f"planner.file: {path} has {len(instances)} instances and {len(groups)} groups, must "
            "have one group for each instance, a worker"
        )
    return found


def _with_counts(
    base: Mapping[str, Any],
    kinds: Mapping[str, str],
    counts: Mapping[str, int],
    prices: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return a run file's part with these numbers of workers, without kinds that have none.

    Args:
        prices: prices of a worker of each kind, for a system that uses dollars.
    """
    part, simulate = dict(base), dict(base.get("simulate") or {})
    part["instances"], part["groups"] = dict(base["instances"]), dict(base["groups"])
    if "groups" in simulate:
        part["simulate"] = simulate | {"groups": dict(simulate["groups"])}
    system = base.get("system")
    dollars = isinstance(system, Mapping) and system.get("name") == "aladdin"
    for name, group in kinds.items():
        count = counts.get(name, 0)
        if not count:
            del part["instances"][name], part["groups"][group]
            part.get("simulate", {}).get("groups", {}).pop(group, None)
            if isinstance(system, Mapping) and name in (system.get("usd_per_hour") or {}):
                left = {k: v for k, v in part["system"]["usd_per_hour"].items() if k != name}
                part["system"] = part["system"] | {"usd_per_hour": left}
            continue
        put_option(part, f"groups.{group}.replicas", count)
        put_option(part, f"instances.{name}.replicas", count)
        if dollars and prices:
            put_option(part, f"system.usd_per_hour.{name}", prices[name])
    return part


def _between_tokens(targets: Targets) -> float:
    """Return the target of the mean time between tokens, in seconds."""
    found = [limit.seconds for limit in limits(targets) if limit.metric == "tpot"]
    if not found:
        raise JaxinferError("goal.slo: eq. 6 needs tpot, in seconds: ttft=0.4,tpot=0.015")
    return min(found)
