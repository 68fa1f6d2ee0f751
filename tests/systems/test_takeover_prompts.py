"""Prompts of takeover while few requests wait: over several steps, and taken over under way."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from schedules import pool, unit
from serving_checks import Outcome, Run, make_requests

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.takeover.accounts import Account, InstanceClass
from jaxinfer.papers.takeover.prompts import cost, limit, pays
from jaxinfer.papers.takeover.slo import Slo
from jaxinfer.papers.takeover.speeds import Speeds
from jaxinfer.papers.takeover.system import Takeover, TakeoverOptions
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit
from jaxinfer.serving.views import ClusterView


def book(decodes: int, limited: int = 0, pending: Sequence[tuple[float, int]] = ()) -> Account:
    """Steps of up to 8 tokens: 10 s for two of them or for none, 5 s for each one more."""
    view: Any = pool("A", 20)
    made = Account(
        view=view,
        name="A",
        legs=(),
        number=0,
        kind=InstanceClass(Speeds(5.0, 0.0, 0.0, 10.0, 40.0, 0.0), 80),
        widest=8,
        budget=8,
        most_backlog=16,
        page_size=4,
        most_seats=8,
        pages=20,
        spared=0,
        decodes=decodes,
        limit=limited,
    )
    made.under_way = {str(n): (at, rest, rest, rest) for n, (at, rest) in enumerate(pending)}
    made.conclude()
    return made


@pytest.mark.parametrize(
    ("decodes", "limited", "backlog", "tokens"),
    [
        (0, 0, 9, 0),  # Nobody is held up.
        (1, 0, 0, 0),
        (1, 0, 3, 1),  # Two are computed while weights are read, one of them a decode.
        (1, 0, 20, 5),  # In four steps.
        (1, 5, 3, 5),  # The last ones no more slowly.
        (1, 0, 28, 0),  # As many as there may be.
    ],
)
def test_prompts_are_spread_beside_decodes(
    decodes: int, limited: int, backlog: int, tokens: int
) -> None:
    assert limit(book(decodes, limited), backlog, Slo()) == tokens


@pytest.mark.parametrize(("tbt", "tokens"), [(0.1, 1), (12, 1), (24, 3), (30, 4), (60, 0)])
def test_with_tbt_at_risk_steps_have_fewer_prompt_tokens(tbt: float, tokens: int) -> None:
    """A step may take nine tenths: 10 s, and 5 s for each token after the first."""
    assert limit(book(1), 20, Slo(tbt=tbt)) == tokens


@examples(200)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.floats(-20, 0), st.integers(1, 30)), min_size=1, max_size=3),
    st.floats(1, 1000),
)
def test_with_ttft_at_risk_steps_have_more(
    decodes: int, pending: list[tuple[float, int]], ttft: float
) -> None:
    """The fewest tokens with which each prompt is computed in nine tenths of the time, if any."""

    def in_time(chunk: int) -> bool:
        step_s, tokens = 10 + 5 * max(chunk + decodes - 2, 0), 0
        for arrival, rest in pending:
            tokens += rest
            if tokens / chunk * step_s > (0.9 * ttft + arrival) * (1 + 1e-9):
                return False
        return True

    found = limit(book(decodes, 0, pending), 30, Slo(ttft=ttft, tbt=0.1), 0.0)
    enough = [chunk for chunk in range(1, 8 - decodes) if in_time(chunk)]
    assert found == (enough[0] if enough else 0)


def faster(decodes: int) -> Account:
    """Full steps take 8 s, of no prompt 2 s, and 1 s more for each decode."""
    made = book(0)
    made.kind = InstanceClass(Speeds(1.0, 1.0, 0.0, 2.0, 8.0, 0.0), 80)
    made.decodes, made.seats, made.room = decodes, 8, 20
    made.conclude()
    return made


@pytest.mark.parametrize(("decodes", "seconds"), [(0, 16), (2, 40), (4, 48)])
def test_a_prompt_costs_more_where_it_delays_decodes(decodes: int, seconds: float) -> None:
    """Steps have 8 of 16 tokens, or 4 beside decodes: 8 s each, where these add 0, 2 and 4 s."""
    assert cost(faster(decodes), 16, Slo()) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("computed", "ttft", "sooner"),
    [
        (3, None, 0),  # 15 s here; half of 32 s are asked, as decodes take half of full steps.
        (4, None, 36),  # 80 s here; there 32 s, 12 s from now.
        (4, 200, 0),  # In time here: 80 s are left of nine tenths.
        (4, 199, 36),
        (3, 199, 0),
        (3, 171, 0),  # 43.5 s there, and in time after another step of 10 s.
        (3, 170, 36.5),
    ],
)
def test_a_prompt_stays_a_while_before_it_is_taken(
    computed: int, ttft: float | None, sooner: float
) -> None:
    """16 tokens are left, and it came 100 s ago."""
    here, there = book(0), faster(4)
    here.backlog, here.under_way = 16, {"r": (0.0, 16, 16 + computed, 20)}
    cluster = ClusterView(100.0, {}, lambda source, dest: 0.5)
    assert pays(here, there, cluster, Slo(ttft=ttft)) == pytest.approx(sooner)


@pytest.mark.parametrize(("backlog", "seconds"), [(1, 10 + 32), (8, 48)])
def test_a_taker_computes_its_own_prompts_first(backlog: int, seconds: float) -> None:
    """Its own are computed while KV is on its way, 10 s; or all take 48 s, by full steps."""
    here, there = book(0), faster(4)
    there.backlog = backlog
    here.backlog, here.under_way = 16, {"r": (0.0, 16, 20, 20)}
    assert pays(here, there, ClusterView(100.0, {}), Slo()) == pytest.approx(80 - seconds)


@pytest.mark.parametrize(("behind", "sooner"), [(10, 0), (11, 36)])
def test_it_goes_where_one_behind_it_would_be_late(behind: int, sooner: float) -> None:
    """All are due in 130 s; it takes 80 s here, and those behind it 5 s for each token."""
    here, there = book(0), faster(4)
    here.under_way = {"r": (0.0, 16, 20, 20), "later": (0.0, behind, behind, behind)}
    here.backlog = 16 + behind
    cluster = ClusterView(50.0, {}, lambda source, dest: 0.5)
    assert pays(here, there, cluster, Slo(ttft=200)) == pytest.approx(sooner)


@pytest.mark.parametrize("slo", ["ttft", "tbt"])
@pytest.mark.parametrize("seconds", [0, -1, "soon"])
def test_what_is_no_target(slo: str, seconds: Any) -> None:
    with pytest.raises(JaxinferError, match=f"slo.{slo} is"):
        TakeoverOptions.model_validate({"slo": {slo: seconds}})


def fit(token_s: float, step_s: float) -> StepFit:
    """Steps of up to 4 tokens."""
    mixed = MixedFit(0.0, 0.0, step_s + 4 * token_s)
    return StepFit(PrefillFit(token_s, 0.0), mixed, DecodeFit(0.0, 0.0, step_s))


FITS = {"A": fit(0.4, 4.0), "B": fit(0.1, 1.0)}


def pair(
    system: Takeover,
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float] | None = None,
    **timing: Any,
) -> Outcome:
    """Requests on a slow and a fast instance, by their fits; steps of both take as long."""

    def made_of(name: str) -> Instance:
        instance = pool(name, {"A": 20, "B": 200}[name])
        instance.fit = FITS[name]
        return instance

    both = [made_of("A"), made_of("B")]
    made = Run(system, both, make_requests(lengths, arrivals), unit(**timing), renew=made_of)
    made.greedy = False
    return made.verify()


def rows(outcome: Outcome, request: str) -> list[tuple[str, int, int]]:
    """The rows of a request, by instance."""
    return [
        (step.batch.instance, row.start, row.count)
        for step in outcome.world.steps
        for row in step.batch.rows
        if row.request.id == request
    ]


def test_a_prompt_under_way_is_taken_over() -> None:
    """B has computed its own prompt after three steps; the rest of A's is sooner done there."""
    system = Takeover()
    outcome = pair(system, [(12, 1), (16, 3)])
    assert [(t.request.id, t.source, t.dest) for t in outcome.world.transfers] == [("r1", "A", "B")]
    assert system.report() == {"decodes_taken": 0, "prompts_taken": 1}
    where = [name for name, start, _ in rows(outcome, "r1") if start < 16]
    assert where == sorted(where)
    assert set(where) == {"A", "B"}


def test_a_prompt_that_is_in_time_stays() -> None:
    system = Takeover(TakeoverOptions(slo=Slo(ttft=1000)))
    outcome = pair(system, [(12, 1), (16, 3)])
    assert {name for name, start, _ in rows(outcome, "r1") if start < 16} == {"A"}
    assert system.report() == {"decodes_taken": 1, "prompts_taken": 0}


def test_a_prompt_begins_where_it_delays_no_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """B's decode adds 2 s to a step: 12 tokens take 16 s beside it and cost 24; 22.8 on A."""
    monkeypatch.setitem(FITS, "A", fit(1.15, 3.0))
    slower = StepFit(PrefillFit(0.1, 0.0), MixedFit(0.0, 0.0, 4.0), DecodeFit(0.0, 2.0, 1.0))
    monkeypatch.setitem(FITS, "B", slower)
    outcome = pair(Takeover(), [(4, 40), (12, 1)], arrivals=[0, 4.5])
    assert {name for name, *_ in rows(outcome, "r0")} == {"B"}
    assert rows(outcome, "r1")[0][0] == "A"


def test_its_taker_is_lost_while_kv_is_on_its_way() -> None:
    first = pair(Takeover(), [(12, 1), (16, 3)]).world.transfers[0].requested
    outcome = pair(Takeover(), [(12, 1), (16, 3)], transfers={"B": 6}, lost={"B": first + 3})
    assert all(r.finish_reason == "length" for r in outcome.finished.values())


def test_prompts_beside_decodes_come_in_small_pieces() -> None:
    """B's first request decodes as the second one's prompt comes: a token beside it is free."""
    outcome = pair(Takeover(), [(4, 30), (4, 2)], arrivals=[0, 4.5])
    pieces = [count for _, start, count in rows(outcome, "r1") if start < 4]
    assert len(pieces) > 1
    system = Takeover(TakeoverOptions(slo=Slo(tbt=100)))
    outcome = pair(system, [(4, 30), (4, 2)], arrivals=[0, 4.5])
    assert len([start for _, start, _ in rows(outcome, "r1") if start < 4]) < len(pieces)
