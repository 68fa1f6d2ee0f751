"""Paged attention in plain JAX: the implementation on CPU, and every kernel's reference.

Keys and values lie in pages ``[P, K, B, H]``; a row of a page table lists a sequence's pages in
token order. Both functions compute softmax(q k^T / sqrt(H)) v with an online softmax (Milakov and
Gimelshein, 2018) over pages, in float32, and loop only as far as the longest context in the batch
reaches, so that one compiled shape serves all lengths.
"""

import math

import jax
import jax.numpy as jnp

TILE_ROWS = 64
TILES_PER_GROUP = 4
# Finite, so that a fully masked row gives 0 and not NaN.
MASKED = -1e30


def write_kv(
    k_PKBH: jax.Array,
    v_PKBH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write each token's key and value to its place. Padding tokens go to page 0."""
    k_PKBH = k_PKBH.at[page_T, :, offset_T].set(k_TKH.astype(k_PKBH.dtype))
    v_PKBH = v_PKBH.at[page_T, :, offset_T].set(v_TKH.astype(v_PKBH.dtype))
    return k_PKBH, v_PKBH


def _attend_pages(
    q_SKRH: jax.Array,
    k_PKBH: jax.Array,
    v_PKBH: jax.Array,
    page_table_SM: jax.Array,
    last_SR: jax.Array,
    num_pages: jax.Array,
) -> jax.Array:
    """Attention of R query rows per sequence, each to the positions up to its ``last``.

    Only the first ``num_pages`` columns of the page table are read. Returns float32 [S, K, R, H].
    """
    page_size = k_PKBH.shape[2]
    q_SKRH = (q_SKRH * (1 / math.sqrt(q_SKRH.shape[-1]))).astype(k_PKBH.dtype)

    def one_page(
        j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out_SKRH, max_SKR, sum_SKR = carry
        page_S = page_table_SM[:, j]
        k_SKBH, v_SKBH = k_PKBH[page_S], v_PKBH[page_S]
        score_SKRB = jnp.einsum(
            "skrh,skbh->skrb", q_SKRH, k_SKBH, preferred_element_type=jnp.float32
        )
        position_B = j * page_size + jnp.arange(page_size)
        seen_SRB = position_B <= last_SR[..., None]
        score_SKRB = jnp.where(seen_SRB[:, None], score_SKRB, MASKED)
        new_max_SKR = jnp.maximum(max_SKR, score_SKRB.max(-1))
        p_SKRB = jnp.exp(score_SKRB - new_max_SKR[..., None])
        shrink_SKR = jnp.exp(max_SKR - new_max_SKR)
        out_SKRH = out_SKRH * shrink_SKR[..., None] + jnp.einsum(
            "skrb,skbh->skrh", p_SKRB.astype(v_SKBH.dtype), v_SKBH,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return out_SKRH, new_max_SKR, sum_SKR * shrink_SKR + p_SKRB.sum(-1)

    rows = q_SKRH.shape[:3]
    start = (
        jnp.zeros(q_SKRH.shape, jnp.float32),
        # Above MASKED: a page that is masked throughout adds exp(MASKED - max) = 0.
        jnp.full(rows, MASKED / 10, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    out_SKRH, _, sum_SKR = jax.lax.fori_loop(0, num_pages, one_page, start)
    return out_SKRH / jnp.maximum(sum_SKR, 1e-30)[..., None]


def decode_attention(
    q_SNH: jax.Array,
    k_PKBH: jax.Array,
    v_PKBH: jax.Array,
    page_table_SM: jax.Array,
    length_S: jax.Array,
) -> jax.Array:
    """Attention of one query row per sequence to its first ``length`` KV entries.

    A length of 0 (padding) gives zeros. Returns float32 [S, N, H].
    """
    S, N, H = q_SNH.shape
    K, page_size = k_PKBH.shape[1:3]
    out_SKGH = _attend_pages(
        q_SNH.reshape(S, K, N // K, H),
        k_PKBH,
        v_PKBH,
        page_table_SM,
        jnp.broadcast_to(length_S[:, None] - 1, (S, N // K)),
        -(-length_S.max() // page_size),
    )
    return out_SKGH.reshape(S, N, H)


def chunk_attention(
    q_TNH: jax.Array,
    k_PKBH: jax.Array,
    v_PKBH: jax.Array,
    page_table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
) -> jax.Array:
    """Causal attention of a ragged batch of prefill chunks to their own pages.

    Chunk c has the rows ``row[c]`` to ``row[c + 1]`` of q; its first row stands at position
    ``start[c]``, and the KV entries up to each row's own are in the pages already. Rows past
    ``row[-1]`` are padding, with unspecified output. Returns float32 [T, N, H].

    Rows are gathered into tiles of one chunk each; tiles run in groups, each as far as its
    longest context.
    """
    T, N, H = q_TNH.shape
    C = start_C.shape[0]
    K, page_size = k_PKBH.shape[1:3]
    G = N // K
    size_C = row_C1[1:] - row_C1[:-1]
    tile_C1 = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-size_C // TILE_ROWS))])
    # Every chunk ends with a part-filled tile at worst, and none is smaller than a row.
    groups = -(-(T // TILE_ROWS + min(C, T)) // TILES_PER_GROUP)
    tile = jnp.arange(groups * TILES_PER_GROUP)
    chunk = jnp.clip(jnp.searchsorted(tile_C1, tile, side="right") - 1, 0, C - 1)
    skipped = (tile - tile_C1[chunk]) * TILE_ROWS
    first_row = row_C1[chunk] + skipped
    first_position = start_C[chunk] + skipped
    last_position = start_C[chunk] + jnp.minimum(skipped + TILE_ROWS, size_C[chunk]) - 1
    pages = jnp.where(tile < tile_C1[-1], last_position // page_size + 1, 0)

    def one_group(g: jax.Array, out: jax.Array) -> jax.Array:
        part = g * TILES_PER_GROUP + jnp.arange(TILES_PER_GROUP)
        row = first_row[part][:, None] + jnp.arange(TILE_ROWS)
        q = q_TNH[jnp.minimum(row, T - 1)]
        q = q.reshape(TILES_PER_GROUP, TILE_ROWS, K, G, H).transpose(0, 2, 3, 1, 4)
        position = first_position[part][:, None] + jnp.arange(TILE_ROWS)
        o = _attend_pages(
            q.reshape(TILES_PER_GROUP, K, G * TILE_ROWS, H),
            k_PKBH,
            v_PKBH,
            page_table_CM[chunk[part]],
            jnp.tile(position, (1, G)),
            pages[part].max(),
        )
        o = o.reshape(TILES_PER_GROUP, K, G, TILE_ROWS, H).transpose(0, 3, 1, 2, 4)
        o = o.reshape(TILES_PER_GROUP * TILE_ROWS, N, H)
        return jax.lax.dynamic_update_slice_in_dim(out, o, g * o.shape[0], 0)

    used_groups = -(-tile_C1[-1] // TILES_PER_GROUP)
    rows = groups * TILES_PER_GROUP * TILE_ROWS
    out = jax.lax.fori_loop(0, used_groups, one_group, jnp.zeros((rows, N, H), jnp.float32))

    # Row r of chunk c lies in the chunk's tiles, at r - row[c].
    r = jnp.arange(T)
    c = jnp.clip(jnp.searchsorted(row_C1, r, side="right") - 1, 0, C - 1)
    return out[tile_C1[c] * TILE_ROWS + r - row_C1[c]]
