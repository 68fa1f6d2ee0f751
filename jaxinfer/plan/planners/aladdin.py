"""How many workers keep the targets at a rate, and of how many GPUs each (Aladdin, sections 4, 5).

Eq. 6 chooses a worker's size from its fitted step times, and says about how many to begin with; the
fewest are found by simulation: exact where one worker more never does harm.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from pydantic import Field

from jaxinfer.config.costs import GroupCosts
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file, put_option
from jaxinfer.config.validation import Named, OptionError, Options, within
from jaxinfer.errors import JaxinferError
from jaxinfer.plan.candidate import Axis, Candidate, Search
from jaxinfer.plan.limits import limits
from jaxinfer.plan.planners.any_system import read_part
from jaxinfer.plan.workers import MeanRequest, MostTokens, fewest, most_tokens
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.targets import Targets


class AladdinOptions(Options):
    """Options of ``Aladdin``.

    Attributes:
        file: path of a run file with one instance on one group, a worker; how many there are does
            not count.
        most: workers of each size, at most.
        sizes: GPUs of a worker that are looked at, and its costs (see ``GroupCosts``, {} for those
            of the file); by default as many as the file has.
        size: which of these: the one that eq. 6 chooses, or, by simulation, the one with the fewest
            GPUs in all.
    """

    file: str
    most: int = Field(default=64, ge=1)
    sizes: Named[GroupCosts] = Field(default_factory=dict)
    size: Literal["eq6", "all"] = "eq6"

    def model_post_init(self, context: object, /) -> None:
        """Refuse sizes that are none."""
        for name in self.sizes:
            if not (name.isdecimal() and int(name) > 0):
                raise OptionError(f"sizes.{name}: must be a number of GPUs")


class Aladdin:
    """Looks for the fewest workers, of one size after the other."""

    Options = AladdinOptions

    def __init__(self, options: AladdinOptions) -> None:
        self._options = options

    def plan(self, search: Search) -> Candidate:
        """The cluster with the fewest GPUs.

        Raises:
            JaxinferError: the goal or the file is another one, or nothing keeps the targets.
        """
        goal = search.problem.goal
        if goal.minimise != "gpus":
            raise JaxinferError("goal: this planner finds the fewest workers, minimise: gpus")
        if goal.requests_per_gpu:
            raise JaxinferError(
                "goal.requests_per_gpu: this planner needs the same requests for all clusters; "
                "give run.workload as many"
            )
        sizes = self._sizes(search)
        sizes.sort(key=lambda each: -each.most.least)  # Stable: of equal ones the first.
        chosen = sizes if self._options.size == "all" else sizes[:1]
        best: Candidate | None = None
        tried: list[Candidate] = []
        limit = 0
        for size in chosen:
            most = self._options.most
            if best:
                most = min(most, (limit - 1) // size.gpus)  # Fewer GPUs than the best.
            keeps = partial(_keeps, search, size, tried)
            if most and (count := fewest(keeps, size.guess, most)):
                limit, best = count * size.gpus, size.candidate(count)
        return search.best([best] if best else tried)

    def _sizes(self, search: Search) -> list["Size"]:
        path, given = self._options.file, self._options.sizes
        try:
            base = read_part(path)
        except JaxinferError as error:
            raise within("planner.file", error) from None
        group, name = _only(base, "groups", path), _only(base, "instances", path)
        mean = MeanRequest.of(search.problem.work)
        atgt_s = _between_tokens(search.problem.targets)
        found = []
        for number, costs in (given or {"": GroupCosts()}).items():
            part = dict(base)
            if number:
                put_option(part, f"groups.{group}.devices", int(number))
                put_option(part, f"groups.{group}.tensor_parallel_size", int(number))
            for key, value in costs.model_dump(mode="json", exclude_unset=True).items():
                put_option(part, f"simulate.groups.{group}.{key}", value)
            try:
                found.append(Size(part, group, name, search, mean, atgt_s))
            except JaxinferError as error:
                where = f"planner.sizes.{number}" if number else "planner.file"
                raise OptionError(f"{where}: {error}") from None
        return found


class Size:
    """Workers of one size.

    Args:
        part: of a run file; ``group``, ``instance``: the names in it.
        atgt_s: the target between tokens, in seconds.

    Attributes:
        gpus: of a worker.
        most: its output tokens per second and GPU, by eq. 6.
        guess: workers that carry the goal's rate by it.
    """

    def __init__(
        self,
        part: Mapping[str, Any],
        group: str,
        instance: str,
        search: Search,
        mean: MeanRequest,
        atgt_s: float,
    ) -> None:
        self._part, self._group, self._instance = part, group, instance
        self.most = MostTokens(0.0, 0.0)
        self.gpus = search.costs(self.candidate(1)).gpus
        config = as_run_file(search.problem.run_file(self.candidate(1).part))
        cluster = model_cluster(resolve(config))
        ((name, modelled),) = cluster.instances.items()
        fit = cluster.fit(name, config.simulate.fit == "relative").decode
        if fit is None:
            raise JaxinferError("eq. 6: max_num_seqs must be 2 or more")
        room = modelled.num_tokens
        self.most = most_tokens(fit, self.gpus, room, mean, atgt_s)
        rate = search.problem.goal.rate or 0.0
        each = self.gpus * self.most.least
        self.guess = math.ceil(rate * mean.output / each) if each else math.inf

    def candidate(self, count: int) -> Candidate:
        """So many workers."""
        part = dict(self._part)
        put_option(part, f"groups.{self._group}.replicas", count)
        put_option(part, f"instances.{self._instance}.replicas", count)
        axes: dict[str, Axis] = {"workers": count}
        if self.most.least:
            axes = {"gpus_per_worker": self.gpus} | axes
            axes["eq6_by_memory"] = round(self.most.by_memory, 1)
            axes["eq6_by_target"] = round(self.most.by_target, 1)
        return Candidate(axes, part, (repr(self._part), count))


def _keeps(search: Search, size: Size, tried: list[Candidate], count: int) -> bool:
    candidate = size.candidate(count)
    tried.append(candidate)
    (score,) = search.scores([candidate])
    if score.refused:
        raise JaxinferError(f"{candidate}: {score.refused}")
    return bool(score.rate) and not score.given_up


def _only(base: Mapping[str, Any], section: str, path: str) -> str:
    """The name of the one thing in a section."""
    names = list(base.get(section) or {})
    if len(names) != 1:
        raise OptionError(
            f"planner.file: {path} has {len(names)} {section}, must have one worker's"
        )
    return str(names[0])


def _between_tokens(targets: Targets) -> float:
    """The target of the mean time between tokens, in seconds."""
    found = [limit.seconds for limit in limits(targets) if limit.metric == "tpot"]
    if not found:
        raise JaxinferError("goal.slo: eq. 6 needs tpot, in seconds: ttft=0.4,tpot=0.015")
    return min(found)
