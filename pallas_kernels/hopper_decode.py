"""Decode for Hopper: one warpgroup per sequence, KV head and part of a context; see ``hopper``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.decode_parts import decode_parts, joined
from jaxinfer.pallas_kernels.gpu_work import Ref
from jaxinfer.pallas_kernels.hopper_tiles import (
    LOG2_E,
    ROWS,
    SLOTS,
    Softmax,
    add_product,
    clear_after,
    copy_tile,
    product,
    shared,
    start,
    store,
    weigh,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.reference import MASKED

# Tokens of context in a tile: two programs then have room on a multiprocessor.
DECODE_TILE = 64
# Of an H100; bytes of each that programs can have, which take 1 kB more themselves.
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
        programs: that are to run at once; contexts are cut into parts until there are so many. By
            default those that fill an H100.
        interpret: parameters of Mosaic's interpret mode, to check results on a CPU.
    """
    S, N, H = q_SNH.shape
    _, K, B, _ = kv.values.shape
    G, dtype = N // K, kv.keys.dtype
    R = -(-G // 8) * 8
    parts = decode_parts(length_S, window, DECODE_TILE, K, programs or programs_at_once(H))
    W = len(parts.sequence_W)
    q_SKGH = q_SNH.astype(dtype).reshape(S, K, G, H)
    q_SKRH = jnp.pad(q_SKGH, ((0, 0), (0, 0), (0, R - G), (0, 0)))
    copies = pl.cdiv(DECODE_TILE, B)
    ring, of_heads = (SLOTS, DECODE_TILE, H), partial(shared, dtype=dtype, head_dim=H)
    out_WKRH, lse_WKR = plgpu.kernel(
        partial(_decode, window=window, interpret=bool(interpret)),
        out_type=(
            jax.ShapeDtypeStruct((W, K, R, H), dtype),
            jax.ShapeDtypeStruct((W, K, R), jnp.float32),
        ),
        grid=(W, K),
        grid_names=("part", "head"),
        scratch_types=(
            of_heads((ROWS, H)),
            of_heads(ring),
            of_heads(ring),
            of_heads((ROWS, DECODE_TILE)) if interpret else plgpu.SMEM((1,), dtype),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(q_SKRH, kv.keys, kv.values, page_table_SM, length_S, *parts[:3])
    return joined(out_WKRH, lse_WKR, parts, G, bool(interpret))


def programs_at_once(head_dim: int) -> int:
    """Return how many decode programs an H100 runs at once: shared memory holds one or two each."""
    size = 2 * head_dim * (ROWS + 2 * SLOTS * DECODE_TILE)
    return MULTIPROCESSORS * (2 if size <= SHARED_MEMORY // 2 else 1)


def _decode(
    q_SKRH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_SM: Ref, length_S: Ref,
    sequence_W: Ref, begin_W: Ref, end_W: Ref, out_WKRH: Ref, lse_WKR: Ref,
    q_sm: Ref, k_sm: Ref, v_sm: Ref, weight_sm: Ref, lse_sm: Ref,
    q_ready: Ref, k_ready: Ref, v_ready: Ref,
    *, window: int | None, interpret: bool,
) -> None:  # fmt: skip
    w, h = lax.axis_index("part"), lax.axis_index("head")
    s, begin, end = sequence_W[w], begin_W[w], end_W[w]
    pl.when(begin < end)(
        partial(
            _decode_part, q_SKRH.at[s, h], k_PKBH, v_PKBH, table_SM.at[s], length_S[s], h,
            begin, end, out_WKRH.at[w, h], lse_WKR.at[w, h],
            q_sm, k_sm, v_sm, weight_sm if interpret else None, lse_sm,
            q_ready, k_ready, v_ready, window=window,
        )
    )  # fmt: skip


def _decode_part(
    q_RH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_M: Ref, length: jax.Array, h: jax.Array,
    begin: jax.Array, end: jax.Array, out_RH: Ref, lse_R: Ref,
    q_sm: Ref, k_sm: Ref, v_sm: Ref, weight_sm: Ref | None, lse_sm: Ref,
    q_ready: Ref, k_ready: Ref, v_ready: Ref,
    *, window: int | None,
) -> None:  # fmt: skip
    R = out_RH.shape[0]
    seen_from = jnp.maximum(length - window, 0) if window else 0

    def fetch(tile: jax.Array) -> None:
        slot = lax.rem(tile - begin, SLOTS)
        for pages, at, ready in ((k_PKBH, k_sm, k_ready), (v_PKBH, v_sm, v_ready)):
            copy_tile(pages, at.at[slot], ready.at[slot], table_M, h, tile)

    plgpu.copy_gmem_to_smem(q_RH, q_sm.at[pl.ds(0, R)], q_ready)
    for ahead in range(SLOTS):
        pl.when(begin + ahead < end)(partial(fetch, begin + ahead))
    plgpu.barrier_wait(q_ready)

    def one_tile(tile: jax.Array, carry: Softmax) -> Softmax:
        slot = lax.rem(tile - begin, SLOTS)
        token = plgpu.broadcasted_iota(jnp.int32, (ROWS, DECODE_TILE), 1, layout=plgpu.Layout.WGMMA)
        token += tile * DECODE_TILE
        seen = token < length
        if window:
            seen &= token >= seen_from
        plgpu.barrier_wait(k_ready.at[slot])
        score = product(q_sm, k_sm.at[slot].transpose((1, 0)))
        found = weigh(carry, jnp.where(seen, score, MASKED))
        carry, weight = found.over(carry.out_RH), found.weight_RJ.astype(q_sm.dtype)
        plgpu.barrier_wait(v_ready.at[slot])
        clear_after(v_sm.at[slot], length - tile * DECODE_TILE)
        out_RH = add_product(carry.out_RH, weight, v_sm.at[slot], weight_sm)
        carry = carry._replace(out_RH=out_RH)
        pl.when(tile + SLOTS < end)(partial(fetch, tile + SLOTS))
        return carry

    done = lax.fori_loop(begin, end, one_tile, start(q_sm.shape[1]))
    lse_sm[...] = done.max_R + jnp.log(store(done, q_sm)) * LOG2_E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_sm.at[pl.ds(0, R)], out_RH)
    plgpu.copy_smem_to_gmem(lse_sm.at[pl.ds(0, R)], lse_R)
    plgpu.wait_smem_to_gmem(0)
