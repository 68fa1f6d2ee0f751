"""Entries of 8 bits: what is written is what is read, to half a step of its page's scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.kv_pages import LARGEST, KVPages, page_runs, write_kv

P, K, B, H = 6, 2, 4, 8


@pytest.mark.parametrize("keys_by_token", [False, True])
@pytest.mark.parametrize("dtype", list(LARGEST))
def test_entries_token_by_token(dtype: str, keys_by_token: bool) -> None:
    """A page's scale grows with its largest entry, and begins anew with the page."""
    rng = np.random.default_rng(0)
    keys = jnp.zeros((P, K, B, H) if keys_by_token else (P, K, H, B), dtype)
    nothing = jnp.full((P, K), 1e3, jnp.float32)  # Of an earlier user of the pages.
    kv = KVPages(keys, jnp.zeros((P, K, B, H), dtype), nothing, nothing)
    x_TKH = np.float32(rng.normal(size=(2 * B, K, H)) * np.arange(1, 2 * B + 1)[:, None, None])
    write = jax.jit(write_kv, static_argnames="keys_by_token")
    for t, x_KH in enumerate(x_TKH):
        page, offset = np.array([[3, 5][t // B]], np.int32), np.array([t % B], np.int32)
        kv = write(kv, x_KH[None], -x_KH[None], page, offset, keys_by_token=keys_by_token)
    assert kv.key_scale_PK is not None
    assert kv.value_scale_PK is not None
    for n, page in enumerate((3, 5)):
        given = x_TKH[n * B : (n + 1) * B].swapaxes(0, 1)
        largest = np.abs(given).max((1, 2))
        for scale in (kv.key_scale_PK, kv.value_scale_PK):
            np.testing.assert_allclose(scale[page], largest / LARGEST[dtype], rtol=1e-6)
        k = kv.keys[page] if keys_by_token else kv.keys[page].swapaxes(1, 2)
        # Rounded again at each of four tokens, by half a step; e4m3 has three bits of mantissa.
        step = np.where(dtype == "int8", largest / 127, largest / 16)[:, None, None]
        for sign, x, scale in ((1, k, kv.key_scale_PK), (-1, kv.values[page], kv.value_scale_PK)):
            read = np.asarray(x, np.float32) * np.asarray(scale)[page][:, None, None]
            assert (np.abs(read - sign * given) <= 2 * step).all()


def test_padding_touches_nothing() -> None:
    scale = jnp.ones((P, K))
    zeros = jnp.zeros((P, K, B, H), jnp.int8)
    new = jnp.ones((3, K, H))
    place = jnp.zeros(3, jnp.int32)
    written = write_kv(KVPages(zeros, zeros, scale, scale), new, new, place, place, True)
    assert not np.any(written.values)
    np.testing.assert_array_equal(written.value_scale_PK, scale)


def test_runs() -> None:
    page = jnp.array([4, 4, 2, 2, 2, 7, 0, 0], jnp.int32)
    offset = jnp.array([2, 3, 0, 1, 2, 9, 0, 0], jnp.int32)
    runs = page_runs(page, offset)
    assert runs.many == 3
    assert runs.token[:3].tolist() == [0, 2, 5]
    assert runs.size[:3].tolist() == [2, 3, 1]
