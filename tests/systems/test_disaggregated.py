"""Disaggregated prefill: whole prompts on one instance, all decoding on the other."""

from collections.abc import Sequence
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
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.views import ClusterView, Leg
from jaxinfer.systems.disaggregated import Disaggregated, DisaggregatedOptions


def make(**options: Any) -> Disaggregated:
    return Disaggregated(DisaggregatedOptions.model_validate(options))


def instance(name: str, pages: int = 100, **options: Any) -> Instance:
    """Five tokens in a step, one step at a time."""
    defaults = {"max_num_batched_tokens": 5, "max_in_flight": 1, "watermark": 0.0}
    return new_instance(name, make_kv(pages, 1), InstanceOptions(**(defaults | options)))


def serve(
    system: Disaggregated,
    lengths: Sequence[tuple[int, int]],
    decode: Instance | None = None,
    timing: Timing | None = None,
    **run: Any,
) -> Outcome:
    pool = [instance("prefill"), decode or instance("decode")]
    timing = timing or Timing(in_order=True)
    return Run(system, pool, make_requests(lengths), timing, **run).verify()


def test_options() -> None:
    assert vars(DisaggregatedOptions()) == {
        "prefill": ("prefill",),
        "decode": ("decode",),
        "hand_off": "on_demand",
        "max_in_prefill": 2,
        "fetch": False,
    }
    system = make(prefill="p", decode="d")
    system.check(["d", "p"])
    assert system.routes(["d", "p", "x"]) == [("p", "d")]
    assert system.tick_interval is None
    assert not system.needs_fits
    assert not system.needs_decode_rows
    # A first token counts once the KV is where it is needed.
    assert system.ttft_counts_transfer


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        (["prefil", "decode"], "prefill is 'prefill': did you mean 'prefil'?"),
        (["prefill", "decoder"], "decode is 'decode': did you mean 'decoder'?"),
        (["prefill"], "decode is 'decode': known: prefill"),
    ],
)
def test_instances_that_are_not_there(instances: list[str], message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        make().check(instances)
    assert str(error.value) == message


def test_two_roles_of_one_instance() -> None:
    with pytest.raises(JaxinferError, match=r"^prefill and decode are both 'x'$"):
        make(prefill="x", decode="x").check(["x", "y"])


def route(system: Disaggregated, count: int, **num_requests: int) -> list[tuple[str, Any]]:
    """Legs of ``count`` requests with prompts of 10, 11 and so on."""
    there = {
        name: SimpleNamespace(
            num_requests=n,
            max_num_batched_tokens=99,
            prompt_tokens_left=0,
            num_pages=99,
            page_size=1,
        )
        for name, n in num_requests.items()
    }
    waiting = [
        SimpleNamespace(
            id=f"r{i}", prompt_len=10 + i, num_known=10 + i, computed=0, max_tokens=3, held_by=None
        )
        for i in range(count)
    ]
    assignments = system.route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
    return [(a.request, a.legs) for a in assignments]


@pytest.mark.parametrize(
    ("most", "there", "given"), [(2, 0, 2), (2, 1, 1), (2, 2, 0), (2, 3, 0), (1, 0, 1), (4, 1, 3)]
)
def test_so_many_in_the_prefill_instance(most: int, there: int, given: int) -> None:
    legs = [
        (f"r{i}", (Leg("p", 10 + i, "at_end"), Leg("d"))) for i in range(given)
    ]  # The rest go on waiting.
    system = make(prefill="p", decode="d", hand_off="at_end", max_in_prefill=most)
    assert route(system, 5, p=there, d=7) == legs


@pytest.mark.parametrize("left", ["p", "d"])
def test_all_on_what_is_left(left: str) -> None:
    system = make(prefill="p", decode="d", max_in_prefill=1)
    assert route(system, 3, **{left: 5}) == [(f"r{i}", (Leg(left),)) for i in range(3)]


def steps(outcome: Outcome) -> list[str]:
    return [
        f"{step.start:g} {step.batch.instance} "
        + " ".join(f"{r.request.id}:{r.start}+{r.count}" for r in step.batch.rows)
        for step in outcome.world.steps
    ]


def test_a_schedule() -> None:
    """Steps and transfers of a second; the third request comes in when the first has left."""
    outcome = serve(make(), [(7, 3), (3, 1), (4, 2)])
    assert steps(outcome) == [
        "0 prefill r0:0+5",
        "1 prefill r0:5+2 r1:0+3",
        "2 prefill r2:0+4",
        "3 decode r0:7+1",
        "4 decode r0:8+1 r2:4+1",
    ]
    moved = [(t.requested, t.request.id, t.start, t.stop) for t in outcome.world.transfers]
    assert moved == [(2, "r0", 0, 7), (3, "r2", 0, 4)]
    metrics = {name: r.metrics for name, r in outcome.finished.items()}
    assert {name: (m.cut, m.received) for name, m in metrics.items()} == {
        "r0": (7, 3),
        "r1": (None, None),
        "r2": (4, 4),
    }
    assert metrics["r0"].token_times == [2, 4, 5]


def test_kv_that_has_not_been_fetched_lets_the_next_prompts_in() -> None:
    """KV that waits is no request of the prefill instance, whose pages are what limits it then."""
    decode = instance("decode", max_num_seqs=1)
    outcome = serve(make(max_in_prefill=1), [(5, 4)] * 3, decode)
    assert steps(outcome)[:3] == ["0 prefill r0:0+5", "1 prefill r1:0+5", "2 prefill r2:0+5"]
    assert [t.requested for t in outcome.world.transfers] == [1, 5, 9]


@examples(60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 8)), min_size=1, max_size=8),
    most=st.integers(1, 3),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 10**6),
)
def test_prompts_here_and_decodes_there(
    lengths: list[tuple[int, int]], most: int, rule: str, seed: int
) -> None:
    def watch(loop: ServingLoop) -> None:
        assert loop.assignments.instances["prefill"].num_requests <= most

    system = make(max_in_prefill=most, hand_off=rule)
    outcome = serve(system, lengths, instance("decode", 40), Timing(seed, 3, 6), watch=watch)
    for number, (prompt_len, max_tokens) in enumerate(lengths):
        name = f"r{number}"
        route, preempted = outcome.route_of(name), outcome.finished[name].metrics.num_preemptions
        assert route[0] == ("prefill", prompt_len)
        if max_tokens == 1:
            assert len(route) == 1
        elif not preempted:
            # KV that nobody has room for is recomputed by the other.
            assert route[1] in (("decode", max_tokens - 1), ("decode", prompt_len + max_tokens - 1))


def test_a_lost_decode_instance() -> None:
    """The prefill instance recomputes what that had, and goes on alone."""
    timing = Timing(in_order=True, lost={"decode": 3.5})
    outcome = serve(make(), [(5, 4), (5, 4)], timing=timing)
    assert outcome.route_of("r0") == [("prefill", 5), ("decode", 2), ("prefill", 8)]
    assert [r.finish_reason for r in outcome.finished.values()] == ["length", "length"]


def test_all_pairs_are_routes() -> None:
    system = make(prefill=["p", "q"], decode=["d", "e"])
    there = [("p", "d"), ("p", "e"), ("q", "d"), ("q", "e")]
    assert system.routes("pqde") == there
    back = [("d", "p"), ("d", "q"), ("e", "p"), ("e", "q")]
    system = make(prefill=["p", "q"], decode=["d", "e"], fetch=True)
    assert system.routes("pqde") == there + back


def test_the_beginning_comes_from_the_decode_instance_that_has_most_of_it() -> None:
    cached = {"p": 60, "d": 30, "e": 50}
    there = {
        name: SimpleNamespace(num_requests=0, cached_tokens=lambda request, count=count: count)
        for name, count in cached.items()
    }
    waiting = [SimpleNamespace(id="r", prompt_len=70)]
    for fetch in (False, True):
        system = make(prefill="p", decode=["d", "e"], fetch=fetch)
        (found,) = system.route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
        assert found.legs == (Leg("p", 70), Leg("d"))
        assert found.fetch_from == ("e" if fetch else None)


@pytest.mark.parametrize(
    ("there", "pairs"),
    [
        ({"p": 0, "q": 0, "d": 0, "e": 0}, ["pd", "qe", "pd", "qe"]),
        ({"p": 1, "q": 0, "d": 5, "e": 3}, ["qe", "pe", "qd"]),
        ({"p": 2, "q": 0, "d": 0, "e": 9}, ["qd", "qd"]),
        ({"p": 2, "q": 3, "d": 0, "e": 0}, []),
        ({"q": 0, "d": 1, "e": 0}, ["qe", "qd"]),
        ({"p": 0, "q": 0, "e": 4}, ["pe", "qe", "pe", "qe"]),
    ],
)
def test_the_pair_with_the_fewest(there: dict[str, int], pairs: list[str]) -> None:
    """The fewest count those left and those given out by the call; ties go by order."""
    system = make(prefill=["p", "q"], decode=["d", "e"], max_in_prefill=2)
    legs = [(legs[0].instance + legs[1].instance) for _, legs in route(system, 6, **there)]
    assert legs == pairs


@pytest.mark.parametrize(
    ("there", "given"),
    [({"p": 3, "q": 1}, "qqpqpq"), ({"d": 0, "e": 0}, "dedede"), ({"e": 7}, "eeeeee")],
)
def test_whole_requests_on_the_role_that_is_left(there: dict[str, int], given: str) -> None:
    system = make(prefill=["p", "q"], decode=["d", "e"], max_in_prefill=1)
    assert route(system, 6, **there) == [(f"r{i}", (Leg(name),)) for i, name in enumerate(given)]


@examples(80)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 8)), min_size=1, max_size=10),
    most=st.integers(1, 3),
    lost=st.dictionaries(st.sampled_from("pqde"), st.integers(0, 40).map(float), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_two_of_each(
    lengths: list[tuple[int, int]], most: int, lost: dict[str, float], seed: int
) -> None:
    """Prompts on p and q, decodes on d and e, and all of it somewhere while one is left."""

    def watch(loop: ServingLoop) -> None:
        if not loop.assignments.losses.lost:
            assert all(loop.assignments.instances[name].num_requests <= most for name in "pq")

    system = make(prefill=["p", "q"], decode=["d", "e"], max_in_prefill=most)
    pool = [instance(name, 40) for name in "pqde"]
    timing = Timing(seed, 3, 6, lost=lost)
    outcome = Run(system, pool, make_requests(lengths), timing, watch=watch).verify()
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    if not lost:
        assert {t.source for t in outcome.world.transfers} <= {"p", "q"}
        assert {t.dest for t in outcome.world.transfers} <= {"d", "e"}
        for name, (prompt_len, _) in enumerate(lengths):
            where, count = outcome.route_of(f"r{name}")[0]
            assert (where in "pq", count) == (True, prompt_len)
