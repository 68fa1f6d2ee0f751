"""Finds the best plan, and bounds its distance from the optimum."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.hexgen2.capacity import Modelled
from jaxinfer.papers.hexgen2.flow import Flow, KVNetwork, PlacedGroup, shared_flow
from jaxinfer.papers.hexgen2.gpus import Site
from jaxinfer.papers.hexgen2.integer_programs import (
    NodePlan,
    PooledPlan,
    best_mix,
    configurations,
    within_nodes,
)
from jaxinfer.papers.hexgen2.moves import Member, MemberPlan, as_plan
from jaxinfer.papers.hexgen2.refine import Effort, Scorer, refine


@dataclass(frozen=True)
class Certified:
    """A plan, and a certificate of how good it is.

    Attributes:
        flow: requests per second over shared networks, and their bottlenecks.
        bound: upper bound on the requests per second of plans whose groups have at most the given
            number of GPUs, wherever these are.
        within: the same for plans whose groups stay within nodes, on the real network.
        per_gpu: additional requests per second for one more GPU of each kind.
    """

    plan: MemberPlan
    groups: Sequence[PlacedGroup]
    flow: Flow
    bound: float
    within: float
    per_gpu: dict[str, float]

    @property
    def gap(self) -> float:
        """The share by which the plan may fall short of the optimum."""
        return max(1 - self.flow.total / self.bound, 0.0)


def plan_of_cells(cells: NodePlan) -> MemberPlan:
    """Return a plan whose groups stay within nodes, as groups with roles."""
    return as_plan(
        (((node, count),), role) for node, groups in cells.groups.items() for count, role in groups
    )


def plan_of_mix(site: Site, mix: PooledPlan) -> MemberPlan:
    """Return a mix's groups on nodes: each kind of GPU of a group uses as few nodes as possible."""
    free = list(site.gpus)
    kind = [site.kind_of_type[type_] for type_ in site.type_of]
    members: list[Member] = []
    wanted = [option for option, count in mix.groups for _ in range(count)]
    for option in sorted(wanted, key=lambda o: (-max(o.gpus), -sum(o.gpus))):
        counts: dict[int, int] = {}
        for number, left in enumerate(option.gpus):
            while left:
                nodes = [n for n in range(len(free)) if kind[n] == number and free[n]]
                enough = [n for n in nodes if free[n] >= left]
                node = min(enough, key=lambda n: (free[n], n), default=None)
                if node is None:
                    node = max(nodes, key=lambda n: (free[n], -n))
                taken = min(free[node], left)
                counts[node], left, free[node] = taken, left - taken, free[node] - taken
        members.append((tuple(sorted(counts.items())), option.role))
    return as_plan(members)


def counts_by_kind(site: Site) -> list[int]:
    """Return the number of GPUs of each kind."""
    counts = [0] * (max(site.kind_of_type) + 1)
    for type_, gpus in zip(site.type_of, site.gpus, strict=True):
        counts[site.kind_of_type[type_]] += gpus
    return counts


def cards_by_kind(site: Site, request_bytes: float) -> list[float]:
    """Return, per kind, the requests per second whose KV the links of all its nodes can carry."""
    found = [0.0] * (max(site.kind_of_type) + 1)
    for node, type_ in enumerate(site.type_of):
        found[site.kind_of_type[type_]] += site.most_gb_s(node) * 1e9 / request_bytes
    return found


def mix_of(capacity: Modelled, request_bytes: float, most: int, known: float = 0.0) -> PooledPlan:
    """Return the best mix of groups of the existing GPUs; see ``best_mix``."""
    site = capacity.site
    counts = counts_by_kind(site)
    options = configurations(capacity.as_local(), counts, most)
    return best_mix(options, counts, cards_by_kind(site, request_bytes), known=known)


def rent(capacity: Modelled, request_bytes: float, most: int, budget: float) -> tuple[Site, float]:
    """Return the GPUs with which ``budget`` dollars per hour serve the most requests.

    It assumes that all GPUs of a kind are in one node. The second value is a number of requests per
    second that no plan exceeds on any GPUs of that price.

    Raises:
        JaxinferError: a node has no price, GPUs of one kind have several, or the budget is too
            small for any plan.
    """
    site = capacity.site
    counts, usd = counts_by_kind(site), site.usd_by_kind
    for name, each, type_ in zip(site.names, site.usd_per_gpu or (), site.type_of, strict=True):
        if each > 1.001 * (least := usd[site.kind_of_type[type_]]):
            raise JaxinferError(
                f"node {name} asks {each:g} dollars per GPU and hour, another of the same kind "
                f"{least:g}: a budget needs one price for each kind"
            )
    options = configurations(capacity.as_local(), counts, most)
    mix = best_mix(options, counts, cards_by_kind(site, request_bytes), usd, budget)
    if not mix.flow:
        raise JaxinferError(f"{budget:g} dollars per hour pay for no plan")
    return site.renting(mix.gpus), mix.bound


def best_plan(
    capacity: Modelled,
    network: KVNetwork,
    request_bytes: float,
    most: int,
    effort: Effort,
    restarts: int,
    seed: int,
) -> Certified:
    """Refine plans of the integer programs over shared networks, and return the best one.

    Args:
        most: largest number of GPUs of a group.

    Raises:
        JaxinferError: no group holds the model and the longest request.
    """
    site = capacity.site
    cells = within_nodes(capacity, request_bytes, most)
    mix = mix_of(capacity, request_bytes, most, cells.flow)
    scorer = Scorer(capacity, network, shared_flow, effort)
    starts = [plan_of_mix(site, mix)]
    if cells.groups:
        starts.append(plan_of_cells(cells))
    best = refine(scorer, starts, most, restarts, seed)
    return certify(scorer, best.plan, mix, cells.bound)


def certify(scorer: Scorer, plan: MemberPlan, mix: PooledPlan, within: float) -> Certified:
    """Compare a plan with an upper bound on all plans.

    Raises:
        JaxinferError: the plan has no flow.
    """
    groups, site = scorer.placed(plan), scorer.site
    flow = scorer.flow(plan)
    if not flow.total:
        raise JaxinferError("no plan is found in which both roles hold the model")
    nodes = [site.types[site.kind_of_type.index(kind)] for kind in range(len(mix.per_gpu))]
    names = [site.nodes[node].gpu for node in nodes]
    # One GPU at two power caps counts as two kinds.
    names = [
        name if names.count(name) == 1 else f"{name} of {site.names[node]}"
        for name, node in zip(names, nodes, strict=True)
    ]
    return Certified(
        plan, groups, flow, mix.bound, within, dict(zip(names, mix.per_gpu, strict=True))
    )
