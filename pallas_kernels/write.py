"""Writes KV entries into their pages on NVIDIA GPUs, in generic Pallas: one launch per step."""

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxinfer.pallas_kernels.gpu_work import Ref, pieces, whole
from jaxinfer.pallas_kernels.kv_pages import LARGEST, KVPages, page_runs, quantise

_power = pl.next_power_of_2


@partial(jax.jit, static_argnames="interpret")
def write_kv(
    kv: KVPages,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    interpret: bool = False,
) -> KVPages:
    """See ``kv_pages.write_kv``; one program per token and KV head, or per run of tokens in a page.

    The pages are written in place.
    """
    T, K, H = k_TKH.shape
    B = kv.values.shape[2]
    kernel: Callable[..., None]
    if kv.key_scale_PK is None:
        k_TKH, v_TKH = k_TKH.astype(kv.keys.dtype), v_TKH.astype(kv.values.dtype)
        inputs: tuple[jax.Array, ...] = k_TKH, v_TKH, page_T, offset_T
        kernel, warps = _write, 1
    else:
        runs = page_runs(page_T, offset_T)
        # The size of padding is 0.
        size = jnp.where(jnp.arange(T) < runs.many, runs.size, 0)
        inputs = k_TKH, v_TKH, page_T, offset_T, runs.token, size
        # At most 128 of a page's entries per thread.
        kernel, warps = _write_8_bits, min(max(4, _power(B) * _power(H) // 4096), 32)
    arrays, tree = jax.tree.flatten(kv)
    specs = list(map(whole, arrays))
    written = pl.pallas_call(
        kernel,
        grid=(T, K),
        in_specs=[*map(whole, inputs), jax.tree.unflatten(tree, specs)],
        out_specs=specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        input_output_aliases={len(inputs) + i: i for i in range(len(arrays))},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="paged_write",
    )(*inputs, kv)
    done: KVPages = jax.tree.unflatten(tree, written)
    return done


def _write(
    k_TKH: Ref, v_TKH: Ref, page_T: Ref, offset_T: Ref, _: KVPages, keys: Ref, values: Ref
) -> None:
    t, h = pl.program_id(0), pl.program_id(1)
    page = page_T[t]
    for start, size in pieces(k_TKH.shape[2]):
        piece = pl.ds(start, size)
        keys[page, h, offset_T[t], piece] = k_TKH[t, h, piece]
        values[page, h, offset_T[t], piece] = v_TKH[t, h, piece]


def _write_8_bits(
    k_TKH: Ref, v_TKH: Ref, page_T: Ref, offset_T: Ref, token_I: Ref, size_I: Ref, _: KVPages,
    keys: Ref, values: Ref, key_scale_PK: Ref, value_scale_PK: Ref,
) -> None:  # fmt: skip
    i, h = pl.program_id(0), pl.program_id(1)
    T, _, H = k_TKH.shape
    B = values.shape[2]
    t, count = token_I[i], size_I[i]
    page, begin = page_T[t], offset_T[t]
    # Rows beyond the page do the same as its last one.
    slot = jnp.minimum(jnp.arange(_power(B)), B - 1)
    token = jnp.clip(t + slot - begin, 0, T - 1)[:, None]
    is_old, is_new = (slot < begin)[:, None], ((slot >= begin) & (slot < begin + count))[:, None]

    def one(x_TKH: Ref, pages: Ref, scale_PK: Ref) -> None:
        cols = [start + jnp.arange(size)[None, :] for start, size in pieces(H)]
        new = [jnp.where(is_new, x_TKH[token, h, at].astype(jnp.float32), 0) for at in cols]
        largest = reduce(jnp.maximum, [jnp.abs(x).max() for x in new])
        old_scale = jnp.where(begin > 0, scale_PK[page, h], 0)
        scale = jnp.maximum(old_scale, largest / LARGEST[pages.dtype.name])
        for at, x in zip(cols, new, strict=True):
            where = page, h, slot[:, None], at
            old = jnp.where(is_old, pages[where].astype(jnp.float32) * old_scale, x)
            pages[where] = quantise(old, scale, pages.dtype)
        scale_PK[page, h] = scale

    @pl.when(count > 0)
    def write_both() -> None:
        one(k_TKH, keys, key_scale_PK)
        one(v_TKH, values, value_scale_PK)
