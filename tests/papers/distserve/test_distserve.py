"""DistServe: units, the queue and the decode instance that a request gets, fetched KV, losses."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.config.run_file import load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.papers.distserve.system import DistServe, DistServeOptions
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import ClusterView, Leg
from jaxinfer.simulate.run import simulate
from jaxinfer.systems.disaggregated import Disaggregated, DisaggregatedOptions
from jaxinfer.workload.lengths import BenchRequest

ROOT = Path(__file__).parents[3]
ONE = [{"prefill": "p", "decode": "d"}]
TWO = [{"prefill": "p", "decode": "d"}, {"prefill": "q", "decode": "e"}]
FOUR = [{"prefill": ["p", "q"], "decode": ["d", "e"]}]


def make(units: list[dict[str, Any]]) -> DistServe:
    return DistServe(DistServeOptions.model_validate({"units": units}))


def instance(name: str, pages: int = 100, **options: Any) -> Instance:
    defaults = {"max_num_batched_tokens": 5, "max_in_flight": 1, "watermark": 0.0}
    return new_instance(name, make_kv(pages, 1), InstanceOptions(**(defaults | options)))


def test_what_a_run_file_says() -> None:
    system = make(TWO)
    system.check("pqde")
    assert system.routes("pqde") == [("p", "d"), ("q", "e")]
    assert make(FOUR).routes("pqde") == list(product("pq", "de"))
    assert not system.ttft_counts_transfer
    # So that a simulation may advance decodes together.
    assert not system.needs_decode_rows
    assert system.tick_interval is None


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([{"prefill": "x", "decode": "d"}], "units[0].prefill is 'x': known: d, p, q"),
        ([{"prefill": "p", "decode": ["d", "x"]}], "units[0].decode[1] is 'x': known: d, p, q"),
        ([*ONE, {"prefill": "q", "decode": "d"}], "units[0].decode and units[1].decode are both"),
        ([{"prefill": "p", "decode": "p"}], "units[0].prefill and units[0].decode are both 'p'"),
    ],
)
def test_units_that_cannot_be(units: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        make(units).check(["p", "d", "q"])
    assert message in str(error.value)


def route(system: DistServe, prompts: Sequence[tuple[str, int]], **loads: int) -> dict[str, Any]:
    """Legs of requests by (id, KV entries computed), each of 10 + 5 tokens."""
    there = {
        name: SimpleNamespace(num_requests=count, num_pages=100, page_size=16)
        for name, count in loads.items()
    }
    waiting = [
        SimpleNamespace(id=name, prompt_len=10, max_tokens=5, computed=computed)
        for name, computed in prompts
    ]
    assignments = system.route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
    return {a.request: a.legs for a in assignments}


@pytest.mark.parametrize(
    ("loads", "given"),
    [
        # The shortest prefill queue of all units, what the call has given out included.
        ({"p": 2, "q": 0, "d": 0, "e": 9}, "qqpq"),
        # Of equal queues, the unit's decode instance decides, and only then the order.
        ({"p": 0, "q": 0, "d": 3, "e": 1}, "qpqp"),
        ({"p": 0, "q": 0, "d": 1, "e": 1}, "pqpq"),
        # Without decode, or without prefill, a unit's other instance takes whole requests.
        ({"p": 1, "q": 0, "e": 0}, "qpqp"),
        ({"d": 1, "q": 0, "e": 5}, "qdqd"),
    ],
)
def test_a_new_request_s_queue(loads: dict[str, int], given: str) -> None:
    legs = route(make(TWO), [(str(i), 0) for i in range(len(given))], **loads)
    assert "".join(each[0].instance for each in legs.values()) == given
    for first, *more in legs.values():
        pair = {"p": "d", "q": "e"}.get(first.instance, "")
        assert first.until == (10 if pair in loads else None)
        assert not more


def test_decodes_stay_in_their_unit_and_go_to_the_least_loaded_there() -> None:
    system = make([{"prefill": "p", "decode": ["d", "f"]}, {"prefill": "q", "decode": "e"}])
    loads = {"p": 0, "q": 1, "d": 4, "f": 3, "e": 0}
    assert route(system, [("a", 0), ("b", 0)], **loads) == {
        "a": (Leg("p", 10),),
        "b": (Leg("q", 10),),
    }
    more = {"c": 0} | loads | {"p": 0, "q": 9}
    route(system, [("c", 0), ("g", 0)], **more)
    legs = route(system, [("c", 10), ("a", 10), ("g", 10), ("b", 10)], **loads)
    assert legs == {"c": (Leg("f"),), "a": (Leg("d"),), "g": (Leg("f"),), "b": (Leg("e"),)}


def serve(
    system: Any,
    lengths: Sequence[tuple[int, int]],
    pool: Sequence[Instance],
    timing: Timing | None = None,
    **run: Any,
) -> Outcome:
    return Run(
        system, pool, make_requests(lengths), timing or Timing(in_order=True), **run
    ).verify()


def test_a_pull_waits_for_room_and_is_the_buffer() -> None:
    """KV for one decode at a time: the rest lies in the prefill pool, which stalls when full."""
    exported: list[int] = []

    def watch(loop: ServingLoop) -> None:
        here, there = (loop.assignments.instances[name] for name in "pd")
        exported.append(here.num_exported)
        assert there.kv.num_pages - there.kv.num_free <= 9

    outcome = serve(make(ONE), [(5, 4)] * 6, [instance("p", 15), instance("d", 9)], watch=watch)
    assert max(exported) == 3  # 15 pages of one token for prompts of 5.
    starts = [step.start for step in outcome.world.steps if step.batch.instance == "p"]
    # Then one for each KV that is fetched, every 4 s: a transfer and three decodes.
    assert starts == [0, 1, 2, 3, 6, 10]
    asked = [t.requested for t in outcome.world.transfers]
    ends = [outcome.finished[f"r{i}"].metrics.token_times[0] for i in range(6)]
    assert any(when > end for when, end in zip(asked, ends, strict=True))
    # Strictly in the order of arrival.
    assert ends == sorted(ends)
    assert [t.request.id for t in outcome.world.transfers] == [f"r{i}" for i in range(6)]


def test_what_no_decode_pool_holds_is_refused_before_its_prefill() -> None:
    lengths = [(5, 4), (5, 20), (5, 4)]
    outcome = serve(make(ONE), lengths, [instance("p"), instance("d", 20)])
    reasons = [outcome.finished[f"r{i}"].finish_reason for i in range(3)]
    assert reasons == ["length", "error", "length"]
    assert not outcome.route_of("r1")
    assert "on instance 'd', which has 20" in str(outcome.finished["r1"].error)


def test_a_unit_that_has_room_for_it_gets_it() -> None:
    pool = [instance("p"), instance("q"), instance("d", 20), instance("e", 50)]
    outcome = serve(make(TWO), [(5, 4), (5, 20), (5, 20)], pool)
    assert outcome.route_of("r0")[-1][0] == "d"
    assert [outcome.route_of(name) for name in ("r1", "r2")] == [[("q", 5), ("e", 19)]] * 2
    pool = [instance("p"), instance("q"), instance("d", 20), instance("e", 50)]
    outcome = serve(make(FOUR), [(5, 4), (5, 20), (5, 20)], pool)
    assert {outcome.route_of(name)[-1] for name in ("r1", "r2")} == {("e", 19)}


def test_a_prefill_pool_is_to_hold_the_prompt_alone() -> None:
    """No pool holds all 24 tokens, and the first unit, with as short a queue, cannot decode."""
    pool = [instance("p", 9), instance("q", 9), instance("d", 20), instance("e", 50)]
    outcome = serve(make(TWO), [(5, 20)], pool)
    assert outcome.route_of("r0") == [("q", 5), ("e", 19)]


@pytest.mark.parametrize(
    ("lost", "route"),
    [
        # Its only decode instance: all that the unit has finishes where it was prefilled.
        ({"d": 3.5}, [("p", 5), ("d", 2), ("p", 8)]),
        # The KV lies with the decode instance by then, and the prefill instance is not needed.
        ({"p": 3.5}, [("p", 5), ("d", 3)]),
        # Before it was fetched: all of it again.
        ({"p": 0.5}, [("p", 5), ("d", 8)]),
    ],
)
def test_losses(lost: dict[str, float], route: list[tuple[str, int]]) -> None:
    timing = Timing(in_order=True, lost=lost)
    outcome = serve(make(ONE), [(5, 4)], [instance("p"), instance("d")], timing)
    assert outcome.route_of("r0") == route


def test_a_decode_instance_lost_while_it_fetches() -> None:
    """The KV is where it was prefilled, and nothing is computed twice."""
    timing = Timing(in_order=True, lost={"d": 3.5}, transfers={"d": 20})
    outcome = serve(make(ONE), [(5, 4)], [instance("p"), instance("d")], timing)
    assert outcome.route_of("r0") == [("p", 8)]


@examples(40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 8)), min_size=1, max_size=8),
    pages=st.integers(22, 40),
    seed=st.integers(0, 10**6),
)
def test_one_pair_is_disaggregated(lengths: list[tuple[int, int]], pages: int, seed: int) -> None:
    """The same steps and transfers at the same times, whatever the pools."""
    options = DisaggregatedOptions(prefill=("p",), decode=("d",), max_in_prefill=10**6)
    found = []
    for system in (make(ONE), Disaggregated(options)):
        pool = [instance("p", pages), instance("d", pages)]
        outcome = serve(system, lengths, pool, Timing(seed, 3, 6))
        steps = [(s.start, s.end, s.batch.instance, len(s.batch.rows)) for s in outcome.world.steps]
        moved = [(t.requested, t.request.id, t.start, t.stop) for t in outcome.world.transfers]
        times = {name: r.metrics.token_times for name, r in outcome.finished.items()}
        found.append((steps, moved, times))
    assert found[0] == found[1]


def test_one_modelled_pair_is_disaggregated_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    work = [
        BenchRequest(None, 20 + i * 389 % 1500, 1 + i * 211 % 500, i * 0.15) for i in range(150)
    ]
    file = "configs/distserve/opt_13b.yaml"
    other = "system={name: disaggregated, max_in_prefill: 1000000}"
    found = []
    for changes in ([], [other, "metrics.ttft_counts_transfer=false"]):
        times: dict[str, list[float]] = {}

        def note(request: RequestState, _: object, times: dict[str, list[float]] = times) -> None:
            times[request.id] = list(request.metrics.token_times)

        metrics = simulate(load_run_file(file, changes), work, on_request=note)
        found.append((times, metrics.ttft_p99, metrics.tpot_p99, metrics.wall_s))
    assert found[0] == found[1]


UNITS = st.sampled_from([ONE, TWO, FOUR])


@examples(50)
@given(
    units=UNITS,
    lengths=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 8)), min_size=1, max_size=10),
    lost=st.dictionaries(st.sampled_from("pqde"), st.integers(0, 40).map(float), max_size=3),
    options=st.lists(
        st.tuples(st.sampled_from((1, 2, 8)), st.integers(22, 40), st.sampled_from((1, 3, 16))),
        min_size=4,
        max_size=4,
    ),
    seed=st.integers(0, 10**6),
)
def test_everyone_is_served_as_long_as_one_instance_is_left(
    units: list[dict[str, Any]],
    lengths: list[tuple[int, int]],
    lost: dict[str, float],
    options: list[tuple[int, int, int]],
    seed: int,
) -> None:
    """Tokens are those of the request alone, and KV stays within a unit."""
    system = make(units)
    names = [name for unit in units for phase in unit.values() for name in phase]
    pool = [
        instance(name, pages, max_num_seqs=seats, max_num_batched_tokens=budget)
        for name, (seats, pages, budget) in zip(names, options, strict=False)
    ]
    gone = {name: at for name, at in lost.items() if name in names[1:]}
    outcome = serve(system, lengths, pool, Timing(seed, 3, 6, lost=gone))
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    pairs = set(system.routes(names))
    assert {(t.source, t.dest) for t in outcome.world.transfers} <= pairs
    if not gone:
        for number, (prompt_len, max_tokens) in enumerate(lengths):
            request = outcome.finished[f"r{number}"]
            if not request.metrics.num_preemptions:
                first, *then = outcome.route_of(request.id)
                assert first[1] == prompt_len
                assert [first[0] in "pq", len(then)] == [True, int(max_tokens > 1)]
    assert not system._prefilled
