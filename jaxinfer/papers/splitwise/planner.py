"""Chooses numbers and kinds of machines for prompts and for tokens (Splitwise, section IV-D).

The paper simulates a grid of both numbers. Here a search walks along the edge of the region that
meets the targets, or that a budget allows. The result is exact if an additional machine never does
harm.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from jaxinfer.config.run_file import put_option
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Candidate, Search
from jaxinfer.lab.plan.file_parts import without_requests
from jaxinfer.lab.plan.planners.any_system import named_files
from jaxinfer.lab.plan.problem import Cost, Problem
from jaxinfer.options.validation import Named, OptionError, Options

POOLS = ("prompt", "token")
# Sums of dollars or watts that differ by less count as equal.
ROUNDING = 1e-9


class Most(Options):
    """Largest numbers of machines in a design.

    Attributes:
        prompt: Replicas of the instance of this name, each with its own group.
        token: Replicas of the instance of this name; without ``token``, the cluster has one pool.
    """

    prompt: int = Field(ge=1)
    token: int = Field(default=0, ge=0)


class MachineBudget(Options):
    """Limits on the cost of a cluster: GPUs, dollars per hour, watts."""

    gpus: int | None = Field(default=None, ge=1)
    usd: float | None = Field(default=None, gt=0)
    watts: float | None = Field(default=None, gt=0)

    @property
    def limits(self) -> dict[Cost, float]:
        """The limits that are given, by kind of cost."""
        costs: tuple[Cost, ...] = ("gpus", "usd", "watts")
        return {of: limit for of in costs if (limit := getattr(self, of)) is not None}


class SplitwisePoolsOptions(Options):
    """Options of ``SplitwisePools``.

    Attributes:
        files: One run file per design, each with the largest numbers of ``prompt`` and ``token``
            machines to try. If ``run`` has no model or requests, those of the files are used and
            must be equal; numbers of replicas in the files are ignored.
        at_most: Limits on a cluster's ``gpus``, ``usd`` per hour or ``watts``; required with
            ``maximise``.
        step: Difference between successive numbers of token machines to try.
    """

    files: Named[Most] = Field(min_length=1)
    at_most: MachineBudget = MachineBudget()
    step: int = Field(default=1, ge=1)


class Design:
    """A design: given kinds of machines, in varying numbers.

    Args:
        name: name in the table.
        base: part of the run file.
        of: costs that will be needed.

    Raises:
        JaxinferError: the run file has other pools, or cannot have this number of machines.
    """

    def __init__(
        self, name: str, base: Mapping[str, Any], most: Most, search: Search, of: Sequence[Cost]
    ) -> None:
        self.most, self._name, self._base = most, name, base
        self._groups = {pool: _group(base, pool) for pool in POOLS}
        for pool, group in self._groups.items():
            if bool(getattr(most, pool)) != bool(group):
                has = f"has instances.{pool}" if group else f"needs instances.{pool}, with a group"
                raise OptionError(f"{pool} is {getattr(most, pool)}, and the file {has}")
        largest = [most.prompt, most.token]
        whole = search.costs(self.candidate(*largest))
        self._whole = {each: whole.amount(each) for each in of}
        # For each cost, what a machine of each pool adds; 0 for a pool of at most one machine.
        self._each = {each: [0.0, 0.0] for each in of}
        for number, count in enumerate(largest):
            if count > 1:
                fewer = list(largest)
                fewer[number] -= 1
                rest = search.costs(self.candidate(*fewer))
                for each in of:
                    self._each[each][number] = self._whole[each] - rest.amount(each)
        least = min(most.prompt, 1), min(most.token, 1)
        found = search.costs(self.candidate(*least))
        for each in of:
            if not math.isclose(found.amount(each), self.cost(each, *least), rel_tol=1e-6):
                raise JaxinferError(
                    f"{each} are {found.amount(each):g} of the smallest cluster, and would be "
                    f"{self.cost(each, *least):g} by what a machine adds to the largest: machines "
                    "must not share nodes, and those of a pool must cost the same"
                )

    def candidate(self, prompts: int, tokens: int) -> Candidate:
        """Return the candidate with these numbers of machines."""
        part = dict(self._base)
        for pool, count in zip(POOLS, (prompts, tokens), strict=True):
            if count:
                put_option(part, f"groups.{self._groups[pool]}.replicas", count)
                put_option(part, f"instances.{pool}.replicas", count)
        return Candidate({"design": self._name, "prompt": prompts, "token": tokens}, part)

    def cost(self, of: Cost, prompts: int, tokens: int) -> float:
        """Return the cost of these numbers of machines."""
        prompt, token = self._each[of]
        fewer = (self.most.prompt - prompts) * prompt + (self.most.token - tokens) * token
        return self._whole[of] - fewer


def _group(base: Mapping[str, Any], pool: str) -> str | None:
    instances = base.get("instances")
    instance = instances.get(pool) if isinstance(instances, Mapping) else None
    group = instance.get("group") if isinstance(instance, Mapping) else None
    return group if isinstance(group, str) else None


@dataclass(frozen=True)
class DesignRow:
    """A design with a fixed number of token machines and a varying number of prompt machines."""

    design: Design
    tokens: int

    def most(self, limits: Mapping[Cost, float]) -> int:
        """Return how many prompt machines the limits allow; 0 if they allow none."""
        counts = range(self.design.most.prompt, 0, -1)
        return next((count for count in counts if self._fits(count, limits)), 0)

    def _fits(self, prompts: int, limits: Mapping[Cost, float]) -> bool:
        return all(
            self.design.cost(of, prompts, self.tokens) <= limit * (1 + ROUNDING)
            for of, limit in limits.items()
        )


class SplitwisePools:
    """Finds the largest rate within a budget, or the cheapest cluster for a rate."""

    Options = SplitwisePoolsOptions

    def __init__(self, options: SplitwisePoolsOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best cluster.

        Raises:
            JaxinferError: the goal does not suit this planner, a design is invalid, or nothing
                meets the targets.
        """
        goal, limits = problem.goal, self._options.at_most.limits
        if goal.maximise not in (None, "cluster"):
            raise JaxinferError(
                f"goal.maximise is {goal.maximise}: this planner finds the largest rate of a "
                "budget, with cluster and planner.at_most, or the cheapest cluster, by minimise"
            )
        if goal.minimise and goal.requests_per_gpu:
            raise JaxinferError(
                "goal.requests_per_gpu: this planner needs the same requests for all clusters; "
                "give run.workload as many"
            )
        if goal.maximise and not limits:
            raise JaxinferError("planner.at_most: give gpus, usd or watts that a cluster may cost")
        rows = list(
            self._rows(problem, search, [*limits, *([goal.minimise] if goal.minimise else [])])
        )
        if not any(row.most(limits) for row in rows):
            raise JaxinferError("planner.at_most: no cluster of any design costs so little")
        if goal.minimise:
            return Staircase(search, goal.minimise, limits, goal.at_once).walk(rows)
        return search.best(_largest(rows, limits))

    def _rows(self, problem: Problem, search: Search, of: Sequence[Cost]) -> Iterator[DesignRow]:
        for file, name, data in named_files(self._options.files, "planner.files"):
            base = without_requests(data, problem.run)
            most = self._options.files[file]
            try:
                design = Design(name, base, most, search, of)
            except JaxinferError as error:
                raise OptionError(f"planner.files: {file}: {error}") from None
            if 0 < most.token < self._options.step:
                raise OptionError(
                    f"planner.step is {self._options.step}, above the {most.token} machines for "
                    f"tokens of {file}"
                )
            counts = range(self._options.step, most.token + 1, self._options.step)
            yield from (DesignRow(design, tokens) for tokens in (counts if most.token else [0]))


def _largest(rows: Sequence[DesignRow], limits: Mapping[Cost, float]) -> list[Candidate]:
    """Return clusters to which the limits allow no more machines, those with even pools first."""
    found: dict[tuple[Design, int], DesignRow] = {}
    for row in rows:
        if prompts := row.most(limits):
            found[row.design, prompts] = row  # Of equal numbers for prompts, the last has the most.
    even = sorted(found.items(), key=lambda each: abs(each[0][1] - each[1].tokens))
    return [row.design.candidate(prompts, row.tokens) for (_, prompts), row in even]


class Staircase:
    """Finds the cheapest cluster that meets the targets at the goal's rate.

    A row is tried with as many prompt machines as are cheaper than the best so far. If these miss
    the targets, so do fewer, and the row is done after one simulation; otherwise, bisection finds
    the smallest number.

    Args:
        of: cost to minimise.
        limits: limits on other costs.
        at_once: number of rows that are tried at a time.
    """

    def __init__(
        self, search: Search, of: Cost, limits: Mapping[Cost, float], at_once: int
    ) -> None:
        self._search, self._of, self._limits, self._at_once = search, of, limits, at_once
        self._tried: list[Candidate] = []
        self._best: Candidate | None = None
        self._least = math.inf

    def walk(self, rows: Sequence[DesignRow]) -> Candidate:
        """Return the best cluster of all rows; once one is found, several rows are tried at a time.

        Raises:
            JaxinferError: nothing meets the targets.
        """
        left = list(rows)
        while left:
            count = self._at_once if self._best else 1
            wave = [(row, most) for row in left[:count] if (most := self._cheaper(row))]
            left = left[count:]
            kept = self._keep([row.design.candidate(most, row.tokens) for row, most in wave])
            for (row, most), met in zip(wave, kept, strict=True):
                if met:
                    self._narrow(row, most)
        return self._best or self._search.best(self._tried)

    def _cheaper(self, row: DesignRow) -> int:
        """Return the largest number of prompt machines with which a row beats the best so far."""
        limit = min(self._limits.get(self._of, math.inf), self._least * (1 - 2 * ROUNDING))
        return row.most({**self._limits, self._of: limit})

    def _keep(self, candidates: list[Candidate]) -> list[bool]:
        self._tried += candidates
        scores = self._search.scores(candidates)
        return [bool(score.rate) and not score.given_up for score in scores]

    def _narrow(self, row: DesignRow, high: int) -> None:
        """Reduce a number of prompt machines that meets the targets to the smallest that does."""
        cheaper = self._cheaper(row)
        if cheaper < high:  # Another row of the wave is the best by now.
            if not cheaper or self._keep([row.design.candidate(cheaper, row.tokens)]) != [True]:
                return
            high = cheaper
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if self._keep([row.design.candidate(middle, row.tokens)]) == [True]:
                high = middle
            else:
                low = middle
        # The result is known: the driver needs the best so far.
        self._best = self._search.best([row.design.candidate(high, row.tokens)])
        self._least = row.design.cost(self._of, high, row.tokens)
