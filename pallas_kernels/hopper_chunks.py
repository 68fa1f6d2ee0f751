"""Prefill for Hopper: two warpgroups multiply in turns, one fetches; see ``hopper``."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.gpu_work import Ref, chunk_tiles
from jaxinfer.pallas_kernels.hopper_tiles import (
    CONSUMERS,
    ROWS,
    SLOTS,
    Softmax,
    Weighed,
    add_product,
    clear_after,
    copy_tile,
    product,
    scores_beside_values,
    shared,
    start,
    store,
    weigh,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.reference import MASKED, work_items

# Rows of queries that a copy by TMA begins at multiples of, and takes at least.
COPIED = 8


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

    One launch for all chunks. Rows of no chunk give 0.

    Args:
        interpret: parameters of Mosaic's interpret mode, to check results on a CPU.
    """
    T, N, H = q_TNH.shape
    K, dtype = kv.values.shape[1], kv.keys.dtype
    G = N // K
    fit = tile_rows(G)
    lie = _layout(row_C1, T, fit)
    size_C = row_C1[1:] - row_C1[:-1]
    tiles = chunk_tiles(start_C, size_C, lie.begin_C, T, fit.tokens)
    q_YKGH = q_TNH.astype(dtype).reshape(T, K, G, H)[lie.token_Y]
    q_YKGH = jnp.pad(q_YKGH, ((0, 0), (0, 0), (0, fit.heads - G), (0, 0)))
    q_KYH = q_YKGH.transpose(1, 0, 2, 3).reshape(K, -1, H)
    # As much as shared memory has room for.
    tile = 128 if H <= 128 else 64
    ring, of_heads = (SLOTS, tile, H), partial(shared, dtype=dtype, head_dim=H)
    ready = plgpu.Barrier(num_arrivals=pl.cdiv(tile, kv.values.shape[2]), num_barriers=SLOTS)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=SLOTS)
    weights = of_heads((CONSUMERS, ROWS, tile)) if interpret else plgpu.SMEM((1,), dtype)
    out_KYH = plgpu.kernel(
        partial(_chunk, G=fit.heads, tile=tile, window=window, interpret=bool(interpret)),
        out_type=jax.ShapeDtypeStruct(q_KYH.shape, dtype),
        grid=(len(tiles.chunk), K),
        grid_names=("tile", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=(
            of_heads((CONSUMERS, ROWS, H)),
            of_heads(ring),
            of_heads(ring),
            weights,
            plgpu.Barrier(num_barriers=CONSUMERS),
            ready,
            ready,
            free,
            free,
            plgpu.Barrier(num_barriers=CONSUMERS),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_chunk",
    )(q_KYH, kv.keys, kv.values, page_table_CM, *tiles)
    out_KYGH = out_KYH.reshape(K, -1, fit.heads, H)
    out_TKGH = out_KYGH[:, lie.place_T, :G].swapaxes(0, 1).astype(jnp.float32)
    return jnp.where((lie.place_T >= 0)[:, None, None], out_TKGH.reshape(T, N, H), 0)


class Fit(NamedTuple):
    """How a tile's rows are made of tokens.

    Attributes:
        heads: of a token, with padding.
        unit: tokens at whose multiples a copy can begin; ``tokens``: of a tile, a multiple.
    """

    heads: int
    unit: int
    tokens: int


def tile_rows(group: int) -> Fit:
    """Choose the padding of heads with which a tile holds the most tokens."""

    def fit(heads: int) -> Fit:
        unit = COPIED // math.gcd(COPIED, heads)
        return Fit(heads, unit, CONSUMERS * ROWS // heads // unit * unit)

    return max(map(fit, range(group, group + COPIED)), key=lambda fit: (fit.tokens, -fit.heads))


class Layout(NamedTuple):
    """Where queries lie for the kernel, and results: Y tokens, each chunk's from a unit on.

    Attributes:
        begin_C: of each chunk; ``token_Y``: which token's lie there, of padding any's.
        place_T: the other way round, -1 of a row of no chunk.
    """

    begin_C: jax.Array
    token_Y: jax.Array
    place_T: jax.Array


def _layout(row_C1: jax.Array, T: int, fit: Fit) -> Layout:
    size_C = row_C1[1:] - row_C1[:-1]
    taken_C = pl.cdiv(size_C, fit.unit) * fit.unit
    # Each chunk ends with a part-filled unit at worst, and the last tile reaches past its end.
    Y = T + min(len(size_C), T) * (fit.unit - 1) + fit.tokens + COPIED
    Y = pl.cdiv(Y, COPIED) * COPIED
    chunk_Y, index_Y, _ = work_items(taken_C, Y)
    token_Y = row_C1[chunk_Y] + index_Y
    to_Y = jnp.where(index_Y < size_C[chunk_Y], token_Y, T)
    place_T = jnp.full(T, -1).at[to_Y].set(jnp.arange(Y), mode="drop")
    return Layout(jnp.cumsum(taken_C) - taken_C, jnp.minimum(token_Y, T - 1), place_T)


def _chunk(
    q_KYH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_CM: Ref,
    chunk_I: Ref, row_I: Ref, start_I: Ref, size_I: Ref, out_KYH: Ref,
    q_sm: Ref, k_sm: Ref, v_sm: Ref, weight_sm: Ref,
    q_ready: Ref, k_ready: Ref, v_ready: Ref, k_free: Ref, v_free: Ref, turn: Ref, cleared: Ref,
    *, G: int, tile: int, window: int | None, interpret: bool,
) -> None:  # fmt: skip
    i, h, me = (lax.axis_index(name) for name in ("tile", "head", "warpgroup"))
    c, start_at, size = chunk_I[i], start_I[i], size_I[i]
    length = start_at + size
    end = pl.cdiv(length, tile)
    begin = lax.div(jnp.maximum(start_at - window + 1, 0), tile) if window else 0

    @pl.when((me == CONSUMERS) & (size > 0))
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(begin, end)
        def _(step: jax.Array) -> None:
            slot = lax.rem(step - begin, SLOTS)
            for pages, at, ready, free in (
                (k_PKBH, k_sm, k_ready, k_free),
                (v_PKBH, v_sm, v_ready, v_free),
            ):
                pl.when(step >= begin + SLOTS)(partial(plgpu.barrier_wait, free.at[slot]))
                copy_tile(pages, at.at[slot], ready.at[slot], table_CM.at[c], h, step)

        # What is waited for once is waited for each time: interpret mode asks for it.
        for slot in range(SLOTS):
            for free in (k_free, v_free):
                pl.when(begin + slot < end)(partial(plgpu.barrier_wait, free.at[slot]))

    @pl.when((me < CONSUMERS) & (size > 0))
    def _multiply() -> None:
        plgpu.set_max_registers(232, action="increase")
        q, weights = q_sm.at[me], weight_sm.at[me] if interpret else None
        # A multiple of the rows that are copied, as units are.
        row = pl.multiple_of(row_I[i] * G, COPIED) + me * ROWS
        plgpu.copy_gmem_to_smem(q_KYH.at[h, pl.ds(row, ROWS)], q, q_ready.at[me])
        plgpu.barrier_wait(q_ready.at[me])

        def see(step: jax.Array, score: jax.Array) -> jax.Array:
            """Mask what a row does not see of a tile."""
            iota = partial(
                plgpu.broadcasted_iota, jnp.int32, (ROWS, tile), layout=plgpu.Layout.WGMMA
            )
            # Of the row minus of the token.
            distance = lax.div(iota(0) + me * ROWS, G) - iota(1) + (start_at - step * tile)
            seen = distance >= 0
            if window:
                seen &= distance < window
            return jnp.where(seen, score, MASKED)

        def one_tile(
            masked: bool, step: jax.Array, carry: tuple[Softmax, jax.Array]
        ) -> tuple[Softmax, jax.Array]:
            """A tile's scores, and the values of the one before."""
            so_far, weight = carry
            slot, before = lax.rem(step - begin, SLOTS), lax.rem(step - 1 - begin, SLOTS)

            def weigh_scores(score: jax.Array) -> Weighed:
                plgpu.barrier_arrive(k_free.at[slot])
                return weigh(so_far, see(step, score) if masked else score)

            plgpu.barrier_wait(k_ready.at[slot])
            done = scores_beside_values(
                so_far, q, k_sm.at[slot].transpose((1, 0)), weight, v_sm.at[before],
                weigh_scores=weigh_scores,
                before_values=partial(plgpu.barrier_wait, v_ready.at[before]),
                issued=partial(plgpu.barrier_arrive, turn.at[1 - me]),
                weighed=partial(plgpu.barrier_wait, turn.at[me]),
                weight_sm=weights,
            )  # fmt: skip
            plgpu.barrier_arrive(v_free.at[before])
            return done

        plgpu.barrier_wait(k_ready.at[0])
        score = product(q, k_sm.at[0].transpose((1, 0)))
        plgpu.barrier_arrive(k_free.at[0])
        found = weigh(start(q.shape[1]), see(begin, score))
        carry = found.over(start(q.shape[1]).out_RH), found.weight_RJ.astype(q.dtype)
        # The tensor cores do one's products while the other's softmax is computed: the first turn
        # is the first one's.
        pl.when(me == 1)(partial(plgpu.barrier_wait, turn.at[me]))
        # Up to here, every row sees every token.
        whole = begin + 1 if window else jnp.maximum(lax.div(start_at + 1, tile), 1)
        carry = lax.fori_loop(begin + 1, whole, partial(one_tile, False), carry)
        so_far, weight = lax.fori_loop(whole, end, partial(one_tile, True), carry)
        last = lax.rem(end - 1 - begin, SLOTS)
        plgpu.barrier_wait(v_ready.at[last])
        pl.when(me == 0)(partial(plgpu.barrier_arrive, turn.at[1]))
        # Only the last tile can have tokens that do not exist.
        clear_after(v_sm.at[last], length - (end - 1) * tile, me, cleared)
        out_RH = add_product(so_far.out_RH, weight, v_sm.at[last], weights)
        plgpu.barrier_arrive(v_free.at[last])
        store(so_far._replace(out_RH=out_RH), q)
        plgpu.commit_smem()
        _write(q, out_KYH.at[h], row, size * G - me * ROWS)
        plgpu.wait_smem_to_gmem(0)


def _write(out_sm: Ref, out_YH: Ref, row: jax.Array, count: jax.Array) -> None:
    """Write a warpgroup's first ``count`` rows: what follows belongs to other tiles."""

    @pl.when(count >= ROWS)
    def _all() -> None:
        plgpu.copy_smem_to_gmem(out_sm, out_YH.at[pl.ds(row, ROWS)])

    @pl.when(count < ROWS)
    def _some() -> None:
        for at in range(0, ROWS, COPIED):

            @pl.when(at < count)
            def _(at: int = at) -> None:
                from_ = out_sm.at[pl.ds(at, COPIED)]
                plgpu.copy_smem_to_gmem(from_, out_YH.at[pl.ds(row + at, COPIED)])
