"""The one driver of all planners: what is simulated when, on which cores, and what is kept."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple, Protocol

from jaxinfer.errors import JaxinferError
from jaxinfer.plan.candidate import Bound, Candidate, Costs, Guess, Score, as_score
from jaxinfer.plan.evaluate import Asked, Evaluator
from jaxinfer.plan.kept import Kept, contents, key_of
from jaxinfer.plan.nameless import nameless
from jaxinfer.plan.problem import Cost, Per, Problem
from jaxinfer.simulate.capacity import Ladder
from jaxinfer.simulate.targets import PercentileTargets, RequestTargets

# What a maximised rate is divided by.
DIVIDED_BY: Mapping[Per, Cost | None] = {
    "cluster": None,
    "gpu": "gpus",
    "usd": "usd",
    "watt": "watts",
}


class _Known(NamedTuple):
    """A candidate that can be, and what is known of it without simulation.

    Attributes:
        bound, guess: in requests per second.
    """

    candidate: Candidate
    costs: Costs
    bound: float
    guess: float | None

    @property
    def promise(self) -> float:
        """By which it comes sooner or later."""
        return self.bound if self.guess is None else min(self.guess, self.bound)

    @property
    def start(self) -> float | None:
        """Where its search begins."""
        return None if math.isinf(self.promise) else self.promise


def _in_full(score: Score) -> bool:
    """Whether it is the largest rate that there is, and one."""
    return not score.refused and not score.given_up and 0 < score.rate < math.inf


class Map(Protocol):
    """``map``, or a pool's."""

    def __call__(self, call: Evaluator, asked: Iterable[Asked], /) -> Iterator[Score]:
        """What each comes to, in their order."""


class DrivenSearch:
    """Simulates candidates for planners; see ``Search``.

    The order and the outcome of all that is done depend on the problem alone: neither on how many
    cores there are nor on which of them is first.

    Args:
        map_scores: runs an evaluator over several, as a pool of processes would.
        kept: where scores are kept; what is there already is not simulated again.
        on_score: called with each candidate that was looked at, what it has come to, and the best
            one so far.

    Attributes:
        tried: each candidate that was looked at, in that order, and its latest score.
    """

    def __init__(
        self,
        problem: Problem,
        map_scores: Map = map,
        kept: Kept | None = None,
        on_score: Callable[[Candidate, Score, Candidate | None], None] = lambda *args: None,
        prune: bool = True,
    ) -> None:
        self.problem = problem
        self.tried: dict[tuple[object, ...], tuple[Candidate, Score]] = {}
        goal = problem.goal
        self.evaluator = Evaluator(goal, problem.work, problem.targets, problem.prices)
        self._map, self._on_score, self._prune = map_scores, on_score, prune
        self._kept = kept or Kept()
        self._best: Candidate | None = None
        # With targets, of which a file may have another reference than before.
        self._digest = key_of(
            repr([goal.model_dump(), problem.prices, problem.work, problem.targets])
        )

    # What planners ask.

    def scores(self, candidates: list[Candidate], rate: float | None = None) -> list[Score]:
        """What each comes to, in full; those of equal keys are looked at once.

        Args:
            rate: that a cluster is to carry, in place of the goal's; its key is to tell the two
                apart.
        """
        floor = self.problem.goal.rate if rate is None else rate
        found = {key: score for key, (_, score) in self.tried.items() if _in_full(score)}
        for wave in self._waves([c for c in candidates if c.key not in found]):
            looked = self._look_at([(candidate, floor, None) for candidate in wave])
            for candidate, score in zip(wave, looked, strict=True):
                self._keep(candidate, score)
                found[candidate.key] = score
        return [found[candidate.key] for candidate in candidates]

    def best(
        self,
        candidates: list[Candidate],
        bound: Bound = lambda candidate: math.inf,
        guess: Guess | None = None,
    ) -> Candidate:
        """The best, with as little work as that takes.

        Those of the best guesses, or else bounds, come first. Each has to be better than the best
        (of ``goal.top``, the last of so many) of the waves before; one that is not, at the rate
        that this takes, is given up. Of equals the first wins.

        Raises:
            JaxinferError: none keeps the targets, none can be, or one keeps them at any rate.
        """
        distinct, top = self._distinct(candidates), self.problem.goal.top
        limits = [known for c in distinct if (known := self._known(c, bound, guess))]
        limits.sort(key=lambda each: -self._value(each.promise, each.costs))
        # The best so far, and what they are worth.
        best: list[tuple[float, Candidate]] = []
        while limits:
            least = best[top - 1][0] if len(best) >= top and self._prune else None
            wave: list[tuple[_Known, float | None]] = []
            while limits and len(wave) < self.problem.goal.at_once:
                known = limits.pop(0)
                floor = self._floor(least, known.costs)
                if self._prune and self._is_out(known.bound, known.costs, floor, least):
                    self._keep(known.candidate, Score(0.0, known.costs, "by its bound"))
                else:
                    wave.append((known, floor))
            looked = self._look_at([(known.candidate, floor, known.start) for known, floor in wave])
            endless: Candidate | None = None
            for (known, _), score in zip(wave, looked, strict=True):
                candidate = known.candidate
                if math.isinf(score.rate):
                    endless = endless or candidate
                elif score.rate and not score.given_up:
                    best.append((self._value(score.rate, known.costs), candidate))
                    best = sorted(best, key=lambda each: -each[0])[:top]
                    self._best = best[0][1]
                self._keep(candidate, score)
            if endless:
                raise JaxinferError(
                    f"the targets hold at any rate of {endless}: give more requests, or "
                    "tighter targets, to tell candidates apart"
                )
        if not best:
            raise JaxinferError(self._nothing([self.tried[c.key] for c in distinct]))
        return best[0][1]

    def costs(self, candidate: Candidate) -> Costs:
        """See ``Search``."""
        return self.evaluator.costs(self.problem.run_file(candidate.part), candidate.uncounted)

    def fresh_rates(self, candidate: Candidate) -> list[float]:
        """The largest rates of a candidate with seeds that the search has not had, one each.

        None where its targets hold at any rate with one of them.
        """
        goal = self.problem.goal
        seeds = range(goal.seeds, goal.seeds + goal.fresh_seeds)
        score = self.tried[candidate.key][1] if candidate.key in self.tried else None
        start = score.rate if score and _in_full(score) else None
        asked = [self._asked(candidate, (seed,), None, start) for seed in seeds]
        scores = list(self._ask(asked))
        told = all(not s.refused and math.isfinite(s.rate) for s in scores)
        return [score.rate for score in scores] if told else []

    def value(self, score: Score) -> float:
        """How good: larger is better."""
        assert score.costs
        return self._value(score.rate, score.costs)

    # How.

    def _value(self, rate: float, costs: Costs) -> float:
        goal = self.problem.goal
        if goal.minimise:
            return -costs.amount(goal.minimise)
        per = DIVIDED_BY[goal.maximise or "cluster"]
        return rate / costs.amount(per) if per else rate

    def _is_out(self, rate: float, costs: Costs, floor: float | None, least: float | None) -> bool:
        """Whether a candidate of which this rate is the bound needs no simulation."""
        if floor is not None and rate < floor:
            return True
        return least is not None and self._value(rate, costs) <= least

    def _floor(self, least: float | None, costs: Costs) -> float | None:
        """The lowest rate at which a cluster of these costs is better than the best."""
        goal = self.problem.goal
        if goal.minimise or least is None:
            return goal.rate
        ladder = Ladder(goal.precision)
        return ladder.rate(ladder.above(least / self._value(1.0, costs)))

    def _known(self, candidate: Candidate, bound: Bound, guess: Guess | None) -> "_Known | None":
        """What is known of one that can be."""
        try:
            if candidate.refused:
                raise JaxinferError(candidate.refused)
            costs = self.costs(candidate)
            guessed = guess(candidate) if guess else None
        except JaxinferError as error:
            self._keep(candidate, Score(0.0, refused=str(error)))
            return None
        return _Known(candidate, costs, bound(candidate), guessed)

    def _distinct(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return list({candidate.key: candidate for candidate in candidates}.values())

    def _waves(self, candidates: list[Candidate]) -> Iterator[list[Candidate]]:
        distinct = self._distinct(candidates)
        for start in range(0, len(distinct), self.problem.goal.at_once):
            yield distinct[start : start + self.problem.goal.at_once]

    def _look_at(
        self, wave: Sequence[tuple[Candidate, float | None, float | None]]
    ) -> Iterator[Score]:
        """Simulate some, each with its floor and its start (see ``Asked``); each score in turn."""
        seeds = tuple(range(self.problem.goal.seeds))
        asked = [
            self._asked(candidate, seeds, floor, start)
            for candidate, floor, start in wave
            if not candidate.refused
        ]
        scores = self._ask(asked)
        for candidate, _, _ in wave:
            yield Score(0.0, refused=candidate.refused) if candidate.refused else next(scores)

    def _asked(
        self,
        candidate: Candidate,
        seeds: tuple[int, ...],
        floor: float | None,
        start: float | None,
    ) -> Asked:
        data = self.problem.run_file(candidate.part)
        return Asked(data, floor, seeds, candidate.outputs, candidate.uncounted, start)

    def _ask(self, asked: Sequence[Asked]) -> Iterator[Score]:
        """Each score as soon as it is there; those that are known are not found again."""
        keys = [self._key(each) for each in asked]
        missing = {
            key: each for key, each in zip(keys, asked, strict=True) if not self._kept.get(key)
        }
        fresh = self._map(self.evaluator, list(missing.values())) if missing else iter(())
        found: dict[str, Score] = {}
        for key in keys:
            if key not in found and key in missing:
                found[key] = next(fresh)
                if not found[key].refused:  # What may be mended elsewhere.
                    self._kept.add(key, asdict(found[key]))
            yield found.get(key) or as_score(self._kept.get(key))

    def _key(self, asked: Asked) -> str:
        """Of all that an answer depends on."""
        # What does not count is told by its name.
        data = asked.data if asked.uncounted else nameless(asked.data)
        return key_of(self._digest, *asked._replace(data=data, start=None), contents(asked.data))

    def _keep(self, candidate: Candidate, score: Score) -> None:
        fresh = self.tried.get(candidate.key, (candidate, None))[1] != score
        self.tried[candidate.key] = candidate, score
        if fresh:  # Planners may ask again.
            self._on_score(candidate, score, self._best)

    def _lack(self, score: Score) -> float:
        """How far a score is from its targets, for the worst of them."""
        targets = self.evaluator.targets
        if isinstance(targets, PercentileTargets):
            pairs = zip(score.figures.values(), targets.limits, strict=True)
            return max((value or 0.0) / limit for value, (_, _, limit) in pairs)
        return -min(share or 0.0 for share in score.figures.values())

    def _nothing(self, tried: Sequence[tuple[Candidate, Score]]) -> str:
        """Why none of these will do: the one that comes nearest, and what it lacks."""
        if not tried:
            return "the planner finds no candidates: nothing fits on what there is"
        missed = [(c, s) for c, s in tried if s.figures]
        if not missed:
            first = next((s.refused for _, s in tried if s.refused), None)
            if first is None:
                rate = self.problem.goal.rate
                return f"none of {len(tried)} candidates carries {rate} requests/s, by their bounds"
            return f"none of {len(tried)} candidates can be, such as: {first}"
        nearest, score = min(missed, key=lambda each: self._lack(each[1]))
        figures = ", ".join(
            f"{name} {'-' if value is None else f'{value:.3g}'} ({must})"
            for (name, value), must in zip(score.figures.items(), self._asked_for(), strict=True)
        )
        return (
            f"none of {len(tried)} candidates keeps the targets; nearest is {nearest}, with "
            f"{figures} at {score.rate:.3g} requests/s"
        )

    def _asked_for(self) -> list[str]:
        """Of each figure, what it has to be."""
        targets = self.evaluator.targets
        if isinstance(targets, PercentileTargets):
            return [f"at most {limit:g}" for _, _, limit in targets.limits]
        assert isinstance(targets, RequestTargets)
        return [f"at least {targets.attainment:g}" for _ in targets.limits]
