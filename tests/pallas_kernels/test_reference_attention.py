"""Plain-JAX paged attention against dense attention in float64 numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import reference
from jaxinfer.pallas_kernels.kv_pages import KVPages, write_kv
from jaxinfer.pallas_kernels.reference import (
    TILE_ROWS,
    chunk_attention,
    decode_attention,
)

M = 12  # pages per sequence


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None) -> np.ndarray:
    """Attention of one row [N, H] to all of k and v [L, K, H], or the last ``window`` of them."""
    k, v = (x[-window:] if window else x for x in (k, v))
    k, v = (np.repeat(x.astype(np.float64), q.shape[0] // x.shape[1], axis=1) for x in (k, v))
    score = np.einsum("nh,lnh->nl", q.astype(np.float64), k)
    p = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("nl,lnh->nh", p / p.sum(-1, keepdims=True), v)


class Cache:
    """Random pages; page 0 and whatever a sequence does not use hold garbage."""

    def __init__(self, rng: np.random.Generator, count: int, B: int, K: int, H: int, dtype: str):
        k, v = (rng.normal(size=(count * M + 1, K, *page)) for page in ((H, B), (B, H)))
        self.pages = KVPages(jnp.asarray(k, dtype), jnp.asarray(v, dtype))
        self.table = 1 + rng.permutation(count * M).reshape(count, M).astype(np.int32)

    def sequence(self, i: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        k_MKHB, v_MKBH = (np.asarray(x, np.float32)[self.table[i]] for x in self.pages[:2])
        k, v = k_MKHB.transpose(0, 3, 1, 2), v_MKBH.transpose(0, 2, 1, 3)
        return k.reshape(-1, *k.shape[2:])[:length], v.reshape(-1, *v.shape[2:])[:length]


def edges(B: int) -> list[int]:
    return [0, 1, B - 1, B, B + 1, 3 * B, M * B - 1, M * B]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("dtype", "window"),
    [("float32", None), ("float32", 1), ("float32", 7), ("bfloat16", None)]
    + [
        pytest.param(dtype, window, marks=pytest.mark.slow)
        for dtype, window in [
            ("float32", 1000),
            ("bfloat16", 1),
            ("bfloat16", 7),
            ("bfloat16", 1000),
        ]
    ],
)
@pytest.mark.parametrize(
    ("B", "K", "G", "H"), [(4, 1, 1, 16), (8, 3, 3, 64), (16, 2, 7, 80), (3, 2, 4, 8)]
)
def test_decode(
    B: int, K: int, G: int, H: int, dtype: str, window: int | None, in_place: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The ways agree with whatever part of the pool is read, and NaN in what is not."""
    monkeypatch.setattr(reference, "POOL_PER_ITEMS", 1000 if in_place else 0)
    rng = np.random.default_rng(B + G)
    lengths = np.array([*edges(B), 5], np.int32)
    cache = Cache(rng, len(lengths), B, K, H, dtype)
    q = rng.normal(size=(len(lengths), K * G, H)).astype(np.float32) / np.sqrt(H)
    used = np.concatenate([row[: -(-n // B)] for row, n in zip(cache.table, lengths, strict=True)])
    unused = np.setdiff1d(np.arange(len(cache.pages.keys)), used)
    pages = jax.tree.map(lambda x: x.at[unused].set(jnp.nan), cache.pages)
    attend = partial(decode_attention, window=window)
    steps = jax.make_jaxpr(attend)(q, pages, cache.table, lengths).eqns
    assert any(step.primitive.name == "cond" for step in steps) == in_place
    got = jax.jit(attend)(q, pages, cache.table, lengths)
    assert got.dtype == jnp.float32
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for i, length in enumerate(lengths):
        if length == 0:
            assert np.all(np.asarray(got[i]) == 0)
        else:
            expected = dense(q[i], *cache.sequence(i, length), window)
            np.testing.assert_allclose(got[i], expected, atol=tolerance, rtol=1e-4)


def test_decode_of_a_page_with_two_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "POOL_PER_ITEMS", 1000)
    rng = np.random.default_rng(0)
    cache = Cache(rng, 3, 4, 2, 8, "float32")
    cache.table[2, :2] = cache.table[0, :2]
    lengths = np.array([11, 20, 9], np.int32)
    q = rng.normal(size=(3, 6, 8)).astype(np.float32)
    got = jax.jit(decode_attention)(q, cache.pages, cache.table, lengths)
    for i, length in enumerate(lengths):
        expected = dense(q[i], *cache.sequence(i, length))
        np.testing.assert_allclose(got[i], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("what", [np.nan, np.inf])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("in_place", [False, True])
def test_decode_beside_and_after_a_sequence_with_nan(
    in_place: bool, window: int | None, what: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another sequence's entries hold, or those that no sequence has any more, is not seen."""
    monkeypatch.setattr(reference, "POOL_PER_ITEMS", 1000 if in_place else 0)
    rng = np.random.default_rng(0)
    B, lengths = 4, np.array([11, 20, 9, 4, 0], np.int32)
    cache = Cache(rng, len(lengths), B, 2, 8, "float32")
    clean, pages = cache.pages, cache.pages
    for row, length in zip(cache.table, lengths, strict=True):
        stale = np.arange(length, M * B)
        pages = _overwritten(pages, row[stale // B], stale % B, what)
    bad = 1
    pages = _overwritten(pages, cache.table[bad, 3:4], np.array([3]), what)
    pages = _overwritten(pages, cache.table[bad, 4:5], np.array([3]), what)
    q = rng.normal(size=(len(lengths), 6, 8)).astype(np.float32)
    attend = jax.jit(partial(decode_attention, window=window))
    got, alone = (np.asarray(attend(q, x, cache.table, lengths)) for x in (pages, clean))
    assert not np.isfinite(got[bad]).any()
    good = np.arange(len(lengths)) != bad
    np.testing.assert_allclose(got[good], alone[good], atol=1e-6)
    for i in (0, 2, 3):
        expected = dense(q[i], *cache.sequence(i, lengths[i]), window)
        np.testing.assert_allclose(got[i], expected, atol=2e-5, rtol=1e-4)


def _overwritten(pages: KVPages, page: np.ndarray, offset: np.ndarray, what: float) -> KVPages:
    """The pages with ``what`` for the entries at these offsets."""
    keys = pages.keys.at[page, :, :, offset].set(what)
    return KVPages(keys, pages.values.at[page, :, offset].set(what))


@pytest.mark.parametrize("S", [1, 3, 8])
def test_decode_of_sequences_that_fill_their_tables(S: int) -> None:
    """Items are as many as there can be: the last block of them is whole, or it is not."""
    rng = np.random.default_rng(S)
    cache = Cache(rng, S, 4, 2, 8, "float32")
    q = rng.normal(size=(S, 6, 8)).astype(np.float32)
    got = jax.jit(decode_attention)(q, cache.pages, cache.table, np.full(S, M * 4, np.int32))
    for i in range(S):
        expected = dense(q[i], *cache.sequence(i, M * 4))
        np.testing.assert_allclose(got[i], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, None), (2, 1), (3, 9), (1, 1000)])
@pytest.mark.parametrize(("B", "K", "G", "H"), [(4, 1, 1, 16), (8, 3, 3, 64), (16, 2, 7, 8)])
def test_chunks(B: int, K: int, G: int, H: int, seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(s) for s in rng.choice([1, 2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 40], 5)]
    sizes = [min(size, M * B) for size in sizes]
    starts = [int(rng.integers(0, M * B - size + 1)) for size in sizes]
    starts[0] = 0
    unused = 3
    cache = Cache(rng, len(sizes) + unused, B, K, H, "float32")
    before = 5 * seed  # rows of decodes
    rows = before + np.concatenate([[0], np.cumsum(sizes), [sum(sizes)] * unused]).astype(np.int32)
    T = before + sum(sizes) + 13
    q = rng.normal(size=(T, K * G, H)).astype(np.float32) / np.sqrt(H)
    start_C = np.array(starts + [0] * unused, np.int32)
    attend = jax.jit(chunk_attention, static_argnames="window")
    got = attend(q, cache.pages, cache.table, start_C, rows, window=window)
    assert got.shape == q.shape
    for c, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        for r in range(size):
            expected = dense(q[rows[c] + r], *cache.sequence(c, start + r + 1), window)
            np.testing.assert_allclose(got[rows[c] + r], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("what", [np.nan, np.inf])
@pytest.mark.parametrize("window", [None, 9])
def test_chunks_beside_and_after_a_sequence_with_nan(window: int | None, what: float) -> None:
    rng = np.random.default_rng(0)
    B, starts, sizes, bad = 8, [0, 13, 5, 0], [37, 3, TILE_ROWS, 21], 1
    cache = Cache(rng, len(sizes), B, 2, 16, "float32")
    pages = cache.pages
    for row, start, size in zip(cache.table, starts, sizes, strict=True):
        stale = np.arange(start + size, M * B)
        pages = _overwritten(pages, row[stale // B], stale % B, what)
    pages = _overwritten(pages, cache.table[bad, 1:2], np.array([4]), what)
    rows = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    q = rng.normal(size=(rows[-1], 6, 16)).astype(np.float32) / 4
    q[rows[bad] : rows[bad + 1]] = what
    attend = jax.jit(partial(chunk_attention, window=window))
    got = np.asarray(attend(q, pages, cache.table, np.array(starts, np.int32), rows))
    assert not np.isfinite(got[rows[bad] : rows[bad + 1]]).any()
    for c in (0, 2, 3):
        for r in range(sizes[c]):
            expected = dense(q[rows[c] + r], *cache.sequence(c, starts[c] + r + 1), window)
            np.testing.assert_allclose(got[rows[c] + r], expected, atol=2e-5, rtol=1e-4)


def test_a_full_batch_of_the_smallest_chunks_fits() -> None:
    """A batch of two-row chunks, which has the most tiles that there can be, fits."""
    rng = np.random.default_rng(0)
    C = 40
    cache = Cache(rng, C, 4, 1, 8, "float32")
    q = rng.normal(size=(2 * C, 2, 8)).astype(np.float32)
    rows = 2 * np.arange(C + 1, dtype=np.int32)
    start_C = rng.integers(0, M * 4 - 1, C).astype(np.int32)
    got = jax.jit(chunk_attention)(q, cache.pages, cache.table, start_C, rows)
    for t in range(2 * C):
        expected = dense(q[t], *cache.sequence(t // 2, start_C[t // 2] + t % 2 + 1))
        np.testing.assert_allclose(got[t], expected, atol=2e-5, rtol=1e-4)


def test_write_touches_its_places_only() -> None:
    rng = np.random.default_rng(1)
    k = jnp.asarray(rng.normal(size=(5, 2, 8, 4)), jnp.float32)
    v = jnp.asarray(rng.normal(size=(5, 2, 4, 8)), jnp.float32)
    new = rng.normal(size=(3, 2, 8)).astype(np.float32)
    page, offset = np.array([3, 3, 1]), np.array([0, 2, 3])
    k2, v2, *_ = write_kv(KVPages(k, v), new, 2 * new, page, offset)
    expected_k, expected_v = np.array(k), np.array(v)
    for t in range(3):
        expected_k[page[t], :, :, offset[t]] = new[t]
        expected_v[page[t], :, offset[t]] = 2 * new[t]
    np.testing.assert_array_equal(k2, expected_k)
    np.testing.assert_array_equal(v2, expected_v)
