"""Paged attention for NVIDIA GPUs in generic Pallas, which lowers to Triton: sm_80 and later.

The functions compute the same as those in ``reference`` and ``kv_pages``. Keys are stored like
values, ``[K, B, H]``, so that memory is read in rows of a head for any page size. A program goes
through the context in tiles of tokens: it looks up a tile's page numbers in the table, and gathers
its keys and values. Heads that share a KV head are the rows of one tile of queries, padded to the
16 rows that a matrix product needs. A head size that is not a power of two is cut into pieces that
are.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxinfer.pallas_kernels.decode_parts import Parts, decode_parts, joined
from jaxinfer.pallas_kernels.gpu_work import (
    Ref,
    Tiles,
    chunk_tiles,
    decode_queries,
    pieces,
    product_dtype,
    whole,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.reference import MASKED, NO_SCORE

# Bytes of keys, and of values, that a program takes at once. Shared memory holds three of each: two
# are on their way while one is multiplied.
DECODE_BYTES, CHUNK_BYTES = 2**14, 2**13
# Stages of Triton's pipeline: page numbers are read two stages before the pages' content, and that
# is read two stages before its product. With the largest heads, one tile each fits.
STAGES, STAGES_OVER_256 = 5, 2
# Rows of a prefill tile (tokens times the query heads of one KV head), for 16-bit floats and for
# float32. Products of float32 do not use tensor cores and need more registers.
CHUNK_ROWS, CHUNK_ROWS_FLOAT32 = 64, 16
MIN_ROWS = 16
# Number of decode programs that an H100 runs at once: two fit into a multiprocessor's shared
# memory.
PROGRAMS = 264
LOG2_E = math.log2(math.e)


class Softmax(NamedTuple):
    """An online softmax over R rows: values by pieces of the head, maximum and sum."""

    outs: tuple[jax.Array, ...]
    max_R: jax.Array
    sum_R: jax.Array


@partial(jax.jit, static_argnames=("window", "programs", "interpret"))
def decode_attention(
    q_SNH: jax.Array,
    kv: KVPages,
    page_table_SM: jax.Array,
    length_S: jax.Array,
    window: int | None = None,
    programs: int = PROGRAMS,
    interpret: bool = False,
) -> jax.Array:
    """See ``reference.decode_attention``; one program per sequence, KV head and part of its tokens.

    Args:
        programs: number of programs to run at once; contexts are cut into parts to reach it.
        interpret: run on any device, slowly, to check results.
    """
    _, N, H = q_SNH.shape
    K = kv.values.shape[1]
    G = N // K
    R = max(MIN_ROWS, pl.next_power_of_2(G))
    dtype = product_dtype(kv)
    tile = _tile_tokens(H, dtype, DECODE_BYTES)
    parts = decode_parts(length_S, window, tile, K, programs)
    q_XSKRH, q_scale_SK = decode_queries(q_SNH, kv, R)
    inputs = q_XSKRH, q_scale_SK, kv, page_table_SM, length_S, parts
    W = len(parts.sequence_W)
    results = [jax.ShapeDtypeStruct((W, K, R, *rest), jnp.float32) for rest in ((H,), ())]
    out_WKRH, lse_WKR = pl.pallas_call(
        partial(_decode, tile=tile, window=window),
        grid=(W, K),
        in_specs=list(jax.tree.map(whole, inputs)),
        out_specs=[whole(x) for x in results],
        out_shape=results,
        compiler_params=_compiler_params(H),
        interpret=interpret,
        name="paged_decode",
    )(*inputs)
    return joined(out_WKRH, lse_WKR, parts, G, interpret)


def _decode(
    q_XSKRH: Ref, q_scale_SK: Ref, kv: KVPages, table_SM: Ref, length_S: Ref, parts: Parts,
    out_WKRH: Ref, lse_WKR: Ref, *, tile: int, window: int | None,
) -> None:  # fmt: skip
    w, h = pl.program_id(0), pl.program_id(1)
    B = kv.values.shape[2]
    s, begin, end = parts.sequence_W[w], parts.begin_W[w], parts.end_W[w]
    length = length_S[s]
    R = q_XSKRH.shape[3]
    cuts = pieces(q_XSKRH.shape[4])
    q = [
        tuple(q_XSKRH[x, s, h, :, pl.ds(start, size)] for x in range(q_XSKRH.shape[0]))
        for start, size in cuts
    ]
    q_scale = None if q_scale_SK is None else q_scale_SK[s, h]

    def one_tile(ends: bool, number: jax.Array, carry: Softmax) -> Softmax:
        token = number * tile + jnp.arange(tile)
        seen = token < length
        if window:
            seen &= token >= length - window
        at = jnp.minimum(token, length - 1) if ends else token
        tokens = Tokens(h, table_SM[s, at // B], at % B, token < length if ends else None)
        masked = ends or window
        seen_RJ = jnp.broadcast_to(seen[None, :], (R, tile)) if masked else None
        return _fold(carry, q, q_scale, cuts, kv, tokens, seen_RJ)

    # Tiles whose tokens all exist, and then the last one, if it has others.
    whole = jnp.minimum(end, length // tile)
    done = jax.lax.fori_loop(begin, whole, partial(one_tile, False), _start(R, cuts))
    done = jax.lax.fori_loop(jnp.maximum(begin, whole), end, partial(one_tile, True), done)
    sum_R = jnp.maximum(done.sum_R, 1e-30)
    for (start, size), out in zip(cuts, done.outs, strict=True):
        out_WKRH[w, h, :, pl.ds(start, size)] = out / sum_R[:, None]
    lse_WKR[w, h, :] = (done.max_R + jnp.log(sum_R)) * LOG2_E


@partial(jax.jit, static_argnames=("window", "interpret"))
def chunk_attention(
    q_TNH: jax.Array,
    kv: KVPages,
    page_table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``reference.chunk_attention``; one program per tile of a chunk and KV head.

    There is one launch for all chunks. Rows without a chunk give 0.
    """
    T, N, H = q_TNH.shape
    K = kv.values.shape[1]
    G = N // K
    padded_G = pl.next_power_of_2(G)
    dtype = product_dtype(kv)
    rows = CHUNK_ROWS_FLOAT32 if dtype == jnp.float32 else CHUNK_ROWS
    # Otherwise, queries of the largest heads would leave no room for keys on an L4.
    tokens = max(rows // (padded_G if H <= 256 else 2 * padded_G), 1)
    tile = _tile_tokens(H, dtype, CHUNK_BYTES)
    tiles = chunk_tiles(start_C, row_C1[1:] - row_C1[:-1], row_C1[:-1], T, tokens)
    # A tile's rows beyond its chunk's end are not written, but have their own place.
    nothing = jnp.zeros((T + tokens, K, padded_G, H), jnp.float32)
    inputs = q_TNH.astype(dtype), kv, page_table_CM, tiles, nothing
    out = pl.pallas_call(
        partial(_chunk, tile=tile, tokens=tokens, G=G, window=window),
        grid=(len(tiles.chunk), K),
        in_specs=list(jax.tree.map(whole, inputs)),
        out_specs=whole(nothing),
        out_shape=jax.ShapeDtypeStruct(nothing.shape, jnp.float32),
        input_output_aliases={len(jax.tree.leaves(inputs)) - 1: 0},
        compiler_params=_compiler_params(H),
        interpret=interpret,
        name="paged_chunk",
    )(*inputs)
    return out[:T, :, :G].reshape(T, N, H)


def _chunk(
    q_TNH: Ref, kv: KVPages, table_CM: Ref, tiles: Tiles, _: Ref, out_TKGH: Ref,
    *, tile: int, tokens: int, G: int, window: int | None,
) -> None:  # fmt: skip
    i, h = pl.program_id(0), pl.program_id(1)
    T, N, H = q_TNH.shape
    B, padded_G = kv.values.shape[2], out_TKGH.shape[2]
    c, row, start, size = (x[i] for x in tiles)
    row = jnp.minimum(row, T - 1)  # For padding.
    last = start + size - 1
    token_R = jnp.arange(tokens * padded_G) // padded_G
    head_R = jnp.arange(tokens * padded_G) % padded_G
    # Rows beyond the end, and heads of padding, compute values that are not stored.
    from_R = jnp.minimum(row + token_R, T - 1), jnp.minimum(h * G + head_R, N - 1)
    cuts = pieces(H)
    q = [
        (q_TNH[from_R[0][:, None], from_R[1][:, None], begin + jnp.arange(length)[None, :]],)
        for begin, length in cuts
    ]

    def one_tile(ends: bool, number: jax.Array, carry: Softmax) -> Softmax:
        token = number * tile + jnp.arange(tile)
        at = jnp.minimum(token, last) if ends else token
        context = Tokens(h, table_CM[c, at // B], at % B, token <= last if ends else None)
        seen_RJ = token[None, :] <= (start + token_R)[:, None] if ends else None
        if window:
            in_window_RJ = token[None, :] > (start + token_R - window)[:, None]
            seen_RJ = in_window_RJ if seen_RJ is None else seen_RJ & in_window_RJ
        return _fold(carry, q, None, cuts, kv, context, seen_RJ)

    first = jnp.maximum(start - window + 1, 0) // tile if window else 0
    end = jnp.where(size > 0, last // tile + 1, first)
    # Tiles before all rows, and then those that some rows are in.
    whole = jnp.minimum(jnp.maximum((start + 1) // tile, first), end)
    done = _start(tokens * padded_G, cuts)
    done = jax.lax.fori_loop(first, whole, partial(one_tile, False), done)
    done = jax.lax.fori_loop(whole, end, partial(one_tile, True), done)
    total_R1 = jnp.maximum(done.sum_R, 1e-30)[:, None]
    for (begin, length), out in zip(cuts, done.outs, strict=True):
        at = (row + token_R)[:, None], h, head_R[:, None], begin + jnp.arange(length)[None, :]
        stored = jnp.broadcast_to((token_R < size)[:, None], out.shape)
        triton.store(out_TKGH.at[at], out / total_R1, mask=stored)


class Tokens(NamedTuple):
    """J tokens of a context.

    Attributes:
        head: number of the KV head.
        page_J: page of each token.
        offset_J: offset in the page.
        exists_J: whether a token exists (memory may hold anything otherwise); None if all exist.
    """

    head: jax.Array
    page_J: jax.Array
    offset_J: jax.Array
    exists_J: jax.Array | None


def _fold(
    so_far: Softmax,
    q: Sequence[tuple[jax.Array, ...]],
    q_scale: jax.Array | None,
    cuts: Sequence[tuple[int, int]],
    kv: KVPages,
    tokens: Tokens,
    seen_RJ: jax.Array | None,
) -> Softmax:
    """Add J tokens of one KV head to the softmax.

    Args:
        q: [R, size] for each piece of the head, or its halves as in ``decode_queries``.
        q_scale: value of 1 of the halves; otherwise None.
        seen_RJ: tokens that each row sees; None for all.
    """
    head, page, offset, exists_J = tokens
    score_RJ = jnp.zeros((), jnp.float32 if q_scale is None else jnp.int32)
    for (start, size), halves in zip(cuts, q, strict=True):
        at = page[None, :], head, offset[None, :], start + jnp.arange(size)[:, None]
        k = kv.keys[at]
        if q_scale is None:
            (piece,) = halves
            score_RJ += _dot(piece, k.astype(piece.dtype))
        else:
            upper, lower = (_dot(half, k) for half in halves)
            score_RJ += upper * 256 + lower
    score_RJ = score_RJ.astype(jnp.float32)
    if kv.key_scale_PK is not None:
        scale_J = kv.key_scale_PK[page, head]
        score_RJ *= (scale_J if q_scale is None else scale_J * q_scale)[None, :]
    if seen_RJ is not None:
        score_RJ = jnp.where(seen_RJ, score_RJ, MASKED)
    max_R = jnp.maximum(so_far.max_R, score_RJ.max(1))
    p_RJ = jnp.exp(score_RJ - max_R[:, None])
    shrink_R = jnp.exp(so_far.max_R - max_R)
    sum_R = so_far.sum_R * shrink_R + p_RJ.sum(1)
    if kv.value_scale_PK is not None:
        scale_J = kv.value_scale_PK[page, head]
        # The scale of an unused page may be NaN, and 0 times NaN is NaN.
        p_RJ *= (scale_J if exists_J is None else jnp.where(exists_J, scale_J, 0))[None, :]
    outs = []
    for (start, size), out in zip(cuts, so_far.outs, strict=True):
        at = page[:, None], head, offset[:, None], start + jnp.arange(size)[None, :]
        v = kv.values[at].astype(product_dtype(kv))
        if exists_J is not None:
            # The same applies to a page's unused part.
            v = jnp.where(exists_J[:, None], v, 0).astype(v.dtype)
        outs.append(out * shrink_R[:, None] + _dot(p_RJ.astype(v.dtype), v))
    return Softmax(tuple(outs), max_R, sum_R)


def _start(rows: int, cuts: Sequence[tuple[int, int]]) -> Softmax:
    outs = tuple(jnp.zeros((rows, size), jnp.float32) for _, size in cuts)
    return Softmax(outs, jnp.full((rows,), NO_SCORE, jnp.float32), jnp.zeros((rows,), jnp.float32))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return triton.dot(a, b, allow_tf32=False)


def _tile_tokens(head_dim: int, dtype: jnp.dtype, size: int) -> int:
    """Return the number of context tokens that a program takes at a time, in ``size`` bytes."""
    return max(min(size // (pl.next_power_of_2(head_dim) * dtype.itemsize), 64), MIN_ROWS)


def _compiler_params(head_dim: int) -> triton.CompilerParams:
    stages = STAGES if head_dim <= 256 else STAGES_OVER_256
    return triton.CompilerParams(num_warps=4, num_stages=stages)
