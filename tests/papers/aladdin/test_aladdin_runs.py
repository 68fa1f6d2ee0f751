"""Aladdin in whole runs: one worker, truths that nobody may see, kinds of workers."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from aladdin_cases import FIT, Checked, instance, make, serve, where
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import Run, make_requests

from jaxinfer.papers.aladdin.ledger import WorkerLedger
from jaxinfer.papers.aladdin.system import Aladdin
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit
from jaxinfer.systems.single import Single

# Half as fast as ``FIT``.
SLOW = StepFit(PrefillFit(1 / 2, 2.0), MixedFit(0.0, 0.0, 1.0), DecodeFit(1 / 32, 1 / 4, 1.0))
LENGTHS = st.lists(
    st.tuples(st.integers(1, 15), st.integers(1, 12), st.none() | st.integers(0, 12)),
    min_size=1,
    max_size=10,
)


@examples(40)
@given(lengths=LENGTHS, gap=st.integers(0, 8), pages=st.sampled_from((30, 200)))
def test_one_worker_with_loose_targets_is_single(
    lengths: list[tuple[int, int, int | None]], gap: int, pages: int
) -> None:
    """Token for token at the same times, as long as nothing has to wait for room."""

    def requests() -> list[RequestState]:
        times = [float(gap * i) for i in range(len(lengths))]
        return make_requests([(prompt, output) for prompt, output, _ in lengths], times)

    loose = {"ttft_s": 1e9, "atgt_s": 1e9, "theta": 1.0}
    if sum(prompt + output for prompt, output, _ in lengths) > pages:
        pages = 400
    outcomes = [
        Run(
            system, [instance("a", pages)], requests(), Timing(in_order=True), greedy=False
        ).verify()
        for system in (make(**loose), Single())
    ]
    found, alone = (
        {id: list(r.metrics.token_times) for id, r in outcome.finished.items()}
        for outcome in outcomes
    )
    assert found == alone


# Nothing of the truth.

STOPS = st.lists(st.integers(12, 80), min_size=8, max_size=8)


def places(stops: Sequence[int], kind: type[Aladdin] = Checked) -> list[str]:
    """Return the instances of eight requests that come within 14 s, in which none of them ends."""
    times = [0.0, 3.0, 4.0, 6.0, 8.0, 9.0, 12.0, 14.0]
    lengths = [(4 + 3 * (n % 4), 90) for n in range(8)]
    requests = make_requests(lengths, times)
    for each in requests:
        each.predicted = (12, 12)
    stop = {f"r{n}": many for n, many in enumerate(stops)}
    pool = [instance(name, 400) for name in "abc"]
    system = make(kind, ttft_s=9.0, theta=0.9)
    outcome = serve(system, pool, requests, stop_at=stop)
    first_end = min(r.metrics.token_times[-1] for r in outcome.finished.values())
    assert first_end > times[-1]
    return where(outcome, 8)


@examples(20)
@given(stops=STOPS)
def test_what_is_placed_is_the_same_whatever_is_to_come(stops: list[int]) -> None:
    """The limit that is shown, 90, is no request's length, and lengths are known at their ends."""
    assert places(stops) == places([12] * 8)


def test_what_decodes_have_saved_decides_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """(d), by times and tokens that are there; without it, prompts pile up."""
    with_slack = places([40] * 8)
    monkeypatch.setattr(WorkerLedger, "_least_slack", lambda *given: math.inf)
    assert places([40] * 8, Aladdin) != with_slack
    assert len(set(with_slack)) > 1


# Kinds of workers.


def test_the_cheapest_for_what_waits_is_opened() -> None:
    """The slow one has half the room by (b), so it is opened at less than half the price only.

    Of 60 entries' time the fast one's share for (4, 4) is (6 / 64 + 0.75 / 8) / (0.75 * 1.5) = 1/6,
    and the slow one's (6 / 32 + 0.75 / 4) / (0.75 * 1) = 1/2.
    """
    for usd, expected in (({"f": 4.0, "s": 1.0}, "s"), ({"f": 2.5, "s": 1.0}, "f"), ({}, "f")):
        pool = [instance("s", fit=SLOW, role="off"), instance("f", role="off")]
        system = make(Checked, heartbeat_s=1, usd_per_hour=usd)
        assert where(serve(system, pool, make_requests([(4, 4)])), 1) == [expected]
        pool = [instance("s", fit=SLOW), instance("f")]
        system = make(Checked, usd_per_hour=usd)
        assert where(serve(system, pool, make_requests([(4, 4)])), 1) == [expected]


def test_limits_are_each_worker_s_own() -> None:
    """(c): 8 s are 28 tokens of prompts for the fast one, and 12 for the slow one."""
    pool = [instance("s", fit=SLOW), instance("f", fit=FIT)]
    system = make(Checked, usd_per_hour={"s": 0.1, "f": 1.0})
    outcome = serve(system, pool, make_requests([(13, 2), (12, 2)]))
    assert where(outcome, 2) == ["f", "f"]  # With the first one there, f is the fuller.
    assert where(serve(system_of_two(), pool_of_two(), make_requests([(12, 2)])), 1) == ["s"]


def pool_of_two() -> list[Any]:
    return [instance("s", fit=SLOW), instance("f", fit=FIT)]


def system_of_two() -> Checked:
    system = make(Checked, usd_per_hour={"s": 0.1, "f": 1.0})
    assert isinstance(system, Checked)
    return system


def test_gpu_seconds_fall_where_workers_are_off() -> None:
    """A request in four workers' time: three of them are never on, and the first not after."""
    pool = [instance("a"), *(instance(name, role="off") for name in "bcd")]
    requests = make_requests([(4, 2), (4, 2)], [0.0, 60.0])
    outcome = serve(make(Checked, heartbeat_s=1, off_after_s=5), pool, requests)
    end = outcome.world.now()
    seconds = {each.name: each.role_seconds(end) for each in pool}
    assert all(seconds[name] == {"off": end} for name in "bcd")
    assert seconds["a"]["off"] > 40
    assert sum(seconds["a"].values()) == pytest.approx(end)
