"""The generic Pallas kernels, interpreted, against the plain functions."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    Shape,
    check_chunks,
    check_decode,
    close,
    decode_case,
    grid,
    pairs,
    plain,
    sampled,
)

from jaxinfer.pallas_kernels import generic, kv_pages, reference, write
from jaxinfer.pallas_kernels.kv_pages import LARGEST, KVPages

SHAPES = grid()
# On a GPU the kernels run as they are.
ON_GPU = jax.default_backend() == "gpu"
INTERPRET = not ON_GPU
DECODE = partial(generic.decode_attention, interpret=INTERPRET)
CHUNKS = partial(generic.chunk_attention, interpret=INTERPRET)


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
        pages = [kv_pages.quantise(x, scale[..., None, None], dtype) for x in pages]
        kv = KVPages(*pages, scale, 2 * scale)
    else:
        kv = KVPages(*(x.astype(dtype) for x in pages))
    return kv, *new, jnp.asarray(page_T), jnp.asarray(offset_T)


def check_write(shape: Shape, seed: int) -> None:
    """Equal to the plain function's, in every page but that of padding."""
    case = write_case(shape, seed)
    got = jax.jit(partial(write.write_kv, interpret=INTERPRET))(*case)
    expected = jax.jit(partial(kv_pages.write_kv, keys_by_token=True))(*case)
    for ours, theirs in zip(got[2:], expected[2:], strict=True):
        if ours is not None and theirs is not None:
            np.testing.assert_allclose(ours[1:], theirs[1:], rtol=1e-6)
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        ours, theirs = (np.asarray(x[1:], np.float32) for x in (ours, theirs))
        # Interpreted or compiled, a quotient may be rounded to another neighbour.
        assert (ours != theirs).mean() < (0.01 if shape.dtype in LARGEST else 1e-9)
        np.testing.assert_allclose(ours, theirs, atol=1.01, rtol=0.13)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", sampled(SHAPES), ids=str)
def test_decode(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", sampled(SHAPES), ids=str)
def test_chunks(shape: Shape) -> None:
    check_chunks(CHUNKS, shape, seed=2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", sampled(SHAPES), ids=str)
def test_write(shape: Shape) -> None:
    check_write(shape, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", pairs(SHAPES), ids=str)
def test_every_pair_of_values(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=4)
    check_chunks(CHUNKS, shape, seed=5)
    check_write(shape, seed=6)


@pytest.mark.gpu
def test_thousands_of_tokens() -> None:
    case = decode_case(Shape(1, 4, 64, 64, "bfloat16"), seed=7, longest=3000)
    q_SNH, kv, *rest = case
    expected = reference.decode_attention(q_SNH, plain(kv), *rest)
    got = jax.jit(partial(generic.decode_attention, interpret=INTERPRET))(q_SNH, kv, *rest)
    close(got, expected, "bfloat16")
