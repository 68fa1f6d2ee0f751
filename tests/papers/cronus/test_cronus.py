"""Cronus in the fake world: how many requests the PPI has, and who computes what."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import Run, make_kv, make_requests, new_instance

from jaxinfer.papers.cronus.system import Cronus, CronusOptions
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.step_fit import MixedFit, PrefillFit, StepFit
from jaxinfer.serving.views import ClusterView, Leg

FIT = StepFit(PrefillFit(0.4, 1), MixedFit(0.01, 0.01, 1))


def instance(name: str, pages: int, page_size: int = 4, seats: int = 8) -> Instance:
    options = InstanceOptions(max_num_seqs=seats, max_num_batched_tokens=5)
    return new_instance(name, make_kv(pages, page_size), options, fit=FIT)


def fixed_cut(cut: float | None) -> dict[str, float]:
    """Cronus' options for a cut after a number of tokens, or at a share of the prompt."""
    return {} if cut is None else {f"cut_{'tokens' if isinstance(cut, int) else 'share'}": cut}


@examples(150)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=10),
    gap=st.integers(0, 4),
    pages=st.tuples(st.sampled_from((10, 11, 40, 200)), st.sampled_from((10, 11, 40, 200))),
    most=st.integers(1, 3),
    cut=st.sampled_from((None, None, 0, 1, 4, 0.5, 1.0)),
    rule=st.sampled_from(("on_demand", "at_end", "per_chunk", "per_segment")),
    refine=st.booleans(),
    seats=st.sampled_from((1, 8)),
    seed=st.integers(0, 10**6),
)
def test_the_ppi_never_has_more_requests_than_it_may(
    lengths: Sequence[tuple[int, int]],
    gap: int,
    pages: tuple[int, int],
    most: int,
    cut: float | int | None,
    rule: str,
    refine: bool,
    seats: int,
    seed: int,
) -> None:
    options = CronusOptions.model_validate(
        {"max_in_partial": most, "hand_off": rule, "refine": refine} | fixed_cut(cut)
    )
    cronus = Cronus(options)

    def watch(loop: ServingLoop) -> None:
        assert loop.assignments.instances["ppi"].num_requests <= most
        assert len(loop.assignments.instances["ppi"].waiting) <= most

    pool = [instance("ppi", pages[0], seats=seats), instance("cpi", pages[1])]
    requests = make_requests(lengths, [i * gap for i in range(len(lengths))])
    outcome = Run(cronus, pool, requests, Timing(seed, 3, 6), watch=watch).verify()
    cuts = {name: noted.length for name, noted in cronus.cuts.items()}
    assert len(cuts) == (len(lengths) if cut is None else 0)
    for name, request in outcome.finished.items():
        if cut is not None:
            fixed = cut if isinstance(cut, int) else round(cut * request.prompt_len)
            cuts[name] = min(fixed, request.prompt_len)
        rows = [
            (batch.instance, row.start + row.count)
            for batch in outcome.world.batches
            for row in batch.rows
            if row.request is request
        ]
        assert max((stop for name, stop in rows if name == "ppi"), default=0) == cuts[name]
        assert {t.stop for t in outcome.world.transfers if t.request is request} <= set(
            range(1, cuts[name] + 1)
        )


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_ppi_is_kept_supplied(most: int) -> None:
    """While requests wait, the PPI has as many as it may, and they come in their order."""
    seen = set()

    def watch(loop: ServingLoop) -> None:
        seen.add(loop.assignments.instances["ppi"].num_requests)

    cronus = Cronus(CronusOptions(max_in_partial=most))
    pool = [instance("ppi", 100, seats=1), instance("cpi", 100)]
    requests = make_requests([(20, 3)] * 8, [i / 8 for i in range(8)])
    outcome = Run(cronus, pool, requests, Timing(0, 3, 6), watch=watch).verify()
    assert max(seen) == most
    first_rows = [
        row.request.id
        for batch in outcome.world.batches
        for row in batch.rows
        if batch.instance == "ppi" and row.start == 0
    ]
    assert first_rows == [f"r{i}" for i in range(8)]
    assert list(cronus.cuts) == first_rows


def test_each_cut_is_made_when_the_ppi_has_room_and_not_before() -> None:
    """Cuts use the statistics of their time: later ones know of the decodes that have begun."""
    cronus = Cronus(CronusOptions())
    pool = [instance("ppi", 100, seats=1), instance("cpi", 100)]
    Run(cronus, pool, make_requests([(20, 30)] * 6), Timing(0, 1, 1)).verify()
    cuts = [noted.length for noted in cronus.cuts.values()]
    assert cuts[0] == cuts[1]
    assert cuts[-1] > cuts[0]
    report = cronus.report()["cuts"]
    assert isinstance(report, dict)
    assert [noted["length"] for noted in report.values()] == cuts
    assert all(noted["prefill"] > 0 for noted in report.values())


@pytest.mark.parametrize(
    ("cut", "lengths"),
    [
        (0, [0, 0, 0]),
        (7, [1, 7, 7]),
        (0.5, [0, 5, 50]),
        (0.98, [1, 10, 99]),
        (1, [1, 1, 1]),
        (1.0, [1, 10, 101]),
        (10**6, [1, 10, 101]),
    ],
)
def test_fixed_cuts(cut: float | int, lengths: list[int]) -> None:
    cronus = Cronus(CronusOptions.model_validate(fixed_cut(cut)))
    assert not cronus.needs_fits
    prompts = [1, 10, 101]
    pool = [instance("ppi", 100), instance("cpi", 100)]
    outcome = Run(cronus, pool, make_requests([(n, 2) for n in prompts])).verify()
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        route = [("ppi", length), ("cpi", prompt + 1 - length)]
        assert outcome.route_of(f"r{number}") == [part for part in route if part[1]]


def make(**options: Any) -> Cronus:
    return Cronus(CronusOptions.model_validate(options))


def test_options() -> None:
    assert vars(CronusOptions()) == {
        "by_cache": False,
        "partial": "ppi",
        "chunked": "cpi",
        "max_in_partial": 2,
        "candidates": 512,
        "refine": False,
        "cut_share": None,
        "cut_tokens": None,
        "hand_off": "on_demand",
    }
    system = make(partial="p", chunked="c")
    system.check(["c", "p"])
    assert system.routes(["c", "p", "x"]) == [("p", "c")]
    assert system.needs_fits
    assert not make(cut_share=0.5).needs_fits
    assert not system.ttft_counts_transfer
    assert system.tick_interval is None


class Watches(Cronus):
    def on_step(self, step, cluster):  # type: ignore[no-untyped-def]
        return ()


@pytest.mark.parametrize(
    ("kind", "refine", "needed"),
    [(Cronus, False, False), (Cronus, True, True), (Watches, False, True), (Watches, True, True)],
)
def test_decodes_are_looked_at_only_where_predictors_are_refined(
    kind: type[Cronus], refine: bool, needed: bool
) -> None:
    assert kind(CronusOptions(refine=refine)).needs_decode_rows == needed


def route(system: Cronus, count: int, **num_requests: int) -> list[tuple[str, tuple[Leg, ...]]]:
    """Legs of ``count`` requests with prompts of 10 tokens; another one has 5 to be computed."""
    there = {
        name: SimpleNamespace(
            num_requests=n,
            max_num_batched_tokens=15,
            prompt_tokens_left=5,
            num_pages=99,
            page_size=1,
        )
        for name, n in num_requests.items()
    }
    waiting = [
        SimpleNamespace(
            id=f"r{i}", prompt_len=10, num_known=10, computed=0, max_tokens=3, held_by=None
        )
        for i in range(count)
    ]
    assignments = system.route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
    return [(a.request, a.legs) for a in assignments]


@pytest.mark.parametrize(
    ("most", "there", "given"), [(2, 0, 2), (2, 1, 1), (2, 2, 0), (2, 3, 0), (1, 0, 1), (4, 1, 3)]
)
def test_so_many_in_the_ppi(most: int, there: int, given: int) -> None:
    system = make(cut_tokens=4, max_in_partial=most, hand_off="at_end")
    legs = (Leg("ppi", 4, "at_end"), Leg("cpi"))
    assert route(system, 5, ppi=there, cpi=7) == [(f"r{i}", legs) for i in range(given)]


@pytest.mark.parametrize("left", ["ppi", "cpi"])
def test_all_on_what_is_left(left: str) -> None:
    """Uncut, and however many are there; so that two steps of 15 tokens are full, and no more."""
    assert route(make(), 5, **{left: 5}) == [(f"r{i}", (Leg(left),)) for i in range(3)]


def test_a_ppi_that_is_back_takes_its_part_of_those_who_wait() -> None:
    """The last six of twelve; what the CPI has got meanwhile stays there."""
    opts = InstanceOptions(max_num_seqs=4, max_num_batched_tokens=8, watermark=0.0)

    def renew(name: str) -> Instance:
        return new_instance(name, make_kv(40, 4), opts)

    outcome = Run(
        make(cut_tokens=4),
        [renew("ppi"), renew("cpi")],
        make_requests([(8, 4)] * 12),
        Timing(in_order=True, lost={"ppi": (1.5, 6.5)}),
        renew=renew,
    ).verify()
    again = {
        row.request.id
        for step in outcome.world.steps
        for row in step.batch.rows
        if step.batch.instance == "ppi" and step.start > 6
    }
    assert again == {f"r{i}" for i in range(6, 12)}
    assert all(request.error is None for request in outcome.finished.values())


def request(name: str, prompt_len: int = 10) -> Any:
    return SimpleNamespace(id=name, prompt_len=prompt_len, computed=0)


def step(instance: str, took: float, *rows: tuple[Any, int, int]) -> Any:
    """Rows are (request, start, count); it starts at 100 s."""
    views = [SimpleNamespace(request=r, start=start, count=count) for r, start, count in rows]
    return SimpleNamespace(instance=instance, rows=views, start=100.0, end=100.0 + took)


def unlike(name: str, fit: StepFit) -> Instance:
    return new_instance(name, make_kv(10, 4), InstanceOptions(max_num_batched_tokens=5), fit=fit)


@pytest.mark.parametrize("candidates", [10, 2])
def test_what_was_expected_and_what_came(candidates: int) -> None:
    """The PPI needs 1 s for each of ten tokens, the CPI 2 s per chunk of five and per token."""
    weak = StepFit(PrefillFit(1, 0), MixedFit(9, 9, 9))
    strong = StepFit(PrefillFit(9, 9), MixedFit(0, 0, 2))
    pool = {"ppi": unlike("ppi", weak), "cpi": unlike("cpi", strong)}
    cluster, system = ClusterView(0.0, pool), make(candidates=candidates)
    ((_, legs),) = [(a.request, a.legs) for a in system.route([request("a")], cluster)]
    # At 4 tokens both take 4 s; at 5, the CPI has one chunk of 2 s left, and the PPI takes 5 s.
    length, expected = (4, 4.0) if candidates == 10 else (5, 2.0)
    assert legs == (Leg("ppi", length), Leg("cpi"))
    a, other = request("a"), request("other")
    for each in (
        step("ppi", 1.5, (a, 0, 2), (other, 0, 3)),
        step("ppi", 0.25, (a, 2, length - 2)),
        step("cpi", 2.5, (a, length, 4)),
        step("cpi", 4.0, (other, 3, 1), (a, 9, 1)),
        step("cpi", 32.0, (a, 10, 1)),  # Its first decode.
        step("cpi", 64.0, (a, 11, 1), (other, 4, 1)),
    ):
        assert not list(system.on_step(each, cluster))
    assert system.report() == {
        "cuts": {
            "a": {
                "prompt_len": 10,
                "length": length,
                "expected_prefill": float(length),
                "expected_chunked": expected,
                "prefill": 1.75,
                "chunked": 6.5,
            }
        }
    }


def test_refining_takes_each_prefill_once_it_is_whole() -> None:
    """And of the CPI's iterations those that its chunks fill."""
    system = make(refine=True, candidates=10)
    fits = StepFit(PrefillFit(1, 0), MixedFit(0, 0, 2))
    cluster = ClusterView(0.0, {"ppi": unlike("ppi", fits), "cpi": unlike("cpi", fits)})
    refined, prefills, mixed = system._refined, [], []
    assert refined
    refined.add_prefill = lambda *seen: prefills.append(seen)  # type: ignore[method-assign]
    refined.add_mixed = lambda *seen: mixed.append(seen)  # type: ignore[method-assign]
    system.route([request("a")], cluster)
    a = request("a")
    steps = [step("ppi", 1.5, (a, 0, 2)), step("ppi", 0.25, (a, 2, 2)), step("cpi", 2, (a, 4, 5))]
    for each in steps:
        system.on_step(each, cluster)
    assert prefills == [(4, 1.75)]
    assert mixed == [(steps[2], 5)]


def test_the_balancer_looks_at_the_cpi() -> None:
    """Free pages of the CPI count: where they are short, the PPI computes all."""
    fits = StepFit(PrefillFit(1, 0), MixedFit(0, 0, 2))
    pool = {"ppi": unlike("ppi", fits), "cpi": unlike("cpi", fits)}
    assert make()._cut(request("a"), ClusterView(0.0, pool)) == 4
    pool["cpi"].kv.reserve(32)  # Eight of ten pages; the prompt takes three.
    assert make()._cut(request("a"), ClusterView(0.0, pool)) == 10
    pool["ppi"].kv.reserve(40)
    pool["cpi"] = unlike("cpi", fits)
    assert make()._cut(request("a"), ClusterView(0.0, pool)) == 4


def test_only_cuts_by_the_balancer_are_reported() -> None:
    system = make(cut_tokens=4)
    route(system, 2, ppi=0, cpi=0)
    assert system.report() == {"cuts": {}}


@pytest.mark.parametrize("refine", [True, False])
def test_the_report_is_bounded_and_says_what_it_leaves_out(
    refine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve() -> Cronus:
        cronus = Cronus(CronusOptions(refine=refine))
        pool = [instance("ppi", 100, seats=1), instance("cpi", 100)]
        lengths = [(5 + i, 3) for i in range(25)]
        Run(cronus, pool, make_requests(lengths), Timing(3, 3, 6)).verify()
        return cronus

    whole = serve().report()
    assert set(whole) == {"cuts"}
    monkeypatch.setattr("jaxinfer.papers.cronus.system.REPORTED", 4)
    cronus = serve()
    found = cronus.report()
    cuts, all_cuts = found["cuts"], whole["cuts"]
    assert isinstance(cuts, dict)
    assert isinstance(all_cuts, dict)
    # The same to the last digit, refined or not, for those that are there.
    assert list(cuts.items()) == list(all_cuts.items())[:4]
    assert found["cuts_left_out"] == len(all_cuts) - 4 == 21
    assert not cronus._in_partial
    # What is left out counts for the fits all the same.
    monkeypatch.undo()
    other = serve()
    assert (cronus._refined is None) == (not refine)
    if cronus._refined and other._refined:
        assert cronus._refined.prefill == other._refined.prefill is not None
        assert cronus._refined.mixed == other._refined.mixed
