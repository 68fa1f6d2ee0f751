"""Tiers: what an instance that computes nothing gets of ended requests, and gives back."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import LAYOUTS, Chaos, Follow, Scenario, Script, Survivor, scenarios
from serving_checks import Outcome, Run, make_kv, new_instance

from jaxinfer.caches.eviction import PinnedLast
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Action, Assignment, Reassign
from jaxinfer.serving.views import ClusterView, Leg, RequestView

A, B = list(range(12)), list(range(100, 112))


def serve(
    prompts: list[list[int]],
    pages: int = 4,
    size: int = 4,
    tier_pages: int = 30,
    takes: str = "all",
    sessions: tuple[int, ...] = (),
) -> Outcome:
    """Prompts of one output token, one after another, on an instance of few pages of four."""
    requests = [
        RequestState(f"r{number}", len(tokens), 1, 50.0 * number, tokens)
        for number, tokens in enumerate(prompts)
    ]
    for number in sessions:
        requests[number].session = "s"
    options = InstanceOptions(max_num_batched_tokens=16, watermark=0)
    own = replace(options, tier="T", tier_takes=takes)
    kept = replace(options, computes=False)
    instances = [
        new_instance("A", make_kv(pages, 4, caching=True), own),
        new_instance("T", make_kv(tier_pages, size, caching=True), kept),
    ]
    scripts = {r.id: Script(r.prompt_len, 1, r.arrival, None, (Leg("A"),), 1) for r in requests}
    return Run(Follow(scripts), instances, requests).verify()


def cached(outcome: Outcome) -> list[int | None]:
    return [r.metrics.num_cached_tokens for _, r in sorted(outcome.finished.items())]


def test_evicted_pages_come_back() -> None:
    """Of the three pages of A, those of B have left one. The last token is computed."""
    outcome = serve([A, B, [*A, 7]])
    assert outcome.transfers_of("r0") == [("A", "T", 0, 12)]
    assert outcome.transfers_of("r1") == [("A", "T", 0, 12)]
    assert outcome.transfers_of("r2") == [("T", "A", 4, 12)]
    assert cached(outcome) == [0, 0, 12]
    assert outcome.route_of("r2") == [("A", 1)]
    assert {batch.instance for batch in outcome.world.batches} == {"A"}


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_fetch_after_a_preemption_leaves_the_time_of_the_first_token(handed_over: bool) -> None:
    """r2 has its first token when r1, which came before it, takes its last page.

    When r1 has ended, r2 fetches its prompt from the tier. Its first token was there long before,
    or had come from P.
    """
    legs = (Leg("P", 13), Leg("A")) if handed_over else (Leg("A"),)
    requests = [
        RequestState("r0", 12, 1, 0.0, A),
        RequestState("r1", 12, 20, 50.0, B),
        RequestState("r2", 13, 4, 51.0 if handed_over else 52.0, [*A, 7]),
    ]
    options = InstanceOptions(max_num_batched_tokens=16, watermark=0)
    instances = [
        new_instance("A", make_kv(8, 4, caching=True), replace(options, tier="T")),
        new_instance("P", make_kv(8, 4, caching=True), options),
        new_instance("T", make_kv(30, 4, caching=True), replace(options, computes=False)),
    ]
    scripts = {
        r.id: Script(r.prompt_len, r.max_tokens, r.arrival, None, (Leg("A"),), 1) for r in requests
    }
    scripts["r2"] = replace(scripts["r2"], legs=legs, at_once=2)
    outcome = Run(Follow(scripts), instances, requests).verify()
    metrics = outcome.finished["r2"].metrics
    assert ("T", "A", 0, 12) in outcome.transfers_of("r2")
    assert metrics.num_preemptions == 1
    assert metrics.token_times == [52.0 if handed_over else 54.0, 73.0, 74.0, 75.0]
    assert metrics.received == (53.0 if handed_over else None)


def test_only_what_is_missing_goes_there() -> None:
    outcome = serve([A, [*A, *range(50, 58)]], pages=20)
    assert outcome.transfers_of("r1") == [("A", "T", 12, 20)]
    assert cached(outcome) == [0, 12]
    # What is still here need not come back.
    assert not any(t.source == "T" for t in outcome.world.transfers)


def test_pages_of_unlike_size() -> None:
    """Of 12 tokens, the tier has one full page of eight, and a page of four lies here."""
    outcome = serve([A, B, [*A, 7]], size=8)
    assert outcome.transfers_of("r0") == [("A", "T", 0, 8)]
    assert outcome.transfers_of("r2") == [("T", "A", 4, 8)]


def test_the_tier_takes_sessions_alone() -> None:
    outcome = serve([A, B, [*A, 7], [*B, 7]], takes="sessions", sessions=(0, 2))
    assert [t.request.id for t in outcome.world.transfers if t.dest == "T"] == ["r0"]
    assert cached(outcome)[:3] == [0, 0, 12]
    assert cached(outcome)[3] == 0


def test_the_tier_evicts_as_well() -> None:
    outcome = serve([A, B, [*A, 7]], tier_pages=3)
    assert [t.request.id for t in outcome.world.transfers if t.dest == "T"] == ["r0", "r1", "r2"]
    assert cached(outcome) == [0, 0, 4]
    assert serve([A], tier_pages=2).world.transfers == []


@pytest.mark.parametrize("pins", [0, 3])
def test_a_tier_pins_pages_of_sessions(pins: int) -> None:
    """Pages of A, of a session, would be the first to leave a tier of six; those of B came last."""
    prompts = A, B, [*range(200, 212)], [*A, 7]
    requests = [
        RequestState(f"r{n}", len(prompt), 1, 50.0 * n, prompt) for n, prompt in enumerate(prompts)
    ]
    requests[0].session = "s"
    options = InstanceOptions(max_num_batched_tokens=16, watermark=0)
    shards = make_kv(6, 4, caching=True).shards
    tier = KVShards(shards, caching=True, new_idle=lambda: PinnedLast(pins, OrderedDict()))
    instances = [
        new_instance("A", make_kv(4, 4, caching=True), replace(options, tier="T")),
        new_instance("T", tier, replace(options, computes=False)),
    ]
    scripts = {r.id: Script(r.prompt_len, 1, r.arrival, None, (Leg("A"),), 1) for r in requests}
    outcome = Run(Follow(scripts), instances, requests).verify()
    assert outcome.finished["r3"].metrics.num_cached_tokens == (12 if pins else 0)


def test_kv_that_blocks_both_is_dropped_though_a_tier_has_more() -> None:
    """r1 and r2 fill A and B, and each waits for the other's; r3 waits at A, ahead of r2.

    The loop drops the KV of r2; r3, which came last, must not hold pages of the tier meanwhile.
    """
    legs = {
        "r0": (Leg("A"),),
        "r1": (Leg("A", 12), Leg("B")),
        "r2": (Leg("B", 12), Leg("A")),
        "r3": (Leg("A"),),
    }
    prompts = A, B, [*range(200, 212)], [*A, 7]
    for tier in (None, "T"):
        requests = [
            RequestState(f"r{n}", len(prompts[n]), output, arrival, prompts[n])
            for n, (output, arrival) in enumerate([(1, 0.0), (4, 50.0), (4, 50.0), (1, 50.2)])
        ]
        options = InstanceOptions(max_num_batched_tokens=16, watermark=0)
        instances = [
            new_instance("A", make_kv(4, 4, caching=True), replace(options, tier=tier)),
            new_instance("B", make_kv(4, 4, caching=True), options),
            new_instance("T", make_kv(30, 4, caching=True), replace(options, computes=False)),
        ]
        scripts = {
            r.id: Script(r.prompt_len, r.max_tokens, r.arrival, None, legs[r.id], r.max_tokens)
            for r in requests
        }
        outcome = Run(Follow(scripts), instances, requests).verify()
        outputs = {id: len(r.output_token_ids) for id, r in outcome.finished.items()}
        assert outputs == {"r0": 1, "r1": 4, "r2": 4, "r3": 1}
        came = [(t.request.id, t.source) for t in outcome.world.transfers if t.source == "T"]
        assert came == ([("r3", "T")] if tier else [])


class Moves(Survivor):
    """Sends r3 from A to B at a tick, and notes which instances are said to hold KV."""

    tick_interval = 50.5

    def __init__(self, scripts: dict[str, Script], moves: bool) -> None:
        super().__init__(scripts)
        self.moves = moves
        self.held_by: set[str | None] = set()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        self.held_by |= {request.held_by for request in waiting}
        return super().route(waiting, cluster)

    def on_tick(self, cluster: ClusterView) -> list[Action]:
        return [Reassign("r3", (Leg("B"),))] if self.moves and cluster.now > 50 else []


@pytest.mark.parametrize("moved", [False, True])
def test_kv_of_a_tier_is_given_up_by_requests_that_leave_their_instance(moved: bool) -> None:
    """At A, r2 imports, and r3 waits for that, when A is lost, or when the system moves r3.

    No system hears of the tier, and B, which has none, computes all tokens.
    """
    prompts = A, list(range(100, 132)), [*A, 7], [*A, 8]
    arrivals = 0.0, 20.0, 50.0, 50.2
    requests = [
        RequestState(f"r{n}", len(prompts[n]), 1, arrival, prompts[n])
        for n, arrival in enumerate(arrivals)
    ]
    options = InstanceOptions(max_num_batched_tokens=16, watermark=0, max_transfers_in_flight=1)
    instances = [
        new_instance("A", make_kv(9, 4, caching=True), replace(options, tier="T")),
        new_instance("B", make_kv(9, 4, caching=True), options),
        new_instance("T", make_kv(30, 4, caching=True), replace(options, computes=False)),
    ]
    scripts = {r.id: Script(r.prompt_len, 1, r.arrival, None, (Leg("A"),), 1) for r in requests}
    system = Moves(scripts, moved)
    outcome = Run(system, instances, requests, Timing(lost={} if moved else {"A": 50.5})).verify()
    assert system.held_by == {None}
    came = [(t.request.id, t.dest) for t in outcome.world.transfers if t.source == "T"]
    assert came == [("r2", "A")]
    assert outcome.route_of("r3") == [("B", 13)]


def with_tier(scenario: Scenario, pages: int, size: int, layout: int) -> Scenario:
    """The scenario with one instance more, to which all others send what has ended."""
    instances = [
        (name, count, each, shape, replace(options, tier="T"))
        for name, count, each, shape, options in scenario.instances
    ]
    tier = ("T", pages, size, LAYOUTS[layout], InstanceOptions(computes=False))
    return replace(scenario, instances=[*instances, tier], caching=True)


TIERS = st.tuples(st.integers(1, 12), st.sampled_from((1, 2, 4, 8)), st.integers(0, 1))


@examples(150)
@given(scenarios(max_instances=2), TIERS, st.integers(0, 2**16), st.integers(0, 20))
def test_runs_with_a_tier(
    scenario: Scenario, tier: tuple[int, int, int], seed: int, actions: int
) -> None:
    given = with_tier(scenario, *tier)
    outcome = given.run(Chaos(given.by_id, seed, actions, caching=True)).verify()
    assert not any(request.error for request in outcome.finished.values())
    assert not any(batch.instance == "T" for batch in outcome.world.batches)


@pytest.mark.parametrize("lost", ["T", "A", "both"])
@examples(60)
@given(scenarios(max_instances=2), TIERS, st.integers(0, 60), st.integers(0, 60))
def test_losses_with_a_tier(
    lost: str, scenario: Scenario, tier: tuple[int, int, int], one: int, other: int
) -> None:
    given = with_tier(scenario, *tier)
    times = {"T": float(one), "A": float(other)}
    times = times if lost == "both" else {lost: times[lost]}
    given = replace(given, timing=replace(given.timing, lost=times))
    outcome = given.run(Survivor(given.by_id)).verify()
    for request in outcome.finished.values():
        assert request.error is None or (lost != "T" and "was lost" in request.error)
