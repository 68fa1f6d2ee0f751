"""An upper bound on the request rate of a modelled cluster, under any system.

A linear program over rates per second. Each instance computes prompt tokens and decodes, each
divided by position in the request, in steps. Every step is assumed to yield a token: work of steps
that yield none could be added to others at no more cost. Step times are convex in a step's
contents, so steps with given totals take at least as long as equal steps (``StepFloor``). The
totals of all instances are those of the workload's requests.

With prefix caches, each page of a common beginning is computed once, and shared entries take no
room in the pools.

The program ignores whole pages, the token budget of a step, KV of unfinished prompts, the order of
a request's work, the capacity of links, and recomputation after preemptions or evictions. All of
these make the bound higher.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, cast

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.prefixes import shared_pages
from jaxinfer.simulate.cluster import ModelledCluster, ModelledInstance
from jaxinfer.simulate.costs.model import Padded, Pipeline
from jaxinfer.simulate.costs.step_floor import ProductFloor, StepFloor
from jaxinfer.workload.bench_request import BenchRequest

# Number of kinds of work by position in a request, for prompts and for decodes each.
BINS = 8
# Units of the program, because solvers treat coefficients below 1e-9 as 0.
_TOKENS, _ENTRIES = 1e3, 1e6


class HasFloor(Protocol):
    """A stage's costs that have a lower bound on step times."""

    def floor(self) -> StepFloor: ...  # noqa: D102


@dataclass(frozen=True)
class Span:
    """The mean work of one request at some positions, as prompt tokens or as decodes.

    Attributes:
        low: first position.
        high: end of the positions.
        tokens: number of tokens at these positions.
        entries: KV entries that these tokens see, including their own.
        unshared: number of these entries that no other request has; None if no requests share
            entries.
    """

    low: int
    high: int
    tokens: float
    entries: float
    unshared: float | None = None


@dataclass(frozen=True)
class InstanceLimits:
    """The limits of instances of one kind.

    Attributes:
        stages: least step times of each stage.
        seats: largest number of tokens that a step samples.
        pool: largest number of KV entries that the decodes of a step see; shared ones count once.
    """

    stages: tuple[StepFloor, ...]
    seats: int
    pool: int


@dataclass(frozen=True)
class Bound:
    """The bound of a cluster and a workload, and the resulting worth of each part of a request.

    The parts of a mean request are worth 1 in total. In any period of any run, the worth done per
    second is at most ``rate``, unless requests share entries.

    Attributes:
        rate: requests per second.
        prompts: spans of positions of prompt tokens.
        decodes: spans of positions of decodes.
        token_worth: requests per token, by span of prompts and then of decodes.
        entry_worth: requests per KV entry that such a token sees.
        first_worth: requests per first token of an answer.
        shares: whether requests share entries.
    """

    rate: float
    prompts: tuple[Span, ...]
    decodes: tuple[Span, ...]
    token_worth: tuple[float, ...]
    entry_worth: tuple[float, ...]
    first_worth: float
    shares: bool = False


def bound_of(cluster: ModelledCluster, work: Sequence[BenchRequest]) -> Bound:
    """Bound the rate at which a cluster serves a workload.

    Raises:
        JaxinferError: an instance has no lower bound on its step times.
    """
    kinds = Counter(
        _capacity(name, each) for name, each in cluster.instances.items() if each.config.computes
    )
    prompt = np.array([item.prompt_len for item in work])
    end = prompt + np.array([item.max_tokens for item in work]) - 1
    configs = [each.config for each in cluster.instances.values()]
    page_sizes = {each.page_size for each in configs if each.enable_prefix_caching}
    first, most = map(np.array, shared_pages(work, page_sizes))
    decodes = spans(prompt, end, most if most.any() else None)
    found = solve(kinds, spans(first, prompt), decodes, prompt.max(), most.max())
    return replace(found, shares=bool(first.any() or most.any()))


def _capacity(name: str, instance: ModelledInstance) -> InstanceLimits:
    cost = instance.cost.cost if isinstance(instance.cost, Padded) else instance.cost
    parts = cost.parts if isinstance(cost, Pipeline) else ()
    if instance.shards or not parts or not all(hasattr(part, "floor") for part in parts):
        raise JaxinferError(
            f"no bound: instances.{name}: the least times of its steps are not known, only those "
            "by roofline or simulate.linear, without attention or FFN groups"
        )
    floors = tuple(cast(HasFloor, part).floor() for part in parts)
    return InstanceLimits(floors, instance.config.max_num_seqs, instance.num_tokens)


def spans(first: np.ndarray, end: np.ndarray, shared: np.ndarray | None = None) -> tuple[Span, ...]:
    """Return the mean work of requests with tokens at positions from ``first`` up to ``end``.

    Args:
        shared: number of each request's first entries that other requests may have, too.
    """
    edges = np.unique(np.linspace(first.min(), max(end.max(), first.min() + 1), BINS + 1).round())
    found = []
    for low, high in pairwise(edges.astype(int)):
        a, b = np.clip(first, low, high), np.clip(end, low, high)
        count = np.maximum(b - a, 0)
        if not count.any():
            continue
        entries = count * (a + b + 1) / 2
        span = Span(int(low), int(high), float(count.mean()), float(entries.mean()))
        if shared is not None:
            a = np.clip(shared, a, b)
            unshared = np.maximum(b - a, 0) * ((a + b + 1) / 2 - shared)
            span = replace(span, unshared=float(unshared.mean()))
        found.append(span)
    return tuple(found)


def solve(
    kinds: Mapping[InstanceLimits, int],
    prompts: tuple[Span, ...],
    decodes: tuple[Span, ...],
    longest: int,
    most_shared: int = 0,
) -> Bound:
    """Solve the linear program, and return the bound.

    Args:
        kinds: number of instances of each kind.
        longest: largest number of tokens of a prompt, and therefore of a chunk.
        most_shared: largest number of entries that a request shares.
    """
    from scipy.optimize import linprog  # Imported here, because it is slow.

    program = _Program()
    rate = program.variable()
    both = (*prompts, *decodes)
    shares: list[list[tuple[int, int]]] = [[] for _ in both]
    held: list[list[int]] = [[] for _ in decodes]
    firsts = []
    for kind, count in kinds.items():
        placed, alone, first = _instance(
            program, kind, count, prompts, decodes, longest, most_shared
        )
        firsts.append(first)
        for share, variables in zip(shares, placed, strict=True):
            share.append(variables)
        for of_span, entries in zip(held, alone, strict=True):
            of_span.append(entries)
    for span, share in zip(both, shares, strict=True):
        program.equal({rate: -span.tokens} | {tokens: 1.0 for tokens, _ in share})
        program.equal({rate: -span.entries} | {entries: 1.0 for _, entries in share})
    program.equal({rate: -1} | dict.fromkeys(firsts, 1))
    for span, of_span in zip(decodes, held, strict=True):
        if span.unshared is not None:
            program.equal({rate: -span.unshared} | dict.fromkeys(of_span, 1.0))
    found = linprog(-program.row({rate: 1.0}), **program.matrices(), method="highs")
    if found.x is None:
        raise JaxinferError(f"no bound: the linear program has no solution: {found.message}")
    worth, last = found.eqlin.marginals, 2 * len(both)
    return Bound(
        found.x[rate],
        prompts,
        decodes,
        tuple(worth[0:last:2]),
        tuple(worth[1:last:2]),
        worth[last],
    )


def _instance(
    program: "_Program",
    kind: InstanceLimits,
    count: int,
    prompts: Sequence[Span],
    decodes: Sequence[Span],
    longest: int,
    most_shared: int,
) -> tuple[list[tuple[int, int]], list[int], int]:
    """Add the work per second of instances of one kind.

    Returns:
        Variables of tokens and entries, by span; of the entries that take room, by span of decodes;
        and of first tokens.
    """
    first, steps, placed = program.variable(_TOKENS), program.variable(), []
    for span in (*prompts, *decodes):
        tokens, entries = program.variable(_TOKENS), program.variable(_ENTRIES)
        # Each token sees all earlier ones and itself.
        program.at_most({tokens: span.low + 1, entries: -1})
        program.at_most({tokens: -span.high, entries: 1})
        placed.append((tokens, entries))
    own, rows = placed[: len(prompts)], placed[len(prompts) :]
    computed = {tokens: 1.0 for tokens, _ in own}
    decoded = {tokens: 1.0 for tokens, _ in rows}
    sampled = decoded | {first: 1.0}
    program.at_most(sampled | {steps: -kind.seats})
    alone = [_alone(program, *each, most_shared) for each in zip(decodes, rows, strict=True)]
    program.at_most(dict.fromkeys(alone, 1.0) | {steps: -kind.pool})
    for stage in kind.stages:
        time: dict[int, float] = {steps: stage.step_s}
        time |= {entries: stage.context_s for _, entries in rows}
        time |= {entries: stage.pair_s for _, entries in own}
        time |= dict.fromkeys(computed, stage.token_s + stage.sequence_s / longest)
        time |= dict.fromkeys(decoded, stage.token_s + stage.sequence_s)
        for product in stage.products:
            time[program.product(product, computed | decoded, steps)] = 1.0
        if stage.head:
            time[program.product(stage.head, sampled, steps)] = 1.0
        program.at_most(time, count)
    return placed, alone, first


def _alone(program: "_Program", span: Span, row: tuple[int, int], most_shared: int) -> int:
    """Return the variable of the entries that take room in a pool."""
    tokens, entries = row
    if span.unshared is None:
        return entries
    alone = program.variable(_ENTRIES)
    program.at_most({alone: 1, entries: -1})
    program.at_most({entries: 1, tokens: -most_shared, alone: -1})
    return alone


class _Program:
    """A linear program over non-negative variables."""

    def __init__(self) -> None:
        self._units: list[float] = []
        self._equal: list[Mapping[int, float]] = []
        self._less: list[tuple[Mapping[int, float], float]] = []

    def variable(self, unit: float = 1.0) -> int:
        """Add a variable that the solver counts in ``unit``."""
        self._units.append(unit)
        return len(self._units) - 1

    def equal(self, row: Mapping[int, float]) -> None:
        """Require that the sum is 0."""
        self._equal.append(row)

    def at_most(self, row: Mapping[int, float], most: float = 0.0) -> None:
        """Require that the sum is at most ``most``."""
        self._less.append((row, most))

    def product(self, product: ProductFloor, tokens: Mapping[int, float], steps: int) -> int:
        """Add a variable: seconds of a matrix product over a number of tokens and steps."""
        seconds = self.variable()
        self.at_most({each: n * product.compute_s for each, n in tokens.items()} | {seconds: -1})
        moved = {each: n * product.moved_s for each, n in tokens.items()}
        self.at_most(moved | {steps: product.weights_s, seconds: -1})
        return seconds

    def row(self, coefficients: Mapping[int, float]) -> np.ndarray:
        """Return the coefficients of all variables, in the solver's units."""
        found = np.zeros(len(self._units))
        for variable, coefficient in coefficients.items():
            found[variable] = coefficient * self._units[variable]
        return found

    def matrices(self) -> dict[str, np.ndarray]:
        """Return the constraints as arguments of ``scipy.optimize.linprog``."""
        return {
            "A_ub": np.array([self.row(row) for row, _ in self._less]),
            "b_ub": np.array([most for _, most in self._less]),
            "A_eq": np.array([self.row(row) for row in self._equal]),
            "b_eq": np.zeros(len(self._equal)),
        }
