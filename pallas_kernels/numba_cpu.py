"""Paged attention on a CPU, compiled by numba, called from inside jit through XLA's FFI.

The user's machine needs no compiler: numba includes LLVM. Pages are passed as pointers, in the
plain layout, and nothing is copied. One kernel handles decodes and chunks: some rows of one
sequence and one KV head, page after page, with an online softmax (Milakov and Gimelshein, 2018) in
float32 whose scores never leave the core's first-level cache. A page is read once for all query
heads that share its KV head and for all of the rows.

Suffixes are those of ``models/layers.py``; G query heads share a KV head, R rows of a tile.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.numba_vectors import RowProduct, exp, tiles
from jaxinfer.pallas_kernels.xla_call import (
    COUNT,
    NativeCode,
    compiled_once,
    data,
    dim,
    is_past,
    part,
    pointer,
    register_target,
    take_after,
    threads,
)

# Number of rows of a prompt that pass the pages together.
TILE_ROWS = 32
# Below every score, and the start of a maximum: exp(MASKED - NO_SCORE) is practically 0.
MASKED, NO_SCORE = np.float32(-1e30), np.float32(-1e29)


class AttentionSizes(NamedTuple):
    """Sizes that a kernel is compiled for; ``bits`` of KV entries, largest ``rows`` of a tile."""

    G: int
    H: int
    B: int
    bits: int
    rows: int

    @property
    def block(self) -> int:
        """Number of query rows whose scores of a page are computed at once."""
        return min(self.rows * self.G, tiles().attention)

    @property
    def padded(self) -> int:
        """Number of query rows of a tile, in whole blocks."""
        return -(-self.rows * self.G // self.block) * self.block

    @property
    def scratch(self) -> int:
        """Number of floats: queries, sums, scores of a block, maximum and total of each row."""
        return 2 * self.padded * self.H + self.block * self.B + 2 * self.padded


def make_tile(sizes: AttentionSizes) -> Callable[..., None]:
    """Return ``tile(q, keys, values, pages, out, scratch, K, k, row, rows, first, window)``.

    It attends for ``rows`` rows from ``row`` on, at positions from ``first`` on, with KV head
    ``k``. q and out are addresses of float32 [T, K G, H], keys of [P, K, H, B], values of [P, K, B,
    H], pages of int32; a window of 0 means none.
    """
    G, H, B, bits, _ = sizes
    block, padded = sizes.block, sizes.padded
    head = H * B * bits // 8
    # A decode passes its pages once, because memory is its limit.
    lines = [-(-entries * bits // 512) if sizes.rows == 1 else 0 for entries in (B, H)]
    scores_of = RowProduct(block, B, bits, prefetch=lines[0]).intrinsic()
    add_values = RowProduct(block, H, bits, add=True, prefetch=lines[1]).intrinsic()

    @part
    def tile(
        q_: int, keys: int, values: int, pages: int, out_: int, scratch: int, K: int, k: int,
        row: int, rows: int, first: int, window: int,
    ) -> None:  # fmt: skip
        N = K * G
        sums_, scores_ = scratch + 4 * padded * H, scratch + 8 * padded * H
        q = nb.carray(pointer(q_, np.float32(0)), (row + rows, N, H))
        out = nb.carray(pointer(out_, np.float32(0)), (row + rows, N, H))
        query = nb.carray(pointer(scratch, np.float32(0)), (padded, H))
        sums = nb.carray(pointer(sums_, np.float32(0)), (padded, H))
        score = nb.carray(pointer(scores_, np.float32(0)), (block, B))
        m = nb.carray(pointer(scores_ + 4 * block * B, np.float32(0)), (2, padded))
        page = nb.carray(pointer(pages, np.int32(0)), 1 << 30)
        used = rows * G
        for v in range(padded):
            m[0, v], m[1, v] = NO_SCORE, np.float32(0)
            for h in range(H):
                query[v, h] = q[row + v // G, k * G + v % G, h] if v < used else np.float32(0)
                sums[v, h] = np.float32(0)
        begin = max(first - window + 1, 0) // B if window > 0 else 0
        end = (first + rows - 1) // B
        for j in range(begin, end + 1):
            at = (np.int64(page[j]) * K + k) * head
            following = keys + (np.int64(page[min(j + 1, end)]) * K + k) * head
            for b in range(0, used, block):
                last = first + min(b + block - 1, used - 1) // G - j * B
                if last < 0 or (window > 0 and first + b // G - window - j * B >= B - 1):
                    continue
                query_, by = scratch + 4 * H * b, B * bits // 8
                scores_of(query_, 4 * H, keys + at, by, scores_, 4 * B, H, values + at, by, 0)
                for i in range(block):
                    # Entries from `low` to `high` of this page are seen.
                    high = first + min(b + i, used - 1) // G - j * B + 1
                    low = high - window if window > 0 else 0
                    for t in range(max(high, 0), B):
                        score[i, t] = MASKED
                    for t in range(0, min(low, B)):
                        score[i, t] = MASKED
                    old = m[0, b + i]
                    top = old
                    for t in range(B):
                        top = max(top, score[i, t])
                    if top > old:
                        shrink = exp(old - top)
                        for h in range(H):
                            sums[b + i, h] *= shrink
                        m[0, b + i], m[1, b + i] = top, m[1, b + i] * shrink
                    total = np.float32(0)
                    for t in range(B):
                        p = exp(score[i, t] - top)
                        score[i, t] = p
                        total += p
                    m[1, b + i] += total
                add_values(
                    scores_,
                    4 * B,
                    values + at,
                    H * bits // 8,
                    sums_ + 4 * H * b,
                    4 * H,
                    min(B, last + 1),
                    following,
                    H * bits // 8,
                    0,
                )
        for v in range(used):
            scale = np.float32(1) / max(m[1, v], np.float32(1e-30))
            for h in range(H):
                out[row + v // G, k * G + v % G, h] = sums[v, h] * scale

    return tile


@compiled_once
def register(sizes: AttentionSizes) -> NativeCode:
    """Compile a kernel, and register it with XLA."""
    tile, H, most = make_tile(sizes), sizes.H, sizes.rows

    @part
    def units(args: int) -> int:
        C, K = dim(args, 4, 0), dim(args, 1, 1)
        row = nb.carray(pointer(data(args, 5), np.int32(0)), (C + 1,))
        found = 0
        for c in range(C):
            found += (row[c + 1] - row[c] + most - 1) // most * K
        return found

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        if worker == COUNT:
            return units(args)
        T, N, K = dim(args, 0, 0), dim(args, 0, 1), dim(args, 1, 1)
        M, C = dim(args, 3, 1), dim(args, 4, 0)
        start = nb.carray(pointer(data(args, 4), np.int32(0)), (C,))
        row = nb.carray(pointer(data(args, 5), np.int32(0)), (C + 1,))
        window = nb.carray(pointer(data(args, 6), np.int32(0)), (1,))[0]
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        if worker == 0:
            out = nb.carray(pointer(data(rets, 0), np.float32(0)), (T, N * H))
            out[: row[0]] = np.float32(0)
            out[row[C] :] = np.float32(0)
        unit = 0
        for c in range(C):
            for skipped in range(0, row[c + 1] - row[c], most):
                rows = min(most, row[c + 1] - row[c] - skipped)
                for k in range(K):
                    if unit == mine:
                        tile(
                            data(args, 0), data(args, 1), data(args, 2),
                            data(args, 3) + 4 * M * c, data(rets, 0), scratch,
                            K, k, row[c] + skipped, rows, start[c] + skipped, window,
                        )  # fmt: skip
                        mine = take_after(shared)
                        if is_past(shared, mine):
                            return 0
                    unit += 1
        return 0

    name = "attention_" + "_".join(map(str, sizes))
    return register_target(name, work, reassociates=True)


def _attend(
    q_TNH: jax.Array,
    kv: KVPages,
    table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
    window: int | None,
    rows: int,
) -> jax.Array:
    T, N, H = q_TNH.shape
    _, K, B, _ = kv.values.shape
    sizes = AttentionSizes(N // K, H, B, 8 * kv.values.dtype.itemsize, rows)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((T, N, H), (threads(), sizes.scratch))
    ]
    call = jax.ffi.ffi_call(register(sizes).name, shapes)
    out_TNH, _ = call(
        q_TNH.astype(jnp.float32),
        kv.keys,
        kv.values,
        table_CM,
        start_C,
        row_C1,
        np.array([window or 0], np.int32),
    )
    return out_TNH


def decode_attention(
    q_SNH: jax.Array,
    kv: KVPages,
    page_table_SM: jax.Array,
    length_S: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attend as ``reference.decode_attention``, over entries of float32 or bfloat16."""
    each_S1 = jnp.arange(len(length_S) + 1, dtype=jnp.int32)
    return _attend(q_SNH, kv, page_table_SM, length_S - 1, each_S1, window, 1)


def chunk_attention(
    q_TNH: jax.Array,
    kv: KVPages,
    page_table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attend as ``reference.chunk_attention`` does; rows without a chunk give 0."""
    return _attend(q_TNH, kv, page_table_CM, start_C, row_C1, window, TILE_ROWS)
