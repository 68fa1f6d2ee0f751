"""Decode for Hopper: one warpgroup per sequence, KV head and part of a context; see ``hopper``."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.decode_parts import decode_parts, joined
from jaxinfer.pallas_kernels.gpu_work import Ref, decode_queries, product_dtype
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
    product_of_halves,
    shared,
    start,
    store,
    weigh,
    widen,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages

# Number of context tokens in a tile; two or three programs then fit on a multiprocessor.
DECODE_TILE = 64
# Numbers for an H100: multiprocessors, and bytes that programs can have on each; a program needs 3
# kB more.
MULTIPROCESSORS = 132
SHARED_MEMORY = 220 * 1024


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
    _, N, H = q_SNH.shape
    _, K, B, _ = kv.values.shape
    G, dtype, entries = N // K, product_dtype(kv), kv.keys.dtype
    R = -(-G // 8) * 8
    parts = decode_parts(length_S, window, DECODE_TILE, K, programs or programs_at_once(H, entries))
    W = len(parts.sequence_W)
    q_XSKRH, q_scale_SK = decode_queries(q_SNH, kv, R)
    copies = pl.cdiv(DECODE_TILE, B)
    of_heads = partial(shared, dtype=dtype, head_dim=H)
    ring = shared((SLOTS, DECODE_TILE, H), entries, H)
    scales = [x for x in (kv.key_scale_PK, kv.value_scale_PK, q_scale_SK) if x is not None]
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
                q=shared((len(q_XSKRH), ROWS, H), q_XSKRH.dtype, H),
                k=ring,
                v=ring,
                wide=of_heads((DECODE_TILE, H)) if scales else None,
                weight=of_heads((ROWS, DECODE_TILE)) if interpret else None,
                lse=plgpu.SMEM((ROWS,), jnp.float32),
                q_ready=plgpu.Barrier(num_arrivals=len(q_XSKRH)),
                k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
                v_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(q_XSKRH, kv.keys, kv.values, page_table_SM, length_S, *parts[:3], *scales)
    return joined(out_WKRH, lse_WKR, parts, G, bool(interpret))


class DecodeMemory(NamedTuple):
    """A program's shared memory, and the barriers that report arrivals there.

    Attributes:
        q: queries, or the halves of their fixed-point numbers.
        k: ring of tiles of keys, as stored in pages.
        v: ring of tiles of values, as stored in pages.
        wide: a tile with 16 bits, for entries of 8 bits; otherwise None.
        weight: only for interpretation, see ``hopper_tiles.add_product``.
    """

    q: Ref
    k: Ref
    v: Ref
    wide: Ref
    weight: Ref
    lse: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref


def programs_at_once(head_dim: int, entries: Any = jnp.bfloat16) -> int:
    """Return how many decode programs an H100 runs at once; their memory and registers limit them.

    Args:
        entries: dtype of KV entries.
    """
    itemsize = jnp.dtype(entries).itemsize
    wide = 2 if itemsize == 1 else 0
    size = head_dim * (2 * ROWS + (2 * SLOTS * itemsize + wide) * DECODE_TILE)
    # For three, a thread must not have more than 168 registers.
    most = 3 if entries == jnp.int8 and head_dim <= 128 else 2
    return MULTIPROCESSORS * min(most, SHARED_MEMORY // size)


def _decode(
    q_XSKRH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_SM: Ref, length_S: Ref,
    sequence_W: Ref, begin_W: Ref, end_W: Ref, *rest: Any, window: int | None,
) -> None:  # fmt: skip
    *scales, out_WKRH, lse_WKR, sm = rest
    w, h = lax.axis_index("part"), lax.axis_index("head")
    s, begin, end = sequence_W[w], begin_W[w], end_W[w]
    R = out_WKRH.shape[2]

    @pl.when(begin < end)
    def _() -> None:
        for x in range(len(q_XSKRH)):
            plgpu.copy_gmem_to_smem(q_XSKRH.at[x, s, h], sm.q.at[x, pl.ds(0, R)], sm.q_ready)
        pages = Pages(k_PKBH, v_PKBH, tuple(scales[:2]), table_SM.at[s], h)
        q_scale = scales[2][s, h] if len(scales) > 2 else None
        done = _attend(pages, length_S[s], begin, end, sm, q_scale, window)
        out = sm.q.at[0] if sm.wide is None else sm.wide
        sm.lse[...] = done.max_R + jnp.log(store(done, out)) * LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, R)], out_WKRH.at[w, h])
        plgpu.copy_smem_to_gmem(sm.lse.at[pl.ds(0, R)], lse_WKR.at[w, h])
        plgpu.wait_smem_to_gmem(0)


def _attend(
    pages: Pages,
    length: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    sm: DecodeMemory,
    q_scale: jax.Array | None,
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

    def scores(k: Ref) -> jax.Array:
        if q_scale is not None:
            return product_of_halves(sm.q, k.transpose((1, 0)))
        if sm.wide is not None:
            widen(k, sm.wide)
            plgpu.commit_smem()
            k = sm.wide
        return product(sm.q.at[0], k.transpose((1, 0)))

    def one_tile(some: bool, tile: jax.Array, carry: Softmax) -> Softmax:
        """Add a tile, of which all tokens are seen, or only some."""
        slot = lax.rem(tile - begin, SLOTS)
        k_scale, v_scale = pages.scales(tile, DECODE_TILE)
        if q_scale is not None:
            k_scale *= q_scale
        missing_from = length - tile * DECODE_TILE
        v = sm.v.at[slot]
        if q_scale is not None:
            # Not between scores and values, where more registers are in use.
            plgpu.barrier_wait(sm.v_ready.at[slot])
            widen(v, sm.wide)
        plgpu.barrier_wait(sm.k_ready.at[slot])
        score = scores(sm.k.at[slot])
        if some:
            iota = partial(plgpu.broadcasted_iota, layout=plgpu.Layout.WGMMA)
            token = iota(jnp.int32, score.shape, 1) + tile * DECODE_TILE
            seen = token < length
            if window:
                seen &= token >= seen_from
            score, k_scale = masked(seen, score, k_scale), None
        found = weigh(carry, score, (k_scale, v_scale))
        if q_scale is None:
            plgpu.barrier_wait(sm.v_ready.at[slot])
        if sm.wide is not None:
            if q_scale is None:
                widen(v, sm.wide, missing_from if some else None)
            plgpu.commit_smem()
            v = sm.wide
        elif some:
            clear_after(v, missing_from)
        so_far = found.over(carry.out_RH)
        out_RH = add_product(so_far.out_RH, found.weight_RJ.astype(v.dtype), v, sm.weight)
        pl.when(tile + SLOTS < end)(partial(fetch, tile + SLOTS))
        return so_far._replace(out_RH=out_RH)

    for ahead in range(SLOTS):
        pl.when(begin + ahead < end)(partial(fetch, begin + ahead))
    plgpu.barrier_wait(sm.q_ready)
    whole = begin if window else jnp.clip(lax.div(length, DECODE_TILE), begin, end)
    done = lax.fori_loop(begin, whole, partial(one_tile, False), start(sm.q.shape[2]))
    return lax.fori_loop(whole, end, partial(one_tile, True), done)
