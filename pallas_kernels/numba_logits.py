"""Logits of a step's rows on a CPU, compiled by numba and called by XLA: see ``numba_matmul``.

A row's sums are taken in blocks, in the order of the weight's rows, whatever the other rows are.
Suffixes are those of ``models/layers.py``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels import numba_matmul
from jaxinfer.pallas_kernels.numba_matmul import BLOCK
from jaxinfer.pallas_kernels.numba_vectors import RowProduct, tiles
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
)

# Number of tokens of the vocabulary whose logits fill a cache line, and number of such lines of a
# unit.
LINE, LINES = 16, 4


class LogitsSizes(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
        tokens: number of the vocabulary's tokens per unit.
        rows: number of these tokens per tile.
        columns: number of rows per tile.
        pairs: whether pairs of bfloat16 of a row are side by side.
    """

    tokens: int
    rows: int
    columns: int
    pairs: bool


@compiled_once
def _logits(sizes: LogitsSizes) -> NativeCode:
    """Compile logits with weights and rows swapped: the vocabulary's are consecutive."""
    tokens, rows, columns, pairs = sizes
    product = RowProduct(rows, columns, 32, pairs=pairs, carry=True)
    product, fetching = product.intrinsic(), product._replace(prefetch=1).intrinsic()

    @part
    def units(args: int) -> int:
        return -(-dim(args, 1, 0) // tokens)

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        if worker == COUNT:
            return units(args)
        S, V, D, padded = dim(rets, 0, 0), dim(args, 1, 0), dim(args, 0, 0), dim(args, 0, 1)
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        found = nb.carray(pointer(scratch, np.float32(0)), (tokens, padded))
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (S, V))
        while True:
            token = min(mine * tokens, V - tokens)
            # Lines of the next unit; LINE tokens have as many lines as x_DS has rows.
            ahead = data(args, 1) + 4 * D * min((mine + dim(rets, 1, 0)) * tokens, V - tokens)
            found[:] = 0
            # As many entries at a time as a cache holds for all rows.
            for d in range(0, D, BLOCK):
                n, by = min(BLOCK, D - d), 4 * padded
                for v in range(0, tokens, rows):
                    head = data(args, 1) + 4 * (D * (token + v) + d)
                    for s in range(0, padded, columns):
                        x, sums = data(args, 0) + by * d + 4 * s, scratch + by * v + 4 * s
                        if s == 0 and v % LINE == 0:
                            far = ahead + 4 * D * v + 64 * d
                            fetching(head, 4 * D, x, by, sums, by, n, far, 64, 0)
                        else:
                            product(head, 4 * D, x, by, sums, by, n, 0, 0, 0)
            for s in range(S):
                for v in range(tokens):
                    out[s, token + v] = found[v, s]
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target("logits_" + "_".join(map(str, sizes)), work)


def logits(x_SD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Return ``x_SD @ head_VD.T`` in float32, for a vocabulary of at least 16 tokens.

    Rows are rounded to bfloat16 if the head is bfloat16; without pairs, XLA computes such products.
    """
    (S, D), V, dtype = x_SD.shape, len(head_VD), head_VD.dtype
    x_SD, pairs = x_SD.astype(dtype), numba_matmul.has_pairs(dtype)
    if (dtype == jnp.bfloat16 and not pairs) or numba_matmul.is_left_to_xla(S, dtype, head=True):
        # XLA multiplies a single row of bfloat16 ten times as slowly as two rows.
        rows = jnp.pad(x_SD, ((0, S == 1 and dtype == jnp.bfloat16), (0, 0)))
        return jnp.einsum("sd,vd->sv", rows, head_VD, preferred_element_type=jnp.float32)[:S]
    x_DS = jnp.pad(x_SD.T, ((0, D % 2 if pairs else 0), (0, -S % tiles().lanes)))
    if pairs:
        head_VD = jnp.pad(head_VD, ((0, 0), (0, D % 2)))
        x_DS2 = x_DS.reshape(-1, 2, x_DS.shape[1]).swapaxes(1, 2)
        x_DS = jax.lax.bitcast_convert_type(x_DS2, jnp.int32)
    columns = next(c for c in (64, 48, 32, LINE, LINE // 2) if x_DS.shape[1] % c == 0)
    tokens = LINE * LINES if V >= LINE * LINES else LINE
    sizes = LogitsSizes(tokens, tiles().logits, columns, pairs)
    return numba_matmul.call(_logits(sizes), (S, V), tokens * x_DS.shape[1], x_DS, head_VD)
