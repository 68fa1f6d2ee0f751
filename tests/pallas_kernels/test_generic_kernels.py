"""The generic Pallas kernels, interpreted, against the plain functions."""

from functools import partial

import jax
import numpy as np
import pytest
from kernel_cases import (
    RARE,
    Shape,
    check_chunks,
    check_decode,
    check_nan_stays,
    close,
    decode_case,
    few_fast,
    grid,
    pairs,
    plain,
    sampled,
    write_case,
)

from jaxinfer.pallas_kernels import generic, kv_pages, reference, write
from jaxinfer.pallas_kernels.kv_pages import LARGEST

SHAPES = grid()
RARE_SHAPES = sampled(grid(**RARE))
# Each is compiled for seconds: four have every dtype but one.
FEW = few_fast(sampled(SHAPES), 4)
# On a GPU the kernels run as they are.
ON_GPU = jax.default_backend() == "gpu"
INTERPRET = not ON_GPU
DECODE = partial(generic.decode_attention, interpret=INTERPRET)
CHUNKS = partial(generic.chunk_attention, interpret=INTERPRET)


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
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_decode(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_chunks(shape: Shape) -> None:
    check_chunks(CHUNKS, shape, seed=2)


@pytest.mark.gpu
def test_nan_stays_with_its_sequence() -> None:
    check_nan_stays(DECODE, CHUNKS, Shape(2, 2, 64, 16, "bfloat16"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_write(shape: Shape) -> None:
    check_write(shape, seed=3)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=pytest.mark.long if i % 6 else pytest.mark.slow)
        for i, shape in enumerate(pairs(SHAPES))
    ],
    ids=str,
)
def test_every_pair_of_values(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=4)
    check_chunks(CHUNKS, shape, seed=5)
    check_write(shape, seed=6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", few_fast(RARE_SHAPES), ids=str)
def test_what_few_models_have(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=8)
    check_chunks(CHUNKS, shape, seed=9)


@pytest.mark.gpu
def test_thousands_of_tokens() -> None:
    case = decode_case(Shape(1, 4, 64, 64, "bfloat16"), seed=7, longest=3000)
    q_SNH, kv, *rest = case
    expected = reference.decode_attention(q_SNH, plain(kv), *rest)
    got = jax.jit(partial(generic.decode_attention, interpret=INTERPRET))(q_SNH, kv, *rest)
    close(got, expected, "bfloat16")
