"""Integer programs: the best plan with groups within nodes, and a bound on all plans."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.hexgen2.capacity import ROLES, Capacity, GroupRole, Modelled

# A program is solved when the remaining gap is smaller than this share.
_GAP = 1e-4
# Largest number of nodes of the search. Unlike a time limit, it always ends at the same place.
_NODES = 200
# A constraint of a program: factors by column, and an upper limit.
Constraint = tuple[dict[int, float], float]
# Integers are returned as floats that are nearly whole.
_HALF = 0.5


class Pattern(NamedTuple):
    """How a node's GPUs are divided: size and role of each group, and the rates of both roles."""

    groups: tuple[tuple[int, GroupRole], ...]
    prefill: float
    decode: float


def patterns(capacity: Capacity, type_: int, gpus: int, most: int) -> list[Pattern]:
    """Return a node's patterns, except those that serve less in both phases than another one."""
    able = [
        (count, role, rate)
        for count in range(1, min(gpus, most) + 1)
        for role in ROLES
        if (rate := capacity.carried(((type_, count),), role).rate) > 0
    ]

    def fill(left: int, first: int) -> Iterator[Pattern]:
        yield Pattern((), 0.0, 0.0)
        for number in range(first, len(able)):
            count, role, rate = able[number]
            if count <= left:
                for rest in fill(left - count, number):
                    groups = ((count, role), *rest.groups)
                    if role == "prefill":
                        yield Pattern(groups, rest.prefill + rate, rest.decode)
                    else:
                        yield Pattern(groups, rest.prefill, rest.decode + rate)

    found: list[Pattern] = []
    for each in sorted(fill(gpus, 0), key=lambda p: (-p.prefill, -p.decode, len(p.groups))):
        if not found or each.decode > max(p.decode for p in found):
            found.append(each)
    return found


@dataclass(frozen=True)
class NodePlan:
    """A plan whose groups stay within nodes.

    Attributes:
        groups: size and role of each group, by node.
        flow: requests per second.
        bound: upper bound for all such plans.
    """

    groups: Mapping[int, tuple[tuple[int, GroupRole], ...]]
    flow: float
    bound: float


def within_nodes(capacity: Capacity, request_bytes: float, most: int) -> NodePlan:
    """Return the best plan whose groups stay within nodes.

    Within a node, sending KV takes no time. Between nodes it uses the network cards, which all
    groups of a node share, and the nodes' own links, which count as part of the card.

    Args:
        request_bytes: bytes of a mean prompt's KV.
        most: largest number of GPUs of a group.
    """
    site = capacity.site
    alike: dict[tuple[int, int], list[int]] = {}
    for node, type_ in enumerate(site.type_of):
        alike.setdefault((type_, site.gpus[node]), []).append(node)
    cells = [
        (key, nodes, pattern)
        for key, nodes in alike.items()
        for pattern in patterns(capacity, *key, most)
    ]
    # For each cell: the number of nodes, what stays in them, what they send, and what they get.
    many = len(cells)
    rows: list[Constraint] = []
    for n, (_, nodes, pattern) in enumerate(cells):
        y, stays, sent, got = n, many + n, 2 * many + n, 3 * many + n
        card = site.most_gb_s(nodes[0]) * 1e9 / request_bytes
        rows.append(({stays: 1.0, sent: 1.0, y: -pattern.prefill}, 0.0))
        rows.append(({stays: 1.0, got: 1.0, y: -pattern.decode}, 0.0))
        rows.append(({sent: 1.0, y: -card}, 0.0))
        rows.append(({got: 1.0, y: -card}, 0.0))
    for key, nodes in alike.items():
        of_key = {n: 1.0 for n, cell in enumerate(cells) if cell[0] == key}
        rows.append((of_key, float(len(nodes))))
    balance = {2 * many + n: 1.0 for n in range(many)} | {3 * many + n: -1.0 for n in range(many)}
    rows += _equal(balance)
    wanted = np.zeros(4 * many)
    wanted[many : 3 * many] = 1.0
    integer = np.zeros(4 * many)
    integer[:many] = 1
    x, flow, bound = _solve(wanted, rows, integer)
    groups: dict[int, tuple[tuple[int, GroupRole], ...]] = {}
    free = {key: list(nodes) for key, nodes in alike.items()}
    for n, (key, _, pattern) in enumerate(cells):
        for _ in range(int(x[n] + _HALF)):
            groups[free[key].pop(0)] = pattern.groups
    return NodePlan(groups, flow, bound)


class Configuration(NamedTuple):
    """A group, described by how many GPUs of each kind it has, wherever these are.

    Attributes:
        shares: for each kind, an upper bound on requests per second times the share of layers that
            the kind has.
    """

    gpus: tuple[int, ...]
    role: GroupRole
    rate: float
    shares: tuple[float, ...]


@dataclass(frozen=True)
class PooledPlan:
    """A plan that treats all GPUs of a kind as one node with all their nodes' network cards.

    Attributes:
        groups: each kind of group, with the number of such groups.
        flow: requests per second.
        bound: upper bound for all plans with groups of this size.
        per_gpu: requests per second gained by one more GPU of each kind, if GPUs were divisible.
        gpus: number of GPUs of each kind that exist or are rented.
    """

    groups: Sequence[tuple[Configuration, int]]
    flow: float
    bound: float
    per_gpu: Sequence[float]
    gpus: Sequence[int]


def configurations(capacity: Modelled, counts: Sequence[int], most: int) -> list[Configuration]:
    """Return groups of up to ``most`` GPUs that serve more than all smaller groups of their kinds.

    Args:
        capacity: capacities without time between stages, for a bound.
        counts: number of GPUs of each kind.
    """
    site = capacity.site
    type_of_kind = [site.kind_of_type.index(kind) for kind in range(len(counts))]
    found: list[Configuration] = []
    every = product(*(range(min(count, most) + 1) for count in counts))
    for gpus in sorted((g for g in every if 0 < sum(g) <= most), key=lambda g: (sum(g), g)):
        signature = tuple(
            (type_, count) for type_, count in sorted(zip(type_of_kind, gpus, strict=True)) if count
        )
        for role in ROLES:
            rate = capacity.carried(signature, role).rate
            if rate > max(
                (
                    c.rate
                    for c in found
                    if c.role == role
                    and all(
                        a <= b and (a > 0) == (b > 0) for a, b in zip(c.gpus, gpus, strict=True)
                    )
                ),
                default=0.0,
            ):
                shares = (
                    capacity.most_of_layers(type_, count, role) if count else 0.0
                    for type_, count in zip(type_of_kind, gpus, strict=True)
                )
                found.append(Configuration(gpus, role, rate, tuple(shares)))
    return found


def best_mix(
    options: Sequence[Configuration],
    counts: Sequence[int],
    cards: Sequence[float],
    prices: Sequence[float] | None = None,
    budget: float = inf,
    known: float = 0.0,
) -> PooledPlan:
    """Return the best groups made of these GPUs or, given prices, of GPUs that a budget can rent.

    It is an upper bound on all plans: KV of one kind may use the cards of all its nodes, and in a
    group of several kinds, each may have any share of the layers that its GPUs can compute in time.

    Args:
        cards: for each kind, requests per second whose KV all its nodes together can send or
            receive.
        prices: dollars per hour of a GPU of each kind.
        budget: dollars per hour in total.
        known: flow of a known plan; the search skips plans with less flow.

    Raises:
        JaxinferError: no configuration prefills, or none decodes.
    """
    kinds, many = len(counts), len(options)
    if {option.role for option in options} != set(ROLES):
        raise JaxinferError("no group of these GPUs holds the model and the longest request")
    # Columns: the number of each configuration, GPUs of each kind, the flow, and the part of it
    # that each configuration serves with the layers on each kind.
    flow = many + kinds
    parts = [
        (n, kind) for n, option in enumerate(options) for kind in range(kinds) if option.gpus[kind]
    ]
    column = {part: flow + 1 + number for number, part in enumerate(parts)}
    rows: list[Constraint] = []
    for kind in range(kinds):
        used = {n: float(o.gpus[kind]) for n, o in enumerate(options) if o.gpus[kind]}
        rows.append((used | {many + kind: -1.0}, 0.0))
    for n, option in enumerate(options):
        carried = {column[n, kind]: 1.0 for kind in range(kinds) if option.gpus[kind]}
        rows.append((carried | {n: -option.rate}, 0.0))
        if len(carried) > 1:
            rows += [
                ({column[n, kind]: 1.0, n: -option.shares[kind]}, 0.0)
                for kind in range(kinds)
                if option.gpus[kind]
            ]
    for role in ROLES:
        through = {column[n, kind]: 1.0 for n, kind in parts if options[n].role == role}
        rows += _equal(through | {flow: -1.0})
    for kind in range(kinds):
        if cards[kind] < inf:
            sent = {
                column[n, k]: 1.0 if options[n].role == "prefill" else -1.0
                for n, k in parts
                if k == kind
            }
            if sent:
                rows.append((sent, cards[kind]))
                rows.append(({at: -value for at, value in sent.items()}, cards[kind]))
    if prices is not None:
        rows.append(({many + kind: price for kind, price in enumerate(prices)}, budget))
    size = flow + 1 + len(parts)
    upper = np.full(size, inf)
    upper[many:flow] = counts
    wanted, integer = np.zeros(size), np.zeros(size)
    wanted[flow], integer[:flow] = 1.0, 1
    matrix, limits = _matrix(rows, size)
    relaxed = linprog(
        -wanted, A_ub=matrix, b_ub=limits, bounds=[(0.0, each) for each in upper], method="highs"
    )
    # With more of a configuration than this, even the relaxed program has no more than a known
    # plan.
    room, costs = float(-relaxed.fun) - known * (1 - _GAP), relaxed.lower.marginals[:many]
    upper[:many] = [room // cost if cost > 0 else inf for cost in costs]
    x, value, bound = _solve(wanted, rows, integer, upper)
    taken = [(option, int(x[n] + _HALF)) for n, option in enumerate(options) if x[n] > _HALF]
    bought = [int(each + _HALF) for each in x[many:flow]]
    per_gpu = [-float(each) for each in relaxed.upper.marginals[many:flow]]
    return PooledPlan(taken, value, min(max(bound, known), float(-relaxed.fun)), per_gpu, bought)


def _equal(row: dict[int, float]) -> list[Constraint]:
    return [(row, 0.0), ({column: -value for column, value in row.items()}, 0.0)]


def _matrix(rows: Sequence[Constraint], columns: int) -> tuple[csr_array, list[float]]:
    where = [(number, column) for number, (row, _) in enumerate(rows) for column in row]
    entries = [value for row, _ in rows for value in row.values()]
    at = tuple(np.array(where).T)
    return csr_array((entries, at), shape=(len(rows), columns)), [limit for _, limit in rows]


def _solve(
    wanted: np.ndarray,
    rows: Sequence[Constraint],
    integer: np.ndarray,
    upper: np.ndarray | None = None,
) -> tuple[np.ndarray, float, float]:
    """Maximise ``wanted @ x``; return x, its value, and an upper bound."""
    matrix, limits = _matrix(rows, len(wanted))
    found = milp(
        -wanted,
        constraints=LinearConstraint(matrix, ub=limits),
        integrality=integer,
        bounds=Bounds(0, inf if upper is None else upper),
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    if found.x is None:
        raise JaxinferError(f"the integer program has no solution: {found.message}")
    return found.x, float(-found.fun), float(-found.mip_dual_bound)
