"""Flows: pairs and shared networks against each other, by duality, and by hand."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import A100, H100, L40, least_side, modelled, site_of
from properties import examples

from jaxinfer.papers.hexgen2.capacity import Carried, PlannedStage
from jaxinfer.papers.hexgen2.flow import KVNetwork, PlacedGroup, pair_flow, shared_flow

# Ten layers, each with so many bytes of KV of a prompt.
LAYER = 1e8


def one(node: int, role: str, rate: float, layers: int = 10, tp: int = 1) -> PlacedGroup:
    """A group of one stage."""
    return PlacedGroup(((node, tp),), role, Carried(rate, (PlannedStage(0, tp, layers),)))  # type: ignore[arg-type]


def network(nodes: int, nic_gb_s: float = 1.0, **more: object) -> KVNetwork:
    site = site_of({f"n{i}": (H100, 8) for i in range(nodes)}, nic_gb_s, **more)
    return KVNetwork(site, LAYER)


def test_a_request_takes_what_stages_share() -> None:
    site = site_of({"a": (H100, 8), "b": (A100, 8), "c": (L40, 8)}, 2.0)
    source = PlacedGroup(
        ((0, 2), (1, 1)), "prefill", Carried(1.0, (PlannedStage(0, 2, 6), PlannedStage(1, 1, 4)))
    )
    dest = PlacedGroup(
        ((1, 4), (2, 1)), "decode", Carried(1.0, (PlannedStage(0, 4, 3), PlannedStage(1, 1, 7)))
    )
    assert KVNetwork(site, LAYER).lanes(source, dest) == {
        ("nic", "a", "out"): (6 * LAYER, 2e9),
        ("nic", "b", "in"): (3 * LAYER, 2e9),
        ("nic", "c", "in"): (7 * LAYER, 2e9),
        ("nic", "b", "out"): (4 * LAYER, 2e9),
    }
    # Stages on one node have a link of their own, over as many pairs of GPUs as one side has.
    within = KVNetwork(site, LAYER).lanes(one(0, "prefill", 1, tp=2), one(0, "decode", 1, tp=4))
    assert within == {("within", 0, 0): (10 * LAYER, 2 * 450e9)}


def test_a_link_of_two_nodes_takes_the_place_of_their_cards() -> None:
    link = {"between": ["n0", "n1"], "gb_s": 5.0}
    lanes = network(3, links=[link]).lanes(one(1, "prefill", 1), one(0, "decode", 1))
    assert lanes == {("link", "n1", "n0"): (10 * LAYER, 5e9)}


def test_cards_that_pairs_share() -> None:
    """A card for four pairs: 1 GB/s for 1 GB each, where pairs by themselves promise four."""
    groups = [one(0, "prefill", 9) for _ in range(2)] + [one(1, "decode", 9) for _ in range(2)]
    assert pair_flow(groups, network(2)).total == pytest.approx(4, rel=1e-4)
    found = shared_flow(groups, network(2))
    assert found.total == pytest.approx(1)
    # The card of either node is full; one more GB/s of one of them alone gives none.
    assert sum(found.per_gb_s.values()) == pytest.approx(1)
    assert not found.per_request


def test_prices_are_what_more_of_it_gives() -> None:
    groups = [one(0, "prefill", 2), one(0, "decode", 0.5), one(1, "decode", 3)]
    found = shared_flow(groups, network(2))
    assert found.total == pytest.approx(1.5)  # One over the cards, half a one within.
    assert found.per_request == {1: pytest.approx(1)}
    assert sum(found.per_gb_s.values()) == pytest.approx(1)
    more = shared_flow([groups[0], one(0, "decode", 0.6), groups[2]], network(2))
    assert more.total == pytest.approx(1.6)
    assert shared_flow(groups, network(2, 1.1)).total == pytest.approx(1.6)


@st.composite
def clusters(draw: st.DrawFn) -> list[PlacedGroup]:
    rates = st.floats(0.1, 10)
    roles = st.sampled_from(("prefill", "decode"))
    return [
        one(draw(st.integers(0, 3)), draw(roles), draw(rates), tp=draw(st.sampled_from((1, 2))))
        for _ in range(draw(st.integers(2, 8)))
    ]


@examples(150)
@given(clusters(), st.floats(0.1, 20))
def test_what_holds_of_any_flow(groups: list[PlacedGroup], nic_gb_s: float) -> None:
    net = network(4, nic_gb_s)
    shared, pairs = shared_flow(groups, net), pair_flow(groups, net)
    assert shared.total <= pairs.total * (1 + 1e-4) + 1e-4
    assert pairs.total <= least_side(groups) + 1e-4
    assert shared_flow(groups, network(4, 2 * nic_gb_s)).total >= shared.total - 1e-7
    # Groups and cards that are full are a cut: what they let through, by their prices, is the flow.
    rates = {i: placed.carried.rate for i, placed in enumerate(groups)}
    value = sum(price * rates[i] for i, price in shared.per_request.items())
    value += sum(price * nic_gb_s for price in shared.per_gb_s.values())
    assert value == pytest.approx(shared.total, rel=1e-4, abs=1e-6)
    for found in (shared, pairs):
        assert sum(found.pairs.values()) == pytest.approx(found.total, rel=1e-5, abs=1e-5)
        for i, placed in enumerate(groups):
            through = sum(flow for pair, flow in found.pairs.items() if i in pair)
            assert through <= placed.carried.rate * (1 + 1e-5)
        assert all(groups[i].role == "prefill" for i, _ in found.pairs)
        assert all(groups[j].role == "decode" for _, j in found.pairs)
    sent: dict[tuple[object, ...], float] = {}
    for (i, j), flow in shared.pairs.items():
        for link, (num_bytes, _) in net.lanes(groups[i], groups[j]).items():
            if link[0] != "within":
                sent[link] = sent.get(link, 0.0) + flow * num_bytes
    assert all(num_bytes <= nic_gb_s * 1e9 * (1 + 1e-5) for num_bytes in sent.values())


@examples(60)
@given(clusters(), st.integers(0, 99))
def test_order_and_names_change_nothing(groups: list[PlacedGroup], seed: int) -> None:
    rng = random.Random(seed)
    again = rng.sample(groups, len(groups))
    renamed = rng.sample(range(4), 4)
    moved = [one(renamed[p.group[0][0]], p.role, p.carried.rate, tp=p.group[0][1]) for p in again]
    net = network(4)
    for flow in (shared_flow, pair_flow):
        total = flow(groups, net).total
        assert flow(again, net).total == pytest.approx(total, rel=1e-5, abs=1e-5)
        assert flow(moved, net).total == pytest.approx(total, rel=1e-5, abs=1e-5)


@examples(60)
@given(clusters())
def test_pairs_are_the_program_where_no_card_is_shared(groups: list[PlacedGroup]) -> None:
    """The flow of pairs and the program's are both the maximum where no flow fills a card."""
    net = network(4, 1e6)
    assert pair_flow(groups, net).total == pytest.approx(
        shared_flow(groups, net).total, rel=1e-4, abs=1e-4
    )


@examples(150)
@given(clusters(), st.floats(0.1, 20))
def test_pairs_carry_what_the_least_cut_lets_through(groups: list[PlacedGroup], nic: float) -> None:
    """The flow is the least of all cuts (Ford and Fulkerson): groups, and edges that leave them."""
    net = network(4, nic)
    prefill = [i for i, placed in enumerate(groups) if placed.role == "prefill"]
    decode = [i for i, placed in enumerate(groups) if placed.role == "decode"]
    least = min(
        sum(groups[i].carried.rate for i in prefill if i not in side)
        + sum(groups[j].carried.rate for j in decode if j in side)
        + sum(
            net.most(groups[i], groups[j])
            for i in prefill
            for j in decode
            if i in side and j not in side
        )
        for count in range(len(groups) + 1)
        for side in combinations(range(len(groups)), count)
    )
    assert pair_flow(groups, net).total == pytest.approx(least, rel=1e-4, abs=1e-4)


def test_one_role_alone_has_no_flow() -> None:
    assert shared_flow([one(0, "prefill", 1)], network(1)).total == 0
    assert pair_flow([one(0, "decode", 1), one(0, "prefill", 0)], network(1)).total == 0


def test_kv_is_of_the_width_that_the_model_has() -> None:
    _, _, request_bytes = modelled(site_of({"h": (H100, 2)}), "llama-2-70b", "HPHD")
    assert request_bytes == 1210 * 327_680
