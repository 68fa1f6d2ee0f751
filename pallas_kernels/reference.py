"""Paged attention in plain JAX: the implementation on CPU, and every kernel's reference.

A page holds B tokens' keys as ``[K, H, B]`` and values as ``[K, B, H]``, so that both products of
attention read it without transposing (which doubles the time of XLA's CPU backend). The kernels'
keys are ``[K, B, H]``; everything else is the same. A row of a page table lists a sequence's pages
in token order. Attention is softmax(q k^T) v with scaled q. It is an online softmax (Milakov and
Gimelshein, 2018) over pages, in float32, and visits only pages that the batch sees, so that one
compiled shape serves all lengths.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.kv_pages import KVPages

# Number of pairs of a sequence and a page that decode attention computes at once, so that their
# pages stay in the cache.
ITEMS = 32
# Largest number of pages of the pool per item at which all pages are multiplied in place; copying a
# page takes over twice as long.
POOL_PER_ITEMS = 2
# Small, so that a tile's scores stay in the cache of a core.
TILE_ROWS = 32
# Finite, so that a row that sees nothing gives 0 and not NaN.
MASKED = -1e30
# The start of a maximum: above MASKED, so that exp(MASKED - maximum) is 0.
NO_SCORE = MASKED / 10


def work_items(count_S: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a list of work: ``count[s]`` items for each s, in order, then padding.

    Returns, for each of ``most`` items, its owner (for padding, the last one) and its index among
    that owner's items; and the number of items.
    """
    start_S = jnp.cumsum(count_S) - count_S
    owner_I = jnp.repeat(jnp.arange(len(count_S)), count_S, total_repeat_length=most)
    return owner_I, jnp.arange(most) - start_S[owner_I], start_S[-1] + count_S[-1]


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    b = b if b.dtype.itemsize > 1 else b.astype(jnp.float32)
    return jnp.einsum(spec, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _float_of(kv: KVPages) -> jnp.dtype:
    """Return the dtype of products."""
    return kv.keys.dtype if kv.keys.dtype.itemsize > 1 else jnp.dtype("float32")


def decode_attention(
    q_SNH: jax.Array,
    kv: KVPages,
    page_table_SM: jax.Array,
    length_S: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attend from one query row per sequence to its first ``length`` KV entries.

    With a window, only to the last ``window`` of them. A length of 0 (padding) gives zeros. Returns
    float32 [S, N, H].

    The work is a list of items, one per sequence and page. If the items are most of the pool, and
    no page has two readers, all pages are multiplied in place, each with its reader's query.
    Otherwise the items' pages are copied, some at a time, so that the cost depends only on the
    pages in use, not on the size of the pool or on unequal lengths.
    """
    S, N, H = q_SNH.shape
    P, K, B, _ = kv.values.shape
    M = page_table_SM.shape[1]
    q_SKGH = q_SNH.astype(_float_of(kv)).reshape(S, K, N // K, H)
    items, count = _decode_items(page_table_SM, length_S, window, B)
    fold = partial(_fold, q_SKGH)
    start = Softmax(
        jnp.zeros((S, K, N // K, H), jnp.float32),
        jnp.full((S, K, N // K), NO_SCORE, jnp.float32),
        jnp.zeros((S, K, N // K), jnp.float32),
    )

    def some_items(i: jax.Array, carry: Softmax) -> Softmax:
        some = Items(*(jax.lax.dynamic_slice_in_dim(x, i * ITEMS, ITEMS) for x in items))
        return fold(carry, some, kv.page(some.page))

    def by_items() -> Softmax:
        return jax.lax.fori_loop(0, -(-count // ITEMS), some_items, start)

    if S * M * POOL_PER_ITEMS < P:
        return _normalised(by_items()).reshape(S, N, H)
    # After the last item: it is not written.
    page_I = jnp.where(jnp.arange(len(items.page)) < count, items.page, P)
    of_pool = Items(*(jnp.zeros(P, jnp.int32).at[page_I].set(x, mode="drop") for x in items))
    readers_P = jnp.zeros(P, jnp.int32).at[page_I].add(1, mode="drop")
    in_place = (count * POOL_PER_ITEMS >= P) & (readers_P.max() <= 1)
    done = jax.lax.cond(in_place, lambda: fold(start, of_pool, kv), by_items)
    return _normalised(done).reshape(S, N, H)


class Items(NamedTuple):
    """Pairs of a sequence and a page that it reads, all int32 [I].

    Attributes:
        row: the sequence, whose query it is.
        page: number in the pool.
        begin: first offset in the page that the sequence sees.
        end: end of these offsets.
    """

    row: jax.Array
    page: jax.Array
    begin: jax.Array
    end: jax.Array


class Softmax(NamedTuple):
    """An online softmax: values weighted by exp(score - max), the maximum, the weights' sum."""

    out_SKGH: jax.Array
    max_SKG: jax.Array
    sum_SKG: jax.Array


def _decode_items(
    page_table_SM: jax.Array, length_S: jax.Array, window: int | None, B: int
) -> tuple[Items, jax.Array]:
    """Return the items, padded with pages that no row sees, and their number."""
    S, M = page_table_SM.shape
    from_S = jnp.maximum(length_S - (window or M * B), 0)
    # Whole blocks of items, because a slice beyond the end would start earlier and repeat some.
    row_I, column_I, count = work_items(-(-length_S // B) - from_S // B, -(-S * M // ITEMS) * ITEMS)
    column_I = column_I + from_S[row_I] // B
    page_I = page_table_SM[row_I, jnp.minimum(column_I, M - 1)]
    begin_I, end_I = (jnp.clip(x_S[row_I] - column_I * B, 0, B) for x_S in (from_S, length_S))
    return Items(row_I, page_I, begin_I, end_I), count


def _fold(q_SKGH: jax.Array, so_far: Softmax, items: Items, pages: KVPages) -> Softmax:
    """Add these items' keys and values to the softmax."""
    S, B = q_SKGH.shape[0], pages.keys.shape[-1]
    out_SKGH, max_SKG, sum_SKG = so_far
    score = _einsum("ikgh,ikhb->ikgb", q_SKGH[items.row], pages.keys)
    if pages.key_scale_PK is not None:
        score *= pages.key_scale_PK[..., None, None]
    offset_B = jnp.arange(B)
    seen_IB = (offset_B >= items.begin[:, None]) & (offset_B < items.end[:, None])
    score = jnp.where(seen_IB[:, None, None], score, MASKED)
    # By a matrix of owners, because XLA:CPU turns a scatter into a loop over items.
    owner_SI = items.row == jnp.arange(S)[:, None]
    item_max_SIKG = jnp.where(owner_SI[..., None, None], score.max(-1), NO_SCORE)
    new_max_SKG = jnp.maximum(max_SKG, item_max_SIKG.max(1))
    p = jnp.exp(score - new_max_SKG[items.row][..., None])
    shrink_SKG = jnp.exp(max_SKG - new_max_SKG)
    out = _einsum("ikgb,ikbh->ikgh", p, pages.values)
    # Entries that a sequence does not see may hold NaN or infinity, and 0 times these is NaN.

    def masked() -> jax.Array:
        values = jnp.where(seen_IB[:, None, :, None], pages.values, 0)
        return _einsum("ikgb,ikbh->ikgh", p, values)

    out = _if_finite(out, masked)
    if pages.value_scale_PK is not None:
        out *= pages.value_scale_PK[..., None, None]
    # So may the scale of an unused page.
    out = jnp.where((items.begin < items.end)[:, None, None, None], out, 0)
    add = jnp.concatenate([out, p.sum(-1, keepdims=True)], -1)

    def summed(add: jax.Array) -> jax.Array:
        return _einsum("si,ikgh->skgh", owner_SI.astype(jnp.float32), add)

    def summed_apart() -> jax.Array:
        """Compute the same if some sequences have NaN, so that it stays in those."""
        is_finite = jnp.isfinite(add)
        lost = summed((~is_finite).astype(jnp.float32)) > 0
        return jnp.where(lost, jnp.nan, summed(jnp.where(is_finite, add, 0)))

    add_SKGH = _if_finite(summed(add), summed_apart)
    out_SKGH = out_SKGH * shrink_SKG[..., None] + add_SKGH[..., :-1]
    return Softmax(out_SKGH, new_max_SKG, sum_SKG * shrink_SKG + add_SKGH[..., -1])


def _if_finite(x: jax.Array, otherwise: Callable[[], jax.Array]) -> jax.Array:
    """Return x or, if any of it is NaN or infinite, the result of ``otherwise``."""
    found: jax.Array = jax.lax.cond(jnp.isfinite((x * 0).sum()), lambda: x, otherwise)
    return found


def _normalised(done: Softmax) -> jax.Array:
    return done.out_SKGH / jnp.maximum(done.sum_SKG, 1e-30)[..., None]


def chunk_attention(
    q_TNH: jax.Array,
    kv: KVPages,
    page_table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attend causally from a ragged batch of prefill chunks to their own pages.

    Chunk c has the rows ``row[c]`` to ``row[c + 1]`` of q. Its first row is at position
    ``start[c]``, and the pages already have the KV entries up to each row's own. With a window, a
    row sees only its last ``window`` entries. Rows without a chunk have undefined output. Returns
    float32 [T, N, H].

    A chunk is cut into tiles of rows; each tile goes through the pages that any of its rows sees.
    """
    T, N, H = q_TNH.shape
    C = start_C.shape[0]
    K = kv.values.shape[1]
    G = N // K
    size_C = row_C1[1:] - row_C1[:-1]
    # At worst, every chunk ends with a partly filled tile, and none is smaller than a row.
    chunk_I, index_I, count = work_items(-(-size_C // TILE_ROWS), T // TILE_ROWS + min(C, T))
    # A tile's rows are cut out and put back at once, even beyond the end.
    q_TNH = jnp.pad(q_TNH.astype(_float_of(kv)), ((0, TILE_ROWS), (0, 0), (0, 0)))

    def one_tile(tile: jax.Array, out_TNH: jax.Array) -> jax.Array:
        c = chunk_I[tile]
        skipped = index_I[tile] * TILE_ROWS
        row = row_C1[c] + skipped
        q = jax.lax.dynamic_slice_in_dim(q_TNH, row, TILE_ROWS)
        q_KRH = q.reshape(TILE_ROWS, K, G, H).transpose(1, 2, 0, 3).reshape(K, -1, H)
        first = start_C[c] + skipped
        last = start_C[c] + jnp.minimum(skipped + TILE_ROWS, size_C[c]) - 1
        o_KRH = _attend_tile(q_KRH, first, last, kv, page_table_CM[c], window)
        o = o_KRH.reshape(K, G, TILE_ROWS, H).transpose(2, 0, 1, 3).reshape(TILE_ROWS, N, H)
        # If a chunk ends within the tile, the next chunk's tiles overwrite the rest.
        return jax.lax.dynamic_update_slice_in_dim(out_TNH, o, row, 0)

    # The output starts as a copy of q, because a buffer of zeros would be made ahead for every
    # layer.
    out_TNH = jax.lax.fori_loop(0, count, one_tile, q_TNH.astype(jnp.float32))
    return out_TNH[:T]


def _attend_tile(
    q_KRH: jax.Array,
    first: jax.Array,
    last: jax.Array,
    kv: KVPages,
    page_M: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attend causally in one tile: TILE_ROWS positions from ``first``, G times over.

    No row needs a page past position ``last``. Returns float32 [K, R, H].
    """
    B = kv.values.shape[2]
    position_R = first + jnp.arange(q_KRH.shape[1]) % TILE_ROWS

    def one_page(
        j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out_KRH, max_KR, sum_KR = carry
        page = kv.page(page_M[j])
        # Entries beyond the tile's last row may hold NaN, and 0 times NaN is NaN.
        exists_B1 = (j * B + jnp.arange(B) <= last)[:, None]
        values_KBH = jnp.where(exists_B1, page.values, 0)
        score_KRB = _einsum("krh,khb->krb", q_KRH, page.keys)
        if page.key_scale_PK is not None:
            score_KRB *= page.key_scale_PK[:, None, None]
        seen_RB = j * B + jnp.arange(B) <= position_R[:, None]
        if window:
            seen_RB &= j * B + jnp.arange(B) > position_R[:, None] - window
        score_KRB = jnp.where(seen_RB, score_KRB, MASKED)
        new_max_KR = jnp.maximum(max_KR, score_KRB.max(-1))
        p_KRB = jnp.exp(score_KRB - new_max_KR[..., None])
        shrink_KR = jnp.exp(max_KR - new_max_KR)
        add_KRH = _einsum("krb,kbh->krh", p_KRB, values_KBH)
        if page.value_scale_PK is not None:
            add_KRH *= page.value_scale_PK[:, None, None]
        out_KRH = out_KRH * shrink_KR[..., None] + add_KRH
        return out_KRH, new_max_KR, sum_KR * shrink_KR + p_KRB.sum(-1)

    start = (
        jnp.zeros(q_KRH.shape, jnp.float32),
        jnp.full(q_KRH.shape[:2], NO_SCORE, jnp.float32),
        jnp.zeros(q_KRH.shape[:2], jnp.float32),
    )
    first_page = jnp.maximum(first - window + 1, 0) // B if window else 0
    out_KRH, _, sum_KR = jax.lax.fori_loop(first_page, last // B + 1, one_page, start)
    return out_KRH / jnp.maximum(sum_KR, 1e-30)[..., None]
