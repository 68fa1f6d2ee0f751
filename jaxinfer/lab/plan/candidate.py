"""A candidate placement and its score."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.problem import Cost, Problem
from jaxinfer.options.validation import Options

GivenUp = Literal["at this rate", "by its bound"]
Axis = str | int | float | None


@dataclass(frozen=True)
class Candidate:
    """A part of a run file, which the plan file's ``run`` completes.

    Attributes:
        axes: words and numbers that distinguish the candidate from others: its columns in the
            table.
        part: groups, instances, system and other sections.
        key: candidates with equal keys are simulated once; by default, all fields make up the key.
        refused: reason why the candidate cannot run, if its planner knows one; it is then not
            simulated.
        outputs: largest number of output tokens per request if the candidate serves one phase of
            requests; 1 means the prompt alone.
        uncounted: groups that cost nothing, because they belong to the other phase.
        wanted: requests per second that the planner expects, if any; if the candidate serves fewer,
            the result says so.
    """

    axes: Mapping[str, Axis]
    part: Mapping[str, Any]
    key: tuple[object, ...] = ()
    refused: str | None = None
    outputs: int | None = None
    uncounted: tuple[str, ...] = ()
    wanted: float | None = None

    def __post_init__(self) -> None:
        if not self.key:
            has = self.axes, self.part, self.refused, self.outputs, self.uncounted
            object.__setattr__(self, "key", (repr(has),))

    @property
    def whole(self) -> bool:
        """True if the candidate serves whole requests and all of its groups count."""
        return self.outputs is None and not self.uncounted

    def __str__(self) -> str:
        """The candidate's axes."""
        return ", ".join(f"{name} {value}" for name, value in self.axes.items())


@dataclass(frozen=True)
class Costs:
    """The costs of a cluster.

    Attributes:
        usd: dollars per hour, None if not known.
    """

    gpus: int
    watts: float | None
    usd: float | None

    def amount(self, of: Cost) -> float:
        """Return the amount of one kind of cost.

        Raises:
            JaxinferError: the amount is not known.
        """
        amount: float | None = getattr(self, of)
        if amount is None:
            raise JaxinferError(
                f"{of} are needed, but not known: give prices, or a hardware "
                "file whose nodes have usd_per_hour"
            )
        return float(amount)


@dataclass(frozen=True)
class Score:
    """The rate that a candidate can serve, and its costs; or the reason why it has no rate.

    Attributes:
        rate: requests per second at which the candidate meets the targets; 0 if it meets them at no
            rate, infinite if it meets them at every rate.
        given_up: set if the candidate missed the targets at the rate to beat, or if its bound is
            below that rate and nothing was simulated.
        figures: figures at that rate, by target (see ``Verdict``).
        refused: reason why the candidate cannot run at all.
        enough: number of requests needed for a verdict, if there were too few (see ``TriedRate``).
    """

    rate: float
    costs: Costs | None = None
    given_up: GivenUp | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    refused: str | None = None
    enough: int | None = None


# Returns the upper bound on a candidate's requests per second, which its planner knows without a
# simulation; infinite if it knows none. A search is only as correct as its bounds.
Bound = Callable[["Candidate"], float]
# Returns a guess of a candidate's rate. It decides the order of candidates, and where a search
# begins.
Guess = Callable[["Candidate"], float]


class Search(Protocol):
    """Answers planners' questions about the candidates for their problem."""

    def scores(self, candidates: list[Candidate], rate: float | None = None) -> list[Score]:
        """Return each candidate's largest rate; given ``rate``, whether it can serve that rate."""

    def best(
        self,
        candidates: list[Candidate],
        bound: Bound = lambda candidate: inf,
        guess: Guess | None = None,
    ) -> Candidate:
        """Return the best candidate, with as few simulations as possible."""

    def costs(self, candidate: Candidate) -> Costs:
        """Return the costs of a candidate, without a simulation.

        Raises:
            JaxinferError: the candidate cannot run.
        """


class Planner(Protocol):
    """Searches for the best candidate. Each search makes a new planner from its ``Options``."""

    Options: type[Options]

    def __init__(self, options: Any) -> None: ...

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best candidate for a problem, using a search to evaluate candidates.

        Raises:
            JaxinferError: no candidate meets the goal.
        """
