"""Evaluates a candidate by searching for its rate, with simulations in other processes."""

import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_groups
from jaxinfer.config.site_values import total_watts
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Costs, GivenUp, Score
from jaxinfer.lab.plan.problem import Goal
from jaxinfer.simulate.capacity import (
    AnyRateError,
    TriedRate,
    alone,
    capacity,
    load,
    num_gpus,
    requests_for,
)
from jaxinfer.simulate.targets import Targets, limits
from jaxinfer.workload.lengths import BenchRequest


class Question(NamedTuple):
    """A question about a candidate: the rate that it can serve.

    Attributes:
        data: contents of the candidate's run file.
        floor: rate that the candidate must reach to be of interest, if any.
        seeds: seeds of the arrivals.
        outputs, uncounted: see ``Candidate``.
        start: first rate to try (see ``capacity``).
    """

    data: Mapping[str, object]
    floor: float | None
    seeds: tuple[int, ...]
    outputs: int | None = None
    uncounted: tuple[str, ...] = ()
    start: float | None = None


class Simulation(NamedTuple):
    """A simulation to run.

    Attributes:
        data, seeds, outputs: see ``Question``.
        rate: requests per second; 0 for a sample of requests, served one at a time (see ``alone``).
        requests: number of the workload's requests to use; None for all.
    """

    data: Mapping[str, object]
    seeds: tuple[int, ...]
    rate: float
    outputs: int | None
    requests: int | None


# The result of a simulation, or the reason why there is none.
Simulate = Callable[[Simulation], TriedRate]


@dataclass(frozen=True)
class Evaluator:
    """Simulates run files in other processes, each of which unpickles the requests once."""

    goal: Goal
    work: Sequence[BenchRequest]
    targets: Targets
    prices: Mapping[str, float]

    @cached_property
    def _packed(self) -> bytes:
        return pickle.dumps((self.goal, self.work, self.targets, self.prices))

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickle needs, packed only once."""
        return _unpacked, (self._packed,)

    def costs(self, data: Mapping[str, object], uncounted: Collection[str] = ()) -> Costs:
        """Return the costs of a run file's cluster, without those of groups in ``uncounted``.

        Raises:
            JaxinferError: the run file is invalid, or has GPUs without a price although dollars
                count.
        """
        placement, there = model_groups(resolve(as_run_file(data)))
        groups = [group for name, group in there.items() if name not in uncounted]
        if self.prices:
            missing = {group.kind for group in groups} - set(self.prices)
            if missing and "usd" in (self.goal.maximise, self.goal.minimise):
                raise JaxinferError(f"prices: none of {min(missing)}, the list has others")
            usd = None
            if not missing:
                usd = sum(self.prices[group.kind] * group.own_devices for group in groups)
        else:
            usd = placement.usd_per_hour if placement else None
        gpus = sum(group.own_devices for group in groups)
        return Costs(gpus, total_watts(placement, groups), usd)

    def __call__(self, asked: Simulation) -> TriedRate | str:
        """Simulate at one rate; return the result, or the reason why it is impossible."""
        try:
            config, work = as_run_file(asked.data), self._work(asked.requests, asked.outputs)
            if asked.rate:
                return load(config, work, self.targets, asked.seeds, asked.rate)
            return TriedRate(0.0, num_gpus(config), alone(config, work, self.targets), None)
        except JaxinferError as error:
            return str(error)

    def score(self, asked: Question, simulate: Simulate) -> Score:
        """Return the score of a run file, after one simulation or several in turn."""
        try:
            costs = self.costs(asked.data, asked.uncounted)
            return self._score(asked, costs, simulate)
        except JaxinferError as error:
            return Score(0.0, refused=str(error))

    def _score(self, asked: Question, costs: Costs, simulate: Simulate) -> Score:
        each = self.goal.requests_per_gpu
        count = len(requests_for(costs.gpus, self.work, each)) if each else None
        self._check_phases(asked.outputs)

        def at(rate: float) -> TriedRate:
            return simulate(Simulation(asked.data, asked.seeds, rate, asked.outputs, count))

        met = None
        if asked.floor is not None:
            met = at(asked.floor)
            if not met.verdict.met or self.goal.minimise:
                return _score(met, costs, None if met.verdict.met else "at this rate")
        try:
            found = capacity(
                as_run_file(asked.data),
                self.work,
                self.targets,
                asked.seeds,
                self.goal.precision,
                map_rates=lambda call, rates: map(at, rates),
                met=met,
                start=asked.start,
                met_alone=lambda: at(0.0).verdict.met,
            )
        except AnyRateError as error:
            return Score(math.inf, costs, enough=error.enough)
        return _score(found, costs)

    def _work(self, count: int | None, outputs: int | None) -> Sequence[BenchRequest]:
        work = self.work if count is None else self.work[:count]
        if outputs is None:
            return work
        return [replace(item, max_tokens=min(item.max_tokens, outputs)) for item in work]

    def _check_phases(self, outputs: int | None) -> None:
        """Refuse targets of whole requests if only one phase is simulated."""
        if outputs is None:
            return
        if self.targets.reference:
            raise JaxinferError(
                "goal.slo: is in multiples of what whole requests take alone, and phases are asked "
                "for: give seconds"
            )
        if any(limit.metric == "normalised" for limit in limits(self.targets)):
            raise JaxinferError(
                "goal.slo: normalised is over a whole request, and phases are asked for: give ttft "
                "and tpot"
            )


@lru_cache(maxsize=2)
def _unpacked(packed: bytes) -> Evaluator:
    return Evaluator(*pickle.loads(packed))


def _score(tried: TriedRate, costs: Costs, given_up: GivenUp | None = None) -> Score:
    return Score(tried.rate, costs, given_up, dict(tried.verdict.figures), enough=tried.enough)
