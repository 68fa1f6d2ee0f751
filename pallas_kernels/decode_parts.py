"""Cuts contexts of decodes so that any lengths fill a GPU, and combines the results.

Shape suffixes: W parts, S sequences, K KV heads, G query heads of each, R the same with padding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxinfer.pallas_kernels.gpu_work import Ref, pieces, whole
from jaxinfer.pallas_kernels.reference import NO_SCORE, work_items

# Cost of a program in addition to its tiles, in tiles: its start, and combining its result with
# others.
START = 1


class Parts(NamedTuple):
    """Parts of contexts, one for each program of a KV head, and each sequence's parts.

    Attributes:
        sequence_W: sequence of each part.
        begin_W: first tile of each part.
        end_W: end of its tiles; equal to ``begin_W`` for padding.
        first_S: first of a sequence's parts.
        count_S: number of its parts, which are consecutive; 0 without context.
    """

    sequence_W: jax.Array
    begin_W: jax.Array
    end_W: jax.Array
    first_S: jax.Array
    count_S: jax.Array


def decode_parts(
    length_S: jax.Array, window: int | None, tile: int, heads: int, at_once: int
) -> Parts:
    """Cut contexts into parts of nearly equal length, chosen by the batch's lengths.

    Args:
        length_S: int32, number of tokens of each context; 0 for padding.
        tile: number of tokens that a program takes at a time.
        heads: number of programs for each part.
        at_once: number of programs that run at a time.
    """
    more = max(at_once // heads, 1)
    first_tile_S = jnp.maximum(length_S - window, 0) // tile if window else jnp.zeros_like(length_S)
    tiles_S = pl.cdiv(length_S, tile) - first_tile_S
    # Number of tiles of a part, if the longest context has 1, 2, ... parts.
    each_X = pl.cdiv(jnp.maximum(tiles_S.max(), 1), 1 + jnp.arange(more))
    count_X = pl.cdiv(tiles_S, each_X[:, None]).sum(1)
    cost_X = pl.cdiv(count_X * heads, at_once) * (each_X + START)
    most = len(length_S) + more
    each = each_X[jnp.argmin(jnp.where(count_X <= most, cost_X, jnp.iinfo(jnp.int32).max))]
    count_S = pl.cdiv(tiles_S, each)
    sequence_W, index_W, count = work_items(count_S, most)
    each_W = pl.cdiv(tiles_S, jnp.maximum(count_S, 1))[sequence_W]
    begin_W = index_W * each_W
    end_W = jnp.minimum(begin_W + each_W, tiles_S[sequence_W])
    skipped_W = first_tile_S[sequence_W]
    is_one_W = jnp.arange(most) < count
    begin_W, end_W = (jnp.where(is_one_W, skipped_W + at, 0) for at in (begin_W, end_W))
    return Parts(sequence_W, begin_W, end_W, jnp.cumsum(count_S) - count_S, count_S)


def joined(
    out_WKRH: jax.Array, lse_WKR: jax.Array, parts: Parts, group: int, interpret: bool = False
) -> jax.Array:
    """Join attention to parts into each sequence's attention.

    Args:
        lse_WKR: float32, base-2 logarithms of the sums of 2^score.
        group: number of rows among R that are query heads.

    Returns:
        float32 [S, K * group, H], zeros for a sequence without parts.
    """
    _, K, _, H = out_WKRH.shape
    S = len(parts.first_S)
    done = jax.ShapeDtypeStruct((S, K, pl.next_power_of_2(group), H), jnp.float32)
    inputs = out_WKRH, lse_WKR, parts.first_S, parts.count_S
    out_SKGH: jax.Array = pl.pallas_call(
        _join,
        grid=(S, K),
        in_specs=[whole(x) for x in inputs],
        out_specs=whole(done),
        out_shape=done,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_join",
    )(*inputs)
    return out_SKGH[:, :, :group].reshape(S, K * group, H)


def _join(out_WKRH: Ref, lse_WKR: Ref, first_S: Ref, count_S: Ref, out_SKGH: Ref) -> None:
    s, h = pl.program_id(0), pl.program_id(1)
    first, count = first_S[s], count_S[s]
    # Rows of padding may belong to any part.
    row = jnp.minimum(jnp.arange(out_SKGH.shape[2]), out_WKRH.shape[2] - 1)
    cuts = pieces(out_WKRH.shape[3])

    def one(part: jax.Array, carry: Any) -> Any:
        outs, max_R, sum_R = carry
        lse_R = lse_WKR[part, h, row]
        new_max_R = jnp.maximum(max_R, lse_R)
        shrink_R, weight_R = jnp.exp2(max_R - new_max_R), jnp.exp2(lse_R - new_max_R)
        found = tuple(
            out * shrink_R[:, None]
            + weight_R[:, None]
            * out_WKRH[part, h, row[:, None], begin + jnp.arange(size)[None, :]].astype(jnp.float32)
            for (begin, size), out in zip(cuts, outs, strict=True)
        )
        return found, new_max_R, sum_R * shrink_R + weight_R

    nothing = tuple(jnp.zeros((len(row), size), jnp.float32) for _, size in cuts)
    start = nothing, jnp.full(row.shape, NO_SCORE, jnp.float32), jnp.zeros(row.shape, jnp.float32)
    outs, _, sum_R = jax.lax.fori_loop(first, first + count, one, start)
    for (begin, size), out in zip(cuts, outs, strict=True):
        out_SKGH[s, h, :, pl.ds(begin, size)] = out / jnp.maximum(sum_R, 1e-30)[:, None]
