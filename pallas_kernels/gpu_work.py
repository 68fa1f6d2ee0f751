"""Divides the work of kernels for GPUs, and prepares their operands."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxinfer.errors import JaxinferError
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.reference import work_items

# Within a kernel: references to memory, and their values.
Ref = Any


class Tiles(NamedTuple):
    """Tiles of chunks' rows, all int32 [I].

    Attributes:
        chunk: chunk of each tile.
        row: number of its first row among the tokens.
        start: position of that row in the sequence.
        size: number of rows; 0 for padding.
    """

    chunk: jax.Array
    row: jax.Array
    start: jax.Array
    size: jax.Array


def chunk_tiles(
    start_C: jax.Array, size_C: jax.Array, row_C: jax.Array, T: int, tokens: int
) -> Tiles:
    """Cut all chunks' rows into tiles of ``tokens``; a chunk's last tile may have fewer.

    Tiles with the longest contexts come first: a GPU starts programs in order, and the last ones
    should end soon.
    """
    chunk_I, index_I, count = work_items(
        pl.cdiv(size_C, tokens), pl.cdiv(T, tokens) + min(len(start_C), T)
    )
    done_I = index_I * tokens
    size_I = jnp.clip(size_C[chunk_I] - done_I, 0, tokens)
    size_I = jnp.where(jnp.arange(len(chunk_I)) < count, size_I, 0)
    tiles = Tiles(chunk_I, row_C[chunk_I] + done_I, start_C[chunk_I] + done_I, size_I)
    order_I = jnp.argsort(jnp.where(size_I > 0, -tiles.start - size_I, 0))
    return Tiles(*(x_I[order_I] for x_I in tiles))


def pieces(size: int) -> list[tuple[int, int]]:
    """Split ``size`` into powers of two, largest first; return the start and length of each."""
    pieces, start = [], 0
    while start < size:
        length = 1 << ((size - start).bit_length() - 1)
        pieces.append((start, length))
        start += length
    return pieces


def whole(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Return a spec that gives every program the whole array, which stays in the GPU's memory.

    Raises:
        JaxinferError: its last entries cannot be addressed.
    """
    # Pallas counts entries in 64 bits from 2**32 bytes on, and below that in signed 32 bits.
    if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32:
        raise JaxinferError(
            f"{x.size} entries of 8 bits in one array: Pallas reaches none between 2**31 and 2**32,"
            " take another num_pages"
        )
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def product_dtype(kv: KVPages) -> jnp.dtype:
    """Return the dtype in which a GPU multiplies queries by keys, and weights by values."""
    return kv.keys.dtype if kv.keys.dtype.itemsize > 1 else jnp.dtype("bfloat16")


def decode_queries(q_SNH: jax.Array, kv: KVPages, rows: int) -> tuple[jax.Array, jax.Array | None]:
    """Return queries in the form in which decodes multiply them by keys.

    Keys of int8 are multiplied as they are, since converting them takes longer than two products of
    8 bits. Queries become fixed-point numbers of 16 bits, in two halves. Such products take 32
    entries at a time; for other head sizes, keys are converted.

    Args:
        rows: R, number of rows of a KV head; the last ones are padding.

    Returns:
        [X, S, K, R, H], int8 halves, the upper one first, or one array with the dtype of products;
        and the value of each fixed-point number's 1 [S, K], otherwise None.
    """
    S, N, H = q_SNH.shape
    K = kv.values.shape[1]
    q_SKGH = q_SNH.reshape(S, K, N // K, H)
    padding = (0, 0), (0, 0), (0, 0), (0, rows - N // K), (0, 0)
    if kv.keys.dtype != jnp.int8 or H % 32:
        return jnp.pad(q_SKGH.astype(product_dtype(kv))[None], padding), None
    largest_SK = jnp.abs(q_SKGH.astype(jnp.float32)).max((2, 3))
    # With it, the upper half of the largest number is 127, and the lower half is 0.
    one_SK = jnp.maximum(largest_SK, 1e-30) / (127 * 256)
    number_SKGH = jnp.round(q_SKGH / one_SK[:, :, None, None]).astype(jnp.int32)
    upper_SKGH = (number_SKGH + 128) >> 8
    halves = jnp.stack([upper_SKGH, number_SKGH - upper_SKGH * 256]).astype(jnp.int8)
    return jnp.pad(halves, padding), one_SK
