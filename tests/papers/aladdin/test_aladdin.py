"""Aladdin: placements keep their constraints, waiting, split phases, mistakes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aladdin_cases import FIT, Checked, instance, make, serve, where
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import make_requests

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.views import ClusterView, Leg

# Where requests go.


def test_one_worker_until_it_is_full() -> None:
    """Requests that come slowly all fit on the first; a burst needs more."""
    slow = make_requests([(3, 4)] * 5, [20.0 * i for i in range(5)])
    outcome = serve(make(Checked), [instance(name) for name in "abc"], slow)
    assert where(outcome, 5) == ["a"] * 5
    burst = make_requests([(8, 4)] * 6)
    outcome = serve(make(Checked), [instance(name) for name in "abc"], burst)
    # (c): 1 + 24 / 4 s are within 8 s, 1 + 32 / 4 s are not.
    assert where(outcome, 6) == ["a"] * 3 + ["b"] * 3


def test_a_prompt_takes_no_more_than_decodes_have_saved() -> None:
    """(d): the first has its first token at 1 s, and at 2 s 2 * 2 - 1 seconds saved; 0.75 of them
    are 2.25, and a prompt of 5 takes 1 + 5/4. One token more is too many.
    """
    for prompt, expected in ((5, "a"), (6, "b")):
        requests = make_requests([(4, 9), (prompt, 2)], [0.0, 2.0])
        outcome = serve(make(Checked), [instance("a"), instance("b")], requests)
        assert where(outcome, 2) == ["a", expected]
    requests = make_requests([(4, 9), (5, 2)], [0.0, 2.0])
    outcome = serve(make(Checked, grant_gap=False), [instance("a"), instance("b")], requests)
    assert where(outcome, 2) == ["a", "b"]


def test_predictions_are_gone_by_and_not_limits() -> None:
    """(b): two may have 0.75 * (2 - 0.5 - 0.25) * 64 = 60 entries; by their limit they have 98."""
    for predicted, expected in ((None, "b"), ((20, 30), "a"), ((60, 80), "b")):
        requests = make_requests([(4, 90), (4, 90)])
        for each in requests:
            each.predicted = predicted
        outcome = serve(make(Checked), [instance("a", 200), instance("b", 200)], requests)
        assert where(outcome, 2) == ["a", expected]


def test_the_history_tells_lengths() -> None:
    """Three answers of 2 tokens, where users allow 90: later ones are packed by what was seen."""
    lengths = [(4, 90)] * 5
    times = [0.0, 50.0, 100.0, 150.0, 150.0]
    stop = {f"r{i}": 2 for i in range(5)}
    system = make(Checked)
    outcome = serve(
        system, [instance("a"), instance("b")], make_requests(lengths, times), stop_at=stop
    )
    assert where(outcome, 5)[3:] == ["a", "a"]
    # Without any, the limit counts: 8 + 0.5 * 180 entries are above 60.
    outcome = serve(
        make(Checked), [instance("a"), instance("b")], make_requests(lengths[:2]), stop_at=stop
    )
    assert where(outcome, 2) == ["a", "b"]


def test_where_nobody_has_room_requests_wait_while_they_may() -> None:
    """Three prompts fit on the worker at once, the others wait at the system, and come in order."""
    system = make(Checked, ttft_s=6.0)
    requests = make_requests([(8, 3)] * 4)
    outcome = serve(system, [instance("a")], requests)
    assert isinstance(system, Checked)
    assert system.waited
    firsts = [outcome.finished[f"r{i}"].metrics.token_times[0] for i in range(4)]
    assert firsts == sorted(firsts)


def test_what_not_even_an_empty_worker_takes_does_not_wait() -> None:
    requests = make_requests([(40, 2), (4, 2)])
    system = make(Checked)
    outcome = serve(system, [instance("a"), instance("b")], requests)
    assert isinstance(system, Checked)
    assert where(outcome, 2) == ["a", "b"]
    assert system.packed == 1


def test_unequal_pools_hold_what_their_limits_say() -> None:
    """Predicted to be short, a request goes where there is room for its limit all the same."""
    requests = make_requests([(4, 30), (4, 30)])
    for each in requests:
        each.predicted = (2, 4)
    outcome = serve(make(Checked), [instance("a", 20), instance("b", 60)], requests)
    assert where(outcome, 2) == ["b", "b"]
    # 33 entries: one after the other where there is just room for one.
    requests = make_requests([(4, 30), (4, 30)])
    outcome = serve(make(), [instance("a", 20), instance("b", 33)], requests)
    assert where(outcome, 2) == ["b", "b"]
    outcome = serve(make(Checked), [instance("a", 20)], make_requests([(4, 30)]))
    assert outcome.finished["r0"].finish_reason == "error"


def test_a_request_that_comes_back_is_booked_once() -> None:
    """A request of an instance that is lost, and back before anybody looks, is booked once."""
    system = make()
    requests = make_requests([(8, 4)])
    cluster = ClusterView(0.0, {"a": instance("a")})
    for _ in range(2):
        (found,) = system.route(requests, cluster)  # type: ignore[arg-type]
        assert [leg.instance for leg in found.legs] == ["a"]
        ((worker,),) = system.placed.look(cluster, ["a"])
        assert worker.context == 8 + 0.5 * 4


# Split phases.


def test_split_phases() -> None:
    """Prompts on the least loaded of two; decodes packed by (b) and (e) alone."""
    system = make(Checked, prefill=["p", "q"])
    requests = make_requests([(9, 5)] * 6)
    outcome = serve(system, [instance(name) for name in "pqde"], requests)
    routes = [[name for name, _ in outcome.route_of(f"r{i}")] for i in range(6)]
    assert [route[0] for route in routes] == ["p", "q"] * 3
    # (b): 0.75 * (1.5 - n / 8) * 64 entries for n of 9 + 2.5 each: 4 of them have 46 of 48.
    assert sorted(route[1] for route in routes) == ["d"] * 4 + ["e"] * 2
    assert {(t.source, t.dest) for t in outcome.world.transfers} <= set(system.routes("pqde"))


def test_prompts_of_one_call_count_as_those_that_are_there() -> None:
    """q has one: p, then p again as the first of equals, then q."""
    system = make(prefill=["p", "q"])
    there = {name: instance(name) for name in "pqd"}
    (busy, *requests) = make_requests([(9, 5)] * 4)
    busy.legs.append(Leg("q"))
    there["q"].waiting.append(busy)
    legs = [each.legs[0].instance for each in system.route(requests, ClusterView(0.0, there))]  # type: ignore[arg-type]
    assert legs == ["p", "p", "q"]


def test_without_one_phase_the_other_serves_alone() -> None:
    for lost in ("pq", "de"):
        timing = Timing(in_order=True, lost=dict.fromkeys(lost, 3.0))
        requests = make_requests([(9, 5)] * 5, [0.0, 0.0, 2.0, 4.0, 5.0])
        pool = [instance(name) for name in "pqde"]
        outcome = serve(make(prefill=["p", "q"]), pool, requests, timing=timing)
        assert all(r.finish_reason == "length" for r in outcome.finished.values())
        assert set(where(outcome, 5)) <= set("pqde") - set(lost)


# Mistakes, and everything at random.


def test_a_target_that_no_iteration_keeps_is_refused_with_both_numbers() -> None:
    with pytest.raises(JaxinferError) as raised:
        serve(make(atgt_s=0.5), [instance("a")], make_requests([(3, 3)]))
    says = "atgt_s is 0.5, must be above the 0.5 s that an iteration of instance 'a' takes"
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fit", [None, StepFit(FIT.prefill, FIT.mixed)])
def test_a_worker_that_is_not_known(fit: StepFit | None) -> None:
    with pytest.raises(JaxinferError, match="instance 'a' has no fit of its decodes"):
        serve(make(), [instance("a", fit=fit)], make_requests([(3, 3)]))


def test_options() -> None:
    system = make(prefill="p")
    system.check("pd")
    assert system.routes("pde") == [("p", "d"), ("p", "e")]
    assert make().routes("de") == []
    assert system.needs_fits
    assert not system.needs_decode_rows
    assert system.tick_interval is None
    for wrong, says in (
        ({"off_after_s": 3}, "off_after_s: needs heartbeat_s"),
        ({"theta": 0}, "theta is 0"),
        ({"ttft_s": -1}, "ttft_s is -1"),
    ):
        with pytest.raises(JaxinferError, match=says):
            make(**wrong)
    with pytest.raises(JaxinferError, match="prefill: has all instances"):
        make(prefill=["p", "q"]).check("pq")
    with pytest.raises(JaxinferError, match="prefill is 'x'"):
        make(prefill="x").check("pq")


LENGTHS = st.lists(
    st.tuples(st.integers(1, 15), st.integers(1, 12), st.none() | st.integers(0, 12)),
    min_size=1,
    max_size=10,
)


@examples(80)
@given(
    lengths=LENGTHS,
    ttft=st.sampled_from((2.0, 5.0, 12.0)),
    atgt=st.sampled_from((0.75, 1.5, 4.0)),
    theta=st.sampled_from((0.25, 0.75, 1.0)),
    grant=st.booleans(),
    split=st.booleans(),
    beat=st.none() | st.tuples(st.integers(1, 5), st.none() | st.integers(1, 9)),
    off=st.sets(st.sampled_from("pqde")),
    lost=st.dictionaries(st.sampled_from("pqde"), st.integers(0, 40).map(float), max_size=3),
    gap=st.integers(0, 8),
    seed=st.integers(0, 10**6),
)
def test_everyone_is_served_and_placed_as_the_constraints_say(
    lengths: list[tuple[int, int, int | None]],
    ttft: float,
    atgt: float,
    theta: float,
    grant: bool,
    split: bool,
    beat: tuple[int, int | None] | None,
    off: set[str],
    lost: dict[str, float],
    gap: int,
    seed: int,
) -> None:
    """Tokens are one instance's, whoever is lost; every placement is recomputed from scratch."""
    options: dict[str, Any] = {"heartbeat_s": beat[0], "off_after_s": beat[1]} if beat else {}
    system = make(
        Checked,
        ttft_s=ttft,
        atgt_s=atgt,
        theta=theta,
        grant_gap=grant,
        prefill=["p"] if split else [],
        **options,
    )
    pool = [
        instance(name, 30, role="off" if name in off and not (split and name == "p") else "")
        for name in "pqde"
    ]
    requests = make_requests(
        [(prompt, output) for prompt, output, _ in lengths],
        [float(gap * i) for i in range(len(lengths))],
    )
    for each, (_, _, low) in zip(requests, lengths, strict=True):
        each.predicted = None if low is None else (low, low + 4)
    outcome = serve(system, pool, requests, timing=Timing(seed, 3, 6, lost=lost))
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    assert not system.placed._where
    assert not any(worker.jobs for worker in system.placed._workers.values())
    assert not system._waiting


@examples(20)
@given(lengths=LENGTHS, gap=st.integers(0, 8), order=st.permutations("abc"))
def test_names_do_not_matter(
    lengths: list[tuple[int, int, int | None]], gap: int, order: list[str]
) -> None:
    def times(names: Sequence[str]) -> dict[str, list[float]]:
        requests = make_requests(
            [(p, o) for p, o, _ in lengths], [float(gap * i) for i in range(len(lengths))]
        )
        outcome = serve(make(), [instance(name) for name in names], requests)
        return {id: list(r.metrics.token_times) for id, r in outcome.finished.items()}

    assert times("abc") == times(order)


def test_the_truth_is_not_looked_at() -> None:
    """A request shows its limit, and a system that asks for more finds nothing."""
    view = SimpleNamespace(
        id="r", prompt_len=3, max_tokens=90, num_known=3, predicted=(4, 6), computed=0
    )
    assert make().placed.job(view, True).expected == 5  # type: ignore[arg-type]
    view.predicted = None
    assert make().placed.job(view, True).expected == 90  # type: ignore[arg-type]
