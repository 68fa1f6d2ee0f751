"""The GPU's products of rows with their experts' weights, interpreted, beside numpy's."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import grouped
from jaxinfer.pallas_kernels.choice import grouped as choose

# On a GPU the kernels run as they are.
INTERPRET = jax.default_backend() != "gpu"
RNG = np.random.default_rng(0)
E = 6
# Of the largest value: weights' dtype -> what float32 sums, and then a result of that dtype, lose.
ROUNDED = {"float32": (1e-6, 1e-6), "bfloat16": (1e-6, 5e-3)}
# Counts of rows, the weights' size, rows behind the last expert's. Steps of 64 of D and columns
# with and without a rest; tiles of 16 rows, one row in all, no row; tiles of more.
FEW = ([0, 14, 1, 0, 33, 2], 80, 48, 3)
NONE = ([0] * E, 16, 16, 2)
MANY = ([0, 150, 0, 40, 0, 300], 176, 272, 0)
CASES = [
    pytest.param("float32", FEW, id="float32-few"),
    pytest.param("bfloat16", FEW, id="bfloat16-few", marks=pytest.mark.slow),
    pytest.param("float32", NONE, id="none"),
    pytest.param("bfloat16", MANY, id="bfloat16-many"),
    pytest.param("float32", MANY, id="float32-many", marks=pytest.mark.slow),
    *(
        pytest.param(
            dtype,
            (list(RNG.multinomial(RNG.integers(200), RNG.dirichlet(np.ones(E)))), 64, 160, 1),
            id=f"random-{dtype}-{number}",
            marks=pytest.mark.slow,
        )
        for dtype in ROUNDED
        for number in range(4)
    ),
]


def by_expert(x_RD: jax.Array, weight_EDF: jax.Array, counts: Sequence[int]) -> np.ndarray:
    """Expert by expert, in float64."""
    rows, weights = np.asarray(x_RD, np.float64), np.asarray(weight_EDF, np.float64)
    ends = np.cumsum(counts)
    parts = [
        rows[end - n : end] @ weight for end, n, weight in zip(ends, counts, weights, strict=True)
    ]
    return np.concatenate(parts)


def close(found: jax.Array, expected: np.ndarray, error: float) -> None:
    off = np.abs(np.asarray(found, np.float64)[: len(expected)] - expected)
    assert off.max(initial=0) <= error * np.abs(expected).max(initial=1)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "case"), CASES)
def test_each_row_by_its_experts_weights(dtype: str, case: tuple[list[int], int, int, int]) -> None:
    counts, D, F, more = case
    x_RD = jnp.asarray(RNG.normal(size=(sum(counts) + more, D)), dtype)
    gate_EDF, up_EDF = jnp.asarray(RNG.normal(size=(2, E, D, F)), dtype)
    count_E = jnp.asarray(counts, jnp.int32)
    gate, up = (by_expert(x_RD, weight, counts) for weight in (gate_EDF, up_EDF))
    # Rows in float32, as the layer gives them.
    rows = x_RD.astype(jnp.float32)
    found = grouped.matmul(rows, gate_EDF, count_E, interpret=INTERPRET)
    assert found.dtype == jnp.float32
    close(found, gate, ROUNDED[dtype][0])
    found = grouped.gated(rows, gate_EDF, up_EDF, count_E, interpret=INTERPRET)
    assert found.dtype == dtype
    close(found, gate / (1 + np.exp(-gate)) * up, ROUNDED[dtype][1])


def test_only_rows_and_experts_that_are_asked_for_are_read() -> None:
    """NaN in a weight without rows reaches nobody; nothing is written behind the last row."""
    counts = jnp.asarray([0, 3, 0, 0, 17, 0], jnp.int32)
    weight_EDF = jnp.ones((E, 16, 16)).at[jnp.array([0, 2, 3, 5])].set(jnp.nan)
    found = grouped.matmul(jnp.ones((24, 16)), weight_EDF, counts, interpret=True)
    np.testing.assert_array_equal(found[:20], 16)
    assert np.isnan(found[20:]).all(), "the interpreter's memory is NaN"


@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_have_each_row_once(rows: int) -> None:
    R = 130
    find = jax.jit(partial(grouped.row_tiles, R=R, rows=rows))
    for some in (0, 1, R, *RNG.integers(R, size=50)):
        counts = RNG.multinomial(some, RNG.dirichlet(np.full(E, 0.3)))
        tiles = jax.tree.map(np.asarray, find(jnp.asarray(counts)))
        owner = np.full(R, -1)
        for expert, row, size in zip(*tiles, strict=True):
            assert 0 <= size <= rows
            assert (owner[row : row + size] == -1).all()
            owner[row : row + size] = expert
        np.testing.assert_array_equal(owner[: counts.sum()], np.repeat(np.arange(E), counts))
        assert (owner[counts.sum() :] == -1).all()
        assert len(tiles.size) % grouped.TOGETHER == 0


def test_who_has_grouped_products() -> None:
    names = ("plain", "numba", "generic", "hopper", "interpret")
    have = {
        (dtype, D, F): [name for name in names if choose(name, jnp.dtype(dtype), D, F)]
        for dtype, D, F in (("bfloat16", 48, 16), ("float16", 16, 16), ("float32", 24, 16))
    }
    gpus = ["generic", "hopper", "interpret"]
    assert have[("float16", 16, 16)] == gpus
    assert [name for name in have[("bfloat16", 48, 16)] if name != "numba"] == gpus
    assert set(have[("float32", 24, 16)]) <= {"numba"}
    assert grouped.why_not(16, 40) == "experts are of 16 x 40, no multiples of 16"
