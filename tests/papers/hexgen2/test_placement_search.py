"""Programs and refinement: against all plans of eight GPUs, their bounds, and each other."""

import random
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from placement_cases import A100, CLASSES, H100, L40, every_plan, least_side, modelled, site_of

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.hexgen2.capacity import ROLES, signature_of
from jaxinfer.papers.hexgen2.certify import (
    best_plan,
    counts_by_kind,
    mix_of,
    plan_of_cells,
    plan_of_mix,
)
from jaxinfer.papers.hexgen2.flow import shared_flow
from jaxinfer.papers.hexgen2.gpus import Site
from jaxinfer.papers.hexgen2.integer_programs import (
    best_mix,
    configurations,
    patterns,
    within_nodes,
)
from jaxinfer.papers.hexgen2.moves import KINDS, apply, as_plan, changes, idle_gpus, size
from jaxinfer.papers.hexgen2.refine import Effort, Scorer, climb, score

EIGHT = {"h": (H100, 4), "a": (A100, 4)}


def scorer(capacity: Any, network: Any) -> Scorer:
    return Scorer(capacity, network, shared_flow, Effort(10**6, 10**6))


def able(capacity: Any) -> Any:
    def carries(counts: tuple[int, ...], role: Any) -> bool:
        group = tuple((node, count) for node, count in enumerate(counts) if count)
        return capacity.carried(signature_of(capacity.site, group), role).rate > 0

    return carries


@cache
def optimum(model: str, work: str, nic: float) -> tuple[float, float, int]:
    """The largest flow of all plans; of those within nodes; and how many plans there are."""
    capacity, network, _ = modelled(site_of(EIGHT, nic), model, work)
    found = scorer(capacity, network)
    # Those first that may be best; what cannot be better needs no flow.
    plans = [(least_side(found.placed(p)), p) for p in every_plan((4, 4), able(capacity))]
    plans.sort(key=lambda each: -each[0])
    best = within = 0.0
    for least, plan in plans:
        local = all(len(group) == 1 for group, _ in plan)
        if least > best or (local and least > within):
            flow = found.flow(plan).total
            best, within = max(best, flow), max(within, flow * local)
    return best, within, len(plans)


CASES = [
    *(("llama-2-70b", work, nic) for work in ("HPLD", "LPHD", "LPLD") for nic in (1.25, 12.5)),
    *(("opt-30b", work, 12.5) for work in CLASSES),
]


@pytest.mark.parametrize(("model", "work", "nic"), CASES)
def test_the_best_of_all_plans_of_eight_gpus(model: str, work: str, nic: float) -> None:
    best, within, count = optimum(model, work, nic)
    assert count > (300 if model == "llama-2-70b" else 3_000)
    capacity, network, request_bytes = modelled(site_of(EIGHT, nic), model, work)
    found = best_plan(capacity, network, request_bytes, 8, Effort(100_000, 2_000), 20, 0)
    assert found.flow.total == pytest.approx(best, rel=1e-5)
    assert found.bound >= best * (1 - 1e-6)
    cells = within_nodes(capacity, request_bytes, 8)
    assert cells.flow == pytest.approx(within, rel=2e-4)
    assert cells.bound >= within * (1 - 1e-6)


@pytest.mark.parametrize("nic", [1.25, 12.5])
def test_the_program_of_cells_is_its_plan(nic: float) -> None:
    """The flow that the program of cells claims is the flow over the real network."""
    site = site_of({"h0": (H100, 8), "h1": (H100, 8), "a": (A100, 8), "l": (L40, 6)}, nic)
    capacity, network, request_bytes = modelled(site, "llama-2-70b", "HPHD")
    cells = within_nodes(capacity, request_bytes, 8)
    plan = plan_of_cells(cells)
    assert scorer(capacity, network).flow(plan).total == pytest.approx(cells.flow, rel=1e-4)
    assert cells.flow <= cells.bound * (1 + 1e-9)
    assert not (idle_gpus(site, plan) - idle_gpus(site, ())), "no more GPUs than there are"


def test_links_of_nodes_count_in_both_bounds() -> None:
    """Prompts on H100s, decodes on A100s, over a link that is ten thousand times their cards."""
    link = {"between": ["h", "a"], "gb_s": 1.0}
    site = site_of({"h": (H100, 2), "a": (A100, 2)}, 1e-4, links=[link])
    capacity, network, request_bytes = modelled(site, "llama-2-70b", "HPHD")
    plan = as_plan([(((0, 2),), "prefill"), (((1, 2),), "decode")])
    flow = scorer(capacity, network).flow(plan).total
    assert flow > 100 * 1e-4 * 1e9 / request_bytes
    found = best_plan(capacity, network, request_bytes, 8, Effort(10_000, 100), 2, 0)
    assert flow <= found.flow.total * (1 + 1e-6)
    assert flow <= found.within * (1 + 1e-6)
    assert found.flow.total <= found.bound * (1 + 1e-6)


def test_patterns_are_undominated_and_fit() -> None:
    capacity, _, _ = modelled(site_of({"h": (H100, 8)}), "opt-30b")
    found = patterns(capacity, 0, 8, 8)
    assert len(found) > 5
    for each in found:
        assert sum(count for count, _ in each.groups) <= 8
        rates = {
            role: sum(capacity.carried(((0, n),), r).rate for n, r in each.groups if r == role)
            for role in ROLES
        }
        assert (each.prefill, each.decode) == pytest.approx((rates["prefill"], rates["decode"]))
    by_prefill = sorted(found, key=lambda p: p.prefill)
    assert [p.decode for p in by_prefill] == sorted((p.decode for p in found), reverse=True)


def test_a_bound_of_larger_groups_is_no_lower_and_prices_are_of_its_gpus() -> None:
    site = site_of({"h": (H100, 4), "a": (A100, 6), "l": (L40, 8)})
    capacity, _, _ = modelled(site, "llama-2-70b", "LPHD")
    counts = counts_by_kind(site)
    free = [inf] * len(counts)
    local = capacity.as_local()
    mixes = [best_mix(configurations(local, counts, g), counts, free) for g in (4, 6, 8)]
    bounds = [mix.bound for mix in mixes]
    assert all(b >= a * (1 - 1e-6) for a, b in pairwise(bounds))
    for mix in mixes:
        assert mix.flow <= mix.bound * (1 + 1e-9)
        # No more than what all GPUs are worth: duality of the relaxed program.
        worth = sum(price * count for price, count in zip(mix.per_gpu, counts, strict=True))
        assert mix.bound <= worth * (1 + 1e-6)
        plan = plan_of_mix(site, mix)
        assert sum(size(group) for group, _ in plan) <= sum(counts)
        assert not {n for n, left in idle_gpus(site, plan).items() if left < 0}


@pytest.mark.slow
def test_slow_cards_lower_the_bound() -> None:
    """Slow cards leave only flow within kinds; faster ones raise it to the bound without cards."""
    nodes = {"h": (H100, 4), "a": (A100, 6), "l": (L40, 8)}
    bounds, flows = [], []
    for nic in (1e-3, 1.25, 12.5):
        capacity, network, request_bytes = modelled(site_of(nodes, nic), "llama-2-70b", "HPLD")
        bounds.append(mix_of(capacity, request_bytes, 8).bound)
        found = best_plan(capacity, network, request_bytes, 8, Effort(10_000, 60), 0, 0)
        flows.append(found.flow.total)
        assert found.bound == pytest.approx(bounds[-1], rel=1e-3)
    assert all(b >= a * (1 - 1e-3) for a, b in pairwise(bounds))
    assert bounds[0] < 0.95 * bounds[-1]
    assert all(f <= b * (1 + 1e-6) for f, b in zip(flows, bounds, strict=True))
    assert flows[-1] >= 0.999 * bounds[-1]


def test_a_budget_buys_what_is_worth_most() -> None:
    site = site_of({"h": (H100, 8), "a": (A100, 8)})
    capacity, _, _ = modelled(site, "opt-30b", "LPHD")
    options = configurations(capacity.as_local(), (8, 8), 8)
    cards, usd_per_gpu = (inf, inf), (3.69, 1.69)
    free = best_mix(options, (8, 8), cards)
    rich = best_mix(options, (8, 8), cards, usd_per_gpu, 1000.0)
    assert rich.flow == pytest.approx(free.flow, rel=1e-3)
    budgets = (5, 10, 20, 40)
    flows = [best_mix(options, (8, 8), cards, usd_per_gpu, each).flow for each in budgets]
    assert flows == sorted(flows)
    poor = best_mix(options, (8, 8), cards, usd_per_gpu, 10.0)
    assert sum(n * usd for n, usd in zip(poor.gpus, usd_per_gpu, strict=True)) <= 10.0
    # The best of all counts that ten dollars buy, each by itself.
    every = [
        best_mix(options, (h, a), cards).flow
        for h in range(3)
        for a in range(6)
        if h + a > 1 and 3.69 * h + 1.69 * a <= 10
    ]
    assert poor.flow == pytest.approx(max(every), rel=2e-4)


def test_nothing_that_holds_the_model() -> None:
    capacity, _, _ = modelled(site_of({"l": (L40, 2)}), "llama-2-70b")
    with pytest.raises(JaxinferError, match="no group of these GPUs holds the model"):
        mix_of(capacity, 1.0, 8)


def test_changes_keep_to_the_gpus_that_there_are() -> None:
    site = site_of({"h": (H100, 4), "a": (A100, 4)})
    rng = random.Random(0)
    plan = as_plan([(((0, 2),), "prefill"), (((0, 1), (1, 2)), "decode"), (((1, 2),), "decode")])
    for _ in range(60):
        options = list(changes(site, plan, KINDS, 5))
        assert len(options) == len(set(options))
        change = rng.choice(options)
        after = apply(plan, change)
        assert after != plan
        used = {n: sum(dict(group).get(n, 0) for group, _ in after) for n in (0, 1)}
        assert all(0 <= used[n] <= 4 for n in used)
        assert all(count > 0 for group, _ in after for _, count in group)
        merged = [group for group, _ in after if group not in dict(plan)]
        assert all(size(group) <= 5 for group in merged)
        plan = after


@pytest.mark.parametrize(("most", "grown", "new"), [(2, {2}, {1, 2}), (3, {2, 3}, {1, 2, 3})])
def test_idle_gpus_join_a_group_up_to_the_most(most: int, grown: set[int], new: set[int]) -> None:
    """Two groups of one, and three idle: one of them gives up its own, grows, or a third is new."""
    site = site_of({"h": (H100, 5)})
    plan = as_plan((((0, 1),), role) for role in ROLES)
    found = list(changes(site, plan, ("idle",), most))
    sizes = [(len(c.out), sum(size(group) for group, _ in c.into)) for c in found]
    assert {many for gone, many in sizes if gone} == {0} | grown
    assert {many for gone, many in sizes if not gone} == new


def test_equal_nodes_are_of_one_type_and_plans_have_no_order() -> None:
    """Nodes of equal GPUs are of one type, whatever their count, unless one has its own link."""
    nodes = {"a": (H100, 2), "b": (L40, 2), "c": (H100, 4)}
    assert site_of(nodes).type_of == [0, 1, 0]
    linked = site_of(nodes, links=[{"between": ["a", "b"], "gb_s": 1.0}])
    assert linked.type_of == [0, 1, 2]
    members = [(((0, 2),), "prefill"), (((2, 1),), "decode"), (((2, 3),), "decode")]
    assert as_plan(members) == as_plan(members[::-1])


def test_equal_changes_are_one() -> None:
    """Two equal pairs of groups: as many changes as of one pair beside its double."""
    site = site_of({"h0": (H100, 2), "h1": (H100, 2)})
    plan = as_plan([(((n, 1),), role) for n in (0, 1) for role in ROLES])
    flips = list(changes(site, plan, ("flip",), 4))
    assert len(flips) == 2


def test_without_merges_and_restarts_it_stops_short() -> None:
    """The same number of groups, whose roles may change: on four H100s and four A100s."""
    capacity, network, request_bytes = modelled(site_of(EIGHT), "llama-2-70b", "LPLD")
    start = as_plan([(((0, 4),), "prefill"), (((1, 4),), "decode")])
    found = scorer(capacity, network)
    few = climb(found, score(found, start), 8, ("move", "swap", "flip"))
    assert len(few.plan) == 2
    best = best_plan(capacity, network, request_bytes, 8, Effort(100_000, 2_000), 5, 0)
    assert few.flow < 0.95 * best.flow.total


def test_the_same_plan_each_time_and_whatever_the_names() -> None:
    def plan(nodes: dict[str, tuple[str, int]]) -> Any:
        site = site_of(nodes, 1.25)
        capacity, network, request_bytes = modelled(site, "llama-2-70b", "HPHD")
        return best_plan(capacity, network, request_bytes, 8, Effort(20_000, 200), 3, 7), site

    def shown(found: Any, site: Site) -> list[Any]:
        return sorted((signature_of(site, group), role) for group, role in found.plan)

    first, site = plan({"x": (H100, 4), "y": (H100, 4), "z": (A100, 4)})
    again, _ = plan({"x": (H100, 4), "y": (H100, 4), "z": (A100, 4)})
    assert first == again
    renamed, other = plan({"q": (H100, 4), "b": (H100, 4), "a": (A100, 4)})
    assert shown(renamed, other) == shown(first, site)
    assert renamed.flow.total == first.flow.total


def test_small_groups_stay_small() -> None:
    capacity, network, request_bytes = modelled(site_of(EIGHT), "opt-30b", "LPHD")
    for most in (1, 2, 3):
        found = best_plan(capacity, network, request_bytes, most, Effort(5_000, 100), 2, 0)
        assert max(size(group) for group, _ in found.plan) <= most
        assert found.flow.total <= found.bound * (1 + 1e-6)
