"""The generic Pallas kernels, interpreted, against the plain functions; and lowered to CUDA."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxinfer.pallas_kernels import generic, reference

# Relative to the largest value.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4")


@dataclass(frozen=True)
class Shape:
    """KV heads, query heads for each, head size, tokens per page; and what is computed."""

    K: int
    G: int
    H: int
    B: int
    dtype: str
    window: int | None


GRID = [
    Shape(K, G, H, B, dtype, window)
    for K in (1, 2)
    for G in (1, 2, 3, 4, 7, 8, 16)
    for H in (64, 80, 96, 128, 256)
    for B in (8, 16, 32, 64, 128)
    for dtype in TOLERANCE
    for window in (None, 1, 100)
]


def sampled(count: int) -> list[Shape]:
    """Some of the grid, with each of its values in some."""
    return random.Random(0).sample(GRID, count)


def pairs() -> list[Shape]:
    """So much of the grid that any two values of two of its axes are together in some."""
    chosen, seen = [], set()
    for shape in random.Random(1).sample(GRID, len(GRID)):
        new = set(combinations(asdict(shape).items(), 2)) - seen
        if new:
            chosen.append(shape)
            seen |= new
    return chosen


def pages(rng: np.random.Generator, shape: Shape, count: int) -> tuple[jax.Array, jax.Array]:
    """With NaN in page 0 and in all pages that no table has."""
    sizes = (count, shape.K, shape.H, shape.B), (count, shape.K, shape.B, shape.H)
    k, v = (jnp.asarray(rng.normal(size=size), shape.dtype) for size in sizes)
    return k.at[0].set(jnp.nan), v.at[0].set(jnp.nan)


def tables(rng: np.random.Generator, shape: Shape, lengths: list[int], M: int) -> np.ndarray:
    """Pages in any order; what a sequence does not reach is page 0. The last two share pages."""
    table = 1 + rng.permutation(len(lengths) * M).reshape(len(lengths), M).astype(np.int32)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // shape.B) :] = 0
    shared = min(lengths[-2:]) // shape.B
    table[-1, :shared] = table[-2, :shared]
    return table


def close(got: jax.Array, expected: jax.Array, dtype: str) -> None:
    scale = float(jnp.abs(expected).max()) or 1.0
    np.testing.assert_allclose(got / scale, expected / scale, atol=TOLERANCE[dtype])


def decode_case(shape: Shape, seed: int) -> tuple[object, ...]:
    rng, B = np.random.default_rng(seed), shape.B
    lengths = [0, 1, B - 1, B, B + 1, generic.KV_TILE + 1, 3 * B, 300, 290]
    M = -(-max(300, 3 * B) // B)
    q = jnp.asarray(rng.normal(size=(len(lengths), shape.K * shape.G, shape.H)), jnp.float32)
    table = tables(rng, shape, lengths, M)
    cache = pages(rng, shape, len(lengths) * M + 1)
    return q * shape.H**-0.5, *cache, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)


def check_decode(shape: Shape, seed: int) -> None:
    case = decode_case(shape, seed)
    expected = reference.decode_attention(*case, shape.window)  # type: ignore[arg-type]
    for parts in (1, 3):
        attend = partial(generic.decode_attention, parts=parts, interpret=True)
        got = jax.jit(partial(attend, window=shape.window))(*case)
        close(got, expected, shape.dtype)
        assert not np.any(got[0])  # A sequence of length 0.


def chunk_case(shape: Shape, seed: int) -> tuple[object, ...]:
    """Chunks of all lengths after contexts of all lengths, decodes before, padding behind."""
    rng, B = np.random.default_rng(seed), shape.B
    sizes = [0, 1, 2, 17, B, 70, 33, 0]
    starts = [0, 0, B - 1, B, 65, 3, 130, 0]
    M = -(-200 // B)
    before = 3
    rows = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    T = int(rows[-1]) + 9
    q = jnp.asarray(rng.normal(size=(T, shape.K * shape.G, shape.H)), jnp.float32)
    ends = [size + start for size, start in zip(sizes, starts, strict=True)]
    table = tables(rng, shape, ends, M)
    cache = pages(rng, shape, len(sizes) * M + 1)
    arrays = (jnp.asarray(x) for x in (table, np.array(starts, np.int32), rows))
    return q * shape.H**-0.5, *cache, *arrays


def check_chunks(shape: Shape, seed: int) -> None:
    case = chunk_case(shape, seed)
    rows = np.asarray(case[-1])
    expected = reference.chunk_attention(*case, shape.window)  # type: ignore[arg-type]
    attend = partial(generic.chunk_attention, window=shape.window, interpret=True)
    got = jax.jit(attend)(*case)
    close(got[rows[0] : rows[-1]], expected[rows[0] : rows[-1]], shape.dtype)
    # All that is returned was written, or is 0.
    assert not np.any(got[: rows[0]])
    assert not np.any(got[rows[-1] :])


@pytest.mark.parametrize("shape", sampled(6), ids=str)
def test_decode(shape: Shape) -> None:
    check_decode(shape, seed=1)


@pytest.mark.parametrize("shape", sampled(6), ids=str)
def test_chunks(shape: Shape) -> None:
    check_chunks(shape, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", pairs(), ids=str)
def test_every_pair_of_values(shape: Shape) -> None:
    check_decode(shape, seed=3)
    check_chunks(shape, seed=4)


def lowered() -> Iterator[tuple[str, Shape]]:
    for number, gpu in enumerate(GPUS):
        for G, H, B in ((3, 80, 8), (4, 128, 64), (16, 256, 128)):
            dtype = ("bfloat16", "float16", "float32")[(number + G) % 3]
            yield gpu, Shape(2, G, H, B, dtype, None if G % 2 else 100)


@pytest.mark.parametrize(("gpu", "shape"), list(lowered()), ids=str)
def test_lowers_to_cuda_without_a_gpu(gpu: str, shape: Shape) -> None:
    device = AbstractDevice(device_kind=gpu, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    for attend, case in (
        (generic.decode_attention, decode_case(shape, 0)),
        (generic.chunk_attention, chunk_case(shape, 0)),
    ):
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(partial(attend, window=shape.window)).trace(*case)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton" in text
