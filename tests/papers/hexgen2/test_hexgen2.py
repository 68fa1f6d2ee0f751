"""HexGen-2: shares of pairs, to within one request; who is full, lost, or too small."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import RULES
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.hexgen2.system import HexGen2, HexGen2Options, Shares
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.views import ClusterView, Leg

FLOWS = {"p": {"d": 3.0, "e": 1.0}, "q": {"e": 2.0}}


def make(flows: Mapping[str, Mapping[str, float]] = FLOWS, **options: Any) -> HexGen2:
    return HexGen2(HexGen2Options.model_validate({"flows": flows} | options))


def instance(name: str, pages: int = 100, **options: Any) -> Instance:
    defaults = {"max_num_batched_tokens": 5, "max_in_flight": 1, "watermark": 0.0}
    return new_instance(name, make_kv(pages, 1), InstanceOptions(**(defaults | options)))


def route(system: HexGen2, count: int, pages: int = 99, **requests: int) -> list[tuple[Leg, ...]]:
    """Legs of requests of 10 and 3 tokens, some of which are cached."""
    there = {
        name: SimpleNamespace(
            num_requests=n,
            max_num_batched_tokens=99,
            prompt_tokens_left=0,
            num_pages=pages,
            page_size=1,
        )
        for name, n in requests.items()
    }
    waiting = [
        SimpleNamespace(
            id=f"r{i}", prompt_len=10, num_known=10, computed=0, max_tokens=3, held_by=None
        )
        for i in range(count)
    ]
    assignments = system.route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
    assert [a.request for a in assignments] == [f"r{i}" for i in range(len(assignments))]
    return [a.legs for a in assignments]


def pairs(legs: Sequence[tuple[Leg, ...]]) -> Counter[str]:
    return Counter("".join(leg.instance for leg in each) for each in legs)


def test_options() -> None:
    system = make()
    assert vars(system.options) == {"flows": FLOWS, "hand_off": "on_demand", "max_in_prefill": 16}
    system.check("pqde")
    # All pairs, since a lost instance may leave any; without decode, to another that prefills.
    assert system.routes("pqde") == [*product("pq", "de")]
    assert system.ttft_counts_transfer
    assert not system.needs_decode_rows
    assert not system.needs_fits
    assert system.tick_interval is None


@pytest.mark.parametrize(
    ("flows", "instances", "message"),
    [
        ({"x": {"d": 1.0}}, "pd", "flows.x: known: d, p"),
        ({"p": {"x": 1.0}}, "pd", "flows.p.x: known: d, p"),
        ({"p": {"q": 1.0}, "q": {"d": 1.0}}, "pqd", "flows: 'q' both prefills and decodes"),
        (FLOWS, "pqdex", "flows: instance 'x' has none"),
        ({"p": {"d": 0.0}}, "pd", "flows.p.d is 0, must be above 0"),
        ({"p": {"d": -1.0}}, "pd", "flows.p.d is -1, must be above 0"),
        ({"p": {}}, "pd", "flows.p is empty, must have a decode instance"),
    ],
)
def test_what_cannot_be(flows: Any, instances: str, message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        make(flows).check(instances)
    assert str(error.value) == message


def test_in_proportion() -> None:
    legs = route(make(max_in_prefill=100), 12, p=0, q=0, d=0, e=0)
    assert pairs(legs) == {"pd": 6, "pe": 2, "qe": 4}
    assert all(each == (Leg(each[0].instance, 10), Leg(each[1].instance)) for each in legs)


def test_each_prefill_instance_has_room_of_its_own() -> None:
    """Two of p's two are there, so that q has all that come, up to its three."""
    system = make(max_in_prefill={"p": 2, "q": 3})
    assert pairs(route(system, 12, p=2, q=0, d=0, e=0)) == {"qe": 3}
    # Sixteen of each that has no limit of its own.
    system = make(max_in_prefill={"p": 2})
    assert pairs(route(system, 40, p=0, q=0, d=0, e=0))["qe"] == 16


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (0, "max_in_prefill is 0, must be from 1 on"),
        ({"p": 1, "q": 0}, "max_in_prefill.q is 0, must be from 1 on"),
        ({"d": 4}, "max_in_prefill.d: known: p, q"),
    ],
)
def test_limits_that_cannot_be(most: Any, message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        make(max_in_prefill=most)
    assert str(error.value) == message
    make(max_in_prefill={"p": 1, "q": 1})


def held(name: str, by: str | None, prompt: int = 10) -> SimpleNamespace:
    done = prompt if by else 0
    return SimpleNamespace(
        id=name, prompt_len=prompt, num_known=prompt, computed=done, max_tokens=3, held_by=by
    )


def test_whose_decode_instance_is_lost_waits_for_no_prefill() -> None:
    """Full prefill instances: those whose prompt is done go on, also behind others."""
    system = make(max_in_prefill=1)
    there = {
        name: SimpleNamespace(
            num_requests=1,
            max_num_batched_tokens=99,
            prompt_tokens_left=0,
            num_pages=99,
            page_size=1,
        )
        for name in "pqe"
    }
    waiting = [held("a", "p"), held("b", None), held("c", "q"), held("d", "p")]
    found = system.route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
    assert {a.request: a.legs for a in found} == dict.fromkeys("acd", (Leg("e"),))


def views(requests: int, **pages: int) -> Any:
    return {
        name: SimpleNamespace(
            num_requests=requests if name == "p" else 0,
            num_pages=pool,
            max_num_batched_tokens=99,
            prompt_tokens_left=0,
            page_size=1,
        )
        for name, pool in pages.items()
    }


def test_who_is_held_goes_where_its_instance_has_flows() -> None:
    waiting = [held(name, "q") for name in "abcdefgh"]
    found = make().route(waiting, ClusterView(0.0, views(0, p=99, q=99, d=99, e=99)))  # type: ignore[arg-type]
    assert [a.legs for a in found] == [(Leg("e"),)] * 8


def test_nobody_overtakes_who_waits_for_room() -> None:
    """The first one fits into one that is full, the other has room behind it; after a loss, too."""
    there = ClusterView(0.0, views(1, p=99, q=12, e=99))
    waiting = [held("a", None, 50), held("b", None, 5), held("c", "q")]
    found = make(max_in_prefill=1).route(waiting, there)  # type: ignore[arg-type]
    assert [a.request for a in found] == ["c"]


def test_after_losses_whole_requests_go_where_they_fit() -> None:
    there = {
        name: SimpleNamespace(
            num_requests=0,
            max_num_batched_tokens=99,
            prompt_tokens_left=0,
            num_pages=pages,
            page_size=1,
        )
        for name, pages in (("p", 11), ("q", 12))
    }
    waiting = [held(name, None) for name in "abc"]
    found = make().route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
    assert [a.legs for a in found] == [(Leg("q"),)] * 3
    # What fits into none is told by the first.
    found = make().route([held("x", None, 50)], ClusterView(0.0, there))  # type: ignore[arg-type]
    assert [a.legs for a in found] == [(Leg("p"),)]


WEIGHTS = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=25)


def shares_of(weights: Sequence[float], ahead: float = 0.0) -> Shares:
    flows = {(f"p{number}", "d"): weight for number, weight in enumerate(weights)}
    return Shares(flows, dict.fromkeys(flows, ahead))


@examples(200)
@given(WEIGHTS)
def test_at_every_moment_within_one_request(weights: list[float]) -> None:
    """Tijdeman's bound, 1 - 1 / (2n - 2), which the largest deficit exceeds."""
    shares = shares_of(weights)
    sent: Counter[tuple[str, str]] = Counter()
    for count in range(1, 300):
        taken = shares.take(list(shares.owed))
        assert taken
        sent[taken] += 1
        for i, weight in enumerate(weights):
            due = count * weight / sum(weights)
            bound = 1 - 0.5 / max(len(weights) - 1, 1)
            assert abs(due - sent[f"p{i}", "d"]) <= bound + 1e-9


@examples(100)
@given(WEIGHTS, st.floats(0, 5), st.data())
def test_who_has_room_gets_ahead_by_so_much_at_most(
    weights: list[float], ahead: float, data: st.DataObject
) -> None:
    """Requests wait for those that are due more than it; never where all have room."""
    shares = shares_of(weights, ahead)
    everyone = list(shares.owed)
    for _ in range(20):
        with_room = data.draw(st.lists(st.sampled_from(everyone), unique=True))
        for _ in range(data.draw(st.integers(1, 50))):
            before = dict(shares.owed)
            taken = shares.take(with_room, everyone)
            assert sum(shares.owed.values()) == pytest.approx(0, abs=1e-6)
            assert min(shares.owed.values()) >= -max(ahead, 1) - 1e-6
            if taken is None:
                assert shares.owed == before
                assert set(with_room) < set(everyone)
                break
            assert taken in with_room


def test_a_full_one_is_waited_for_and_gets_what_it_missed() -> None:
    """Two halves: the one is given two more than its share, which is four while nobody else is."""
    shares = shares_of((1.0, 1.0), ahead=2.0)
    one, other = everyone = list(shares.owed)
    assert [shares.take([one], everyone) for _ in range(5)] == [one] * 4 + [None]
    taken = [shares.take(everyone, everyone) for _ in range(8)]
    assert taken[:3] == [other] * 3
    assert (taken.count(one), taken.count(other)) == (2, 6)


@examples(100)
@given(WEIGHTS, st.data())
def test_who_may_not_have_them_gains_little(weights: list[float], data: st.DataObject) -> None:
    """A pair that is owed a request already gains nothing more meanwhile."""
    shares = shares_of(weights)
    everyone = list(shares.owed)
    for _ in range(100):
        able = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
        for _ in range(data.draw(st.integers(1, 50))):
            before = shares.owed
            assert shares.take(able) in able
            assert sum(shares.owed.values()) == pytest.approx(0, abs=1e-6)
            for pair in before.keys() - set(able):
                owed = shares.owed[pair]
                assert owed == before[pair] if before[pair] >= 1 else owed < 2
        if data.draw(st.booleans()):
            break


@pytest.mark.parametrize("seed", range(20))
def test_who_is_kept_from_having_them_is_owed_little(seed: int) -> None:
    """Less than (n + 3) / 2, though those that are owed the most may mostly not have them.

    What the k that are owed the most are owed above 2 each is k (n - k) / 2 at most. This holds for
    k = n, as all add up to 0. Otherwise those that may have the request gain one together and lose
    one; where who loses it is not of the k, it is at most one less than any of them that gained,
    and the sums of k + 1 and of those of the k that stayed as they were, being in bounds, leave no
    more for the rest.
    """
    rng = random.Random(seed)
    shares = shares_of([10 ** rng.uniform(-4, 0) for _ in range(rng.randint(2, 25))])
    everyone = list(shares.owed)
    for _ in range(60):
        least = sorted(everyone, key=shares.owed.__getitem__)
        able = rng.choice((everyone, least))[: rng.randint(1, len(everyone))]
        for _ in range(rng.randint(1, 50)):
            assert shares.take(able) in able
            assert max(shares.owed.values()) < (len(everyone) + 3) / 2


def test_shares_of_those_that_may_have_them() -> None:
    flows = {("p", "d"): 3.0, ("p", "e"): 1.0, ("q", "e"): 4.0}
    shares = Shares(flows, dict.fromkeys(flows, 0.0))
    taken = Counter(shares.take([("p", "d"), ("p", "e")]) for _ in range(400))
    assert abs(taken["p", "d"] - 300) <= 2
    # What it missed comes back by one request, not by 400.
    back = [shares.take(list(shares.owed)) for _ in range(8)]
    assert back.count(("q", "e")) in (5, 6)


def test_a_queue_that_is_never_empty_keeps_to_the_flows() -> None:
    """p has no room for long: q gets what it may have at once more than its share, and no more."""
    system = make({"p": {"d": 3.0}, "q": {"e": 1.0}}, max_in_prefill={"p": 1, "q": 4})
    given = [pairs(route(system, 9, p=1, q=0, d=0, e=0)) for _ in range(4)]
    assert sum(each["qe"] for each in given) == 5
    assert pairs(route(system, 9, p=0, q=0, d=0, e=0)) == {"pd": 1}


def test_limits_of_prefill_instances() -> None:
    system = make(max_in_prefill=3)
    assert pairs(route(system, 9, p=2, q=0, d=0, e=0)) == {"pd": 1, "qe": 3}
    assert route(system, 9, p=3, q=3, d=0, e=0) == []


@pytest.mark.parametrize(
    ("there", "given"),
    [
        ("pde", {"pd": 6, "pe": 2}),  # The pairs that are left keep their ratio.
        ("pqe", {"pe": 3, "qe": 5}),
        ("qd", {"qd": 8}),  # No pair has a flow: all are equal.
        ("pq", {"p": 4, "q": 4}),  # Whole requests.
        ("de", {"d": 4, "e": 4}),
        ("e", {"e": 8}),
    ],
)
def test_who_is_left(there: str, given: dict[str, int]) -> None:
    legs = route(make(max_in_prefill=100), 8, **dict.fromkeys(there, 0))
    assert pairs(legs) == given
    assert {len(each) for each in legs} == {len(next(iter(given)))}


def test_who_comes_back_has_its_share_again() -> None:
    system = make(max_in_prefill=100)
    route(system, 50, p=0, d=0, e=0)
    assert pairs(route(system, 6, p=0, q=0, d=0, e=0)) == {"pd": 3, "pe": 1, "qe": 2}


def serve(
    system: HexGen2,
    lengths: Sequence[tuple[int, int]],
    pool: Sequence[Instance],
    timing: Timing | None = None,
) -> Outcome:
    return Run(system, pool, make_requests(lengths), timing or Timing(in_order=True)).verify()


def test_pools_that_are_too_small_are_passed_over() -> None:
    """A request waits for those that hold it, though another has room; what none holds is told."""
    pool = [instance("p", 8), instance("q", 30), instance("d", 20), instance("e", 50)]
    lengths = [(5, 4), (9, 4), (9, 20), (9, 4), (5, 20), (5, 60)]
    outcome = serve(make(max_in_prefill=1), lengths, pool)
    routes = {name: [where for where, _ in outcome.route_of(name)] for name in outcome.finished}
    assert [routes[f"r{i}"] for i in (1, 2, 3)] == [["q", "e"]] * 3
    assert routes["r4"][1] == "e"
    assert [outcome.finished[f"r{i}"].finish_reason for i in (4, 5)] == ["length", "error"]


@examples(80)
@given(
    flows=st.dictionaries(
        st.sampled_from("pq"),
        st.dictionaries(st.sampled_from("de"), st.floats(0.01, 9), min_size=1),
        min_size=1,
    ),
    lengths=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 8)), min_size=1, max_size=10),
    most=st.integers(1, 4),
    rule=st.sampled_from(RULES),
    lost=st.dictionaries(st.sampled_from("pqde"), st.integers(0, 40).map(float), max_size=3),
    options=st.lists(
        st.tuples(st.sampled_from((1, 2, 8)), st.integers(22, 40), st.sampled_from((1, 3, 16))),
        min_size=4,
        max_size=4,
    ),
    seed=st.integers(0, 10**6),
)
def test_everyone_is_served_as_long_as_one_instance_is_left(
    flows: dict[str, dict[str, float]],
    lengths: list[tuple[int, int]],
    most: int,
    rule: str,
    lost: dict[str, float],
    options: list[tuple[int, int, int]],
    seed: int,
) -> None:
    """Tokens are those of the request alone; without losses, KV goes where flows do."""
    system = make(flows, max_in_prefill=most, hand_off=rule)
    names = [*flows, *dict.fromkeys(dest for row in flows.values() for dest in row)]
    pool = [
        instance(name, pages, max_num_seqs=seats, max_num_batched_tokens=budget)
        for name, (seats, pages, budget) in zip(names, options, strict=False)
    ]
    gone = {name: at for name, at in lost.items() if name in names[1:]}
    outcome = serve(system, lengths, pool, Timing(seed, 3, 6, lost=gone))
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    moved = {(t.source, t.dest) for t in outcome.world.transfers}
    assert moved <= set(system.routes(names))
    if not gone:
        assert moved <= {(p, d) for p, row in flows.items() for d in row}
        for number, (prompt_len, _) in enumerate(lengths):
            request = outcome.finished[f"r{number}"]
            if not request.metrics.num_preemptions:
                assert outcome.route_of(request.id)[0][1] == prompt_len
