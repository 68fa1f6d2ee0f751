"""Shapes and inputs on which kernels are compared with the plain functions."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import reference
from jaxinfer.pallas_kernels.kv_pages import KVPages, quantise, write_kv

# Relative to the largest value.
TOLERANCE = {
    "float32": 2e-5,
    "bfloat16": 2e-2,
    "float16": 2e-3,
    "int8": 2e-2,
    "float8_e4m3fn": 2e-2,
}


@dataclass(frozen=True)
class Shape:
    """The shape of a computation.

    Attributes:
        K: KV heads; ``G``: query heads for each; ``H``: their size; ``B``: tokens per page.
        dtype: of entries.
    """

    K: int
    G: int
    H: int
    B: int
    dtype: str
    window: int | None = None


VALUES: dict[str, tuple[Any, ...]] = {
    "K": (1, 2),
    "G": (1, 2, 3, 4, 7, 8, 16),
    "H": (64, 80, 96, 128, 256),
    "B": (8, 16, 32, 64, 128),
    "dtype": tuple(TOLERANCE),
    "window": (None, 1, 100),
}


# What few models have.
RARE: dict[str, tuple[Any, ...]] = {"G": (5, 9), "H": (112, 160, 192), "B": (8, 256)}


def grid(**fixed: tuple[Any, ...]) -> list[Shape]:
    """Combinations of all axes, with some axes' values given."""
    values = VALUES | fixed
    return [Shape(*found) for found in product(*values.values())]


def sampled(shapes: list[Shape]) -> list[Shape]:
    """A few, in which every value of every axis occurs."""
    return _covering(shapes, 1)


def pairs(shapes: list[Shape]) -> list[Shape]:
    """So many that any two values of two axes are together in some."""
    return _covering(shapes, 2)


def few_fast(shapes: list[Shape], count: int = 1) -> list[Any]:
    """The first few as they are, the others for slow tests."""
    return [
        pytest.param(shape, marks=pytest.mark.slow if number >= count else [])
        for number, shape in enumerate(shapes)
    ]


def _covering(shapes: list[Shape], together: int) -> list[Shape]:
    """Choose from a shuffled list, greedily, shapes with the most pairs that no other has."""
    found = {shape: set(combinations(vars(shape).items(), together)) for shape in shapes}
    left = set().union(*found.values())
    chosen = []
    rng = random.Random(0)
    while left:
        drawn = rng.sample(shapes, min(len(shapes), 200))
        best = max(drawn, key=lambda shape: len(left & found[shape]))
        if new := left & found[best]:
            chosen.append(best)
            left -= new
    return chosen


def tables(rng: np.random.Generator, shape: Shape, lengths: list[int], M: int) -> np.ndarray:
    """Pages in any order; what a sequence does not reach is page 0. The last two share pages."""
    table = 1 + rng.permutation(len(lengths) * M).reshape(len(lengths), M).astype(np.int32)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // shape.B) :] = 0
    shared = min(lengths[-2:]) // shape.B
    table[-1, :shared] = table[-2, :shared]
    return table


def filled(
    rng: np.random.Generator, shape: Shape, table: np.ndarray, lengths: list[int]
) -> KVPages:
    """Keys by token. Page 0 and all that no sequence sees hold NaN, or the largest there is."""
    P, K, B, H = 1 + len(lengths) * table.shape[-1], shape.K, shape.B, shape.H
    dtype = jnp.dtype(shape.dtype)
    entries = [rng.normal(size=(P, K, B, H)) * rng.uniform(0.5, 2, (P, K, 1, 1)) for _ in range(2)]
    if dtype.itemsize > 1:
        keys, values = (jnp.asarray(x, dtype) for x in entries)
        pages = KVPages(keys, values)
        nothing: Any = jnp.nan
    else:
        zeros = jnp.zeros((P, K, B, H), dtype)
        scale = jnp.zeros((P, K), jnp.float32)
        pages = KVPages(zeros, zeros, scale, scale)
        k, v = (np.float32(x.transpose(0, 2, 1, 3).reshape(P * B, K, H)) for x in entries)
        page, offset = np.divmod(np.arange(P * B, dtype=np.int32), B)
        pages = jax.jit(partial(write_kv, keys_by_token=True))(pages, k, v, page, offset)
        nothing = 127 if dtype == jnp.int8 else jnp.nan
    seen = np.zeros((P, B), bool)
    for row, length in zip(table, lengths, strict=True):
        position = np.arange(length)
        seen[row[position // B], position % B] = True
    unseen = jnp.asarray(~seen)[:, None, :, None]
    keys, values = (jnp.where(unseen, jnp.asarray(nothing, dtype), x) for x in pages[:2])
    pages = pages._replace(keys=keys, values=values)
    if pages.key_scale_PK is None:
        return pages
    no_page = jnp.asarray(~seen.any(1))[:, None]
    scales = (jnp.where(no_page, jnp.nan, x) for x in pages[2:])
    return KVPages(keys, values, *scales)


def plain(kv: KVPages) -> KVPages:
    """The same for the plain functions: keys lie by head size, and nothing is NaN."""

    def number(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isnan(x.astype(jnp.float32)), jnp.zeros((), x.dtype), x)

    return jax.tree.map(number, kv._replace(keys=jnp.swapaxes(kv.keys, 2, 3)))


def float_of(shape: Shape) -> str:
    """Return the type that a shape is computed in."""
    return "bfloat16" if jnp.dtype(shape.dtype).itemsize == 1 else shape.dtype


def decode_case(shape: Shape, seed: int, longest: int = 300) -> tuple[Any, ...]:
    """Queries, pages, tables and lengths: 0, 1, page edges and their neighbours."""
    rng, B = np.random.default_rng(seed), shape.B
    lengths = [0, 1, B - 1, B, B + 1, 65, 3 * B, longest, longest - 10]
    M = -(-max(lengths) // B)
    q = rng.normal(size=(len(lengths), shape.K * shape.G, shape.H)) * shape.H**-0.5
    table = tables(rng, shape, lengths, M)
    kv = filled(rng, shape, table, lengths)
    q_SNH = jnp.asarray(q, float_of(shape)).astype(jnp.float32)
    return q_SNH, kv, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)


def chunk_case(shape: Shape, seed: int) -> tuple[Any, ...]:
    """Chunks of all lengths after contexts of all lengths, decodes before, padding behind."""
    rng, B = np.random.default_rng(seed), shape.B
    sizes = [0, 1, 2, 17, B, 70, 33, 0]
    starts = [0, 0, B - 1, B, 65, 3, 130, 0]
    ends = [size + start for size, start in zip(sizes, starts, strict=True)]
    M = -(-max(ends) // B)
    rows = 3 + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    q = rng.normal(size=(int(rows[-1]) + 9, shape.K * shape.G, shape.H)) * shape.H**-0.5
    table = tables(rng, shape, ends, M)
    kv = filled(rng, shape, table, ends)
    q_TNH = jnp.asarray(q, float_of(shape)).astype(jnp.float32)
    arrays = (jnp.asarray(x) for x in (table, np.array(starts, np.int32), rows))
    return q_TNH, kv, *arrays


def close(got: jax.Array, expected: jax.Array, dtype: str) -> None:
    scale = float(jnp.abs(expected).max()) or 1.0
    np.testing.assert_allclose(got / scale, expected / scale, atol=TOLERANCE[dtype])


def check_decode(attend: Callable[..., jax.Array], shape: Shape, seed: int) -> None:
    """Compare with the plain function, whole and in parts."""
    q_SNH, kv, *rest = decode_case(shape, seed)
    expected = jax.jit(partial(reference.decode_attention, window=shape.window))(
        q_SNH, plain(kv), *rest
    )
    for programs in (1, 40):
        got = jax.jit(partial(attend, programs=programs, window=shape.window))(q_SNH, kv, *rest)
        close(got, expected, shape.dtype)
        assert not np.any(got[0])  # A sequence of length 0.


def check_chunks(attend: Callable[..., jax.Array], shape: Shape, seed: int) -> None:
    """Compare with the plain function."""
    q_TNH, kv, *rest = chunk_case(shape, seed)
    first, last = (int(np.asarray(rest[-1])[i]) for i in (0, -1))
    expected = jax.jit(partial(reference.chunk_attention, window=shape.window))(
        q_TNH, plain(kv), *rest
    )
    got = jax.jit(partial(attend, window=shape.window))(q_TNH, kv, *rest)
    close(got[first:last], expected[first:last], shape.dtype)
    # All that is returned was written, or is 0.
    assert not np.any(got[:first])
    assert not np.any(got[last:])


def check_nan_stays(
    decode: Callable[..., jax.Array], chunks: Callable[..., jax.Array], shape: Shape,
    laid: Callable[[KVPages], KVPages] = lambda kv: kv,
) -> None:  # fmt: skip
    """Have one sequence's queries and entries be NaN, and compare the others with before.

    Args:
        laid: the pages as the kernel has them.
    """
    for attend, (q, kv, table, *rest), bad in (
        (decode, decode_case(shape, 0), 5),
        (chunks, chunk_case(shape, 0), 3),
    ):
        broken = jax.tree.map(lambda x, at=table[bad]: x.at[at].set(jnp.nan), kv)
        one = [bad] if attend is decode else np.arange(*rest[-1][bad : bad + 2])
        run = jax.jit(partial(attend, window=shape.window))
        before = np.asarray(run(q, laid(kv), table, *rest))
        after = np.asarray(run(q.at[jnp.asarray(one)].set(jnp.nan), laid(broken), table, *rest))
        assert np.isnan(after[one]).all()
        np.testing.assert_array_equal(np.delete(after, one, 0), np.delete(before, one, 0))


def write_case(shape: Shape, seed: int) -> tuple[Any, ...]:
    """A decode, chunks that begin and end within pages and at their edges, padding."""
    rng, K, B, H = np.random.default_rng(seed), shape.K, shape.B, shape.H
    spans = [(B - 1, 1), (0, 2 * B + 1), (3, 1), (B // 2, B), (B, B)]
    M, T = 4, sum(size for _, size in spans) + 3
    table = 1 + rng.permutation(len(spans) * M).reshape(-1, M)
    page_T, offset_T = np.zeros((2, T), np.int32)
    t = 0
    for number, (start, size) in enumerate(spans):
        position = start + np.arange(size)
        page_T[t : t + size] = table[number, position // B]
        offset_T[t : t + size] = position % B
        t += size
    shapes = (len(spans) * M + 1, K, B, H), (T, K, H)
    dtype = jnp.dtype(shape.dtype)
    pages, new = ([jnp.asarray(rng.normal(size=s), jnp.float32) for _ in "kv"] for s in shapes)
    if dtype.itemsize == 1:
        scale = jnp.asarray(rng.uniform(0.001, 0.03, (shapes[0][0], K)), jnp.float32)
        pages = [quantise(x, scale[..., None, None], dtype) for x in pages]
        kv = KVPages(*pages, scale, 2 * scale)
    else:
        kv = KVPages(*(x.astype(dtype) for x in pages))
    return kv, *new, jnp.asarray(page_T), jnp.asarray(offset_T)
