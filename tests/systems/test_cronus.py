"""Cronus in the fake world: how many requests the PPI has, and who computes what."""

from collections.abc import Sequence

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from scenarios import examples
from serving_checks import Run, make_kv, make_requests

from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.step_fit import MixedFit, PrefillFit, StepFit
from jaxinfer.systems.cronus import Cronus, CronusOptions

FIT = StepFit(PrefillFit(0.4, 1), MixedFit(0.01, 0.01, 1))


def instance(name: str, pages: int, page_size: int = 4, seats: int = 8) -> Instance:
    options = InstanceOptions(max_num_seqs=seats, max_num_batched_tokens=5)
    return Instance(name, make_kv(pages, page_size), options, fit=FIT)


def fixed_cut(cut: float | None) -> dict[str, float]:
    """Cronus' options for a cut after so many tokens, or at a share of the prompt."""
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
        assert loop.instances["ppi"].num_requests <= most
        assert len(loop.instances["ppi"].waiting) <= most

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
    """As many as it may have are there while requests wait, and they come in their order."""
    seen = set()

    def watch(loop: ServingLoop) -> None:
        seen.add(loop.instances["ppi"].num_requests)

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
    """By statistics of that time: the later ones know of the decodes that have begun."""
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
