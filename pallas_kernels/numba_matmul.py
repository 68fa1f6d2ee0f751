"""Products of a step's rows with weights on a CPU, compiled by numba and called by XLA.

A weight is read where it lies, some columns at a time, which then stay in the core's second cache
for all of the rows; those that the core takes next are fetched meanwhile. XLA's own products copy a
weight into another order first, each time, which costs most where there are few rows. A row's sums
are taken in blocks, in the order of the weight's rows, whatever the other rows are.

Suffixes are those of ``models/layers.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.numba_vectors import RowProduct, has_avx512, lanes, silu
from jaxinfer.pallas_kernels.xla_call import (
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

# Registers of a row of a tile. A tile's sums are three quarters of the registers.
VECTORS = 3
# Tokens of the vocabulary that are looked at together: their logits fill a cache line.
TOKENS = 16
# Products that are summed by themselves: one sum of thousands would round more than XLA's do.
BLOCK = 768


class MatmulSizes(NamedTuple):
    """Sizes that a kernel is compiled for: rows and columns of a tile."""

    rows: int
    columns: int


def _sizes(x_TD: jax.Array, weight_DF: jax.Array) -> MatmulSizes:
    T, F = len(x_TD), weight_DF.shape[1]
    return MatmulSizes(min(8 if has_avx512() else 4, T), min(VECTORS * lanes(), F))


def in_blocks(product: RowProduct) -> Any:
    """``run(x, weight, D, row_bytes, sums, ahead)``: the product over D, summed in blocks."""
    columns = product.columns
    first, more = (product._replace(add=add, prefetch=True).intrinsic() for add in (False, True))

    @part
    def run(x: int, weight: int, D: int, row_bytes: int, sums: int, ahead: int) -> None:
        first(x, 4 * D, weight, row_bytes, sums, 4 * columns, min(BLOCK, D), ahead)
        for d in range(BLOCK, D, BLOCK):
            at, far, count = weight + row_bytes * d, ahead + row_bytes * d, min(BLOCK, D - d)
            more(x + 4 * d, 4 * D, at, row_bytes, sums, 4 * columns, count, far)

    return run


def _register(name: str, sizes: MatmulSizes, tile: Callable[..., None]) -> NativeCode:
    """A kernel whose units are columns of the weights, for all rows.

    Args:
        tile: of the lists of arguments and results, its first row and column, the columns that
            follow, the tile's number, and scratch memory.
    """
    rows, columns = sizes

    @part
    def units(args: int) -> int:
        return -(-dim(args, 1, 1) // columns)

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        T, F = dim(args, 0, 0), dim(args, 1, 1)
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        while True:
            # The last columns, and the last rows, may be some that were computed already.
            column = min(mine * columns, F - columns)
            following = min((mine + dim(rets, 1, 0)) * columns, F - columns)
            for i in range((T + rows - 1) // rows):
                tile(args, rets, min(i * rows, T - rows), column, following, i, scratch)
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target(f"{name}_" + "_".join(map(str, sizes)), units, work)


@compiled_once
def _matmul(sizes: MatmulSizes) -> NativeCode:
    (rows, columns), product = sizes, in_blocks(RowProduct(*sizes, 32))
    # Cache lines of a row of the tile's columns; each tile of rows fetches one.
    lines = -(-columns * 4 // 64)

    @part
    def tile(
        args: int, rets: int, row: int, column: int, following: int, i: int, scratch: int
    ) -> None:
        D, F, weight = dim(args, 1, 0), dim(args, 1, 1), data(args, 1)
        ahead = weight + 4 * following + 64 * min(i, lines - 1)
        x = data(args, 0) + 4 * D * row
        product(x, weight + 4 * column, D, 4 * F, scratch, ahead)
        # All at once: another core may be at some of these columns, too.
        found = nb.carray(pointer(scratch, np.float32(0)), (rows, columns))
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (dim(args, 0, 0), F))
        for r in range(rows):
            for c in range(columns):
                out[row + r, column + c] = found[r, c]

    return _register("matmul", sizes, tile)


@compiled_once
def _gated(sizes: MatmulSizes) -> NativeCode:
    (rows, columns), product = sizes, in_blocks(RowProduct(*sizes, 32))
    lines = -(-columns * 4 // 64)

    @part
    def tile(
        args: int, rets: int, row: int, column: int, following: int, i: int, scratch: int
    ) -> None:
        D, F = dim(args, 1, 0), dim(args, 1, 1)
        x, line = data(args, 0) + 4 * D * row, 4 * following + 64 * min(i, lines - 1)
        for g in range(2):
            weight, sums = data(args, 1 + g), scratch + 4 * g * rows * columns
            product(x, weight + 4 * column, D, 4 * F, sums, weight + line)
        found = nb.carray(pointer(scratch, np.float32(0)), (2, rows, columns))
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (dim(args, 0, 0), F))
        for r in range(rows):
            for c in range(columns):
                out[row + r, column + c] = silu(found[0, r, c]) * found[1, r, c]

    return _register("gated", sizes, tile)


@compiled_once
def _logits(sizes: MatmulSizes) -> NativeCode:
    """Compile logits with weights and rows swapped: the vocabulary's lie one after the other."""
    rows, columns = sizes
    product = RowProduct(rows, columns, 32).intrinsic()

    @part
    def units(args: int) -> int:
        return -(-dim(args, 1, 0) // TOKENS)

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        S, (V, D), padded = dim(rets, 0, 0), (dim(args, 1, 0), dim(args, 1, 1)), dim(args, 0, 1)
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        found = nb.carray(pointer(scratch, np.float32(0)), (TOKENS, padded))
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (S, V))
        while True:
            token = min(mine * TOKENS, V - TOKENS)
            for v in range(0, TOKENS, rows):
                for s in range(0, padded, columns):
                    product(
                        data(args, 1) + 4 * D * (token + v),
                        4 * D,
                        data(args, 0) + 4 * s,
                        4 * padded,
                        scratch + 4 * (v * padded + s),
                        4 * padded,
                        D,
                        0,
                    )
            for s in range(S):
                for v in range(TOKENS):
                    out[s, token + v] = found[v, s]
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target("logits_" + "_".join(map(str, sizes)), units, work)


def _call(target: NativeCode, shape: tuple[int, int], scratch: int, *args: jax.Array) -> jax.Array:
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (threads(), scratch))]
    out, _ = jax.ffi.ffi_call(target.name, shapes)(*args)
    return out


def matmul(x_TD: jax.Array, weight_DF: jax.Array) -> jax.Array:
    """``x_TD @ weight_DF``, all in float32."""
    sizes = _sizes(x_TD, weight_DF)
    shape = len(x_TD), weight_DF.shape[1]
    return _call(_matmul(sizes), shape, sizes.rows * sizes.columns, x_TD, weight_DF)


def gated(x_TD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array) -> jax.Array:
    """``silu(x_TD @ gate_DF) * (x_TD @ up_DF)``, as ``matmul`` has its products."""
    sizes = _sizes(x_TD, gate_DF)
    shape, scratch = (len(x_TD), gate_DF.shape[1]), 2 * sizes.rows * sizes.columns
    return _call(_gated(sizes), shape, scratch, x_TD, gate_DF, up_DF)


def logits(x_SD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """``x_SD @ head_VD.T``, all in float32, of a vocabulary of 16 tokens or more."""
    S, V = len(x_SD), len(head_VD)
    x_DS = jnp.pad(x_SD.T, ((0, 0), (0, -S % TOKENS)))
    columns = next(c for c in (64, 48, 32, TOKENS) if x_DS.shape[1] % c == 0)
    sizes = MatmulSizes(8 if has_avx512() else 4, columns)
    return _call(_logits(sizes), (S, V), TOKENS * x_DS.shape[1], x_DS, head_VD)
