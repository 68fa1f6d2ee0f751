"""What one candidate comes to, found by simulation in one process."""

import math
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.plan.candidate import Costs, GivenUp, Score
from jaxinfer.plan.limits import limits
from jaxinfer.plan.problem import Goal
from jaxinfer.simulate.capacity import AnyRateError, TriedRate, capacity, load, requests_for
from jaxinfer.simulate.hardware import sum_known
from jaxinfer.simulate.targets import Targets
from jaxinfer.workload.lengths import BenchRequest


class Asked(NamedTuple):
    """What is asked about a candidate.

    Attributes:
        data: what its run file holds.
        floor: a rate that it has to carry to be of interest, if it has to.
        seeds: of the arrivals.
        outputs, uncounted: see ``Candidate``.
        start: a rate to begin with (see ``capacity``); it changes nothing in the answer where
            whoever carries a rate carries all lower ones.
    """

    data: Mapping[str, object]
    floor: float | None
    seeds: tuple[int, ...]
    outputs: int | None = None
    uncounted: tuple[str, ...] = ()
    start: float | None = None


@dataclass(frozen=True)
class Evaluator:
    """Scores run files for a goal; goes to other processes, which unpack its requests once."""

    goal: Goal
    work: Sequence[BenchRequest]
    targets: Targets
    prices: Mapping[str, float]

    @cached_property
    def _packed(self) -> bytes:
        return pickle.dumps((self.goal, self.work, self.targets, self.prices))

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle: packed once, whatever is asked."""
        return _unpacked, (self._packed,)

    def costs(self, data: Mapping[str, object], uncounted: Collection[str] = ()) -> Costs:
        """Of a run file, but for some groups.

        Raises:
            JaxinferError: it is none, its parts do not fit together, or it has GPUs without a
                price where dollars count.
        """
        site = resolve(as_run_file(data))
        groups = {n: group for n, group in site.groups.items() if n not in uncounted}
        counts = {name: group.devices for name, group in groups.items()}
        names = {name: str(group.kind) for name, group in groups.items()}
        if self.prices:
            missing = set(names.values()) - set(self.prices)
            if missing and "usd" in (self.goal.maximise, self.goal.minimise):
                raise JaxinferError(f"prices: none of {min(missing)}, the list has others")
            usd = (
                None if missing
                else sum(self.prices[names[name]] * count for name, count in counts.items())
            )  # fmt: skip
        else:
            usd = site.placement.usd_per_hour if site.placement else None
        watts = (
            site.placement.watts
            if site.placement
            else sum_known(site.gpus[n].watts for n, count in counts.items() for _ in range(count))
        )
        return Costs(sum(counts.values()), watts, usd)

    def __call__(self, asked: Asked) -> Score:
        """The score of a run file."""
        try:
            costs = self.costs(asked.data, asked.uncounted)
            return self._score(as_run_file(asked.data), costs, asked)
        except JaxinferError as error:
            return Score(0.0, refused=str(error))

    def _score(self, config: RunFile, costs: Costs, asked: Asked) -> Score:
        work, seeds = self._work(costs, asked.outputs), asked.seeds
        met = None
        if asked.floor is not None:
            met = load(config, work, self.targets, seeds, asked.floor)
            if not met.verdict.met or self.goal.minimise:
                return _score(met, costs, None if met.verdict.met else "at this rate")
        try:
            found = capacity(
                config, work, self.targets, seeds, self.goal.precision, met=met, start=asked.start
            )
        except AnyRateError:
            return Score(math.inf, costs)
        return _score(found, costs)

    def _work(self, costs: Costs, outputs: int | None) -> Sequence[BenchRequest]:
        work = self.work
        if self.goal.requests_per_gpu:
            work = requests_for(costs.gpus, work, self.goal.requests_per_gpu)
        if outputs is None:
            return work
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
        return [replace(item, max_tokens=min(item.max_tokens, outputs)) for item in work]


@lru_cache(maxsize=2)
def _unpacked(packed: bytes) -> Evaluator:
    return Evaluator(*pickle.loads(packed))


def _score(tried: TriedRate, costs: Costs, given_up: GivenUp | None = None) -> Score:
    return Score(tried.rate, costs, given_up, dict(tried.verdict.figures))
