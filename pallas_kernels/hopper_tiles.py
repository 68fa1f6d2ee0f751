"""Building blocks of the kernels for Hopper: tiles of a context, and a softmax over them."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product as product_of
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.gpu_work import Ref
from jaxinfer.pallas_kernels.reference import MASKED, NO_SCORE

# Number of rows that a warpgroup multiplies at once.
ROWS = 64
# Number of tiles of keys, and of values, that shared memory holds.
SLOTS = 2
# Number of warpgroups that multiply in a program of prefill; one more fetches.
CONSUMERS = 2
LOG2_E = math.log2(math.e)


class Softmax(NamedTuple):
    """An online softmax over the rows of a warpgroup, in wgmma's register layout.

    Attributes:
        out_RH: values weighted by 2^(score - max).
        max_R: maximum of scores times log2(e).
        sum_R: sum of the weights.
    """

    out_RH: jax.Array
    max_R: jax.Array
    sum_R: jax.Array


class Weighed(NamedTuple):
    """A tile's weights [R, J], and the updated softmax statistics before its values.

    Attributes:
        shrink_R: factor for the values so far.
    """

    weight_RJ: jax.Array
    max_R: jax.Array
    sum_R: jax.Array
    shrink_R: jax.Array

    def over(self, out_RH: jax.Array) -> Softmax:
        """Return the softmax with the values so far."""
        return Softmax(out_RH * rows(self.shrink_R, out_RH), self.max_R, self.sum_R)


def start(head_dim: int) -> Softmax:
    """Return the state of a softmax that has not seen any scores."""
    of_rows = plgpu.Layout.WGMMA.reduce(1)
    return Softmax(
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), NO_SCORE, jnp.float32), of_rows),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_rows),
    )


def weigh(so_far: Softmax, score_RJ: jax.Array, scales: tuple[Any, Any] = (None, None)) -> Weighed:
    """Weigh a tile's new scores, and update the statistics of the softmax.

    Args:
        scales: factors for the scores, and for the weights after they are summed.
    """
    of_scores, of_weights = scales
    to_log2 = LOG2_E if of_scores is None else of_scores * LOG2_E
    max_R = jnp.maximum(so_far.max_R, score_RJ.max(1) * to_log2)
    weight_RJ = jnp.exp2(score_RJ * to_log2 - rows(max_R, score_RJ))
    shrink_R = jnp.exp2(so_far.max_R - max_R)
    sum_R = so_far.sum_R * shrink_R + weight_RJ.sum(1)
    weight_RJ = weight_RJ if of_weights is None else weight_RJ * of_weights
    return Weighed(weight_RJ, max_R, sum_R, shrink_R)


def store(done: Softmax, out_RH: Ref) -> jax.Array:
    """Write the softmax to shared memory; return the sums of the weights, at least 1e-30."""
    sum_R = jnp.maximum(done.sum_R, 1e-30)
    out_RH[...] = (done.out_RH / rows(sum_R, done.out_RH)).astype(out_RH.dtype)
    return sum_R


def rows(x_R: jax.Array, like_RX: jax.Array) -> jax.Array:
    """Broadcast a number per row to all of its columns."""
    return lax.broadcast_in_dim(x_R, like_RX.shape, [0])


def product(a: Ref, b: Ref) -> jax.Array:
    """Multiply a by b from shared memory, into float32 registers."""

    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        found: jax.Array = acc[...]
        return found

    shape = a.shape[0], b.shape[1]
    found: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    return found


def product_of_halves(a_2RH: Ref, b_HJ: Ref) -> jax.Array:
    """Multiply fixed-point numbers by int8; sums of up to 512 entries are exact in int32."""

    def multiply(upper: Ref, lower: Ref) -> jax.Array:
        plgpu.wgmma(upper, a_2RH.at[0], b_HJ)
        plgpu.wgmma(lower, a_2RH.at[1], b_HJ)
        found: jax.Array = (upper[...] * 256 + lower[...]).astype(jnp.float32)
        return found

    acc = plgpu.WGMMAAccumulatorRef((a_2RH.shape[1], b_HJ.shape[1]), jnp.int32)
    found: jax.Array = pl.run_scoped(multiply, acc, acc)
    return found


def add_product(out_RH: jax.Array, a: Any, b: Ref, a_sm: Ref | None) -> jax.Array:
    """Add a product: out + a b, with a in registers.

    Args:
        a_sm: shared memory for a in interpret mode, which supports neither operands in registers
            nor sums with an initial value. None on a GPU.
    """
    if a_sm is not None:
        a_sm[...] = a
        plgpu.commit_smem()
        return out_RH + product(a_sm, b)

    def add(acc: Ref) -> None:
        plgpu.wgmma(acc, a, b)

    found: jax.Array = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(out_RH))
    return found


def scores_beside_values(
    so_far: Softmax,
    q: Ref,
    k_HJ: Ref,
    weight_RJ: jax.Array,
    v_JH: Ref,
    weigh_scores: Callable[[jax.Array], Weighed],
    before_values: Callable[[], None],
    issued: Callable[[], None],
    weighed: Callable[[], None],
    weight_sm: Ref | None,
) -> tuple[Softmax, jax.Array]:
    """Weigh a tile's scores while the previous tile's values are multiplied.

    Both products are issued at once; the softmax of the first runs during the second.

    Args:
        weight_RJ: 16-bit weights of the previous tile, whose values are ``v_JH``.
        weigh_scores: called with the scores [R, J].
        before_values: waits for the values.
        issued: called when both products are issued.
        weighed: called when the scores are weighed; it waits for something, which keeps the
            assembler from waiting for the values earlier.
        weight_sm: see ``add_product``.

    Returns:
        The softmax with the values of the previous tile, and the new weights.
    """
    dtype = weight_RJ.dtype
    if weight_sm is not None:
        score_RJ = product(q, k_HJ)
        before_values()
        out_RH = add_product(so_far.out_RH, weight_RJ, v_JH, weight_sm)
        issued()
        found = weigh_scores(score_RJ)
        weighed()
        return found.over(out_RH), found.weight_RJ.astype(dtype)

    def multiply(score: Ref, out: Ref, weight: Ref, max_R: Ref, sum_R: Ref, shrink_R: Ref) -> None:
        plgpu.wgmma(score, q, k_HJ)
        before_values()
        plgpu.wgmma(out, weight_RJ, v_JH)
        issued()
        found = weigh_scores(plgpu.wgmma_accumulator_load(score, wait_n=1))
        found = Weighed(*lax.optimization_barrier(tuple(found)))
        weighed()
        weight[...], max_R[...], sum_R[...], shrink_R[...] = found

    def with_scores(refs: tuple[Ref, ...]) -> None:
        shape = ROWS, k_HJ.shape[1]
        pl.run_scoped(
            lambda score: multiply(score, *refs), plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        )

    out = plgpu.WGMMAAccumulatorRef.init(so_far.out_RH)
    some_RJ = plgpu.layout_cast(jnp.zeros(weight_RJ.shape, jnp.float32), plgpu.Layout.WGMMA)
    state = out, some_RJ, so_far.max_R, so_far.sum_R, so_far.sum_R
    out_RH, new_RJ, *rest = pl.run_state(with_scores)(state)
    # Rounded only now. The registers of the old weights are in use until the values have arrived;
    # otherwise, the assembler would make each product wait for the previous one.
    new_RJ, out_RH = lax.optimization_barrier((new_RJ, out_RH))
    return Weighed(new_RJ, *rest).over(out_RH), new_RJ.astype(dtype)


def copy_tile(
    pages_PKBH: Ref,
    shared: Ref,
    ready: Ref,
    table_M: Ref,
    head: jax.Array,
    tile: jax.Array,
) -> None:
    """Start the copies of a tile's tokens, one for each page that contains them."""
    B, size = pages_PKBH.shape[2], shared.shape[0]
    unit = min(B, size)
    for part in range(size // unit):
        token = tile * size + part * unit
        # A tile may reach beyond the table's end, where there are no tokens.
        page = table_M[jnp.minimum(lax.div(token, B), table_M.shape[0] - 1)]
        at = pl.ds(lax.rem(token, B), unit) if size < B else slice(None)
        plgpu.copy_gmem_to_smem(
            pages_PKBH.at[page, head, at], shared.at[pl.ds(part * unit, unit)], ready
        )


class Pages(NamedTuple):
    """A KV head of a sequence's pages, with scales for entries of 8 bits."""

    k_PKBH: Ref
    v_PKBH: Ref
    scales_PK: tuple[Ref, ...]
    table_M: Ref
    head: jax.Array

    def scales(self, tile: jax.Array, size: int) -> tuple[Any, Any]:
        """Return a tile's scales of keys and of values, None with 16 bits.

        A tile lies in one page.
        """
        if not self.scales_PK:
            return None, None
        page = self.table_M[lax.div(tile * size, self.k_PKBH.shape[2])]
        k_PK, v_PK = self.scales_PK
        return k_PK[page, self.head], v_PK[page, self.head]


def masked(seen: jax.Array, score_RJ: jax.Array, scale: Any) -> jax.Array:
    """Return scores times their scale, if any; MASKED where they are not seen."""
    return jnp.where(seen, score_RJ if scale is None else score_RJ * scale, MASKED)


def clear_after(v_JH: Ref, count: jax.Array, me: Any = 0, cleared: Ref | None = None) -> None:
    """Zero the values of tokens from ``count`` on, because 0 times old memory may be NaN.

    Args:
        me: number of this warpgroup among those that share the tile.
        cleared: barrier on which they then wait.
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
        plgpu.commit_smem()
        if cleared is not None:
            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)


def widen(x_JH: Ref, wide_JH: Ref, count: jax.Array | None = None) -> None:
    """Widen a tile's entries of 8 bits to 16.

    Args:
        count: tokens from here on become zeros, unless entries are integers: their weights are 0,
            but the entries may be NaN.
    """
    J, H = x_JH.shape
    is_integer = x_JH.dtype == jnp.int8
    # Pieces that fit into registers.
    columns = 128 if H % 128 == 0 else H
    lanes = _lanes(H)
    for begin, column in product_of(range(0, J, ROWS), range(0, H, columns)):
        at = pl.ds(begin, ROWS), pl.ds(column, columns)
        x = plgpu.layout_cast(x_JH[at], lanes)
        # int8 is converted in pairs; fp8 has no direct conversion.
        x = (x if is_integer else x.astype(jnp.float32)).astype(wide_JH.dtype)
        if count is not None and not is_integer:
            row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=lanes)
            x = jnp.where(row + begin < count, x, jnp.zeros_like(x))
        wide_JH[at] = x


def _lanes(head_dim: int) -> Any:
    """Return the layout of registers in which a lane holds 8 entries of a row.

    It reads 8 bytes and writes 16 at a time. A warp takes whole rows of the swizzled tiles of 8
    bits, so its lanes use different banks.
    """
    row = plgpu.find_swizzle(8 * head_dim)
    rows = 32 * 8 // row
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4 * rows, row), (rows, row), (8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def shared(shape: tuple[int, ...], dtype: jnp.dtype, head_dim: int) -> Any:
    """Return shared memory laid out for TMA and wgmma, which needs equal layouts of operands."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(head_dim * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))
