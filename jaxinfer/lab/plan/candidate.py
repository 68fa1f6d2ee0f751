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
    """A run file's part, which the plan file's ``run`` completes.

    Attributes:
        axes: what it is among the others, in words and numbers: its columns in the table.
        part: groups, instances, system and the like.
        key: candidates with equal keys are simulated once; by default all that it has.
        refused: why it cannot be, where its planner knows; it is not simulated.
        outputs: of a phase of requests, the tokens that each has at most: one is a prompt alone.
        uncounted: groups that cost nothing, since they stand for what a phase leaves out.
        wanted: requests per second that its planner means it to carry, if any; where it carries
            fewer, the result says so.
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
        """True if it serves whole requests, all of it counted."""
        return self.outputs is None and not self.uncounted

    def __str__(self) -> str:
        """The candidate's axes."""
        return ", ".join(f"{name} {value}" for name, value in self.axes.items())


@dataclass(frozen=True)
class Costs:
    """The costs of a cluster.

    Attributes:
        usd: dollars per hour, None where nobody has said.
    """

    gpus: int
    watts: float | None
    usd: float | None

    def amount(self, of: Cost) -> float:
        """The amount of a cost.

        Raises:
            JaxinferError: nobody has said.
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
    """The rate that a candidate carries and its costs, or why there is none.

    Attributes:
        rate: requests per second at which it keeps the targets; 0 if at none, infinite if at any.
        given_up: it missed them at this rate, the one to beat, or its bound lies below that, and
            nothing was simulated.
        figures: those found at that rate, by target (see ``Verdict``).
        refused: why it cannot be at all.
        enough: requests that would tell, where they were too few for the rate (see ``TriedRate``).
    """

    rate: float
    costs: Costs | None = None
    given_up: GivenUp | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    refused: str | None = None
    enough: int | None = None


# A rate, in requests per second, above which its planner holds that a candidate carries nothing,
# without simulation; infinite where it knows none. A search is as right as its bounds.
Bound = Callable[["Candidate"], float]
# About what rate a candidate may have: who comes first, and where its search begins.
Guess = Callable[["Candidate"], float]


class Search(Protocol):
    """The questions that planners ask about candidates for their problem."""

    def scores(self, candidates: list[Candidate], rate: float | None = None) -> list[Score]:
        """Return each one's largest rate; with ``rate``, whether it carries that one."""

    def best(
        self,
        candidates: list[Candidate],
        bound: Bound = lambda candidate: inf,
        guess: Guess | None = None,
    ) -> Candidate:
        """The best, with as little work as that takes."""

    def costs(self, candidate: Candidate) -> Costs:
        """Return the costs of one; nothing is simulated.

        Raises:
            JaxinferError: it cannot be.
        """


class Planner(Protocol):
    """Walks through candidates. Made anew for each search from its ``Options``."""

    Options: type[Options]

    def __init__(self, options: Any) -> None: ...

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best one for a problem, asking a search what others come to.

        Raises:
            JaxinferError: there is none.
        """
