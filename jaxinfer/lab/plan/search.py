"""The common driver of all planners: decides which simulations to run, and stores their results."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import NamedTuple, Protocol

from jaxinfer.errors import JaxinferError
from jaxinfer.files.contents import contents
from jaxinfer.files.kept import KeptResults, key_of
from jaxinfer.lab.plan.candidate import Bound, Candidate, Costs, Guess, Score
from jaxinfer.lab.plan.canonical import nameless
from jaxinfer.lab.plan.evaluate import Evaluator, Question, Simulation
from jaxinfer.lab.plan.lacking import more_requests, why_nothing
from jaxinfer.lab.plan.problem import Cost, Per, Problem
from jaxinfer.simulate.capacity import Ladder, TriedRate
from jaxinfer.simulate.targets import Verdict

# The divisor of a maximised rate.
DIVIDED_BY: Mapping[Per, Cost | None] = {
    "cluster": None,
    "gpu": "gpus",
    "usd": "usd",
    "watt": "watts",
}


class _Prospect(NamedTuple):
    """A valid candidate, and what is known of it without simulation.

    Attributes:
        bound: upper bound of its rate, in requests per second.
        guess: estimate of its rate, in requests per second.
    """

    candidate: Candidate
    costs: Costs
    bound: float
    guess: float | None

    @property
    def promise(self) -> float:
        """The rate that decides how soon it is tried."""
        return self.bound if self.guess is None else min(self.guess, self.bound)

    @property
    def start(self) -> float | None:
        """The rate at which its search begins, if there is one."""
        return None if math.isinf(self.promise) else self.promise


def _in_full(score: Score) -> bool:
    """Tell whether the score has the exact largest rate, neither 0 nor infinite."""
    return not score.refused and not score.given_up and 0 < score.rate < math.inf


class MapSimulations(Protocol):
    """``map``, or the ``map`` of a pool of processes; several threads may call it."""

    def __call__(
        self, call: Evaluator, asked: Iterable[Simulation], /
    ) -> Iterator[TriedRate | str]:
        """Return the results of all simulations, in their order."""


class Watcher:
    """Is told of a search's progress; this base class ignores the news."""

    def expect(self, count: int) -> None:
        """Expect ``count`` more candidates."""

    def simulated(self, candidate: Candidate, tried: TriedRate) -> None:
        """Record that a rate of a candidate was simulated or found in the cache; thread-safe."""

    def scored(self, candidate: Candidate, score: Score, best: Candidate | None) -> None:
        """Record a candidate's score, and the best candidate so far."""


class DrivenSearch:
    """Simulates candidates for planners; see ``Search``.

    Which candidates are tried, and from which rate on, depends only on the problem, not on the
    number of cores or on which of them is first.

    Args:
        map_calls: runs an evaluator over simulations, for example in a pool of processes. Unless it
            is ``map``, all candidates of a wave are tried at the same time.
        kept: cache of simulations; those found there are not simulated again.

    Attributes:
        tried: each candidate that was tried, in order, with its latest score.
    """

    def __init__(
        self,
        problem: Problem,
        map_calls: MapSimulations = map,
        kept: KeptResults | None = None,
        watcher: Watcher | None = None,
        prune: bool = True,
    ) -> None:
        self.problem = problem
        self.tried: dict[tuple[object, ...], tuple[Candidate, Score]] = {}
        goal = problem.goal
        self.evaluator = Evaluator(goal, problem.work, problem.targets, problem.prices)
        self._map, self._prune = map_calls, prune
        self._kept, self._watcher = kept or KeptResults(), watcher or Watcher()
        self._best: Candidate | None = None
        # With the targets, because a file may have another reference than before.
        self._digest = key_of(repr([problem.work, problem.targets]))

    # The functions that planners call.

    def scores(self, candidates: list[Candidate], rate: float | None = None) -> list[Score]:
        """Return the full score of each candidate; candidates with equal keys are tried once.

        Args:
            rate: rate that a cluster must serve, instead of the goal's; candidates for different
                rates need different keys.
        """
        floor = self.problem.goal.rate if rate is None else rate
        found = {key: score for key, (_, score) in self.tried.items() if _in_full(score)}
        missing = self._distinct(c for c in candidates if c.key not in found)
        self._watcher.expect(sum(c.key not in self.tried for c in missing))
        for wave in self._waves(missing):
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
        """Return the best candidate, with as few simulations as possible.

        Candidates with the best guesses, or else bounds, come first. Each must beat the
        ``goal.top``-th best of earlier waves; one that does not, at the required rate, is
        abandoned. Among equal candidates, the first wins.

        Raises:
            JaxinferError: no candidate meets the targets, none is valid, or one meets them at any
                rate.
        """
        distinct, top = self._distinct(candidates), self.problem.goal.top
        self._watcher.expect(sum(c.key not in self.tried for c in distinct))
        limits = [known for c in distinct if (known := self._known(c, bound, guess))]
        limits.sort(key=lambda each: -self._value(each.promise, each.costs))
        # The best candidates so far, and their values.
        best: list[tuple[float, Candidate]] = []
        while limits:
            least = best[top - 1][0] if len(best) >= top and self._prune else None
            wave: list[tuple[_Prospect, float | None]] = []
            while limits and len(wave) < self.problem.goal.at_once:
                known = limits.pop(0)
                floor = self._floor(least, known.costs)
                if self._prune and self._is_out(known.bound, known.costs, floor, least):
                    self._keep(known.candidate, Score(0.0, known.costs, "by its bound"))
                else:
                    wave.append((known, floor))
            looked = self._look_at([(known.candidate, floor, known.start) for known, floor in wave])
            endless: tuple[Candidate, Score] | None = None
            for (known, _), score in zip(wave, looked, strict=True):
                candidate = known.candidate
                if math.isinf(score.rate):
                    endless = endless or (candidate, score)
                elif score.rate and not score.given_up:
                    best.append((self._value(score.rate, known.costs), candidate))
                    best = sorted(best, key=lambda each: -each[0])[:top]
                    self._best = best[0][1]
                self._keep(candidate, score)
            if endless:
                raise JaxinferError(
                    f"the targets hold at any rate of {endless[0]}: "
                    f"{more_requests(endless[1].enough)}, to tell candidates apart"
                )
        if not best:
            tried = [self.tried[c.key] for c in distinct]
            raise JaxinferError(why_nothing(tried, self.problem))
        return best[0][1]

    def costs(self, candidate: Candidate) -> Costs:
        """See ``Search``."""
        return self.evaluator.costs(self.problem.run_file(candidate.part), candidate.uncounted)

    def fresh_rates(self, candidate: Candidate) -> list[float]:
        """Return a candidate's largest rates, one for each seed that the search has not used.

        The list is empty if, with one of the seeds, the targets are met at any rate.
        """
        goal = self.problem.goal
        seeds = range(goal.seeds, goal.seeds + goal.fresh_seeds)
        score = self.tried[candidate.key][1] if candidate.key in self.tried else None
        start = score.rate if score and _in_full(score) else None
        asked = [(candidate, self._asked(candidate, (seed,), None, start)) for seed in seeds]
        scores = list(self._ask(asked))
        told = all(not s.refused and math.isfinite(s.rate) for s in scores)
        return [score.rate for score in scores] if told else []

    def value(self, score: Score) -> float:
        """Return how good a score is: larger is better."""
        assert score.costs
        return self._value(score.rate, score.costs)

    # Helpers.

    def _value(self, rate: float, costs: Costs) -> float:
        goal = self.problem.goal
        if goal.minimise:
            return -costs.amount(goal.minimise)
        per = DIVIDED_BY[goal.maximise or "cluster"]
        return rate / costs.amount(per) if per else rate

    def _is_out(self, rate: float, costs: Costs, floor: float | None, least: float | None) -> bool:
        """Tell whether a candidate whose bound is this rate needs no simulation."""
        if floor is not None and rate < floor:
            return True
        return least is not None and self._value(rate, costs) <= least

    def _floor(self, least: float | None, costs: Costs) -> float | None:
        """Return the lowest rate at which a cluster with these costs beats the best."""
        goal = self.problem.goal
        if goal.minimise or least is None:
            return goal.rate
        ladder = Ladder(goal.precision)
        return ladder.rate(ladder.above(least / self._value(1.0, costs)))

    def _known(self, candidate: Candidate, bound: Bound, guess: Guess | None) -> "_Prospect | None":
        """Return what is known of a candidate without simulation; None if it is invalid."""
        try:
            if candidate.refused:
                raise JaxinferError(candidate.refused)
            costs = self.costs(candidate)
            guessed = guess(candidate) if guess else None
        except JaxinferError as error:
            self._keep(candidate, Score(0.0, refused=str(error)))
            return None
        most = bound(candidate)
        for what, rate in (("guess", guessed), ("bound", most)):
            if rate is not None and not rate >= 0:  # This also refuses NaN.
                raise JaxinferError(
                    f"planner {self.problem.planner['name']}: the {what} of {candidate} is {rate}, "
                    "must be requests/s, a number from 0 on"
                )
        return _Prospect(candidate, costs, most, guessed)

    def _distinct(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        found: dict[tuple[object, ...], Candidate] = {}
        for candidate in candidates:
            found.setdefault(candidate.key, candidate)
        return list(found.values())

    def _waves(self, candidates: list[Candidate]) -> Iterator[list[Candidate]]:
        for start in range(0, len(candidates), self.problem.goal.at_once):
            yield candidates[start : start + self.problem.goal.at_once]

    def _look_at(
        self, wave: Sequence[tuple[Candidate, float | None, float | None]]
    ) -> Iterator[Score]:
        """Simulate candidates, each with floor and start (see ``Question``); yield scores
        in order.
        """
        seeds = tuple(range(self.problem.goal.seeds))
        asked: list[tuple[Candidate, Question]] = []
        refusals: list[str | None] = []
        for candidate, floor, start in wave:
            refused = candidate.refused
            if not refused:
                try:
                    asked.append((candidate, self._asked(candidate, seeds, floor, start)))
                except JaxinferError as error:
                    refused = str(error)
            refusals.append(refused)
        scores = self._ask(asked)
        for refused in refusals:
            yield Score(0.0, refused=refused) if refused else next(scores)

    def _asked(
        self,
        candidate: Candidate,
        seeds: tuple[int, ...],
        floor: float | None,
        start: float | None,
    ) -> Question:
        data = self.problem.run_file(candidate.part)
        return Question(data, floor, seeds, candidate.outputs, candidate.uncounted, start)

    def _ask(self, asked: Sequence[tuple[Candidate, Question]]) -> Iterator[Score]:
        """Yield each score as soon as it is known; equal questions are answered once."""
        parts = [self._part(each) for _, each in asked]
        keys = [
            (part, each.floor, each.seeds, each.outputs, each.uncounted)
            for part, (_, each) in zip(parts, asked, strict=True)
        ]
        distinct = {
            key: (*each, part)
            for key, each, part in reversed([*zip(keys, asked, parts, strict=True)])
        }
        order = list(dict.fromkeys(keys))
        fresh = self._scores([distinct[key] for key in order])
        found: dict[object, Score] = {}
        for key in keys:
            if key not in found:
                found[key] = next(fresh)
            yield found[key]

    def _scores(self, asked: Sequence[tuple[Candidate, Question, str]]) -> Iterator[Score]:
        """Yield scores in order; with a pool, all searches run at once, each in a thread."""
        if self._map is map or not asked:
            yield from map(self._score, asked)
            return
        threads = ThreadPoolExecutor(len(asked))
        try:
            yield from threads.map(self._score, asked)
        finally:  # After a signal, waiting for them could take long.
            threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, asked: tuple[Candidate, Question, str]) -> Score:
        candidate, each, part = asked

        def simulate(simulation: Simulation) -> TriedRate:
            found = self._simulate(part, simulation)
            self._watcher.simulated(candidate, found)
            return found

        return self.evaluator.score(each, simulate)

    def _simulate(self, part: str, simulation: Simulation) -> TriedRate:
        """Return the result of one simulation, from the cache or run now.

        Raises:
            JaxinferError: it is impossible; that is not stored, since other files may correct it.
        """
        key = key_of(part, *simulation[1:])
        if known := self._kept.get(key):
            return TriedRate(**{**known, "verdict": Verdict(**known["verdict"])})
        found = next(iter(self._map(self.evaluator, [simulation])))
        if isinstance(found, str):
            raise JaxinferError(found)
        self._kept.add(key, asdict(found))
        return found

    def _part(self, asked: Question) -> str:
        """Return a key of everything that a candidate's simulations depend on, except
        the question.
        """
        # Names that do not count.
        data = asked.data if asked.uncounted else nameless(asked.data)
        return key_of(self._digest, data, contents(asked.data))

    def _keep(self, candidate: Candidate, score: Score) -> None:
        fresh = self.tried.get(candidate.key, (candidate, None))[1] != score
        self.tried[candidate.key] = candidate, score
        if fresh:  # Planners may ask again.
            self._watcher.scored(candidate, score, self._best)
