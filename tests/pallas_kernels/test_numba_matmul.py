"""The CPU's products beside numpy's in 64 bits."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import layers

pytest.importorskip("numba")
from jaxinfer.pallas_kernels import numba_matmul, numba_vectors, xla_call
from jaxinfer.pallas_kernels.numba_logits import logits
from jaxinfer.pallas_kernels.numba_matmul import gated, is_left_to_xla, matmul

Shape = tuple[int, int, int]
# T, D, F: whole tiles, and some more rows and columns; in place and, on some processors, packed.
SHAPES = [(17, 17, 49), (67, 18, 100)]
# Less than a tile, and a model's.
OTHERS = [(1, 5, 1), (3, 20, 7), (8, 16, 48), (64, 576, 192)]
shapes = pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)], ids=str
)


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 one by one"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dtype of weights; bfloat16 also as on processors that do not multiply it in pairs."""
    if request.param == "bfloat16 one by one":
        monkeypatch.setattr(numba_matmul, "has_pairs", lambda dtype: False)
    elif request.param == "bfloat16" and not numba_matmul.has_pairs(jnp.dtype("bfloat16")):
        pytest.skip("this processor does not multiply bfloat16 in pairs")
    return str(request.param).split()[0]


@pytest.fixture(autouse=True)
def all_products_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_matmul, "is_left_to_xla", lambda *args, **more: False)


def operands(T: int, D: int, F: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(T + D + F)
    x_TD, weight_DF = random.normal(size=(T, D)), random.normal(size=(D, F))
    return jnp.asarray(x_TD, jnp.float32), jnp.asarray(weight_DF, dtype)


def exact(x_TD: jax.Array, weight_DF: jax.Array) -> np.ndarray:
    """The product of rows that are rounded as the weight is, in 64 bits."""
    return np.asarray(x_TD.astype(weight_DF.dtype), np.float64) @ np.asarray(weight_DF, np.float64)


@shapes
def test_all_sums_are_right(shape: Shape, dtype: str) -> None:
    x_TD, weight_DF = operands(*shape, dtype)
    got = jax.jit(lambda *given: matmul(*given))(x_TD, weight_DF)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact(x_TD, weight_DF), rtol=0, atol=4e-7 * shape[1])


def test_long_sums_round_about_as_little_as_xlas(dtype: str) -> None:
    """Summed in one go, they would round more than twice as much."""
    x_TD, weight_DF = operands(9, 6 * numba_matmul.BLOCK + 5, 100, dtype)
    right = exact(x_TD, weight_DF)
    ours, theirs = (
        jax.jit(lambda *given, f=f: f(*given))(x_TD, weight_DF) - right
        for f in (
            matmul,
            lambda x, w: jnp.matmul(x.astype(w.dtype), w, preferred_element_type="float32"),
        )
    )
    assert np.sqrt(np.mean(ours**2)) < 1.5 * np.sqrt(np.mean(theirs**2))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_finds_the_same_bits(
    threads: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_TD, weight_DF = operands(67, 17, 200, dtype)
    expected = np.asarray(jax.jit(lambda x, w: matmul(x, w))(x_TD, weight_DF))
    monkeypatch.setattr(numba_matmul, "threads", lambda: threads)
    np.testing.assert_array_equal(jax.jit(lambda x, w: matmul(x, w))(x_TD, weight_DF), expected)


def test_calls_of_many_threads_share_those_who_look_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever calls they help in between, bits are the same, and in the end nobody looks out."""
    x_TD, weight_DF = operands(67, 17, 200)
    expected = np.asarray(jax.jit(matmul)(x_TD, weight_DF))
    monkeypatch.setattr(numba_matmul, "threads", lambda: 3)
    multiply = jax.jit(lambda x, w: matmul(x, w))

    def calls(_: int) -> bool:
        return all(np.array_equal(multiply(x_TD, weight_DF), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))
    until = time.monotonic() + 60
    while np.any(xla_call._places) and time.monotonic() < until:
        time.sleep(0.01)
    assert not np.any(xla_call._places)


def test_a_row_is_the_same_whatever_stands_beside_it(dtype: str) -> None:
    x_TD, weight_DF = operands(67, 17, 100, dtype)
    multiply = jax.jit(lambda *given: matmul(*given))
    whole = np.asarray(multiply(x_TD, weight_DF))
    for rows in (slice(0, 1), slice(50, 67), slice(5, 25)):
        np.testing.assert_array_equal(multiply(x_TD[rows], weight_DF), whole[rows])


@pytest.mark.parametrize(
    ("multiply", "dtype"),
    [
        (matmul, np.float32),
        pytest.param(gated, np.float32, marks=pytest.mark.slow),
        pytest.param(matmul, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(gated, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(matmul, np.int8, marks=pytest.mark.slow),
        pytest.param(gated, np.int8, marks=pytest.mark.slow),
    ],
)
def test_packed_weights_give_the_bits_of_weights_in_place(
    multiply: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several units of several tiles, whichever tiles this processor would take."""
    T, D, F = 67, numba_matmul.BLOCK + 5, 100
    random = np.random.default_rng(0)
    x_TD = random.normal(size=(T, D)).astype(np.float32)
    weights: list[np.ndarray] = []
    for _ in range(2 if multiply is gated else 1):
        weights.append(random.integers(-9, 10, (D, F)).astype(dtype))
        if dtype == np.int8:
            weights.append(random.uniform(0.5, 2, F).astype(np.float32))
    found = []
    for panel in (0, 2 * 48 * D * 2):
        own = numba_matmul.tiles()._replace(panel=panel)
        with monkeypatch.context() as patch:
            patch.setattr(numba_matmul, "tiles", lambda own=own: own)
            found.append(jax.jit(lambda *given: multiply(*given))(x_TD, *weights))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("has", [True, False])
def test_products_that_are_left_to_xla(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512, float32: more rows than 64, and the head of one."""
    monkeypatch.setattr(numba_matmul, "has", lambda feature: has)
    left = [
        (rows, dtype, head)
        for rows in (1, 2, 64, 65, 512)
        for dtype in ("float32", "bfloat16", "int8")
        for head in (False, True)
        if is_left_to_xla(rows, jnp.dtype(dtype), head)
    ]
    expected = [(1, "float32", True), (65, "float32", False), (512, "float32", False)]
    assert left == ([] if has else expected)


@pytest.mark.parametrize("rows", [1, 65])
def test_right_sums_of_what_is_left_to_xla(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_matmul, "is_left_to_xla", lambda *args, **more: True)
    x_TD, gate_DF = operands(rows, 100, 203, "float32")
    up_DF = gate_DF[::-1]
    gate_TF, up_TF = exact(x_TD, gate_DF), exact(x_TD, up_DF)
    np.testing.assert_allclose(matmul(x_TD, gate_DF), gate_TF, rtol=1e-4, atol=1e-4)
    gated_TF = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
    np.testing.assert_allclose(gated(x_TD, gate_DF, up_DF), gated_TF, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(logits(x_TD, gate_DF.T), gate_TF, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("multiply", [matmul, gated])
def test_large_weights_give_right_sums_and_a_row_the_same_bits(
    multiply: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the weight's rows and a rest, units of columns; in place, and packed for more."""
    tiny = numba_matmul.tiles()._replace(panel=2**14, in_place=())
    monkeypatch.setattr(numba_matmul, "tiles", lambda: tiny)
    monkeypatch.setattr(numba_matmul, "LARGE", 0)
    T, D, F = 67, 2 * numba_matmul.DEPTH + 7, 203
    x_TD, weight_DF = operands(T, D, F, dtype)
    weights = [weight_DF, weight_DF[::-1]][: 1 + (multiply is gated)]
    expected = exact(x_TD, weight_DF)
    # Rounding of sums of D products; a gate's slope is at most 1.1, and carries it on.
    bound = 4e-7 * D * np.ones_like(expected)
    if multiply is gated:
        up_TF = exact(x_TD, weights[1])
        bound *= 1.1 * np.abs(up_TF) + np.abs(expected) + 1
        expected = expected / (1 + np.exp(-expected)) * up_TF
    run = jax.jit(lambda *given: multiply(*given))
    whole = np.asarray(run(x_TD, *weights))
    assert np.all(np.abs(whole - expected) <= bound)
    few = numba_matmul.few_rows(D, F, weight_DF.dtype, numba_matmul.has_pairs(weight_DF.dtype))[0]
    for rows in (1, few, few + 1):
        np.testing.assert_array_equal(run(x_TD[7 : 7 + rows], *weights), whole[7 : 7 + rows])


MODELS = {
    "135M": [(576, 576), (576, 192), (576, 1536), (1536, 576)],
    "1B": [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)],
    "8B": [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)],
}


@pytest.mark.parametrize(
    ("features", "few"),
    [
        # By shape: rows that meet it where it lies at most, in float32, and as bfloat16.
        (
            "",
            {"135M": "64/64 64/64 16/64 16/64", "1B": "3/3 3/64 3/3 3/3", "8B": "3/3 3/3 3/3 3/3"},
        ),
        ("+avx512f", {"135M": "64/64 " * 4, "1B": "3/64 64/64 3/3 3/3", "8B": "3/3 3/64 3/3 3/3"}),
    ],
    ids=["AVX2", "AVX-512"],
)
def test_what_is_read_in_place_by_shape(
    features: str, few: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codegen = numba_vectors.cpu_target.target_context.codegen()
    with monkeypatch.context() as patch:
        patch.setattr(codegen, "magic_tuple", lambda: ("", "", features))
        sizes = numba_vectors.tiles.__wrapped__()
    monkeypatch.setattr(numba_matmul, "tiles", lambda: sizes)
    for model, shapes in MODELS.items():
        found = []
        for D, F in shapes:
            each = [
                numba_matmul.few_rows(D, F, jnp.dtype(d), False) for d in ("float32", "bfloat16")
            ]
            assert [large for _, large in each] == [D * F * size > 2**23 for size in (4, 2)]
            found.append("/".join(str(rows) for rows, _ in each))
        assert found == few[model].split()


def test_pairs_and_8_bits_meet_weights_of_all_sizes_in_a_tile_of_rows() -> None:
    tile = numba_matmul.tiles()
    for D, F in (shape for shapes in MODELS.values() for shape in shapes):
        assert numba_matmul.few_rows(D, F, jnp.dtype("bfloat16"), True)[0] == tile.matmul
        assert numba_matmul.few_rows(D, F, jnp.dtype("int8"), False)[0] == tile.sums // 2


@shapes
def test_a_gate_with_what_it_lets_through(shape: Shape, dtype: str) -> None:
    x_TD, gate_DF = operands(*shape, dtype)
    up_DF = gate_DF[::-1]
    gate_TF, up_TF = exact(x_TD, gate_DF), exact(x_TD, up_DF)
    expected = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
    got = jax.jit(lambda *given: gated(*given))(x_TD, gate_DF, up_DF)
    # Rounding of a sum of D products, carried through the gate, whose slope is at most 1.1.
    D = shape[1]
    gate_error, up_error = (
        D**0.5 * 2.0**-24 * exact(np.abs(x_TD), np.abs(w)) for w in (gate_DF, up_DF)
    )
    bound = 1.1 * gate_error * np.abs(up_TF) + np.abs(gate_TF) * up_error
    assert np.all(np.abs(got - expected) <= bound + 1e-6 * np.abs(expected))


def test_a_gate_far_from_zero() -> None:
    gate = np.array([-200, -88, -20, -1, 0, 1, 20, 88, 200, 1e30], np.float32)
    T, D, F = SHAPES[0]
    one_TD = jnp.zeros((T, D)).at[:, 0].set(1)
    gate_DF = jnp.zeros((D, F)).at[0, : len(gate)].set(gate)
    got = jax.jit(gated)(one_TD, gate_DF, jnp.ones((D, F)))
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(
        got[:, : len(gate)], np.tile(wide / (1 + np.exp(-wide)), (T, 1)), rtol=1e-6, atol=1e-35
    )


@pytest.mark.parametrize(
    "shape",
    [
        (3, 17, 49),
        (9, 2 * 768 + 5, 70),
        *(pytest.param(s, marks=pytest.mark.slow) for s in [(1, 5, 16), (50, 20, 150)]),
    ],
    ids=str,
)
def test_logits_of_all_rows(shape: Shape, dtype: str) -> None:
    x_SD, head_DV = operands(*shape, dtype)
    got = jax.jit(lambda *given: logits(*given))(x_SD, head_DV.T)
    assert got.shape == (shape[0], shape[2])
    np.testing.assert_allclose(got, exact(x_SD, head_DV), rtol=0, atol=4e-7 * shape[1])


def test_layers_use_them_where_the_kernels_have_them(dtype: str) -> None:
    x_TD, weight_DF = operands(9, 17, 60, dtype)
    right_TF = exact(x_TD, weight_DF)
    silu_TF = right_TF / (1 + np.exp(-right_TF)) * right_TF

    def all_three(x_TD: jax.Array, kernels: str) -> tuple[jax.Array, ...]:
        return (
            layers.dense(x_TD, weight_DF.reshape(17, 5, 12), kernels),
            layers.gated(x_TD, weight_DF, weight_DF, jax.nn.silu, kernels),
            layers.head(x_TD, weight_DF.T, kernels),
        )

    pairs = numba_matmul.has_pairs(weight_DF.dtype)
    for kernels, own_head in (("numba", dtype == "float32" or pairs), ("plain", False)):
        run = jax.jit(all_three, static_argnums=1)
        text = run.lower(x_TD, kernels).as_text()
        for name, calls in (
            ("matmul", kernels == "numba"),
            ("gated", kernels == "numba"),
            ("logits", own_head),
        ):
            assert text.count(f"@jaxinfer_{name}") == calls
        dense, gate, head = run(x_TD, kernels)
        assert dense.shape == (9, 5, 12)
        np.testing.assert_allclose(dense.reshape(9, 60), right_TF, atol=1e-5)
        np.testing.assert_allclose(gate, silu_TF, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(head, right_TF, atol=1e-5)
