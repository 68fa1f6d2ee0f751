"""Sampling against closed forms."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from properties import examples

from jaxinfer.runtime.stage.sampler import (
    SamplerShape,
    Samples,
    SamplingInputs,
    _edit,
    _penalise,
    argmax,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    sample,
)
from jaxinfer.runtime.stage.sampling_inputs import NO_TOKEN, empty_sampling

V = 50
# XLA:CPU takes subnormal numbers for 0.
FINITE = st.floats(-30, 30, width=32, allow_subnormal=False)
# With equals among them, and tokens that are forbidden; the first is not.
TIED = st.one_of(FINITE, st.sampled_from([-np.inf, 1.0, 1.0, 2.0]))
LOGITS = arrays(np.float32, (3, V), elements=FINITE)


@st.composite
def edited(draw: st.DrawFn) -> np.ndarray:
    logits = draw(arrays(np.float32, (3, V), elements=TIED))
    logits[:, 0] = draw(arrays(np.float32, 3, elements=FINITE))
    # Some are so large that their exponentials are infinite.
    return logits + np.float32(draw(st.sampled_from([0, 200])))


NONE_BEFORE = np.zeros(4, np.int32)


EVERYTHING = SamplerShape(drawn=True, top_k=True, top_p=True)


@partial(jax.jit, static_argnames="sampler")
def draw(logits: np.ndarray, inputs: SamplingInputs, sampler: SamplerShape = EVERYTHING) -> Samples:
    return sample(logits, jnp.asarray(NONE_BEFORE), inputs, sampler)


def inputs(
    rows: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SamplingInputs:
    return empty_sampling(rows, SamplerShape())._replace(
        temperature_S=np.full(rows, temperature, np.float32),
        top_k_S=np.full(rows, top_k, np.int32),
        top_p_S=np.full(rows, top_p, np.float32),
        min_p_S=np.full(rows, min_p, np.float32),
        seed_S2=np.tile(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), (rows, 1)),
        position_S=np.arange(rows, dtype=np.int32),
    )


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@examples(60)
@given(edited(), st.lists(st.integers(0, V + 5), min_size=3, max_size=3))
def test_top_k_keeps_what_sorting_keeps(logits: np.ndarray, ks: list[int]) -> None:
    kept = np.isfinite(jax.jit(keep_top_k)(logits, np.array(ks, np.int32)))
    left = np.isfinite(logits)
    for row, k, mask, some in zip(logits, ks, kept, left, strict=True):
        threshold = np.sort(row)[::-1][min(k, V) - 1] if k else -np.inf
        np.testing.assert_array_equal(mask, some & (row >= threshold))


@jax.jit
def top_p_of(logits: np.ndarray, ps: np.ndarray) -> jax.Array:
    return keep_top_p(jnp.asarray(logits), jnp.asarray(logits).max(-1, keepdims=True), ps)


@examples(100)
@given(edited(), st.lists(st.one_of(st.floats(1e-30, 1), st.just(1.0)), min_size=3, max_size=3))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: np.ndarray, ps: list[float]) -> None:
    kept = np.isfinite(top_p_of(logits, np.array(ps, np.float32)))
    for row, p, mask, some in zip(softmax(logits), ps, kept, np.isfinite(logits), strict=True):
        if np.float32(p) == 1:
            np.testing.assert_array_equal(mask, some)
            continue
        # A set within rounding of p may go either way.
        assert row[mask].sum() >= p - V * 2**-30
        assert row[row > row[mask].min()].sum() <= p + V * 2**-30
        assert mask.any()
    # Of the logits themselves: probabilities may be equal where those are not.
    for row, mask in zip(logits, kept, strict=True):
        assert mask[row.argmax()]
        assert not np.any(row[~mask & np.isfinite(row)] >= row[mask].min())


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}])
def test_hardly_any_temperature_takes_the_likeliest(options: dict[str, Any]) -> None:
    """Logits of 1e30, whose exponentials are infinite."""
    logits = np.random.default_rng(0).normal(size=(20, V)).astype(np.float32)
    token = draw(logits, inputs(20, 1e-30, **options)).token_S
    np.testing.assert_array_equal(token, logits.argmax(-1))


def test_top_p_of_a_whole_vocabulary() -> None:
    """128,256 tokens: sums stay within what the function says of them, 2^-31 for each."""
    V = 128256
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(6, V)) * np.array([[1e-6], [1e-3], [1], [2], [4], [9]])).astype("f4")
    for p in (0.1, 0.9, 0.999):
        kept = np.isfinite(top_p_of(logits, np.full(6, p, np.float32)))
        for row, probability, mask in zip(logits, softmax(logits), kept, strict=True):
            order = np.argsort(-row, kind="stable")
            reached = np.cumsum(probability[order])
            count = mask.sum()
            assert reached[count - 1] >= p - V * 2.0**-31
            # Without the least of those kept, and its equals.
            more = (row > row[mask].min()).sum()
            assert not more or reached[more - 1] <= p + V * 2.0**-31
            assert mask[order[:count]].all()


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = np.zeros((2, V), np.float32)
    logits[0, [7, 9]] = 3
    assert argmax(jnp.asarray(logits)).tolist() == [7, 0]
    token, logprob, *_ = draw(logits, inputs(2, 0.0))
    assert token.tolist() == [7, 0]
    np.testing.assert_allclose(logprob, np.log(softmax(logits)[[0, 1], [7, 0]]), rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.5, 8, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.0, 7, 0.9, 0.2),
    ],
)
def test_frequencies(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-squared against the distribution that the four options define."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=12).astype(np.float32) * 2 + 200
    p = softmax(logits / temperature)
    order = np.argsort(-p)
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p /= p.sum()
    rows = 20000
    batch = np.tile(logits, (rows, 1))
    token, logprob, *_ = draw(batch, inputs(rows, temperature, top_k, top_p, min_p, seed=99))
    count = np.bincount(token, minlength=12)
    assert count[p == 0].sum() == 0
    expected = rows * p
    # Pearson's statistic wants cells of some size: the rare tokens are one cell.
    common = expected > 20
    observed = np.append(count[common], count[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    cells = expected > 0
    chi2 = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    # Six standard deviations of a chi-squared variable.
    assert chi2 < freedom + 6 * np.sqrt(2 * max(freedom, 1))
    np.testing.assert_allclose(logprob, np.log(softmax(logits))[token], rtol=1e-4)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, V)).astype(np.float32)
    params = inputs(6, 1.0, seed=2**40 + 17)
    params.top_k_S[:] = [0, 5, 0, 40, 0, 3]
    params.top_p_S[:] = [1, 1, 0.5, 0.9, 1, 1]
    together = np.asarray(draw(logits, params)[0])
    for i in range(6):
        alone = draw(logits[i : i + 1], SamplingInputs(*(x[i : i + 1] for x in params)))[0]
        assert alone[0] == together[i]
    mixed = params._replace(temperature_S=np.array([1, 0, 1, 0, 1, 0], np.float32))
    token = np.asarray(draw(logits, mixed)[0])
    np.testing.assert_array_equal(token[::2], together[::2])
    np.testing.assert_array_equal(token[1::2], logits[1::2].argmax(-1))


def test_seeds_and_positions_give_independent_draws() -> None:
    logits = np.zeros((1000, V), np.float32)
    one = np.asarray(draw(logits, inputs(1000, 1.0, seed=1))[0])
    for seed in (2, 1 << 32, (1 << 32) + 1):
        other = np.asarray(draw(logits, inputs(1000, 1.0, seed=seed))[0])
        # Equal by chance with probability 1 / V: 20 expected of 1000.
        assert 0 <= (one == other).sum() < 50


@examples(60)
@given(LOGITS, st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3))
def test_min_p_keeps_what_is_likely_enough(logits: np.ndarray, ps: list[float]) -> None:
    max_S1 = logits.max(-1, keepdims=True)
    kept = np.isfinite(jax.jit(keep_min_p)(logits, max_S1, np.array(ps, np.float32)))
    for row, p, mask in zip(softmax(logits), ps, kept, strict=True):
        threshold = p * row.max()
        assert mask[row > threshold * (1 + 1e-4)].all()
        assert not mask[row < threshold * (1 - 1e-4)].any()
        assert mask[row.argmax()]


@examples(60)
@given(
    LOGITS,
    st.lists(st.lists(st.integers(0, V - 1), max_size=12), min_size=3, max_size=3),
    st.lists(st.integers(0, 12), min_size=3, max_size=3),
    st.lists(st.integers(-1, 3), min_size=3, max_size=3),
    st.lists(
        st.tuples(*(st.sampled_from(x) for x in ([1, 0.5, 1.7], [0, 1.5, -2], [0, 0.4, -0.3]))),
        min_size=3,
        max_size=3,
    ),
)
def test_penalties(
    logits: np.ndarray,
    histories: list[list[int]],
    prompts: list[int],
    slots: list[int],
    penalties: list[tuple[float, float, float]],
) -> None:
    """Token by token, as vLLM and the OpenAI API define them."""
    previous = np.array([7, 7, 0, V - 1], np.int32)
    given = empty_sampling(3, SamplerShape(history=12))
    expected = logits.astype(np.float64)
    for i in range(3):
        history, (repetition, presence, frequency) = histories[i], penalties[i]
        prompt_len = min(prompts[i], len(history))
        given.history_SL[i, : len(history)] = history
        given.prompt_len_S[i], given.pending_S[i] = prompt_len, slots[i]
        given.repetition_S[i], given.presence_S[i] = repetition, presence
        given.frequency_S[i] = frequency
        output = history[prompt_len:] + ([int(previous[slots[i]])] if slots[i] >= 0 else [])
        for token in {*history, *output}:
            x = expected[i, token]
            expected[i, token] = x / repetition if x > 0 else x * repetition
        for token in set(output):
            expected[i, token] -= presence + frequency * output.count(token)
    got = jax.jit(_penalise)(logits, previous, given)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_edits_add_up_and_forbid() -> None:
    logits = np.zeros((2, V), np.float32)
    given = empty_sampling(2, SamplerShape(edits=4))
    given.edit_token_SE[0, :3], given.edit_SE[0, :3] = [3, 3, 9], [1.5, 2, -np.inf]
    expected = logits.copy()
    expected[0, [3, 9]] = 3.5, -np.inf
    np.testing.assert_array_equal(jax.jit(_edit)(logits, given), expected)
    assert NO_TOKEN > 2**30
    token, logprob, *_ = draw(logits, given)
    assert token.tolist() == [3, 0]
    # What is reported is the model's own probability.
    np.testing.assert_allclose(logprob, -np.log(V), rtol=1e-5)


def test_edits_come_before_penalties() -> None:
    """A bias of 3 on a token seen before: (1 + 3) / 2, and not 1 / 2 + 3."""
    logits = np.array([[1, 2.5, 3.25, 0]], np.float32)
    given = empty_sampling(1, SamplerShape(edits=1, history=1))
    given.edit_token_SE[0], given.edit_SE[0] = 0, 3
    given.history_SL[0], given.repetition_S[0] = 0, 2
    assert draw(logits, given)[0].tolist() == [2]
    given.repetition_S[0] = 1
    assert draw(logits, given)[0].tolist() == [0]


def test_a_top_p_of_1_keeps_what_its_sum_cannot_show() -> None:
    """The term e^-20 is nothing in float32 beside 1; a row beside it has another p."""
    logits = np.zeros((2, 4), np.float32)
    logits[:, 0] = 20
    kept = np.isfinite(top_p_of(logits, np.array([1, 0.9], np.float32)))
    assert kept.tolist() == [[True] * 4, [True, False, False, False]]


def test_min_p_is_of_the_whole_distribution() -> None:
    """The filter comes before top_p: of 0.5, 0.3 and 0.2, a third of 0.5 leaves all, 0.7 two."""
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.2], np.float32)), (400, 1))
    token = np.asarray(draw(logits, inputs(400, 1.0, top_p=0.7, min_p=0.33))[0])
    assert set(token.tolist()) == {0, 1}


def test_extreme_logits_are_told_apart() -> None:
    """The bisection takes all 32 bits: neighbouring floats, both signs, and equal zeros."""
    one = np.nextafter(np.float32(1), np.float32(2))
    logits = np.array([[1, one, -1, -one], [3e38, -3e38, 0, -0.0], [1, 1, 1, 1]], np.float32)
    kept = np.isfinite(jax.jit(keep_top_k)(logits, np.array([1, 2, 2], np.int32)))
    assert kept.tolist() == [
        [False, True, False, False],
        [True, False, True, True],
        [True, True, True, True],
    ]


def test_zeros_of_either_sign_are_equals() -> None:
    logits = np.array([[0, -0.0, -1, -2], [-0.0, 0, -1, -2]], np.float32)
    kept = np.isfinite(jax.jit(keep_top_k)(logits, np.array([1, 1], np.int32)))
    assert kept.tolist() == [[True, True, False, False]] * 2
    kept = np.isfinite(top_p_of(logits, np.array([0.3, 0.3], np.float32)))
    assert kept.tolist() == [[True, True, False, False]] * 2


@examples(40)
@given(LOGITS, st.integers(0, 2**40))
def test_likeliest_tokens_and_ranks(logits: np.ndarray, seed: int) -> None:
    got = draw(logits, inputs(3, 1.0, seed=seed), SamplerShape(drawn=True, top=8))
    log_p = np.log(softmax(logits))
    np.testing.assert_allclose(got.top_logprob_SN, -np.sort(-log_p)[:, :8], rtol=1e-4, atol=1e-5)
    rows = np.arange(3)[:, None]
    np.testing.assert_allclose(
        np.take_along_axis(log_p, np.asarray(got.top_token_SN), 1),
        got.top_logprob_SN,
        rtol=1e-4,
        atol=1e-5,
    )
    order = np.argsort(-logits, axis=1, kind="stable")
    np.testing.assert_array_equal(got.top_token_SN, order[:, :8])
    assert (order[rows[:, 0], np.asarray(got.rank_S) - 1] == got.token_S).all()


def test_likeliest_tokens_among_equals_and_signed_zeros() -> None:
    logits = np.array([[-0.0, 0.0, -1, 0.0, -0.0]], np.float32)
    got = draw(logits, inputs(1, 0.0), SamplerShape(top=4))
    assert got.top_token_SN.tolist() == [[0, 1, 3, 4]]
    assert (got.token_S.tolist(), got.rank_S.tolist()) == ([0], [1])


def test_a_vocabulary_smaller_than_the_tokens_to_report() -> None:
    got = draw(np.zeros((1, 5), np.float32), inputs(1, 0.0), SamplerShape(top=8))
    assert got.top_token_SN.tolist() == [[0, 1, 2, 3, 4]]
