"""Paged attention for NVIDIA Hopper (sm_90) in Mosaic GPU: pages by TMA, products by wgmma.

The same functions as in ``reference``, whose docstrings say what they compute; keys lie as values
do, ``[K, B, H]``, in 16-bit floats. A page, or the part of it that a tile of tokens needs, is one
TMA copy into a ring of slots in shared memory, whose barriers count the copies. Scores leave the
tensor cores in registers, and their weights go back to them from there. The heads that share a KV
head are rows of one product of at least 64.
"""

import jax.numpy as jnp

from jaxinfer.pallas_kernels.hopper_chunks import chunk_attention
from jaxinfer.pallas_kernels.hopper_decode import DECODE_TILE, decode_attention
from jaxinfer.pallas_kernels.hopper_tiles import ROWS

__all__ = ["chunk_attention", "decode_attention", "why_not"]


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
