"""Paged attention for NVIDIA Hopper (sm_90) in Mosaic GPU: pages by TMA, products by wgmma.

The same functions as in ``reference``, whose docstrings say what they compute; keys lie as values
do, ``[K, B, H]``, in 16-bit floats. A page, or the part of it that a tile of tokens needs, is one
TMA copy into a ring of slots in shared memory, whose barriers count the copies. Scores leave the
tensor cores in registers; their weights go back to them through shared memory. The heads that
share a KV head are rows of one product of at least 64.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.generic import Ref, chunk_tiles, parts_of
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.reference import MASKED, NO_SCORE

# Rows that a warpgroup multiplies at once.
ROWS = 64
# Tokens of context in a tile of decodes: two programs then have room on a multiprocessor.
DECODE_TILE = 64
# Programs that an H100 runs at once, two on each multiprocessor.
PROGRAMS = 264
SLOTS = 2
# Warpgroups that multiply in a program of prefill; one more fetches.
CONSUMERS = 2
LOG2_E = math.log2(math.e)


def why_not(head_dim: int, group: int, page_size: int, dtype: jnp.dtype) -> str | None:
    """Say why these kernels cannot run; None if they can. ``group``: query heads per KV head."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"KV entries are {dtype.name}, no 16-bit floats"
    if head_dim % 16 or head_dim > 256:
        return f"head_dim is {head_dim}, no multiple of 16 up to 256"
    if group > ROWS:
        return f"{group} query heads share a KV head, more than {ROWS}"
    if page_size < 8 or (DECODE_TILE % page_size and page_size % 128):
        return f"page_size is {page_size}, neither 8, 16, 32, 64 nor a multiple of 128"
    return None


class Softmax(NamedTuple):
    """An online softmax over the rows of a warpgroup: in registers, as wgmma lays them out.

    Attributes:
        out_RH: values weighted by 2^(score - max).
        max_R: of scores times log2(e); ``sum_R``: of the weights.
    """

    out_RH: jax.Array
    max_R: jax.Array
    sum_R: jax.Array


@partial(jax.jit, static_argnames=("window", "parts", "interpret"))
def decode_attention(
    q_SNH: jax.Array,
    kv: KVPages,
    page_table_SM: jax.Array,
    length_S: jax.Array,
    window: int | None = None,
    parts: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See ``reference.decode_attention``; one program per sequence, KV head and part of its tokens.

    Args:
        parts: of a context, whose results are combined; by default as many as fill an H100.
        interpret: parameters of Mosaic's interpret mode, to check results on a CPU.
    """
    S, N, H = q_SNH.shape
    _, K, B, _ = kv.values.shape
    G, dtype = N // K, kv.keys.dtype
    R = -(-G // 8) * 8
    most = pl.cdiv(page_table_SM.shape[1] * B, DECODE_TILE)
    parts = parts or parts_of(S * K, most, PROGRAMS)
    q_SKGH = q_SNH.astype(dtype).reshape(S, K, G, H)
    q_SKRH = jnp.pad(q_SKGH, ((0, 0), (0, 0), (0, R - G), (0, 0)))
    copies = pl.cdiv(DECODE_TILE, B)
    ring, shared = (SLOTS, DECODE_TILE, H), partial(_shared, dtype=dtype, head_dim=H)
    out, lse = plgpu.kernel(
        partial(_decode, window=window, interpret=bool(interpret)),
        out_type=(
            jax.ShapeDtypeStruct((parts, S, K, R, H), dtype),
            jax.ShapeDtypeStruct((parts, S, K, R), jnp.float32),
        ),
        grid=(S, K, parts),
        grid_names=("sequence", "head", "part"),
        scratch_types=(
            shared((ROWS, H)),
            shared(ring),
            shared(ring),
            shared((ROWS, DECODE_TILE)),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(q_SKRH, kv.keys, kv.values, page_table_SM, length_S)
    weight = jnp.exp2(lse - lse.max(0))[..., None]
    out_SKRH = (out.astype(jnp.float32) * weight).sum(0) / weight.sum(0)
    return out_SKRH[:, :, :G].reshape(S, N, H)


def _decode(
    q_SKRH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_SM: Ref, length_S: Ref,
    out_XSKRH: Ref, lse_XSKR: Ref,
    q_sm: Ref, k_sm: Ref, v_sm: Ref, weight_sm: Ref, lse_sm: Ref,
    q_ready: Ref, k_ready: Ref, v_ready: Ref,
    *, window: int | None, interpret: bool,
) -> None:  # fmt: skip
    s, h, part = (lax.axis_index(name) for name in ("sequence", "head", "part"))
    parts, _, _, R, _ = out_XSKRH.shape
    length = length_S[s]
    seen_from = jnp.maximum(length - window, 0) if window else 0
    tiles = pl.cdiv(length, DECODE_TILE)
    first = lax.div(seen_from, DECODE_TILE) if window else 0
    each = pl.cdiv(tiles - first, parts)
    begin = first + part * each
    end = jnp.minimum(begin + each, tiles)
    table_M = table_SM.at[s]

    def fetch(tile: jax.Array) -> None:
        slot = lax.rem(tile - begin, SLOTS)
        for pages, shared, ready in ((k_PKBH, k_sm, k_ready), (v_PKBH, v_sm, v_ready)):
            _copy_tile(pages, shared.at[slot], ready.at[slot], table_M, h, tile)

    plgpu.copy_gmem_to_smem(q_SKRH.at[s, h], q_sm.at[pl.ds(0, R)], q_ready)
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
        score = _product(q_sm, k_sm.at[slot].transpose((1, 0)), DECODE_TILE)
        carry, weight = _weigh(carry, jnp.where(seen, score, MASKED))
        weight_sm[...] = weight.astype(weight_sm.dtype)
        plgpu.barrier_wait(v_ready.at[slot])
        _clear_after(v_sm.at[slot], length - tile * DECODE_TILE)
        plgpu.commit_smem()
        carry = _add_values(carry, weight_sm, v_sm.at[slot], interpret)
        pl.when(tile + SLOTS < end)(partial(fetch, tile + SLOTS))
        return carry

    done = lax.fori_loop(begin, end, one_tile, _start(q_sm.shape[1]))
    lse_sm[...] = done.max_R + jnp.log(_store(done, q_sm)) * LOG2_E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_sm.at[pl.ds(0, R)], out_XSKRH.at[part, s, h])
    plgpu.copy_smem_to_gmem(lse_sm.at[pl.ds(0, R)], lse_XSKR.at[part, s, h])
    plgpu.wait_smem_to_gmem(0)


@partial(jax.jit, static_argnames=("window", "interpret"))
def chunk_attention(
    q_TNH: jax.Array,
    kv: KVPages,
    page_table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
    window: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See ``reference.chunk_attention``; one program per tile of a chunk and KV head.

    One launch for all chunks. Queries are laid out by tiles first: a copy by TMA begins at a
    multiple of 8 rows. Results are, too, with room for what a chunk does not fill. Rows of no chunk
    give 0.
    """
    T, N, H = q_TNH.shape
    K, dtype = kv.values.shape[1], kv.keys.dtype
    G = N // K
    R = CONSUMERS * ROWS
    tokens = R // G
    tiles = chunk_tiles(start_C, row_C1, T, tokens)
    count = len(tiles.chunk)
    row_IX = tiles.row[:, None] + jnp.arange(tokens)
    q_IXKGH = q_TNH.astype(dtype).reshape(T, K, G, H)[jnp.minimum(row_IX, T - 1)]
    q_IKRH = q_IXKGH.transpose(0, 2, 1, 3, 4).reshape(count, K, tokens * G, H)
    q_IKRH = jnp.pad(q_IKRH, ((0, 0), (0, 0), (0, R - tokens * G), (0, 0)))
    # As much as shared memory has room for.
    tile = 128 if H <= 128 else 64
    ring, shared = (SLOTS, tile, H), partial(_shared, dtype=dtype, head_dim=H)
    ready = plgpu.Barrier(num_arrivals=pl.cdiv(tile, kv.values.shape[2]), num_barriers=SLOTS)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=SLOTS)
    out_IKRH = plgpu.kernel(
        partial(_chunk, G=G, tile=tile, window=window, interpret=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((count, K, R, H), dtype),
        grid=(count, K),
        grid_names=("tile", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=(
            shared((CONSUMERS, ROWS, H)),
            shared(ring),
            shared(ring),
            shared((CONSUMERS, ROWS, tile)),
            plgpu.Barrier(num_barriers=CONSUMERS),
            ready,
            ready,
            free,
            free,
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_chunk",
    )(q_IKRH, kv.keys, kv.values, page_table_CM, *tiles)
    # Where each row's result is: in which tile, and where in it.
    row_IX = jnp.where(jnp.arange(tokens) < tiles.size[:, None], row_IX, T)
    place_T = jnp.full(T, -1).at[row_IX.reshape(-1)].set(jnp.arange(count * tokens), mode="drop")
    out_IKXGH = out_IKRH[:, :, : tokens * G].reshape(count, K, tokens, G, H)
    out_TKGH = out_IKXGH[place_T // tokens, :, place_T % tokens].astype(jnp.float32)
    return jnp.where((place_T >= 0)[:, None, None], out_TKGH.reshape(T, N, H), 0)


def _chunk(
    q_IKRH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_CM: Ref,
    chunk_I: Ref, _: Ref, start_I: Ref, size_I: Ref, out_IKRH: Ref,
    q_sm: Ref, k_sm: Ref, v_sm: Ref, weight_sm: Ref,
    q_ready: Ref, k_ready: Ref, v_ready: Ref, k_free: Ref, v_free: Ref, cleared: Ref,
    *, G: int, tile: int, window: int | None, interpret: bool,
) -> None:  # fmt: skip
    i, h, me = (lax.axis_index(name) for name in ("tile", "head", "warpgroup"))
    c, start, size = chunk_I[i], start_I[i], size_I[i]
    length = start + size
    end = pl.cdiv(length, tile)
    begin = lax.div(jnp.maximum(start - window + 1, 0), tile) if window else 0
    table_M = table_CM.at[c]

    @pl.when((me == CONSUMERS) & (size > 0))
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(begin, end)
        def _(step: jax.Array) -> None:
            slot = lax.rem(step - begin, SLOTS)
            for pages, shared, ready, free in (
                (k_PKBH, k_sm, k_ready, k_free),
                (v_PKBH, v_sm, v_ready, v_free),
            ):
                pl.when(step >= begin + SLOTS)(partial(plgpu.barrier_wait, free.at[slot]))
                _copy_tile(pages, shared.at[slot], ready.at[slot], table_M, h, step)

    @pl.when((me < CONSUMERS) & (size > 0))
    def _multiply() -> None:
        plgpu.set_max_registers(232, action="increase")
        q, weights = q_sm.at[me], weight_sm.at[me]
        mine = pl.ds(me * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q_IKRH.at[i, h, mine], q, q_ready.at[me])
        plgpu.barrier_wait(q_ready.at[me])

        def one_tile(masked: bool, step: jax.Array, carry: Softmax) -> Softmax:
            slot = lax.rem(step - begin, SLOTS)
            plgpu.barrier_wait(k_ready.at[slot])
            score = _product(q, k_sm.at[slot].transpose((1, 0)), tile)
            plgpu.barrier_arrive(k_free.at[slot])
            if masked:
                iota = partial(
                    plgpu.broadcasted_iota, jnp.int32, (ROWS, tile), layout=plgpu.Layout.WGMMA
                )
                # Of the row minus of the token.
                distance = lax.div(iota(0) + me * ROWS, G) - iota(1) + (start - step * tile)
                seen = distance >= 0
                if window:
                    seen &= distance < window
                score = jnp.where(seen, score, MASKED)
            carry, weight = _weigh(carry, score)
            weights[...] = weight.astype(weights.dtype)
            plgpu.barrier_wait(v_ready.at[slot])
            if masked:
                _clear_after(v_sm.at[slot], length - step * tile, me, cleared)
            plgpu.commit_smem()
            carry = _add_values(carry, weights, v_sm.at[slot], interpret)
            plgpu.barrier_arrive(v_free.at[slot])
            return carry

        # Up to here, every row sees every token.
        whole = begin if window else lax.div(start + 1, tile)
        done = lax.fori_loop(begin, whole, partial(one_tile, False), _start(q_sm.shape[2]))
        done = lax.fori_loop(whole, end, partial(one_tile, True), done)
        _store(done, q)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out_IKRH.at[i, h, mine])
        plgpu.wait_smem_to_gmem(0)


def _copy_tile(
    pages_PKBH: Ref,
    shared: Ref,
    ready: Ref,
    table_M: Ref,
    head: jax.Array,
    tile: jax.Array,
) -> None:
    """Start the copies of a tile's tokens, one for each page that they lie in."""
    B, size = pages_PKBH.shape[2], shared.shape[0]
    unit = min(B, size)
    for part in range(size // unit):
        token = tile * size + part * unit
        # A tile may reach past the table's end, where there are no tokens.
        page = table_M[jnp.minimum(lax.div(token, B), table_M.shape[0] - 1)]
        at = pl.ds(lax.rem(token, B), unit) if size < B else slice(None)
        plgpu.copy_gmem_to_smem(
            pages_PKBH.at[page, head, at], shared.at[pl.ds(part * unit, unit)], ready
        )


def _product(a: Ref, b: Ref, columns: int) -> jax.Array:
    """a b, of shared memory, in float32 registers."""

    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        found: jax.Array = acc[...]
        return found

    found: jax.Array = pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32)
    )
    return found


def _weigh(so_far: Softmax, score_RJ: jax.Array) -> tuple[Softmax, jax.Array]:
    """The softmax with new scores, their values still missing; and the weights of these."""
    max_R = jnp.maximum(so_far.max_R, score_RJ.max(1) * LOG2_E)
    weight_RJ = jnp.exp2(score_RJ * LOG2_E - _rows(max_R, score_RJ))
    shrink_R = jnp.exp2(so_far.max_R - max_R)
    out_RH = so_far.out_RH * _rows(shrink_R, so_far.out_RH)
    return Softmax(out_RH, max_R, so_far.sum_R * shrink_R + weight_RJ.sum(1)), weight_RJ


def _add_values(so_far: Softmax, weight_RJ: Ref, v_JH: Ref, interpret: bool) -> Softmax:
    """The softmax with the values of what it was weighed with."""
    if interpret:
        # Accumulators that start with something are not interpreted.
        added_RH = _product(weight_RJ, v_JH, v_JH.shape[1])
        return so_far._replace(out_RH=so_far.out_RH + added_RH)

    def add(acc: Ref) -> None:
        plgpu.wgmma(acc, weight_RJ, v_JH)

    return so_far._replace(out_RH=pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(so_far.out_RH)))


def _store(done: Softmax, out_RH: Ref) -> jax.Array:
    """Write the softmax to shared memory; returns the weights' sums, of no weights something."""
    sum_R = jnp.maximum(done.sum_R, 1e-30)
    out_RH[...] = (done.out_RH / _rows(sum_R, done.out_RH)).astype(out_RH.dtype)
    return sum_R


def _clear_after(v_JH: Ref, count: jax.Array, me: Any = 0, cleared: Ref | None = None) -> None:
    """Zero the values of tokens from ``count`` on: 0 times what memory holds there may be NaN.

    Args:
        me: which of the warpgroups that share the tile, and ``cleared``, on which they then wait.
    """

    def clear(begin: int) -> None:
        part = v_JH.at[pl.ds(begin, ROWS)]
        v = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(row + begin < count, v, jnp.zeros_like(v))

    @pl.when(count < v_JH.shape[0])
    def _() -> None:
        for begin in range(0, v_JH.shape[0], ROWS):
            pl.when(me == begin // ROWS % CONSUMERS)(partial(clear, begin))
        if cleared is not None:
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)


def _start(head_dim: int) -> Softmax:
    of_rows = plgpu.Layout.WGMMA.reduce(1)
    return Softmax(
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), NO_SCORE, jnp.float32), of_rows),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_rows),
    )


def _rows(x_R: jax.Array, like_RX: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x_R, like_RX.shape, [0])


def _shared(shape: tuple[int, ...], dtype: jnp.dtype, head_dim: int) -> Any:
    """Shared memory laid out for TMA and wgmma, which needs both of its operands laid out alike."""
    swizzle = plgpu.find_swizzle(head_dim * 16)
    tiling = plgpu.TilingTransform((8, swizzle // 2))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))
