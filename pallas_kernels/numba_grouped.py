"""Products of rows with their experts' weights on a CPU, compiled by numba and called by XLA.

The rows of an expert lie together. Its weights are read where they lie, some columns at a time,
which then stay in the core's second cache for all of its rows; an expert without rows is not read.
A row's sums are taken in blocks, in the order of the weight's rows, whatever the other rows are.

Suffixes are those of ``models/layers.py``; R is rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.numba_matmul import BLOCK
from jaxinfer.pallas_kernels.numba_vectors import Product, has_avx512, lanes, silu
from jaxinfer.pallas_kernels.xla_call import (
    Target,
    compiled_once,
    data,
    dim,
    is_past,
    pointer,
    register_target,
    take_after,
    threads,
)

# Registers of a row of a tile: as many columns as divide most models' sizes.
VECTORS = 4
_kernel = nb.njit(nogil=True, error_model="numpy", boundscheck=False, fastmath=True)


class GroupedSizes(NamedTuple):
    """What a kernel is compiled for: D, columns of a tile, bits of a weight, gated or plain."""

    D: int
    columns: int
    bits: int
    gated: bool


def _most_rows() -> int:
    return 6 if has_avx512() else 3


def _row_counts() -> list[int]:
    """Rows of tiles: the largest, and those that a group's last rows are cut into."""
    return [rows for rows in (6, 3, 2, 1) if rows <= _most_rows()]


def _tile(sizes: GroupedSizes, rows: int) -> Callable[..., None]:
    """``run(args, rets, row, expert, column, ahead, scratch)``: so many rows by some columns.

    ``ahead`` is how many bytes behind the tile's first weight the bytes to prefetch begin.
    """
    D, columns, bits, gated = sizes
    size, weights = bits // 8, 1 + gated
    product = Product(rows, columns, 4 * D, bits, add=True, prefetch=True).intrinsic()

    @_kernel
    def run(
        args: int, rets: int, row: int, expert: int, column: int, ahead: int, scratch: int
    ) -> None:
        F, x = dim(args, 1, 2), data(args, 0) + 4 * D * row
        found = nb.carray(pointer(scratch, np.float32(0)), (2, rows, columns))
        for g in range(weights):
            for r in range(rows):
                for c in range(columns):
                    found[g, r, c] = 0
            weight = data(args, 1 + g) + size * (expert * D * F + column)
            for d in range(0, D, BLOCK):
                at = weight + size * F * d
                product(
                    x + 4 * d,
                    at,
                    size * F,
                    scratch + 4 * g * rows * columns,
                    4 * columns,
                    min(BLOCK, D - d),
                    at + ahead,
                )
        # All at once: another core may be at some of these columns, too.
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (dim(args, 0, 0), F))
        for r in range(rows):
            for c in range(columns):
                x0 = found[0, r, c]
                out[row + r, column + c] = silu(x0) * found[1, r, c] if gated else x0

    return run


def _all_rows(sizes: GroupedSizes, row_counts: list[int]) -> Callable[..., None]:
    """The same, of the rows up to ``end``, in tiles of these many rows, the largest first."""
    if not row_counts:

        @_kernel
        def nothing(
            args: int, rets: int, row: int, end: int, e: int, column: int, next: int, scratch: int
        ) -> None:
            pass

        return nothing  # type: ignore[no-any-return]
    rows, line = row_counts[0], 64
    tile, rest = _tile(sizes, rows), _all_rows(sizes, row_counts[1:])
    # Each tile of rows fetches one cache line of each row of the next columns.
    lines = -(-sizes.columns * sizes.bits // 8 // line)

    @_kernel
    def run(
        args: int, rets: int, row: int, end: int, e: int, column: int, next: int, scratch: int
    ) -> None:
        while row + rows <= end:
            tile(args, rets, row, e, column, next, scratch)
            row += rows
            next = next + line if next % (lines * line) != (lines - 1) * line else next
        rest(args, rets, row, end, e, column, next, scratch)

    return run  # type: ignore[no-any-return]


@compiled_once
def _grouped(sizes: GroupedSizes) -> Target:
    """Compile a kernel whose units are some columns of one expert, for all of its rows."""
    columns, weights = sizes.columns, 1 + sizes.gated
    size = sizes.bits // 8
    all_rows = _all_rows(sizes, _row_counts())

    @_kernel
    def units(args: int) -> int:
        return dim(args, 1, 0) * -(-dim(args, 1, 2) // columns)

    @_kernel
    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> None:
        E, F = dim(args, 1, 0), dim(args, 1, 2)
        tiles = -(-F // columns)
        row_E1 = nb.carray(pointer(data(args, 1 + weights), np.int32(0)), (E + 1,))
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        while True:
            expert, tile = mine // tiles, mine % tiles
            # The last columns may be some that were computed already.
            column = min(tile * columns, F - columns)
            following = min((tile + dim(rets, 1, 0)) * columns, F - columns)
            ahead = size * (following - column)
            all_rows(
                args,
                rets,
                np.int64(row_E1[expert]),
                np.int64(row_E1[expert + 1]),
                expert,
                column,
                ahead,
                scratch,
            )
            mine = take_after(shared)
            if is_past(shared, mine):
                return

    return register_target("grouped_" + "_".join(str(int(x)) for x in sizes), units, work)


def _call(x_RD: jax.Array, count_E: jax.Array, *weights: jax.Array) -> jax.Array:
    (R, D), F = x_RD.shape, weights[0].shape[2]
    bits, gated = 8 * weights[0].dtype.itemsize, len(weights) > 1
    sizes = GroupedSizes(D, min(VECTORS * lanes(), F), bits, gated)
    scratch = threads(), 2 * _most_rows() * sizes.columns
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((R, F), scratch)]
    row_E1 = jnp.pad(jnp.cumsum(count_E, dtype=jnp.int32), (1, 0))
    out_RF, _ = jax.ffi.ffi_call(_grouped(sizes).name, shapes)(x_RD, *weights, row_E1)
    return out_RF


def matmul(x_RD: jax.Array, weight_EDF: jax.Array, count_E: jax.Array) -> jax.Array:
    """Each row by its expert's weights: float32 [R, F].

    Args:
        x_RD: float32, the first expert's rows first.
        weight_EDF: float32 or bfloat16; the rows are not rounded to it.
        count_E: rows of each expert, R together.
    """
    return _call(x_RD, count_E, weight_EDF)


def gated(
    x_RD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, count_E: jax.Array
) -> jax.Array:
    """``silu(x gate) * (x up)``, as ``matmul`` has its products."""
    return _call(x_RD, count_E, gate_EDF, up_EDF)
