"""The CPU's products with weights of 8 bits beside numpy's in 64 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")
from jaxinfer.pallas_kernels import numba_matmul
from jaxinfer.pallas_kernels.numba_matmul import gated, matmul

DTYPES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
# Of rows: on some processors, bfloat16 is multiplied in pairs.
rows = pytest.mark.parametrize("row_dtype", ["float32", "bfloat16"])
# T, D, F. The first have one kernel: whole tiles, and some more rows and columns.
SHAPES = [(9, 17, 65), (37, 17, 200)]
# Less than a tile, and a model's.
OTHERS = [(1, 5, 1), (3, 20, 7), (8, 1600, 48), (64, 576, 192)]
shapes = pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)], ids=str
)


def operands(
    shape: tuple[int, int, int], dtype: np.dtype[Any], row_dtype: str = "float32"
) -> tuple[np.ndarray, ...]:
    """Rows, weights of all kinds of numbers, those without an exponent too, and scales."""
    T, D, F = shape
    random = np.random.default_rng(T + D + F)
    bits_DF = random.integers(0, 256, (D, F), dtype=np.uint8)
    bits_DF[(bits_DF & 0x7F) == 0x7F] = 3  # fp8's NaN
    scale_F = random.uniform(0.5, 2, F).astype(np.float32)
    x_TD = random.normal(size=(T, D)).astype(jnp.dtype(row_dtype))
    return x_TD, bits_DF.view(dtype), scale_F


def exact(x_TD: np.ndarray, weight_DF: np.ndarray, scale_F: np.ndarray) -> np.ndarray:
    return x_TD.astype(np.float64) @ weight_DF.astype(np.float64) * scale_F


def bound(x_TD: np.ndarray, weight_DF: np.ndarray, scale_F: np.ndarray) -> np.ndarray:
    """Rounding of a sum of products: random steps, each of half a unit in the last place."""
    size_TF = exact(np.abs(x_TD.astype(np.float32)), np.abs(weight_DF.astype(np.float32)), scale_F)
    return 2.0**-24 * (4 + x_TD.shape[1] ** 0.5) * size_TF


@dtypes
@rows
@shapes
def test_all_sums_are_right(
    shape: tuple[int, int, int], row_dtype: str, dtype: np.dtype[Any]
) -> None:
    given = operands(shape, dtype, row_dtype)
    got = jax.jit(matmul)(*given)
    assert got.dtype == jnp.float32
    assert np.all(np.abs(got - exact(*given)) <= bound(*given))


@dtypes
@rows
@shapes
def test_a_gate_with_what_it_lets_through(
    shape: tuple[int, int, int], row_dtype: str, dtype: np.dtype[Any]
) -> None:
    x_TD, gate_DF, gate_scale_F = operands(shape, dtype, row_dtype)
    # Where silu bends.
    gate_scale_F = gate_scale_F / 1000
    up_DF, up_scale_F = gate_DF[::-1].copy(), gate_scale_F[::-1].copy()
    gate, up = (x_TD, gate_DF, gate_scale_F), (x_TD, up_DF, up_scale_F)
    gate_TF, up_TF = exact(*gate), exact(*up)
    expected = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
    got = jax.jit(gated)(x_TD, gate_DF, gate_scale_F, up_DF, up_scale_F)
    allowed = 1.1 * bound(*gate) * np.abs(up_TF) + np.abs(gate_TF) * bound(*up)
    assert np.all(np.abs(got - expected) <= allowed + 1e-6 * np.abs(expected))


@dtypes
@rows
def test_every_number_of_8_bits(row_dtype: str, dtype: np.dtype[Any]) -> None:
    """A product with 1 is the number itself, to the last bit."""
    bits = np.arange(256, dtype=np.uint8)
    values = np.zeros((17, 256), np.uint8)
    values[3] = np.where((bits & 0x7F) == 0x7F, 0, bits)
    x_TD = np.zeros((9, 17), jnp.dtype(row_dtype))
    x_TD[:, 3] = 1
    got = jax.jit(matmul)(x_TD, values.view(dtype), np.ones(256, np.float32))
    np.testing.assert_array_equal(got, np.tile(values[3].view(dtype).astype(np.float32), (9, 1)))


@pytest.mark.parametrize("threads", [1, 7])
def test_any_number_of_threads_finds_the_same_bits(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands((37, 17, 200), DTYPES["int8"])
    expected = np.asarray(jax.jit(matmul)(*given))
    monkeypatch.setattr(numba_matmul, "threads", lambda: threads)
    np.testing.assert_array_equal(jax.jit(lambda *args: matmul(*args))(*given), expected)


@rows
def test_a_row_is_the_same_whatever_stands_beside_it(row_dtype: str) -> None:
    x_TD, *weight = operands((37, 17, 200), DTYPES["int8"], row_dtype)
    whole = np.asarray(jax.jit(matmul)(x_TD, *weight))
    for rows in (slice(0, 1), slice(28, 37), slice(5, 25)):
        np.testing.assert_array_equal(jax.jit(matmul)(x_TD[rows], *weight), whole[rows])


@pytest.mark.parametrize(
    "dtype", [pytest.param(DTYPES["int8"], marks=pytest.mark.slow), DTYPES["fp8"]], ids=str
)
def test_a_row_behind_a_gate_is_the_same_whatever_stands_beside_it(dtype: np.dtype[Any]) -> None:
    """The same wherever arrays lie, too, of which each call has new ones."""
    x_TD, gate_DF, scale_F = operands((37, 17, 200), dtype)
    weights = gate_DF, scale_F / 1000, gate_DF[::-1].copy(), scale_F[::-1].copy()
    whole = np.asarray(jax.jit(gated)(x_TD, *weights))
    for rows in (slice(0, 1), *[slice(0, 37)] * 20):
        np.testing.assert_array_equal(jax.jit(gated)(x_TD[rows], *weights), whole[rows])


@pytest.mark.slow
def test_the_same_bits_as_of_wide_weights() -> None:
    """Products of int8 are summed as those of float32 are: in the same blocks and order."""
    x_TD, weight_DF, scale_F = operands((9, 2 * numba_matmul.BLOCK + 5, 65), DTYPES["int8"])
    wide = jax.jit(numba_matmul.matmul)(x_TD, weight_DF.astype(np.float32))
    got = jax.jit(matmul)(x_TD, weight_DF, scale_F)
    np.testing.assert_array_equal(got, np.asarray(wide) * scale_F)
