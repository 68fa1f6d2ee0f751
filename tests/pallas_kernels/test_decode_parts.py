"""Contexts of decodes are cut into parts that fill a GPU, and nothing is lost or done twice."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.decode_parts import Parts, decode_parts, joined
from jaxinfer.pallas_kernels.hopper_decode import programs_at_once

TILE = 64


def parts_of(lengths: list[int], heads: int, at_once: int, window: int | None = None) -> Parts:
    cut = jax.jit(decode_parts, static_argnums=(1, 2, 3, 4))
    return jax.tree.map(np.asarray, cut(jnp.array(lengths), window, TILE, heads, at_once))


def filled(lengths: list[int], heads: int, at_once: int) -> float:
    """The share of a GPU's time that is work, if programs start in order wherever one ends."""
    parts = parts_of(lengths, heads, at_once)
    ends = [0] * at_once
    for tiles in np.repeat(parts.end_W - parts.begin_W, heads):
        heapq.heapreplace(ends, ends[0] + int(tiles))
    return heads * sum(-(-length // TILE) for length in lengths) / (at_once * max(ends))


@pytest.mark.parametrize("window", [None, 1, 100, 1000])
@pytest.mark.parametrize("at_once", [1, 40, 264])
@pytest.mark.parametrize("heads", [1, 8])
def test_each_tile_is_in_one_part(heads: int, at_once: int, window: int | None) -> None:
    lengths = [0, 1, 63, 64, 65, 5000, 300, 0, 64 * 7, 0]
    parts = parts_of(lengths, heads, at_once, window)
    taken: list[tuple[int, int]] = []
    for s in range(len(lengths)):
        first, count = parts.first_S[s], parts.count_S[s]
        assert (parts.sequence_W[first : first + count] == s).all()
        for begin, end in zip(
            parts.begin_W[first : first + count], parts.end_W[first : first + count], strict=True
        ):
            assert begin < end
            taken += [(s, tile) for tile in range(begin, end)]
    expected = [
        (s, tile)
        for s, length in enumerate(lengths)
        for tile in range(-(-length // TILE))
        if window is None or (tile + 1) * TILE > length - window
    ]
    assert taken == expected
    # What is left is padding.
    assert (parts.end_W - parts.begin_W)[parts.count_S.sum() :].sum() == 0


@pytest.mark.parametrize(
    ("lengths", "heads", "least"),
    [
        ([4096] * 64, 8, 0.95),
        ([65536] * 4, 8, 0.95),
        ([131072], 8, 0.95),
        ([4096] * 17 + [0] * 47, 8, 0.75),
        ([32768] + [300] * 63, 8, 0.6),
        ([4096] * 17 + [0] * 47, 1, 0.75),
    ],
)
def test_a_gpu_is_filled(lengths: list[int], heads: int, least: float) -> None:
    """Programs fill it whatever the bucket's size; the same for heads of which one program fits."""
    for head_dim in (128, 256):
        assert filled(lengths, heads, programs_at_once(head_dim)) >= least


def test_programs_of_an_h100() -> None:
    assert [programs_at_once(head_dim) for head_dim in (64, 128, 160, 192, 256)] == [
        264,
        264,
        264,
        132,
        132,
    ]
    # With entries of int8, three fit on a multiprocessor; fp8 takes too many registers.
    assert programs_at_once(128, jnp.float8_e4m3fn) == 264
    assert [programs_at_once(head_dim, jnp.int8) for head_dim in (64, 128, 192, 256)] == [
        396,
        396,
        264,
        132,
    ]


def test_what_is_short_stays_whole() -> None:
    """Many short contexts fill a GPU as they are."""
    parts = parts_of([300] * 256, 8, 264)
    assert (parts.count_S == 1).all()


def test_joined() -> None:
    """The same as the softmax over all of it, computed in NumPy."""
    rng = np.random.default_rng(0)
    parts = parts_of([0, 500, 64], 2, 16)
    W, K, R, G, H = len(parts.sequence_W), 2, 8, 3, 48
    out, lse = rng.normal(size=(W, K, R, H)), rng.normal(size=(W, K, R)) * 3
    out[parts.count_S.sum() :] = np.nan  # What no program wrote.
    given = jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)
    got = joined(*given, jax.tree.map(jnp.asarray, parts), G, True).reshape(3, K, G, H)
    assert not np.any(got[0])
    for s in (1, 2):
        of = slice(parts.first_S[s], parts.first_S[s] + parts.count_S[s])
        assert (parts.count_S[s] > 1) == (s == 1)
        weight = 2 ** lse[of][..., None]
        expected = ((out[of] * weight).sum(0) / weight.sum(0))[:, :G]
        np.testing.assert_allclose(got[s], expected, rtol=2e-5, atol=1e-6)
