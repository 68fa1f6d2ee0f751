"""The CPU's products of rows with their experts' weights beside numpy's, expert by expert."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")
from jaxinfer.pallas_kernels import numba_grouped
from jaxinfer.pallas_kernels.choice import grouped

# Two tiles of columns, of which the second overlaps the first.
D, F, E = 17, 100, 6
# Rows of each expert: none, one, all sizes of tiles; one row in all; all rows at one.
COUNTS = [(0, 14, 1, 0, 11, 2), (0, 0, 0, 1, 0, 0), (0, 9, 0, 0, 0, 0), (3, 1, 0, 0, 0, 5)]


def operands(
    count_E: Sequence[int], dtype: str = "float32", depth: int = D
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows, two weights and counts."""
    random = np.random.default_rng(sum(count_E))
    x_RD = jnp.asarray(random.normal(size=(sum(count_E), depth)), jnp.float32)
    gate_EDF, up_EDF = jnp.asarray(random.normal(size=(2, E, depth, F)), dtype)
    return x_RD, gate_EDF, up_EDF, jnp.asarray(count_E, jnp.int32)


def exact(x_RD: jax.Array, weight_EDF: jax.Array, count_E: Sequence[int]) -> np.ndarray:
    x_RD, weight_EDF = np.asarray(x_RD, np.float64), np.asarray(weight_EDF, np.float64)
    owner_R = np.repeat(np.arange(E), count_E)
    rows = [row @ weight_EDF[e] for row, e in zip(x_RD, owner_R, strict=True)]
    return np.stack(rows)


@pytest.mark.parametrize("count_E", COUNTS, ids=str)
def test_each_row_by_its_experts_weights(count_E: tuple[int, ...]) -> None:
    x_RD, weight_EDF, _, counts = operands(count_E)
    got = jax.jit(numba_grouped.matmul)(x_RD, weight_EDF, counts)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact(x_RD, weight_EDF, count_E), rtol=0, atol=4e-7 * D)


def test_weights_of_16_bits_and_rows_of_32_in_blocks() -> None:
    """The rows are not rounded, which would be off by 100 times as much."""
    depth = numba_grouped.BLOCK + 5
    x_RD, weight_EDF, _, counts = operands(COUNTS[0], "bfloat16", depth)
    got = jax.jit(numba_grouped.matmul)(x_RD, weight_EDF, counts)
    np.testing.assert_allclose(got, exact(x_RD, weight_EDF, COUNTS[0]), rtol=0, atol=4e-4)


def test_a_gate_with_what_it_lets_through() -> None:
    x_RD, gate_EDF, up_EDF, counts = operands(COUNTS[0])
    gate_RF, up_RF = exact(x_RD, gate_EDF, COUNTS[0]), exact(x_RD, up_EDF, COUNTS[0])
    got = jax.jit(numba_grouped.gated)(x_RD, gate_EDF, up_EDF, counts)
    expected = gate_RF / (1 + np.exp(-gate_RF)) * up_RF
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_any_number_of_threads_finds_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x_RD, weight_EDF, _, counts = operands(COUNTS[0])
    expected = np.asarray(jax.jit(numba_grouped.matmul)(x_RD, weight_EDF, counts))
    for threads in (1, 2, 7):
        monkeypatch.setattr(numba_grouped, "threads", lambda threads=threads: threads)
        again = jax.jit(lambda *args: numba_grouped.matmul(*args))(x_RD, weight_EDF, counts)
        np.testing.assert_array_equal(again, expected)


def test_a_row_is_the_same_whatever_stands_beside_it() -> None:
    x_RD, weight_EDF, _, counts = operands(COUNTS[0])
    whole = np.asarray(jax.jit(numba_grouped.matmul)(x_RD, weight_EDF, counts))
    for expert, row in ((1, 0), (1, 13), (4, 20)):
        alone = jnp.zeros(E, jnp.int32).at[expert].set(1)
        got = jax.jit(numba_grouped.matmul)(x_RD[row : row + 1], weight_EDF, alone)
        np.testing.assert_array_equal(got[0], whole[row])


def test_nan_stays_in_its_row_and_its_expert() -> None:
    x_RD, weight_EDF, _, counts = operands(COUNTS[0])
    whole = np.asarray(jax.jit(numba_grouped.matmul)(x_RD, weight_EDF, counts))
    bad_rows = [3, 13, 27]
    # Experts 0 and 3 have no rows.
    got = jax.jit(numba_grouped.matmul)(
        x_RD.at[jnp.array(bad_rows)].set(jnp.nan),
        weight_EDF.at[jnp.array([0, 3])].set(jnp.nan),
        counts,
    )
    others = np.setdiff1d(np.arange(len(whole)), bad_rows)
    np.testing.assert_array_equal(np.asarray(got)[others], whole[others])
    assert np.isnan(got).all(1).sum() == len(bad_rows)


def test_who_has_grouped_products() -> None:
    for dtype, numba in (("float32", True), ("bfloat16", True), ("float16", False)):
        found = grouped("numba", jnp.dtype(dtype), D, F)
        assert (found is not None and found.matmul is numba_grouped.matmul) == numba
