"""Products of rows with their experts' weights on a CPU, compiled by numba and called by XLA.

The rows of an expert are consecutive. Its weights are read in place, a block of columns at a time,
which then stays in the core's second-level cache for all of its rows. An expert without rows is not
read. A row's sums are taken in blocks, in the order of the weight's rows, whatever the other rows
are.

Suffixes are those of ``models/layers.py``; R is rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.numba_matmul import BLOCK
from jaxinfer.pallas_kernels.numba_vectors import RowProduct, lanes, silu, tiles
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

# Number of registers of a row of a tile; its columns divide most models' sizes.
VECTORS = 4


class GroupedSizes(NamedTuple):
    """Sizes that a kernel is compiled for: columns of a tile, bits of a weight; gated or not."""

    columns: int
    bits: int
    gated: bool


def _columns(F: int) -> int:
    """Return the columns of a tile: whole registers, as many as fit."""
    return min(VECTORS, F // lanes()) * lanes() or F


def _product(sizes: GroupedSizes, row_counts: tuple[int, ...]) -> Any:
    """Return ``run(rows, x, D, weight, row_bytes, sums, count, ahead)``.

    It is ``RowProduct``'s for one of the counts of rows, added to the sums.
    """
    columns, bits, _ = sizes
    most, *others = row_counts
    product = RowProduct(most, columns, bits, add=True, prefetch=1).intrinsic()
    rest = _product(sizes, tuple(others)) if others else None

    @part
    def last(
        rows: int, x: int, D: int, weight: int, row_bytes: int, sums: int, count: int, ahead: int
    ) -> None:
        product(x, 4 * D, weight, row_bytes, sums, 4 * columns, count, ahead, row_bytes, 0)

    if rest is None:
        return last

    @part
    def run(
        rows: int, x: int, D: int, weight: int, row_bytes: int, sums: int, count: int, ahead: int
    ) -> None:
        if rows == most:
            product(x, 4 * D, weight, row_bytes, sums, 4 * columns, count, ahead, row_bytes, 0)
        else:
            rest(rows, x, D, weight, row_bytes, sums, count, ahead)

    return run


def _tile(sizes: GroupedSizes) -> Any:
    """Return ``run(args, rets, row, rows, weight, column, ahead, scratch)``.

    It multiplies some rows by some columns. ``weight`` is the number of the tile's first entry
    among all weights; prefetching begins ``ahead`` bytes after it.
    """
    columns, bits, gated = sizes
    size, most, product = bits // 8, tiles().grouped[0], _product(sizes, tiles().grouped)
    weights = 1 + gated

    @part
    def run(
        args: int,
        rets: int,
        row: int,
        rows: int,
        weight: int,
        column: int,
        ahead: int,
        scratch: int,
    ) -> None:
        D, F = dim(args, 1, 1), dim(args, 1, 2)
        x = data(args, 0) + 4 * D * row
        found = nb.carray(pointer(scratch, np.float32(0)), (2, most * columns))
        for g in range(weights):
            for i in range(rows * columns):
                found[g, i] = 0
            sums = scratch + 4 * g * most * columns
            for d in range(0, D, BLOCK):
                at = data(args, 1 + g) + size * (weight + d * F)
                product(rows, x + 4 * d, D, at, size * F, sums, min(BLOCK, D - d), at + ahead)
        # Added all at once, because another core may be working on some of these columns, too.
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (dim(args, 0, 0), F))
        for r in range(rows):
            for c in range(columns):
                x0 = found[0, r * columns + c]
                x1 = silu(x0) * found[1, r * columns + c] if gated else x0
                out[row + r, column + c] = x1

    return run


@compiled_once
def _grouped(sizes: GroupedSizes) -> NativeCode:
    """Compile a kernel whose units are some columns of one expert, for all of its rows."""
    columns, bits, gated = sizes
    weights, size, counts, tile = 1 + gated, bits // 8, tiles().grouped, _tile(sizes)
    # Number of cache lines of a row of the tile's columns; each tile of rows fetches one.
    lines = -(-columns * size // 64)

    @part
    def units(args: int) -> int:
        return dim(args, 1, 0) * -(-dim(args, 1, 2) // columns)

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        if worker == COUNT:
            return units(args)
        E, D, F = dim(args, 1, 0), dim(args, 1, 1), dim(args, 1, 2)
        tiles = -(-F // columns)
        row_E1 = nb.carray(pointer(data(args, 1 + weights), np.int32(0)), (E + 1,))
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        while True:
            expert, number = mine // tiles, mine % tiles
            # The last columns may include some that were already computed.
            column = min(number * columns, F - columns)
            following = min((number + dim(rets, 1, 0)) * columns, F - columns)
            row, end, done = row_E1[expert], row_E1[expert + 1], 0
            while row < end:
                rows = 1
                for count in counts[::-1]:
                    if count <= end - row:
                        rows = count
                ahead = size * (following - column) + 64 * min(done, lines - 1)
                weight = expert * D * F + column
                tile(args, rets, row, rows, weight, column, ahead, scratch)
                row, done = row + rows, done + 1
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target("grouped_" + "_".join(str(int(x)) for x in sizes), work)


def _call(x_RD: jax.Array, count_E: jax.Array, *weights: jax.Array) -> jax.Array:
    R, F = len(x_RD), weights[0].shape[2]
    bits, gated = 8 * weights[0].dtype.itemsize, len(weights) > 1
    sizes = GroupedSizes(_columns(F), bits, gated)
    scratch = threads(), 2 * tiles().grouped[0] * sizes.columns
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((R, F), scratch)]
    row_E1 = jnp.pad(jnp.cumsum(count_E, dtype=jnp.int32), (1, 0))
    out_RF, _ = jax.ffi.ffi_call(_grouped(sizes).name, shapes)(x_RD, *weights, row_E1)
    return out_RF


def matmul(x_RD: jax.Array, weight_EDF: jax.Array, count_E: jax.Array) -> jax.Array:
    """Multiply each row by its expert's weights: float32 [R, F].

    Args:
        x_RD: float32, the first expert's rows first.
        weight_EDF: float32 or bfloat16; rows are not rounded to it.
        count_E: number of rows of each expert; their sum is R.
    """
    return _call(x_RD, count_E, weight_EDF)


def gated(x_RD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, count_E: jax.Array) -> jax.Array:
    """Return ``silu(x gate) * (x up)``; see ``matmul``."""
    return _call(x_RD, count_E, gate_EDF, up_EDF)
