"""Decode for Hopper: one warpgroup per sequence, KV head and part of a context; see ``hopper``."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.decode_parts import decode_parts, joined
from jaxinfer.pallas_kernels.gpu_work import Ref, product_dtype
from jaxinfer.pallas_kernels.hopper_tiles import (
    LOG2_E,
    ROWS,
    SLOTS,
    Pages,
    Softmax,
    add_product,
    clear_after,
    copy_tile,
    masked,
    product,
    shared,
    start,
    store,
    weigh,
    widen,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages

# Number of context tokens in a tile; two programs then fit on a multiprocessor.
DECODE_TILE = 64
# Numbers for an H100: multiprocessors, and bytes that programs can have on each; a program needs 1
# kB more.
MULTIPROCESSORS = 132
SHARED_MEMORY = 226 * 1024


@partial(jax.jit, static_argnames=("window", "programs", "interpret"))
def decode_attention(
    q_SNH: jax.Array,
    kv: KVPages,
    page_table_SM: jax.Array,
    length_S: jax.Array,
    window: int | None = None,
    programs: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See ``reference.decode_attention``; one program per sequence, KV head and part of its tokens.

    Args:
        programs: number of programs to run at once; contexts are cut into parts to reach it. By
            default, the number that fills an H100.
        interpret: parameters of Mosaic's interpret mode, to check results on a CPU.
    """
    S, N, H = q_SNH.shape
    _, K, B, _ = kv.values.shape
    G, dtype, entries = N // K, product_dtype(kv), kv.keys.dtype
    R = -(-G // 8) * 8
    parts = decode_parts(
        length_S, window, DECODE_TILE, K, programs or programs_at_once(H, entries.itemsize)
    )
    W = len(parts.sequence_W)
    q_SKGH = q_SNH.astype(dtype).reshape(S, K, G, H)
    q_SKRH = jnp.pad(q_SKGH, ((0, 0), (0, 0), (0, R - G), (0, 0)))
    copies = pl.cdiv(DECODE_TILE, B)
    of_heads = partial(shared, dtype=dtype, head_dim=H)
    ring = shared((SLOTS, DECODE_TILE, H), entries, H)
    scales = () if kv.key_scale_PK is None else (kv.key_scale_PK, kv.value_scale_PK)
    wide = of_heads((DECODE_TILE, H)) if scales else None
    out_WKRH, lse_WKR = plgpu.kernel(
        partial(_decode, window=window),
        out_type=(
            jax.ShapeDtypeStruct((W, K, R, H), dtype),
            jax.ShapeDtypeStruct((W, K, R), jnp.float32),
        ),
        grid=(W, K),
        grid_names=("part", "head"),
        scratch_types=(
            DecodeMemory(
                q=of_heads((ROWS, H)),
                k=ring,
                v=ring,
                wide_k=wide,
                wide_v=wide,
                weight=of_heads((ROWS, DECODE_TILE)) if interpret else None,
                lse=plgpu.SMEM((ROWS,), jnp.float32),
                q_ready=plgpu.Barrier(),
                k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
                v_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(q_SKRH, kv.keys, kv.values, page_table_SM, length_S, *parts[:3], *scales)
    return joined(out_WKRH, lse_WKR, parts, G, bool(interpret))


class DecodeMemory(NamedTuple):
    """A program's shared memory, and the barriers that report arrivals there.

    Attributes:
        k: ring of tiles of keys, as stored in pages.
        v: ring of tiles of values, as stored in pages.
        wide_k, wide_v: one tile each with 16 bits, for entries of 8 bits; otherwise None.
        weight: only for interpretation, see ``hopper_tiles.add_product``.
    """

    q: Ref
    k: Ref
    v: Ref
    wide_k: Ref
    wide_v: Ref
    weight: Ref
    lse: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref


def programs_at_once(head_dim: int, itemsize: int = 2) -> int:
    """Return how many decode programs an H100 runs at once; shared memory limits them.

    Args:
        itemsize: bytes of an entry.
    """
    tiles = 2 * SLOTS * itemsize + (4 if itemsize == 1 else 0)
    size = head_dim * (2 * ROWS + tiles * DECODE_TILE)
    return MULTIPROCESSORS * (2 if size <= SHARED_MEMORY // 2 else 1)


def _decode(
    q_SKRH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_SM: Ref, length_S: Ref,
    sequence_W: Ref, begin_W: Ref, end_W: Ref, *rest: Any, window: int | None,
) -> None:  # fmt: skip
    *scales_PK, out_WKRH, lse_WKR, sm = rest
    w, h = lax.axis_index("part"), lax.axis_index("head")
    s, begin, end = sequence_W[w], begin_W[w], end_W[w]
    R = out_WKRH.shape[2]

    @pl.when(begin < end)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q_SKRH.at[s, h], sm.q.at[pl.ds(0, R)], sm.q_ready)
        pages = Pages(k_PKBH, v_PKBH, tuple(scales_PK), table_SM.at[s], h)
        done = _attend(pages, length_S[s], begin, end, sm, window)
        sm.lse[...] = done.max_R + jnp.log(store(done, sm.q)) * LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sm.q.at[pl.ds(0, R)], out_WKRH.at[w, h])
        plgpu.copy_smem_to_gmem(sm.lse.at[pl.ds(0, R)], lse_WKR.at[w, h])
        plgpu.wait_smem_to_gmem(0)


def _attend(
    pages: Pages,
    length: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    sm: DecodeMemory,
    window: int | None,
) -> Softmax:
    """Return the softmax over a part's tiles."""
    seen_from = jnp.maximum(length - window, 0) if window else 0

    def fetch(tile: jax.Array) -> None:
        slot = lax.rem(tile - begin, SLOTS)
        for x_PKBH, at, ready in (
            (pages.k_PKBH, sm.k, sm.k_ready),
            (pages.v_PKBH, sm.v, sm.v_ready),
        ):
            copy_tile(x_PKBH, at.at[slot], ready.at[slot], pages.table_M, pages.head, tile)

    def one_tile(tile: jax.Array, carry: Softmax) -> Softmax:
        slot = lax.rem(tile - begin, SLOTS)
        token = plgpu.broadcasted_iota(jnp.int32, (ROWS, DECODE_TILE), 1, layout=plgpu.Layout.WGMMA)
        token += tile * DECODE_TILE
        seen = token < length
        if window:
            seen &= token >= seen_from
        k_scale, v_scale = pages.scales(tile, DECODE_TILE)
        plgpu.barrier_wait(sm.k_ready.at[slot])
        k, v = sm.k.at[slot], sm.v.at[slot]
        if sm.wide_k is not None:
            widen(k, sm.wide_k)
            plgpu.commit_smem()
            k, v = sm.wide_k, sm.wide_v
        score = product(sm.q, k.transpose((1, 0)))
        found = weigh(carry, masked(seen, score, k_scale), (None, v_scale))
        plgpu.barrier_wait(sm.v_ready.at[slot])
        missing_from = length - tile * DECODE_TILE
        if sm.wide_v is not None:
            widen(sm.v.at[slot], sm.wide_v, missing_from)
            plgpu.commit_smem()
        else:
            clear_after(v, missing_from)
        so_far = found.over(carry.out_RH)
        out_RH = add_product(so_far.out_RH, found.weight_RJ.astype(v.dtype), v, sm.weight)
        pl.when(tile + SLOTS < end)(partial(fetch, tile + SLOTS))
        return so_far._replace(out_RH=out_RH)

    for ahead in range(SLOTS):
        pl.when(begin + ahead < end)(partial(fetch, begin + ahead))
    plgpu.barrier_wait(sm.q_ready)
    return lax.fori_loop(begin, end, one_tile, start(sm.q.shape[1]))
