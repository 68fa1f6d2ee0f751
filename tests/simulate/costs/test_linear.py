"""Linear step times: sums by hand, the papers' forms, and the fit that gives them back."""

from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.fit import fit_costs
from jaxinfer.simulate.costs.linear import LinearCosts, LinearStage
from jaxinfer.simulate.costs.model import Pipeline


def test_a_step_is_the_sum_of_its_counts() -> None:
    costs = LinearCosts(
        step_s=1000, token_s=100, sequence_s=10, decode_context_s=1, chunk_context_s=0.5
    )
    # Chunks of 16 and 20 tokens after 40 and 10 entries, and 4 decodes that see 280 in all.
    work = Work(40, 4, 6, 5, 280, [(40, 16), (10, 20)])
    varying = 40 * 100 + 6 * 10 + 280 * 1 + 50 * 0.5
    assert LinearStage(costs).seconds(work) == pytest.approx(1000 + varying)
    assert LinearStage(costs, share=0.25).seconds(work) == pytest.approx(1000 + varying / 4)


def test_stages_share_all_but_the_fixed_part() -> None:
    costs = LinearCosts(step_s=0.5, token_s=0.25)
    parts = tuple(LinearStage(costs, share) for share in (0.75, 0.25))
    pipeline = Pipeline(parts, 0.0, (0.0,), (0.0,), 2)
    work = Work(8, 0, 1, 1, 0, [(0, 8)])
    assert sum(pipeline.stages(work)) == pytest.approx(2 * 0.5 + 8 * 0.25)


def test_what_lies_between_stages() -> None:
    """Stages that send are busy with it, the last one is not; a hop moves every token's numbers."""
    parts = tuple(LinearStage(LinearCosts(step_s=seconds)) for seconds in (1.0, 2.0, 3.0))
    pipeline = Pipeline(parts, 0.25, (10.0, 20.0), (0.001, 0.01), 5)
    work = Work(8, 1, 4, 2, 7, [(2, 3), (0, 2), (9, 2)])
    assert pipeline.stages(work) == [1.25, 2.25, 3.0]
    assert pipeline.hops(work) == pytest.approx([10 + 40 * 0.001, 20 + 40 * 0.01])
    assert Pipeline(parts[:1], 0.25, (), (), 5).stages(work) == [1.0]


@pytest.mark.parametrize(
    ("start", "decodes", "each"), [(0, 0, 0), (7000, 0, 0), (0, 31, 900), (3584, 200, 1500)]
)
def test_eq_3_of_a_full_chunk(start: int, decodes: int, each: int) -> None:
    budget, k_ctxp, k_ctxd, k_p, b_c = 512, 4.0e-6, 1.5e-7, 6e-5, 0.04
    costs = LinearCosts(
        step_s=b_c - k_p * budget, token_s=k_p, decode_context_s=k_ctxd, chunk_context_s=k_ctxp
    )
    chunk = start, budget - decodes
    work = Work(budget, decodes, decodes + 1, decodes, decodes * each, [chunk], decodes)
    expected = k_ctxp * start + k_ctxd * decodes * each + b_c
    assert LinearStage(costs).seconds(work) == pytest.approx(expected, rel=1e-12)


def test_distserve_profile_of_decodes() -> None:
    a, b, c = 19.93e-3, 0.627e-6, 0.0385e-3
    costs = LinearCosts(step_s=a, token_s=c, decode_context_s=b)
    work = Work(32, 32, 32, 32, 32 * 400, [], 32)
    assert LinearStage(costs).seconds(work) == pytest.approx(a + b * 32 * 400 + c * 32)


def test_either_of_both_gives_steps_a_time() -> None:
    work = Work(8, 0, 1, 1, 0, [(0, 8)])
    assert LinearStage(LinearCosts(step_s=0.5)).seconds(work) == 0.5
    assert LinearStage(LinearCosts(token_s=0.5)).seconds(work) == 4.0


@pytest.mark.parametrize("relative", [True, False])
def test_the_fit_gives_back_the_coefficients(relative: bool) -> None:
    """Coefficients come back if prompts take one step: over several, eq. 2 is no straight line."""
    budget = 2048
    costs = LinearCosts(step_s=0.012, token_s=6e-5, decode_context_s=1.5e-7, chunk_context_s=4e-6)
    pipeline = Pipeline((LinearStage(costs),), 0.0, (), (), 2)
    fit = fit_costs(pipeline, budget, 256, longest=budget, pool=10**5, relative=relative)
    assert fit.prefill.per_token == pytest.approx(6e-5, rel=1e-6)
    assert fit.prefill.constant == pytest.approx(0.012, rel=1e-6)
    assert fit.mixed.per_prefill_context == pytest.approx(4e-6, rel=1e-6)
    assert fit.mixed.per_decode_context == pytest.approx(1.5e-7, rel=1e-6)
    assert fit.mixed.constant == pytest.approx(0.012 + 6e-5 * budget, rel=1e-6)


def test_eq_3_has_no_term_for_sequences() -> None:
    """A prefill has one sequence: eq. 2 holds; in eq. 3 their number varies beside its terms."""
    costs = LinearCosts(step_s=0.012, token_s=6e-5, sequence_s=1e-4)
    pipeline = Pipeline((LinearStage(costs),), 0.0, (), (), 2)
    fit = fit_costs(pipeline, 2048, 256, longest=2048, pool=10**5, relative=True)
    assert fit.prefill.constant == pytest.approx(0.012 + 1e-4, rel=1e-6)
    assert fit.mixed.per_decode_context > 1e-9


@pytest.mark.parametrize("relative", [True, False])
def test_the_fit_of_decodes_gives_back_the_coefficients(relative: bool) -> None:
    costs = LinearCosts(step_s=0.012, token_s=6e-5, sequence_s=1e-4, decode_context_s=1.5e-7)
    pipeline = Pipeline((LinearStage(costs),), 0.0, (), (), 2)
    fit = fit_costs(pipeline, 2048, 256, longest=2048, pool=10**5, relative=relative).decode
    assert fit
    assert fit.per_context == pytest.approx(1.5e-7, rel=1e-6)
    assert fit.per_sequence == pytest.approx(1.6e-4, rel=1e-6)
    assert fit.constant == pytest.approx(0.012, rel=1e-6)
    assert fit.seconds(1000, 8) == pytest.approx(0.012 + 1.5e-4 + 12.8e-4, rel=1e-6)


def test_one_request_at_a_time_tells_nothing_of_batches() -> None:
    """Nor does a context of one token; the other fits are there all the same."""
    costs = LinearCosts(step_s=0.012, token_s=6e-5, decode_context_s=1.5e-7)
    pipeline = Pipeline((LinearStage(costs),), 0.0, (), (), 2)
    fit = fit_costs(pipeline, 2048, 1, longest=2048, pool=10**5, relative=True)
    assert fit.decode is None
    assert fit.prefill.per_token == pytest.approx(6e-5, rel=1e-6)


class Curved:
    """A cost that no line fits, with a hop; it notes what it has been asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Work, float]] = []

    def stages(self, work: Work) -> list[float]:
        chunks = sum((start + 10) * count**1.5 for start, count in work.chunks)
        seconds = 0.5 + 0.01 * chunks + 0.002 * work.single_context**1.2 + 0.1 * work.sampled
        self.asked.append((work, seconds + 0.25))
        return [seconds]

    def hops(self, work: Work) -> list[float]:
        return [0.25]


@pytest.mark.parametrize(("budget", "seqs"), [(48, 32), (32, 100)])
def test_what_a_profile_measures(budget: int, seqs: int) -> None:
    """64 lengths up to 128 in steps of the budget; 8 contexts, 5 counts of decodes, 3 of theirs.

    Decodes beside a chunk are up to half of what a step can have, by its sequences or by its
    tokens; alone they are all of it, at contexts up to what the pool of 1,000 holds of each.
    """
    cost = Curved()
    fit_costs(cost, budget, seqs, longest=128, pool=1000, relative=True)
    works = [work for work, _ in cost.asked]
    prefills, mixed, decodes = split(works)
    assert prefills == [
        Work(count, 0, 1, start + count == length, 0, [(start, count)])
        for length in range(2, 129, 2)
        for start in range(0, length, budget)
        for count in [min(length - start, budget)]
    ]
    assert mixed == [
        Work(budget, n, n + 1, n, n * context, [(start, budget - n)])
        for start in range(0, 128, 16)
        for n in (0, 2, 4, 8, 16)
        for context in (4, 16, 32)
    ]
    assert decodes == [
        Work(n, n, n, n, n * context, [], n)
        for n, reach in ((1, 128), (4, 128), (8, 125), (12, 83), (16, 62), (20, 50), (24, 41),
                         (28, 35), (32, 31))
        for context in sorted({max(reach // part, 1) for part in (32, 8, 4, 2, 1)})
    ]  # fmt: skip


def split(asked: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Prefills, mixed steps, decodes; of 9 batches, each with 5 contexts."""
    ends = len(asked) - 9 * 5 - 8 * 5 * 3, len(asked) - 9 * 5
    return asked[: ends[0]], asked[ends[0] : ends[1]], asked[ends[1] :]


@pytest.mark.parametrize("relative", [True, False])
def test_the_fit_has_the_least_squares(relative: bool) -> None:
    """The normal equations, by what has been asked for: no error is left along any column."""
    cost = Curved()
    fit = fit_costs(cost, 48, 32, longest=128, pool=1000, relative=relative)
    by_length: dict[int, float] = {}
    total = 0.0
    prefills, mixed, decodes = split(cost.asked)
    for work, seconds in prefills:
        total += seconds
        if work.sampled:
            ((start, count),) = work.chunks
            by_length[start + count], total = total, 0.0
    assert len(by_length) == 64
    eq_2 = [((n, 1.0), s, fit.prefill.seconds(n)) for n, s in by_length.items()]
    eq_3 = [
        (
            (work.chunks[0][0], work.single_context, 1.0),
            s,
            fit.mixed.seconds(work.chunks[0][0], work.single_context),
        )
        for work, s in mixed
    ]
    assert fit.decode
    aladdin_3 = [
        (
            (work.single_context, work.singles, 1.0),
            s,
            fit.decode.seconds(work.single_context, work.singles),
        )
        for work, s in decodes
    ]
    for points in (eq_2, eq_3, aladdin_3):
        errors = [found - s for _, s, found in points]
        assert max(abs(error) for error in errors) > 0.01
        for column in range(len(points[0][0])):
            weights = [x[column] / (s * s if relative else 1) for x, s, _ in points]
            left = sum(w * e for w, e in zip(weights, errors, strict=True))
            size = sum(abs(w * e) for w, e in zip(weights, errors, strict=True))
            assert abs(left) < 1e-6 * size


def test_an_instance_without_room_for_two_decodes_is_refused() -> None:
    """A token to a step: no chunk beside a decode, and nothing to fit eq. 3 to."""
    with pytest.raises(JaxinferError, match="too small to fit step times to: give it more tokens"):
        fit_costs(Curved(), 1, 1, longest=1, pool=1, relative=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "step_s or token_s must be greater than 0"),
        ({"sequence_s": 1.0, "decode_context_s": 1e-6}, "step_s or token_s must be greater"),
        ({"step_s": -1.0, "token_s": 1.0}, "step_s is -1.0, must be greater than or equal to 0"),
        ({"step_s": 1.0, "sequence_s": -1.0}, "sequence_s is -1.0, must be greater than or equal"),
        ({"step_s": 1.0, "decode_context_s": -1.0}, "decode_context_s is -1.0, must be greater"),
        ({"step_s": 1.0, "chunk_context_s": -1.0}, "chunk_context_s is -1.0, must be greater"),
        ({"step_s": 1.0, "token_s": -1e-6}, "token_s is -1e-06, must be greater than or equal"),
        ({"step_s": 1.0, "context_s": 1e-6}, "context_s: unknown option"),
    ],
)
def test_costs_that_cannot_be_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        LinearCosts(**given)
    assert message in str(error.value)
