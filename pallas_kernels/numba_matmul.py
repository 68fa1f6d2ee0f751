"""Products of a step's rows with weights on a CPU, compiled by numba and called by XLA.

A weight is read some columns at a time, which then stay in the core's second cache for all of the
rows; those that the core takes next are fetched meanwhile. They are read where they lie or, on
processors of 16 registers and where there are many rows, packed first: the rows of a weight are
thousands of bytes apart, so that many share few sets of a cache and push each other out. Weights
of 8 bits, int8 or fp8 (e4m3), become float32 in the core's registers, or once as they are packed.
XLA's own products copy a whole weight into another order first, each time, which costs most where
there are few rows. A row's sums are taken in blocks, in the order of the weight's rows, whatever
the other rows are.

Suffixes are those of ``models/layers.py``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.numba_vectors import FP8_UNIT, RowProduct, silu, tiles
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

# Tokens of the vocabulary that are looked at together: their logits fill a cache line.
TOKENS = 16
# Products that are summed by themselves: one sum of thousands would round more than XLA's do.
BLOCK = 768
# Columns of a tile of weights of 8 bits: a cache line. Registers of a row of other tiles, at most.
SCALED_COLUMNS, VECTORS = 64, 3
# Rows up to which float32 weights are read where they lie: packing them would take longer.
IN_PLACE = 64


class MatmulSizes(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
        rows, columns: of a tile.
        dtype: of the weights: float32, int8 or float8_e4m3fn.
        gated: two products in one pass.
        packed: the columns of a unit are copied side by side first, as float32.
    """

    rows: int
    columns: int
    dtype: str
    gated: bool
    packed: bool


def _in_blocks(product: RowProduct) -> Any:
    """``run(x, weight, D, row_bytes, sums, ahead, ahead_bytes)``: over D, summed in blocks."""
    columns = product.columns
    first, more = (product._replace(add=add).intrinsic() for add in (False, True))

    @part
    def run(
        x: int, weight: int, D: int, row_bytes: int, sums: int, ahead: int, ahead_bytes: int
    ) -> None:
        count, by = min(BLOCK, D), ahead_bytes
        first(x, 4 * D, weight, row_bytes, sums, 4 * columns, count, ahead, by)
        for d in range(BLOCK, D, BLOCK):
            at, far, count = weight + row_bytes * d, ahead + by * d, min(BLOCK, D - d)
            more(x + 4 * d, 4 * D, at, row_bytes, sums, 4 * columns, count, far, by)

    return run


@compiled_once
def _matmul(sizes: MatmulSizes) -> NativeCode:
    """Compile a kernel whose units are some tiles of columns, for all rows.

    Its arguments are the rows, each weight, followed by its scales where it has 8 bits, and the
    number of tiles of a unit.
    """
    rows, columns, dtype, gated, packed = sizes
    weights, scaled, is_float = 1 + gated, dtype != "float32", dtype == "float8_e4m3fn"
    each, size, unit = 1 + scaled, 1 if scaled else 4, np.float32(FP8_UNIT if is_float else 1)
    kept = RowProduct(rows, columns, 8 * size, prefetch=True, is_float=is_float)
    fetching = _in_blocks(RowProduct(rows, columns, 32, prefetch=True) if packed else kept)
    product = _in_blocks(RowProduct(rows, columns, 32)) if packed else fetching
    as_floats = kept.floats()
    # Cache lines of a row of the tile's columns; each tile of rows fetches one.
    lines = -(-columns * size // 64)

    @part
    def tiles_of(args: int) -> int:
        return nb.carray(pointer(data(args, 1 + weights * each), np.int32(0)), (1,))[0]

    @part
    def units(args: int) -> int:
        return -(-dim(args, 1, 1) // (columns * tiles_of(args)))

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        if worker == COUNT:
            return units(args)
        T, D, F, count = dim(args, 0, 0), dim(args, 1, 0), dim(args, 1, 1), tiles_of(args)
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        panels = scratch + 4 * weights * rows * columns
        found = nb.carray(pointer(scratch, np.float32(0)), (2, rows, columns))
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (T, F))
        scale = nb.carray(pointer(data(args, each), np.float32(0)), (F,))
        other = nb.carray(pointer(data(args, weights * each), np.float32(0)), (F,))
        while True:
            first = mine * count
            last = min(first + count, (F + columns - 1) // columns)
            if packed:
                for d in range(D):
                    for g in range(weights):
                        weight = data(args, 1 + each * g) + size * F * d
                        for j in range(first, last):
                            to = panels + 4 * columns * (((j - first) * weights + g) * D + d)
                            as_floats(weight + size * min(j * columns, F - columns), to)
            for i in range((T + rows - 1) // rows):
                # The last rows, and the last columns, may be some that were computed already.
                row = min(i * rows, T - rows)
                x = data(args, 0) + 4 * D * row
                for j in range(first, last):
                    column = min(j * columns, F - columns)
                    following = min((j + count * dim(rets, 1, 0)) * columns, F - columns)
                    for g in range(weights):
                        sums, weight = scratch + 4 * g * rows * columns, data(args, 1 + each * g)
                        ahead = weight + size * following + 64 * min(i, lines - 1)
                        if packed:
                            panel = panels + 4 * columns * D * ((j - first) * weights + g)
                            if i == 0:
                                fetching(x, panel, D, 4 * columns, sums, ahead, size * F)
                            else:
                                product(x, panel, D, 4 * columns, sums, 0, 0)
                        else:
                            at = weight + size * column
                            fetching(x, at, D, size * F, sums, ahead, size * F)
                    # All at once: another core may be at some of these columns, too.
                    for r in range(rows):
                        for c in range(columns):
                            y = found[0, r, c]
                            if scaled:
                                y *= scale[column + c] * unit
                            if gated:
                                z = found[1, r, c]
                                if scaled:
                                    z *= other[column + c] * unit
                                y = silu(y) * z
                            out[row + r, column + c] = y
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target(("gated_" if gated else "matmul_") + "_".join(map(str, sizes)), work)


class LogitsSizes(NamedTuple):
    """Sizes that a kernel is compiled for: tokens of the vocabulary and rows of a tile."""

    rows: int
    columns: int


@compiled_once
def _logits(sizes: LogitsSizes) -> NativeCode:
    """Compile logits with weights and rows swapped: the vocabulary's lie one after the other."""
    rows, columns = sizes
    product = RowProduct(rows, columns, 32).intrinsic()

    @part
    def units(args: int) -> int:
        return -(-dim(args, 1, 0) // TOKENS)

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        if worker == COUNT:
            return units(args)
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
                        0,
                    )
            for s in range(S):
                for v in range(TOKENS):
                    out[s, token + v] = found[v, s]
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target("logits_" + "_".join(map(str, sizes)), work)


def _call(target: NativeCode, shape: tuple[int, int], scratch: int, *args: jax.Array) -> jax.Array:
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (threads(), scratch))]
    out, _ = jax.ffi.ffi_call(target.name, shapes)(*args)
    return out


def matmul(x_TD: jax.Array, *weight: jax.Array) -> jax.Array:
    """``x_TD @ weight_DF`` in float32; a weight of 8 bits is followed by its columns' scales."""
    return _product(x_TD, weight, 1)


def gated(x_TD: jax.Array, *weights: jax.Array) -> jax.Array:
    """``silu(x_TD @ gate_DF) * (x_TD @ up_DF)``, as ``matmul`` has its products."""
    return _product(x_TD, weights, 2)


def _product(x_TD: jax.Array, weights: tuple[jax.Array, ...], count: int) -> jax.Array:
    (T, D), F, dtype, tile = x_TD.shape, weights[0].shape[1], weights[0].dtype, tiles()
    scaled = dtype != jnp.float32
    in_place = tile.scaled if scaled else IN_PLACE
    packed = tile.panel > 0 and in_place < T
    most, columns = tile.matmul, SCALED_COLUMNS
    if scaled and not packed:
        most = tile.scaled
    # As few tiles of rows as there can be, of as few rows as they can have.
    rows = -(-T // -(-T // most))
    if packed or not scaled:
        columns = min(VECTORS, tile.sums // rows) * tile.lanes
    sizes = MatmulSizes(rows, min(columns, F), dtype.name, count == 2, packed)
    floats = count * D * sizes.columns
    each = _tiles_of_unit(-(-F // sizes.columns), floats) if packed else 1
    scratch = count * sizes.rows * sizes.columns + packed * each * floats
    return _call(_matmul(sizes), (T, F), scratch, x_TD, *weights, jnp.full(1, each, jnp.int32))


def _tiles_of_unit(count: int, floats: int) -> int:
    """Tiles of columns that a unit packs: no more than a panel has, of units that share evenly."""
    units = -(-count // max(tiles().panel // floats, 1))
    return -(-count // (-(-units // threads()) * threads()))


def logits(x_SD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """``x_SD @ head_VD.T``, all in float32, of a vocabulary of 16 tokens or more."""
    S, V = len(x_SD), len(head_VD)
    x_DS = jnp.pad(x_SD.T, ((0, 0), (0, -S % TOKENS)))
    columns = next(c for c in (64, 48, 32, TOKENS) if x_DS.shape[1] % c == 0)
    sizes = LogitsSizes(tiles().logits, columns)
    return _call(_logits(sizes), (S, V), TOKENS * x_DS.shape[1], x_DS, head_VD)
