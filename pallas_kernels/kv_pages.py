"""Pages of KV entries in plain JAX: their contents, and writing tokens to them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The largest value of each kind of entry that needs scales.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class KVPages(NamedTuple):
    """A layer's P pages of B tokens.

    Attributes:
        keys: [P, K, B, H]; for the plain functions [P, K, H, B].
        values: [P, K, B, H].
        key_scale_PK: float32 factors of keys of 8 bits; None for wider ones.
        value_scale_PK: float32 factors of values of 8 bits; None for wider ones.
    """

    keys: jax.Array
    values: jax.Array
    key_scale_PK: jax.Array | None = None
    value_scale_PK: jax.Array | None = None

    def page(self, page: jax.Array) -> "KVPages":
        """Return a page, or several."""
        some: KVPages = jax.tree.map(lambda x: x[page], self)
        return some


def quantise(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return ``x / scale`` in 8 bits; ``scale`` must broadcast to the shape of ``x``."""
    largest = LARGEST[jnp.dtype(dtype).name]
    x = jnp.clip(x / jnp.maximum(scale, 1e-30), -largest, largest)
    return (jnp.floor(x + 0.5) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype)


def write_kv(
    kv: KVPages,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    keys_by_token: bool = False,
) -> KVPages:
    """Write each token's key and value to its place. Padding tokens go to page 0.

    Entries of 8 bits share one scale per page and head, that of the largest entry. If it grows,
    existing entries are rounded again. A page's tokens must be consecutive in the batch, in order.
    Old entries at and after the first one's offset are lost.
    """
    if kv.key_scale_PK is not None:
        return _write_8_bits(kv, k_TKH, v_TKH, page_T, offset_T, keys_by_token)
    k_TKH, v_TKH = k_TKH.astype(kv.keys.dtype), v_TKH.astype(kv.values.dtype)
    at = page_T, slice(None), offset_T
    by_head_dim = page_T, slice(None), slice(None), offset_T
    return KVPages(
        _scatter(kv.keys, at if keys_by_token else by_head_dim, k_TKH),
        _scatter(kv.values, at, v_TKH),
    )


def _scatter(pages: jax.Array, at: tuple[Any, ...], entries: jax.Array) -> jax.Array:
    if pages.dtype != jnp.bfloat16 or jax.__version_info__ >= (0, 11):
        return pages.at[at].set(entries)
    # XLA:CPU of jax 0.10 scatters in float32: it would convert all pages, there and back, in each
    # step.
    bits = jax.lax.bitcast_convert_type
    found = bits(pages, jnp.uint16).at[at].set(bits(entries, jnp.uint16))
    return bits(found, pages.dtype)


class PageRuns(NamedTuple):
    """Runs of consecutive tokens in one page, int32 [T]: the runs, then padding.

    Attributes:
        token: index of the first token.
        size: number of tokens.
    """

    token: jax.Array
    size: jax.Array
    many: jax.Array


def page_runs(page_T: jax.Array, offset_T: jax.Array) -> PageRuns:
    """Return the runs of a batch, without those in page 0."""
    T = len(offset_T)
    begins_T = (offset_T == 0) | (page_T != jnp.roll(page_T, 1)) | (jnp.arange(T) == 0)
    end_T = jax.lax.cummin(jnp.where(begins_T, jnp.arange(T), T), reverse=True)
    size_T = jnp.append(end_T[1:], T) - jnp.arange(T)
    (token_T,) = jnp.nonzero(begins_T & (page_T > 0), size=T, fill_value=0)
    return PageRuns(token_T, size_T[token_T], (begins_T & (page_T > 0)).sum())


def _write_8_bits(
    kv: KVPages,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    keys_by_token: bool,
) -> KVPages:
    B = kv.values.shape[2]
    runs = page_runs(page_T, offset_T)
    slot_B = jnp.arange(B)
    # Room for the entries of a page before and after the batch's tokens.
    around = (B, B), (0, 0), (0, 0)
    k_YKH, v_YKH = (jnp.pad(x.astype(jnp.float32), around) for x in (k_TKH, v_TKH))

    def one(
        pages: jax.Array, scale_PK: jax.Array, x_YKH: jax.Array, run: jax.Array, by_token: bool
    ) -> tuple[jax.Array, jax.Array]:
        t = runs.token[run]
        page, offset = page_T[t], offset_T[t]
        new_KBH = jax.lax.dynamic_slice_in_dim(x_YKH, t - offset + B, B).swapaxes(0, 1)
        old_KBH = pages[page].astype(jnp.float32)
        old_KBH = old_KBH if by_token else old_KBH.swapaxes(1, 2)
        is_new_B1 = ((slot_B >= offset) & (slot_B < offset + runs.size[run]))[:, None]
        largest_K = jnp.where(is_new_B1, jnp.abs(new_KBH), 0).max((1, 2))
        old_scale_K = jnp.where(offset > 0, scale_PK[page], 0)
        scale_K = jnp.maximum(old_scale_K, largest_K / LARGEST[pages.dtype.name])
        kept_KBH = jnp.where((slot_B < offset)[:, None], old_KBH * old_scale_K[:, None, None], 0)
        x_KBH = jnp.where(is_new_B1, new_KBH, kept_KBH)
        x_KBH = quantise(x_KBH, scale_K[:, None, None], pages.dtype)
        x_KBH = x_KBH if by_token else x_KBH.swapaxes(1, 2)
        return pages.at[page].set(x_KBH), scale_PK.at[page].set(scale_K)

    def one_run(run: jax.Array, kv: KVPages) -> KVPages:
        assert kv.key_scale_PK is not None
        assert kv.value_scale_PK is not None
        keys, key_scale_PK = one(kv.keys, kv.key_scale_PK, k_YKH, run, keys_by_token)
        values, value_scale_PK = one(kv.values, kv.value_scale_PK, v_YKH, run, True)
        return KVPages(keys, values, key_scale_PK, value_scale_PK)

    return jax.lax.fori_loop(0, runs.many, one_run, kv)
