"""The comparison with HexGen-3's simulator: rates by hand, and plans that none exceeds."""

from itertools import combinations_with_replacement

import pytest

from jaxinfer.hardware.catalogue import ModelShape
from scripts.validate.hexgen3 import (
    Assumptions,
    Inputs,
    Replica,
    allocate,
    plan_rate,
    published_cases,
)

SHAPE = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=10,
)
# 10^9 bytes per second, and FLOPs that take no time.
INPUTS = Inputs(SHAPE, {"c": (1e24, 1e9)}, {1: (100, 20)})
EXCHANGE = 4 * 8 * 2 / 100e9


def test_rates_by_hand() -> None:
    """Four requests of 100 and 20 tokens, which see 110 entries on average, in three layers."""
    ffn = (2 * 3 * 8 * 16 + 4 * 2 * (3 * 16 + 2 * 8)) * 1e-9
    alone = Replica("ffn", "c", 1, 1)
    found = INPUTS.rate(alone, 1, Assumptions())
    assert found == pytest.approx(4 / (20 * 3 * (ffn + EXCHANGE)), rel=1e-9)
    experts = INPUTS.rate(alone._replace(ep=4), 1, Assumptions(experts=True))
    each = ffn / 4 + 0.05 * 3 * EXCHANGE + EXCHANGE
    assert experts == pytest.approx(4 / (20 * 3 * each), rel=1e-9)
    assert INPUTS.rate(alone._replace(ep=4), 1, Assumptions()) == found

    weights, moved = 2 * (8 * 16 + 8 * 8), 4 * 2 * (8 + 16 + 8 + 8)
    entries = 4 * 110 * 2 * 2 * 2 * 2
    layer = (weights + moved + entries) * 1e-9
    sent = 4 * 100 * 3 * 2 * 2 * 2 * 2 / 100e9
    attention = Replica("attn", "c", 1, 1)
    expected = 4 / (sent + 20 * 3 * (layer + EXCHANGE))
    assert INPUTS.rate(attention, 1, Assumptions()) == pytest.approx(expected, rel=1e-9)
    scores = 2 * 4 * 110 * 4 * 2 * 1e-9
    expected = 4 / (sent + 20 * 3 * (layer + scores + EXCHANGE))
    found = INPUTS.rate(attention, 1, Assumptions(scores=True))
    assert found == pytest.approx(expected, rel=1e-9)


def test_attention_as_a_whole_takes_as_long_for_twice_the_requests() -> None:
    """Two GPUs divide weights; entries are those of eight requests, read by each alone."""
    two = Replica("attn", "c", 2, 1)
    fast, slow = (INPUTS.rate(two, 1, Assumptions(attention=one)) for one in (False, True))
    entries = 8 * 110 * 2 * 2 * 2 * 2 * 1e-9
    assert 8 / slow - 8 / fast == pytest.approx(20 * 3 * entries / 2, rel=1e-9)


def test_no_plan_is_better_than_the_best() -> None:
    """Of all plans for three and two cards, by trying each set of replicas."""
    kinds = [
        Replica(worker, card, tp, 1)
        for worker in ("pre", "attn", "ffn")
        for card in "cd"
        for tp in (1, 2)
    ]
    rates = {each: 1.0 + 0.37 * (7 * number % 5) for number, each in enumerate(kinds)}
    capacity = {"c": 3, "d": 2}
    best = 0.0
    for count in range(3, 6):
        for plan in combinations_with_replacement(kinds, count):
            used = {card: sum(each.tp for each in plan if each.card == card) for card in "cd"}
            if all(used[card] <= capacity[card] for card in capacity):
                best = max(best, plan_rate(plan, rates))
    found, plan = allocate(rates, capacity)
    assert found == best == plan_rate(plan, rates) > 0
    assert sum(each.tp for each in plan if each.card == "c") <= 3


def test_plans_are_read_from_published_results() -> None:
    strategy = {"replicas": [{"tp": 2, "ep": 8, "gpus": 2}]}
    afd = {
        "architecture": "AFD",
        "baseline": "X",
        "capacity": {"c": 4},
        "parallelism": {"ffn/c": strategy, "attn/c": strategy | {"dp": 1}},
        "system_throughput_req_s": 3.0,
        "cost_per_hour": 7.0,
    }
    pd = afd | {"architecture": "PD", "parallelism": {"decode": {"c": strategy, "d": strategy}}}
    hour = {"hour": 2, "workload_type": 3, "baselines": [afd, pd]}
    results = {"static_results": [afd], "dynamic_results": [hour]}
    first, second, third = published_cases(results)
    assert (first.name, first.kind, first.published) == ("static X", 1, 3.0)
    assert (second.name, second.kind) == ("hour 2 X", 3)
    assert first.replicas == [Replica("ffn", "c", 2, 8), Replica("attn", "c", 2, 8)]
    assert third.replicas == [Replica("decode", card, 2, 8) for card in "cd"]
    assert third.usd == 7.0


def test_a_decode_pool_does_both_parts_one_after_the_other_on_each_card() -> None:
    rates = {
        Replica(worker, card, 1, 1): rate
        for worker, by_card in {"pre": (9, 9), "attn": (2, 1), "ffn": (2, 3)}.items()
        for card, rate in zip("cd", by_card, strict=True)
    }
    plan = [Replica("pre", "c", 1, 1), *(Replica("decode", card, 1, 1) for card in "ccd")]
    # Two of card c take turns at attention and FFN of 4 a second each: 2; one of d: 1 / (1 + 1/3).
    assert plan_rate(plan, rates) == pytest.approx(2 + 3 / 4, rel=1e-12)
    assert (
        plan_rate([plan[0]._replace(card="d"), *plan[1:]], rates | {Replica("pre", "d", 1, 1): 1.5})
        == 1.5
    )
