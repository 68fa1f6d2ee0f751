"""Layers against numpy, in float64."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.models.config import Rope
from jaxinfer.models.layers import (
    LayerNorm,
    PagedBatch,
    RMSNorm,
    apply_rope,
    init_weight,
    paged_attention,
    project,
    rope_tables,
)
from jaxinfer.models.layouts import LAYOUTS, Layout
from jaxinfer.models.sharding import pages_sharding
from jaxinfer.pallas_kernels.kv_pages import KVPages

RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_norms_near_zero_and_far_from_it() -> None:
    """``eps`` is most of the divisor in one row, nothing in another."""
    x, scale, bias = draw(3, 8) * [[1e-3], [1], [1e3]] + [[0], [3], [0]], draw(8), draw(8)
    rms, layer = RMSNorm(8, eps=1e-4), LayerNorm(8, eps=1e-4)
    assert (rms.scale_D[...] == 1).all()
    rms.scale_D, layer.scale_D, layer.bias_D = map(
        nnx.Param, map(jnp.asarray, (scale, scale, bias))
    )
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-4) * scale
    np.testing.assert_allclose(rms(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5)
    off = x64 - x64.mean(-1, keepdims=True)
    expected = off / np.sqrt((off**2).mean(-1, keepdims=True) + 1e-4) * scale + bias
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_work_in_float32(norm: Any) -> None:
    """The square of 300 is too coarse in bfloat16, and too large in float16."""
    x = jnp.asarray([[300.0, 301, 299, 302]], jnp.float16)
    got = norm(4, eps=1e-5)(x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, norm(4, eps=1e-5)(x.astype(jnp.float32)), rtol=1e-6)
    assert np.isfinite(np.asarray(got)).all()


def test_products_in_the_weights_dtype_add_up_in_float32() -> None:
    x, weight = draw(4, 512), jnp.asarray(draw(512, 3), jnp.bfloat16)
    got = project("td,df->tf", jnp.asarray(x), weight)
    assert got.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    np.testing.assert_allclose(got, rounded @ np.asarray(weight, np.float64), rtol=1e-4, atol=1e-4)
    # Not in float32, which is not what the weights are.
    assert np.abs(np.asarray(got) - x @ np.asarray(weight, np.float64)).max() > 1e-3


def test_weights_are_drawn_with_their_scale() -> None:
    for scale in (0.02, 0.5):
        weight = np.asarray(init_weight(nnx.Rngs(0), (200, 200), scale)[...])
        assert weight.std() == pytest.approx(scale, rel=0.02)
    assert np.asarray(init_weight(nnx.Rngs(0), (200, 200))[...]).std() == pytest.approx(0.02, 0.02)


def test_rotation_keeps_relative_positions_and_scales() -> None:
    rope = Rope((1.0, 0.1, 0.01), factor=1.5)
    position, x = np.array([0, 3, 100]), draw(3, 2, 6)
    cos, sin = rope_tables(jnp.asarray(position), rope)
    angle = position[:, None] * np.array(rope.frequencies)
    np.testing.assert_allclose(cos, 1.5 * np.cos(angle), atol=1e-5)
    np.testing.assert_allclose(sin, 1.5 * np.sin(angle), atol=1e-5)
    pairs = x[..., :3] + 1j * x[..., 3:]
    turned = 1.5 * pairs * np.exp(1j * angle)[:, None]
    got = apply_rope(jnp.asarray(x), cos, sin)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)


# Attention: two decodes, of which one is its sequence's first token, and a chunk.

PAGE, N, K, H = 4, 4, 2, 8
# Of each sequence: entries before, tokens.
SEQUENCES = ((0, 1), (6, 1), (3, 5))
T = sum(count for _, count in SEQUENCES) + 2  # Two rows of padding.


def case() -> tuple[dict[str, np.ndarray], KVPages, PagedBatch, list[np.ndarray]]:
    """Inputs, pages with what came before, the batch, and each sequence's whole keys and values."""
    q, k, v = draw(T, N, H), draw(T, K, H), draw(T, K, H)
    pages = 1 + RNG.permutation(9).reshape(3, 3)
    keys, values = np.zeros((10, K, H, PAGE), np.float32), np.zeros((10, K, PAGE, H), np.float32)
    batch = PagedBatch(
        position_T=np.zeros(T),
        page_T=np.zeros(T),
        offset_T=np.zeros(T),
        decode_table_SM=np.zeros((3, 3)),
        decode_length_S=np.array([1, 7, 0]),
        chunk_table_CM=pages[2:],
        chunk_start_C=np.array([3]),
        chunk_row_C1=np.array([2, 7]),
    )
    batch = PagedBatch(*(np.asarray(x, np.int32) for x in batch))
    batch.decode_table_SM[:2] = pages[:2]
    whole, row = [], 0
    for number, (before, count) in enumerate(SEQUENCES):
        old = draw(2, before, K, H)
        for position in range(before + count):
            page, offset = pages[number][position // PAGE], position % PAGE
            if position < before:
                keys[page, :, :, offset], values[page, :, offset] = old[:, position]
            else:
                batch.position_T[row], batch.page_T[row], batch.offset_T[row] = (
                    position,
                    page,
                    offset,
                )
                row += 1
        rows = slice(row - count, row)
        whole.append(np.concatenate([old, np.stack([k[rows], v[rows]])], 1))
    return {"q": q, "k": k, "v": v}, KVPages(jnp.asarray(keys), jnp.asarray(values)), batch, whole


def expected(
    q: np.ndarray, whole: list[np.ndarray], scale: float, window: int | None
) -> np.ndarray:
    rows = []
    for (before, count), (keys, values) in zip(SEQUENCES, whole, strict=True):
        for i in range(count):
            stop = before + i + 1
            seen = slice(max(stop - window, 0) if window else 0, stop)
            heads = []
            for n in range(N):
                group = n // (N // K)
                scores = keys[seen, group].astype(np.float64) @ q[len(rows), n] * scale
                p = np.exp(scores - scores.max())
                heads.append(p @ values[seen, group] / p.sum())
            rows.append(heads)
    return np.array(rows)


# Each of three devices has three rows: decodes and the chunk's begin; its middle; its end, padding.
BY_ROWS = Layout((), {"heads": {"T": "x"}}, kv={"K": "y"})


@pytest.mark.parametrize(
    ("sizes", "layout", "scale", "window"),
    [
        ((1, 1), LAYOUTS["megatron"], None, None),
        ((2, 1), LAYOUTS["megatron"], 0.9, 3),
        ((3, 1), BY_ROWS, None, None),
        ((3, 2), BY_ROWS, 0.9, 3),
    ],
)
def test_attention_of_decodes_and_chunks(
    sizes: tuple[int, int], layout: Layout, scale: float | None, window: int | None
) -> None:
    given, kv, batch, whole = case()
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, ("x", "y"))
    kv = jax.device_put(kv, pages_sharding(mesh, layout))
    q, k, v = (jax.device_put(given[name], NamedSharding(mesh, PartitionSpec())) for name in "qkv")

    def attend(q: Any, k: Any, v: Any, kv: KVPages, batch: PagedBatch) -> Any:
        return paged_attention(q, k, v, kv, batch, "plain", scale, window, layout)

    with jax.set_mesh(mesh):
        got, after = jax.jit(attend)(q, k, v, kv, batch)
    want = expected(given["q"], whole, scale or H**-0.5, window)
    np.testing.assert_allclose(np.asarray(got)[: len(want)], want, atol=1e-4)
    for row in range(len(want)):
        page, offset = batch.page_T[row], batch.offset_T[row]
        np.testing.assert_array_equal(after.keys[page, :, :, offset], given["k"][row])
        np.testing.assert_array_equal(after.values[page, :, offset], given["v"][row])
