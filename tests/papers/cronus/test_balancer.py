"""The Balancer against the paper's equations, each iteration of the CPI taken by itself.

Cronus, section 4.3: T_chunked adds up the iterations that part 2 of a prompt takes (eq. 1); section
4.4: eq. 2 is a partial prefill's time, eq. 3 that of one iteration. Appendix A chooses between 512
lengths.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf, isclose
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import examples
from serving_checks import make_kv, new_instance

from jaxinfer.papers.cronus.balancer import CPILoad, Refined, balance, chunked_seconds, load_of
from jaxinfer.papers.cronus.system import Cronus, CronusOptions
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import LeastSquares, MixedFit, PrefillFit, StepFit
from jaxinfer.serving.views import ClusterView, Leg

ROOMY = CPILoad(
    free_pages=10**6, page_size=16, max_num_batched_tokens=512, num_decodes=0, decode_context=0
)


def chunks(load: CPILoad, prompt_len: int, length: int) -> list[tuple[int, int]]:
    """(context, tokens) of each iteration, by letting them pass."""
    found, context = [], length
    while context < prompt_len:
        tokens = min(load.max_num_batched_tokens - load.num_decodes, prompt_len - context)
        found.append((context, tokens))
        context += tokens
    return found


def seconds_of_chunks(fit: MixedFit, load: CPILoad, prompt_len: int, length: int) -> float:
    """Eq. 3, added up."""
    return sum(
        fit.per_prefill_context * context
        + fit.per_decode_context * load.decode_context
        + fit.constant
        for context, _ in chunks(load, prompt_len, length)
    )


per_token = st.floats(0, 1e-3)
seconds = st.floats(0, 1)
prefill_fits = st.builds(PrefillFit, per_token, seconds)
mixed_fits = st.builds(MixedFit, per_token, per_token, seconds)
prompt_lens = st.integers(1, 5000)


@st.composite
def loads(draw: st.DrawFn) -> CPILoad:
    """Draw loads with room for a chunk."""
    budget = draw(st.integers(1, 2048))
    decodes = draw(st.integers(0, min(budget - 1, 300)))
    return replace(
        ROOMY,
        max_num_batched_tokens=budget,
        num_decodes=decodes,
        decode_context=decodes * draw(st.integers(1, 3000)),
    )


@examples(300)
@given(mixed_fits, loads(), prompt_lens, st.data())
def test_chunked_seconds_add_up_the_iterations(
    fit: MixedFit, load: CPILoad, prompt_len: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, prompt_len))
    expected = seconds_of_chunks(fit, load, prompt_len, length)
    found = chunked_seconds(fit, load, prompt_len, length)
    assert isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("length", "contexts"),
    [
        (0, [0, 100, 200]),
        (1, [1, 101, 201]),
        (99, [99, 199, 299]),
        (100, [100, 200]),  # As long as two chunks: Algorithm 1's floor would see a third.
        (101, [101, 201]),
        (200, [200]),
        (299, [299]),
        (300, []),
    ],
)
def test_contexts_of_the_iterations(length: int, contexts: list[int]) -> None:
    load = replace(ROOMY, max_num_batched_tokens=110, num_decodes=10, decode_context=7000)
    assert [context for context, _ in chunks(load, 300, length)] == contexts
    # Powers of two, such that the terms can be told apart, and are exact.
    fit = MixedFit(per_prefill_context=2**20, per_decode_context=2**-20, constant=1.0)
    expected = sum(2**20 * context + 7000 * 2**-20 + 1 for context in contexts)
    assert chunked_seconds(fit, load, 300, length) == expected


def candidates(prompt_len: int, count: int = 512) -> list[int]:
    """Algorithm 1's lengths, in its order, without floating point."""
    return [ceil(Fraction(i, count) * prompt_len) for i in range(1, count + 1)]


@examples(60)
@given(prefill_fits, mixed_fits, loads(), prompt_lens)
def test_no_candidate_has_a_smaller_gap(
    prefill: PrefillFit, mixed: MixedFit, load: CPILoad, prompt_len: int
) -> None:
    def gap(length: int) -> float:
        weak = prefill.per_token * length + prefill.constant
        return abs(weak - seconds_of_chunks(mixed, load, prompt_len, length))

    found = balance(prefill, mixed, load, prompt_len, 512)
    lengths = candidates(prompt_len)
    assert found in lengths
    least = min(map(gap, lengths))
    assert gap(found) <= least + 1e-9 * (1 + least)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 512, 1000])
@pytest.mark.parametrize("prompt_len", [1, 2, 511, 512, 513, 1014])
def test_the_candidates(prompt_len: int, count: int) -> None:
    """The choice is where the two parts take as long: where it is the one of no gap."""
    load = replace(ROOMY, max_num_batched_tokens=1)
    lengths = sorted(set(candidates(prompt_len, count)))
    for length in lengths[:: max(1, len(lengths) // 40)]:
        # One token per iteration, a second each; of the PPI's seconds, as many at this length.
        prefill = PrefillFit(per_token=prompt_len, constant=prompt_len - length * (prompt_len + 1))
        assert prefill.seconds(length) == prompt_len - length
        assert balance(prefill, MixedFit(0, 0, 1), load, prompt_len, count) == length


@pytest.mark.parametrize("speed", [0.01, 0.25, 1, 3, 50])
def test_equal_pace_is_shared_by_speed(speed: float) -> None:
    """A second per token on the CPI, ``speed`` tokens per second on the PPI."""
    load = replace(ROOMY, max_num_batched_tokens=1)
    found = balance(PrefillFit(1 / speed, 0), MixedFit(0, 0, 1), load, 1024, 512)
    assert abs(found - 1024 * speed / (1 + speed)) <= 1


def test_decodes_take_a_part_of_each_chunk_and_slow_it_down() -> None:
    """Decodes have the PPI take more, either way."""
    prefill, mixed = PrefillFit(1e-3, 0), MixedFit(1e-6, 1e-6, 0.05)
    alone = balance(prefill, mixed, ROOMY, 2000, 512)
    seats = balance(prefill, mixed, replace(ROOMY, num_decodes=256), 2000, 512)
    context = balance(prefill, mixed, replace(ROOMY, decode_context=100_000), 2000, 512)
    assert alone < seats
    assert alone < context


def test_equals_go_to_the_shortest() -> None:
    """The shortest of equal lengths is chosen, as by argmin."""
    assert balance(PrefillFit(0, 1), MixedFit(0, 0, 1), ROOMY, 500, 512) == 1


@examples(100)
@given(prefill_fits, mixed_fits, loads(), prompt_lens, st.integers(1, 64))
def test_without_the_pages_the_ppi_computes_all(
    prefill: PrefillFit, mixed: MixedFit, load: CPILoad, prompt_len: int, page_size: int
) -> None:
    needed = -(-prompt_len // page_size)
    short = replace(load, page_size=page_size, free_pages=needed - 1)
    assert balance(prefill, mixed, short, prompt_len, 512) == prompt_len
    enough = replace(short, free_pages=needed)
    roomy = replace(short, free_pages=10**6)
    assert balance(prefill, mixed, enough, prompt_len, 512) == balance(
        prefill, mixed, roomy, prompt_len, 512
    )


@pytest.mark.parametrize("num_decodes", [512, 513])
def test_where_decodes_use_up_the_budget_the_ppi_computes_all(num_decodes: int) -> None:
    load = replace(ROOMY, num_decodes=num_decodes)
    assert chunked_seconds(MixedFit(0, 0, 0), load, 100, 99) == inf
    assert chunked_seconds(MixedFit(0, 0, 0), load, 100, 100) == 0
    assert balance(PrefillFit(1, 0), MixedFit(0, 0, 0), load, 100, 512) == 100


def test_the_statistics_are_those_of_the_moment() -> None:
    """Decodes, and their context; requests whose prompt is not done are none."""
    options = InstanceOptions(max_num_batched_tokens=77)
    instance = new_instance("cpi", make_kv(40, 8), options)
    for name, prompt_len, computed in (("a", 10, 10), ("b", 10, 30), ("c", 50, 49), ("d", 9, 0)):
        request = RequestState(name, prompt_len, 50)
        request.computed = computed
        request.hold = instance.kv.reserve(max(computed, 1))
        instance.taking_part.add(request)
    waiting = RequestState("e", 5, 5)
    waiting.legs = [Leg("cpi")]
    instance.waiting.append(waiting)
    # 2 + 4 + 7 + 1 pages are taken.
    assert load_of(instance) == CPILoad(
        free_pages=26, page_size=8, max_num_batched_tokens=77, num_decodes=2, decode_context=40
    )


class TestLeastSquares:
    @examples(200)
    @given(
        st.integers(1, 4).flatmap(
            lambda size: st.lists(
                st.tuples(*[st.integers(-1000, 1000)] * size, st.floats(-10, 10)),
                min_size=size,
                max_size=30,
            )
        )
    )
    def test_as_numpy(self, rows: list[tuple[float, ...]]) -> None:
        x, y = np.array([row[:-1] for row in rows]), np.array([row[-1] for row in rows])
        singular = np.linalg.svd(x, compute_uv=False)
        assume(singular[-1] > 1e-3 * singular[0])
        fit = LeastSquares(x.shape[1])
        for row in rows:
            fit.add(row[:-1], row[-1])
        found = fit.solve()
        expected, *_ = np.linalg.lstsq(x, y, rcond=None)
        assert found == pytest.approx(list(expected), rel=1e-6, abs=1e-9)
        assert fit.count == len(rows)

    @pytest.mark.parametrize(
        "rows",
        [
            [],
            [(3, 1)],
            [(3, 1), (3, 1), (3, 1)],
            [(0, 5), (0, 7)],
            [(2, 4, 1), (1, 2, 1), (5, 10, 1), (7, 14, 1)],
            [(100, 0, 1), (200, 0, 1), (512, 0, 1), (4096, 0, 1)],
        ],
    )
    def test_undecided(self, rows: Sequence[tuple[int, ...]]) -> None:
        fit = LeastSquares(len(rows[0]) if rows else 2)
        for row in rows:
            fit.add(row, 1.0)
        assert fit.solve() is None

    def test_contexts_of_a_large_pool_decide(self) -> None:
        """60 GB of KV of LLaMA3-8B are about 450,000 tokens."""
        rng = np.random.default_rng(0)
        fit, true = LeastSquares(3), np.array([4e-6, 2e-8, 0.05])
        x = np.stack([rng.uniform(0, 4000, 64), rng.normal(450e3, 30e3, 64), np.ones(64)], 1)
        for row in x:
            fit.add(row.tolist(), float(row @ true))
        assert np.linalg.matrix_rank(x) == 3
        assert np.linalg.lstsq(x, x @ true, rcond=None)[0] == pytest.approx(true, rel=1e-6)
        assert fit.solve() == pytest.approx(true, rel=1e-3)


# Fits from the run's own steps.

BUDGET = 128


def step(
    instance: str, rows: Sequence[tuple[RequestState, int, int]], start: float, took: float
) -> Any:
    """Rows are (request, start, count)."""
    views = [SimpleNamespace(request=r, start=at, count=n) for r, at, n in rows]
    return SimpleNamespace(instance=instance, rows=views, start=start, end=start + took)


def iteration(fit: MixedFit, context: int, decodes: Sequence[int], count: int | None = None) -> Any:
    """A chunk after ``context`` tokens beside decodes; it fills the budget unless said."""
    count = BUDGET - len(decodes) if count is None else count
    rows = [(RequestState(f"d{i}", 1, 10**4), at, 1) for i, at in enumerate(decodes)]
    rows.append((RequestState("p", 10**4, 1), context, count))
    return step("cpi", rows, 3.0, fit.seconds(context, sum(decodes)))


def test_refined_finds_the_coefficients_of_steps() -> None:
    rng = np.random.default_rng(1)
    prefill, mixed = PrefillFit(3e-4, 0.02), MixedFit(2e-6, 1e-7, 0.07)
    refined = Refined()
    for number in range(40):
        assert (refined.prefill is None) == (number < Refined.ENOUGH)
        assert (refined.mixed is None) == (number < Refined.ENOUGH)
        length = int(rng.integers(1, 2000))
        refined.add_prefill(length, prefill.seconds(length))
        decodes = rng.integers(1, 3000, int(rng.integers(0, 60))).tolist()
        refined.add_mixed(iteration(mixed, int(rng.integers(0, 4000)), decodes), BUDGET)
        # Not eq. 3's: no chunk, or not a full one. Their times would spoil the fit.
        refined.add_mixed(iteration(MixedFit(1, 1, 9), 100, [50], count=BUDGET - 2), BUDGET)
        decode = step("cpi", [(RequestState("d", 1, 10**4), 50, 1)] * BUDGET, 0, 99)
        refined.add_mixed(decode, BUDGET)
    assert refined.prefill is not None
    assert refined.mixed is not None
    for found, true in ((refined.prefill, prefill), (refined.mixed, mixed)):
        assert vars(found) == pytest.approx(vars(true), rel=1e-6)


def test_refined_stays_out_of_what_steps_do_not_decide() -> None:
    refined = Refined()
    for _ in range(30):
        refined.add_prefill(100, 1.0)
        refined.add_mixed(iteration(MixedFit(1e-6, 1e-6, 1), 512, [100]), BUDGET)
    assert refined.prefill is None
    assert refined.mixed is None


def test_prefills_that_get_faster_with_length_are_noise() -> None:
    refined = Refined()
    for number in range(30):
        refined.add_prefill(100 + number, 1.0 - number / 100)
    assert refined.prefill is None


@pytest.mark.parametrize("refine", [True, False])
def test_cronus_cuts_by_what_its_steps_have_shown(refine: bool) -> None:
    """The profile has both groups alike; in truth, the weak one takes three times as long."""
    profile = StepFit(PrefillFit(1e-4, 0.01), MixedFit(1e-6, 1e-7, 0.0128))
    weak, strong = PrefillFit(3e-4, 0.02), profile.mixed
    ppi, cpi = (
        new_instance(
            name,
            make_kv(10**4, 16),
            InstanceOptions(max_num_batched_tokens=BUDGET),
            fit=profile,
        )
        for name in ("ppi", "cpi")
    )
    cluster = ClusterView(0.0, {"ppi": ppi, "cpi": cpi})
    cronus = Cronus(CronusOptions(refine=refine))
    assert cronus.needs_fits
    rng = np.random.default_rng(2)
    cuts = []
    for number in range(40):
        request = RequestState(f"r{number}", int(rng.integers(300, 1500)), 10)
        (assignment,) = cronus.route([request], cluster)
        first, second = assignment.legs
        assert (first.instance, second.instance, second.until) == ("ppi", "cpi", None)
        assert first.until is not None
        cuts.append((request.prompt_len, first.until))
        # In chunks, as the PPI would; their times add up to eq. 2's.
        starts = range(0, first.until, BUDGET)
        for start in starts:
            count = min(BUDGET, first.until - start)
            took = weak.seconds(first.until) / len(starts)
            cronus.on_step(step("ppi", [(request, start, count)], 0, took), cluster)
        decodes = [(RequestState("d", 1, 10**4), 10 * number, 1)]
        for start in range(first.until, request.prompt_len, BUDGET - 1):
            rows = [*decodes, (request, start, min(BUDGET - 1, request.prompt_len - start))]
            took = strong.seconds(start, 10 * number)
            cronus.on_step(step("cpi", rows, 0, took), cluster)
        noted = cronus.cuts[request.id]
        assert noted.prefill == pytest.approx(weak.seconds(first.until))
        assert noted.length == first.until
        if noted.chunked:
            assert noted.chunked == pytest.approx(
                sum(
                    strong.seconds(start, 10 * number)
                    for start in range(first.until, request.prompt_len, BUDGET - 1)
                )
            )
    load = load_of(cpi)
    before, after = cuts[: Refined.ENOUGH], cuts[Refined.ENOUGH :]
    for prompt_len, cut in before:
        assert cut == balance(profile.prefill, profile.mixed, load, prompt_len, 512)
    for prompt_len, cut in after:
        fit = weak if refine else profile.prefill
        # Found up to rounding: where two neighbours' gaps are as good as equal, either may win.
        assert abs(cut - balance(fit, strong, load, prompt_len, 512)) <= 3
    if refine:
        assert sum(c / p for p, c in after) < 0.7 * sum(c / p for p, c in before)
