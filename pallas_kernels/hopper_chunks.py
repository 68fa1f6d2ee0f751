"""Prefill for Hopper: two warpgroups take turns to multiply, one fetches; see ``hopper``."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.gpu_work import Ref, chunk_tiles, product_dtype
from jaxinfer.pallas_kernels.hopper_layout import COPIED, layout, tile_rows
from jaxinfer.pallas_kernels.hopper_tiles import (
    CONSUMERS,
    ROWS,
    SLOTS,
    Pages,
    Softmax,
    Weighed,
    add_product,
    clear_after,
    copy_tile,
    masked,
    product,
    scores_beside_values,
    shared,
    start,
    store,
    weigh,
    widen,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages


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

    There is one launch for all chunks. Rows without a chunk give 0.

    Args:
        interpret: parameters of Mosaic's interpret mode, to check results on a CPU.
    """
    T, N, H = q_TNH.shape
    K, dtype, entries = kv.values.shape[1], product_dtype(kv), kv.keys.dtype
    G = N // K
    fit = tile_rows(G)
    lie = layout(row_C1, T, fit)
    size_C = row_C1[1:] - row_C1[:-1]
    tiles = chunk_tiles(start_C, size_C, lie.begin_C, T, fit.tokens)
    q_YKGH = q_TNH.astype(dtype).reshape(T, K, G, H)[lie.token_Y]
    q_YKGH = jnp.pad(q_YKGH, ((0, 0), (0, 0), (0, fit.heads - G), (0, 0)))
    q_KYH = q_YKGH.transpose(1, 0, 2, 3).reshape(K, -1, H)
    scales = () if kv.key_scale_PK is None else (kv.key_scale_PK, kv.value_scale_PK)
    # As many as fit into shared memory; for 8-bit entries, those with one scale.
    tile = 128 if H <= 128 and not scales else 64
    of_heads = partial(shared, dtype=dtype, head_dim=H)
    raw_slots = SLOTS if H <= 192 else 1
    raw = shared((raw_slots, tile, H), entries, H) if scales else None
    arrived = plgpu.Barrier(num_barriers=raw_slots) if scales else None
    copies = 1 if scales else pl.cdiv(tile, kv.values.shape[2])
    ready = plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=SLOTS)
    out_KYH = plgpu.kernel(
        partial(_chunk, G=fit.heads, window=window),
        out_type=jax.ShapeDtypeStruct(q_KYH.shape, dtype),
        grid=(len(tiles.chunk), K),
        grid_names=("tile", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=(
            ChunkMemory(
                q=of_heads((CONSUMERS, ROWS, H)),
                k=of_heads((SLOTS, tile, H)),
                v=of_heads((SLOTS, tile, H)),
                raw_k=raw,
                raw_v=raw,
                weight=of_heads((CONSUMERS, ROWS, tile)) if interpret else None,
                q_ready=plgpu.Barrier(num_barriers=CONSUMERS),
                k_ready=ready,
                v_ready=ready,
                k_arrived=arrived,
                v_arrived=arrived,
                k_free=free,
                v_free=free,
                turn=plgpu.Barrier(num_barriers=CONSUMERS),
                cleared=plgpu.Barrier(num_arrivals=CONSUMERS),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_chunk",
    )(q_KYH, kv.keys, kv.values, page_table_CM, *tiles, *scales)
    out_KYGH = out_KYH.reshape(K, -1, fit.heads, H)
    out_TKGH = out_KYGH[:, lie.place_T, :G].swapaxes(0, 1).astype(jnp.float32)
    return jnp.where((lie.place_T >= 0)[:, None, None], out_TKGH.reshape(T, N, H), 0)


class ChunkMemory(NamedTuple):
    """A program's shared memory, and the barriers that guard it.

    Attributes:
        k: ring of tiles of keys, with 16 bits.
        v: ring of tiles of values, with 16 bits.
        k_ready, v_ready: a tile is ready.
        k_free, v_free: a tile has been multiplied.
        raw_k, raw_v: rings of entries of 8 bits as they arrive; otherwise None.
        k_arrived, v_arrived: a tile of 8 bits has arrived; otherwise None.
        weight: only for interpretation, see ``hopper_tiles.add_product``.
        turn: each warpgroup waits here until the other has issued its products.
        cleared: values of missing tokens in the last tile are cleared.
    """

    q: Ref
    k: Ref
    v: Ref
    raw_k: Ref
    raw_v: Ref
    weight: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    k_arrived: Ref
    v_arrived: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref
    cleared: Ref


class Rows(NamedTuple):
    """A tile of a chunk's rows, tokens times G heads.

    Attributes:
        start: position of the first token.
        size: number of tokens.
        begin: first tile of context that they see.
        end: end of these tiles.
    """

    start: jax.Array
    size: jax.Array
    begin: Any
    end: jax.Array
    G: int
    window: int | None


def _chunk(
    q_KYH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_CM: Ref,
    chunk_I: Ref, row_I: Ref, start_I: Ref, size_I: Ref, *rest: Any, G: int, window: int | None,
) -> None:  # fmt: skip
    *scales_PK, out_KYH, sm = rest
    i, h, me = (lax.axis_index(name) for name in ("tile", "head", "warpgroup"))
    tile, start_at, size = sm.k.shape[1], start_I[i], size_I[i]
    begin = lax.div(jnp.maximum(start_at - window + 1, 0), tile) if window else 0
    mine = Rows(start_at, size, begin, pl.cdiv(start_at + size, tile), G, window)
    pages = Pages(k_PKBH, v_PKBH, tuple(scales_PK), table_CM.at[chunk_I[i]], h)

    @pl.when((me == CONSUMERS) & (size > 0))
    def _() -> None:
        plgpu.set_max_registers(72 if scales_PK else 40, action="decrease")
        (_fetch_wide if scales_PK else _fetch)(pages, mine, sm)
        # Interpret mode requires as many waits as arrivals.
        for slot in range(SLOTS):
            for free in (sm.k_free, sm.v_free):
                pl.when(begin + slot < mine.end)(partial(plgpu.barrier_wait, free.at[slot]))

    @pl.when((me < CONSUMERS) & (size > 0))
    def _() -> None:
        plgpu.set_max_registers(216 if scales_PK else 232, action="increase")
        q = sm.q.at[me]
        # A multiple of the rows that are copied, like units.
        row = pl.multiple_of(row_I[i] * G, COPIED) + me * ROWS
        plgpu.copy_gmem_to_smem(q_KYH.at[h, pl.ds(row, ROWS)], q, sm.q_ready.at[me])
        plgpu.barrier_wait(sm.q_ready.at[me])
        store(_multiply(pages, mine, sm, me), q)
        plgpu.commit_smem()
        _write(q, out_KYH.at[h], row, size * G - me * ROWS)
        plgpu.wait_smem_to_gmem(0)


def _fetch(pages: Pages, mine: Rows, sm: ChunkMemory) -> None:
    """Copy tiles to where they are multiplied."""

    @pl.loop(mine.begin, mine.end)
    def _(step: jax.Array) -> None:
        slot = lax.rem(step - mine.begin, SLOTS)
        for x_PKBH, x, ready, free in (
            (pages.k_PKBH, sm.k, sm.k_ready, sm.k_free),
            (pages.v_PKBH, sm.v, sm.v_ready, sm.v_free),
        ):
            pl.when(step >= mine.begin + SLOTS)(partial(plgpu.barrier_wait, free.at[slot]))
            copy_tile(x_PKBH, x.at[slot], ready.at[slot], pages.table_M, pages.head, step)


def _fetch_wide(pages: Pages, mine: Rows, sm: ChunkMemory) -> None:
    """Copy tiles of 8-bit entries, and write them with 16 bits to where they are multiplied."""
    begin, end, tile, raw_slots = mine.begin, mine.end, sm.k.shape[1], sm.raw_k.shape[0]

    def copy(step: jax.Array) -> None:
        slot = lax.rem(step - begin, raw_slots)
        for x_PKBH, raw, arrived in (
            (pages.k_PKBH, sm.raw_k, sm.k_arrived),
            (pages.v_PKBH, sm.raw_v, sm.v_arrived),
        ):
            copy_tile(x_PKBH, raw.at[slot], arrived.at[slot], pages.table_M, pages.head, step)

    for ahead in range(raw_slots):
        pl.when(begin + ahead < end)(partial(copy, begin + ahead))

    @pl.loop(begin, end)
    def _(step: jax.Array) -> None:
        slot, raw_slot = lax.rem(step - begin, SLOTS), lax.rem(step - begin, raw_slots)
        missing_from = mine.start + mine.size - step * tile
        for raw, x, arrived, ready, free, count in (
            (sm.raw_k, sm.k, sm.k_arrived, sm.k_ready, sm.k_free, None),
            (sm.raw_v, sm.v, sm.v_arrived, sm.v_ready, sm.v_free, missing_from),
        ):
            plgpu.barrier_wait(arrived.at[raw_slot])
            pl.when(step >= begin + SLOTS)(partial(plgpu.barrier_wait, free.at[slot]))
            widen(raw.at[raw_slot], x.at[slot], count)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])
        pl.when(step + raw_slots < end)(partial(copy, step + raw_slots))


def _multiply(pages: Pages, mine: Rows, sm: ChunkMemory, me: jax.Array) -> Softmax:
    """Return the softmax of a warpgroup's rows over all tiles."""
    q, weights = sm.q.at[me], None if sm.weight is None else sm.weight.at[me]
    begin, end, tile = mine.begin, mine.end, sm.k.shape[1]

    def weigh_tile(some: bool, step: jax.Array, so_far: Softmax, score: jax.Array) -> Weighed:
        """Weigh a tile's scores; rows see all of them, or only some."""
        k_scale, v_scale = pages.scales(step, tile)
        if not some:
            return weigh(so_far, score, (k_scale, v_scale))
        iota = partial(plgpu.broadcasted_iota, jnp.int32, score.shape, layout=plgpu.Layout.WGMMA)
        # Position of the row minus position of the token.
        distance = lax.div(iota(0) + me * ROWS, mine.G) - iota(1) + (mine.start - step * tile)
        seen = distance >= 0
        if mine.window:
            seen &= distance < mine.window
        return weigh(so_far, masked(seen, score, k_scale), (None, v_scale))

    def one_tile(
        some: bool, step: jax.Array, carry: tuple[Softmax, jax.Array]
    ) -> tuple[Softmax, jax.Array]:
        """Compute a tile's scores, and multiply the values of the previous tile."""
        so_far, weight = carry
        slot, before = lax.rem(step - begin, SLOTS), lax.rem(step - 1 - begin, SLOTS)

        def weigh_scores(score: jax.Array) -> Weighed:
            plgpu.barrier_arrive(sm.k_free.at[slot])
            return weigh_tile(some, step, so_far, score)

        plgpu.barrier_wait(sm.k_ready.at[slot])
        done = scores_beside_values(
            so_far,
            q,
            sm.k.at[slot].transpose((1, 0)),
            weight,
            sm.v.at[before],
            weigh_scores=weigh_scores,
            before_values=partial(plgpu.barrier_wait, sm.v_ready.at[before]),
            issued=partial(plgpu.barrier_arrive, sm.turn.at[1 - me]),
            weighed=partial(plgpu.barrier_wait, sm.turn.at[me]),
            weight_sm=weights,
        )
        plgpu.barrier_arrive(sm.v_free.at[before])
        return done

    plgpu.barrier_wait(sm.k_ready.at[0])
    score = product(q, sm.k.at[0].transpose((1, 0)))
    plgpu.barrier_arrive(sm.k_free.at[0])
    nothing = start(q.shape[1])
    found = weigh_tile(True, begin, nothing, score)
    carry = found.over(nothing.out_RH), found.weight_RJ.astype(q.dtype)
    # The tensor cores compute one's products during the other's softmax; the first takes the first
    # turn.
    pl.when(me == 1)(partial(plgpu.barrier_wait, sm.turn.at[me]))
    # Up to here, every row sees every token.
    whole = begin + 1 if mine.window else jnp.maximum(lax.div(mine.start + 1, tile), 1)
    carry = lax.fori_loop(begin + 1, whole, partial(one_tile, False), carry)
    so_far, weight = lax.fori_loop(whole, end, partial(one_tile, True), carry)
    last = lax.rem(end - 1 - begin, SLOTS)
    plgpu.barrier_wait(sm.v_ready.at[last])
    pl.when(me == 0)(partial(plgpu.barrier_arrive, sm.turn.at[1]))
    if sm.raw_v is None:
        # Only the last tile can have tokens that do not exist.
        missing_from = mine.start + mine.size - (end - 1) * tile
        clear_after(sm.v.at[last], missing_from, me, sm.cleared)
    out_RH = add_product(so_far.out_RH, weight, sm.v.at[last], weights)
    plgpu.barrier_arrive(sm.v_free.at[last])
    return so_far._replace(out_RH=out_RH)


def _write(out_sm: Ref, out_YH: Ref, row: jax.Array, count: jax.Array) -> None:
    """Write a warpgroup's first ``count`` rows; later rows belong to other tiles."""

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
