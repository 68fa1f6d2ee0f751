"""Products of a step's rows with weights on a CPU, compiled by numba and called by XLA.

A block of a weight's columns is read at a time and stays in the core's second-level cache for all
rows; the next block is fetched meanwhile. Weights are read in place or, with many rows, packed
first: the rows of a weight are thousands of bytes apart, so that many share few cache sets and
evict each other. bfloat16 is multiplied in pairs if the processor can, so that two rows of a weight
count as one. Otherwise it becomes float32 in registers, or once when it is packed; the same holds
for weights of 8 bits, int8 or fp8 (e4m3), with float32 rows. XLA's own products copy the whole
weight into another order each time, which costs most with few rows. Except for logits, a row's sums
are taken in blocks, in the order of the weight's rows, whatever the other rows are.

Suffixes are those of ``models/layers.py``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.numba_vectors import FP8_UNIT, RowProduct, has, silu, tiles
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

# Number of rows or pairs whose products are summed separately; one sum of thousands would have
# larger rounding errors than XLA's.
BLOCK = 768
# Number of columns of a tile of 8-bit weights: a cache line.
SCALED_COLUMNS = 64
# Number of columns whose pairs of bfloat16 fill a register of AVX-512.
PAIRS = 16
# Largest number of rows for which weights that are not multiplied in pairs are read in place,
# because packing would take longer. For smaller weights, ``TileSizes.in_place`` has more rows.
FEW = 3
# Number of float32 rows above which XLA's own products are faster, without AVX-512.
XLA_BEYOND = 64
# Bytes above which a weight is read some rows at a time, over many columns. A page of memory for
# each row would need more addresses than a processor keeps, and rows at distances of powers of two
# share few sets of its caches. Then: number of rows or pairs that are packed and summed separately;
# and number of rows that are read side by side in place, half of the size of a set of the first
# cache.
LARGE, DEPTH, STREAMS = 2**23, 256, 4


class MatmulSizes(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
        rows: number of rows of a tile.
        columns: number of columns of a tile.
        dtype: dtype of the weights: float32, bfloat16, int8 or float8_e4m3fn.
        gated: whether there are two products in one pass.
        packed: whether the columns of a unit are first copied side by side, as float32 or as pairs.
        pairs: whether rows of bfloat16 are multiplied two at a time.
        streamed: whether a few of the weight's rows are read at a time, in place.
    """

    rows: int
    columns: int
    dtype: str
    gated: bool
    packed: bool
    pairs: bool
    streamed: bool


def _in_blocks(product: RowProduct) -> Any:
    """Return ``run(x, x_bytes, weight, D, row_bytes, sums, more, ahead, go_on, slowness)``.

    It goes over D of a weight's rows or pairs, in blocks. With ``more``, they are added to the
    present sums or, if a product carries, continue from there. ``slowness`` is that of
    ``RowProduct.intrinsic``.
    """
    by = 4 * product.columns
    first = product._replace(add=False, carry=False).intrinsic()
    follow = product._replace(add=not product.carry).intrinsic()

    @part
    def run(
        x: int, x_bytes: int, weight: int, D: int, row_bytes: int, sums: int, more: bool,
        ahead: int, go_on: int, slowness: int,
    ) -> None:  # fmt: skip
        for d in range(0, D, BLOCK):
            at, far, n = weight + row_bytes * d, ahead + go_on * (d >> slowness), min(BLOCK, D - d)
            if more or d > 0:
                follow(x + 4 * d, x_bytes, at, row_bytes, sums, by, n, far, go_on, slowness)
            else:
                first(x + 4 * d, x_bytes, at, row_bytes, sums, by, n, far, go_on, slowness)

    return run


@compiled_once
def _matmul(sizes: MatmulSizes) -> NativeCode:
    """Compile a kernel whose units are some tiles of columns, for all rows.

    Its arguments are the rows; each weight, followed by its scales if it has 8 bits; and two
    numbers: the tiles of a unit, and how many rows or pairs of a weight are multiplied at a time.
    """
    rows, columns, dtype, gated, packed, pairs, streamed = sizes
    size, is_float = jnp.dtype(dtype).itemsize, dtype == "float8_e4m3fn"
    weights, scaled, unit = 1 + gated, size == 1, np.float32(FP8_UNIT if is_float else 1)
    each = 1 + scaled
    # Number of cache lines of a row of the tile's columns. Each tile of rows fetches one line, of
    # each row or of one row of a pair. Pairs that are read in place have one tile of rows, which
    # fetches all.
    lines, all_at_once = -(-columns * size // 64), streamed or (pairs and not packed)
    fetched = 1 if all_at_once else lines * (1 + pairs)
    kept = RowProduct(rows, columns, 8 * size, False, lines if all_at_once else 1, is_float, pairs)
    kept = kept._replace(carry=streamed)
    panel = kept._replace(bits=32, is_float=False)
    fetching = _in_blocks(panel if packed else kept)
    product = _in_blocks(panel._replace(prefetch=0)) if packed else fetching
    pack, together, cells = kept.packed(), 1 + pairs, rows * columns
    streams = STREAMS // together

    @part
    def number(args: int, i: int) -> Any:
        return np.int64(nb.carray(pointer(data(args, 1 + weights * each), np.int32(0)), (2,))[i])

    @part
    def units(args: int) -> int:
        return -(-dim(args, 1, 1) // (columns * number(args, 0)))

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        if worker == COUNT:
            return units(args)
        T, F, count, depth = dim(args, 0, 0), dim(args, 1, 1), number(args, 0), number(args, 1)
        # Number of rows or pairs of a weight, and bytes from one to the next.
        D, by, down = dim(args, 1, 0) // together, size * F * together, -(-T // rows)
        # Sums of tiles: of all tiles while they wait for the weights' next rows, and then of the
        # streamed rows.
        scratch, each_tile = data(rets, 1) + 4 * worker * dim(rets, 1, 1), weights * cells
        kept_rows = down if depth < D else 1
        panels = scratch + 4 * each_tile * count * kept_rows
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (T, F))
        scale = nb.carray(pointer(data(args, each), np.float32(0)), (F,))
        other = nb.carray(pointer(data(args, weights * each), np.float32(0)), (F,))
        blocks, turns = -(-D // depth), weights if streamed else 1
        # Lines to read next are fetched as evenly as powers of two permit.
        slowness = 0
        while fetched << (slowness + 1) <= down:
            slowness += 1
        while True:
            first = mine * count
            last = min(first + count, (F + columns - 1) // columns)
            # Streamed weights are read one after the other; rows of both would also share sets.
            for turn in range(turns * blocks):
                top = turn % blocks * depth
                high, only = min(depth, D - top), turn // blocks
                if packed:
                    for d in range(high):
                        for g in range(weights):
                            weight = data(args, 1 + each * g) + by * (top + d)
                            for j in range(first, last):
                                to = panels + 4 * columns * (
                                    ((j - first) * weights + g) * depth + d
                                )
                                pack(weight + size * min(j * columns, F - columns), size * F, to)
                for low in range(0, high, streams if streamed else high):
                    wide = min(streams, high - low) if streamed else high
                    # What is read next: the rows below, or the next unit's rows.
                    below, beside = top + low + wide, 0
                    if below >= D:
                        below, beside = 0, count * dim(rets, 1, 0)
                    for i in range(down):
                        # The last rows and columns may include some that were already computed.
                        row = min(i * rows, T - rows)
                        x = data(args, 0) + 4 * (D * row + top + low)
                        tiles = scratch + 4 * each_tile * count * (i if depth < D else 0)
                        to = panels + 4 * each_tile * count * i if streamed else tiles
                        line, stretch = i >> slowness, i % (1 << slowness)
                        lower, along = divmod(min(line, fetched - 1), lines)
                        for g in range(only, only + weights // turns):
                            weight = data(args, 1 + each * g)
                            far = weight + size * F * lower + 64 * along
                            far += by * (below + (stretch * wide >> slowness))
                            for j in range(first, last):
                                sums = to + 4 * ((j - first) * each_tile + g * cells)
                                ahead = far + size * min((j + beside) * columns, F - columns)
                                if not packed:
                                    at = weight + by * (top + low)
                                    at += size * min(j * columns, F - columns)
                                    fetching(
                                        x, 4 * D, at, wide, by, sums, low > 0, ahead, by, slowness
                                    )
                                    continue
                                at = panels + 4 * columns * depth * ((j - first) * weights + g)
                                if line < fetched:
                                    fetching(
                                        x, 4 * D, at, high, 4 * columns, sums, top > 0,
                                        ahead, by, slowness,
                                    )  # fmt: skip
                                else:
                                    product(x, 4 * D, at, high, 4 * columns, sums, top > 0, 0, 0, 0)
                        if streamed and low + wide == high:
                            shape = last - first, weights, cells
                            total = nb.carray(pointer(tiles, np.float32(0)), shape)
                            these = nb.carray(pointer(to, np.float32(0)), shape)
                            for j in range(last - first):
                                for c in range(cells):
                                    sofar = total[j, only, c] if top > 0 else np.float32(0)
                                    total[j, only, c] = sofar + these[j, only, c]
                        if top + low + wide < D or only + 1 < turns:
                            continue
                        wide_shape = last - first, weights, rows, columns
                        found = nb.carray(pointer(tiles, np.float32(0)), wide_shape)
                        for j in range(first, last):
                            column = min(j * columns, F - columns)
                            # Added all at once, because another core may be working on some of
                            # these columns, too.
                            for r in range(rows):
                                for c in range(columns):
                                    y = found[j - first, 0, r, c]
                                    if scaled:
                                        y *= scale[column + c] * unit
                                    if gated:
                                        z = found[j - first, weights - 1, r, c]
                                        if scaled:
                                            z *= other[column + c] * unit
                                        y = silu(y) * z
                                    out[row + r, column + c] = y
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target(("gated_" if gated else "matmul_") + "_".join(map(str, sizes)), work)


def call(target: NativeCode, shape: tuple[int, int], scratch: int, *args: jax.Array) -> jax.Array:
    """Call a kernel; return its result of this shape. Each thread gets ``scratch`` numbers."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (threads(), scratch))]
    out, _ = jax.ffi.ffi_call(target.name, shapes)(*args)
    return out


def has_pairs(dtype: jnp.dtype) -> bool:
    """Tell whether this processor multiplies rows of this dtype in pairs; only bfloat16 can be."""
    return dtype == jnp.bfloat16 and tiles().lanes == PAIRS and has("avx512bf16")


def matmul(x_TD: jax.Array, *weight: jax.Array) -> jax.Array:
    """Return ``x_TD @ weight_DF``, summed in float32.

    A weight of 8 bits is followed by its columns' scales. Rows are rounded to bfloat16 if the
    weight is bfloat16, and may be for 8 bits.
    """
    if is_left_to_xla(len(x_TD), weight[0].dtype):
        return _plain(x_TD, weight[0])
    return _product(x_TD, weight, 1)


def gated(x_TD: jax.Array, *weights: jax.Array) -> jax.Array:
    """Return ``silu(x_TD @ gate_DF) * (x_TD @ up_DF)``; see ``matmul``."""
    if is_left_to_xla(len(x_TD), weights[0].dtype):
        gate_DF, up_DF = weights
        return jax.nn.silu(_plain(x_TD, gate_DF)) * _plain(x_TD, up_DF)
    return _product(x_TD, weights, 2)


def is_left_to_xla(rows: int, dtype: jnp.dtype, head: bool = False) -> bool:
    """Tell whether XLA's own product is faster, as measured by ``scripts/bench/products.py``.

    Without AVX-512, that is true of float32 with many rows, and of the head with one row.
    """
    if dtype != jnp.float32 or has("avx512f"):
        return False
    return rows == 1 if head else rows > XLA_BEYOND


def _plain(x_TD: jax.Array, weight_DF: jax.Array) -> jax.Array:
    x_TD = x_TD.astype(weight_DF.dtype)
    return jnp.einsum("td,df->tf", x_TD, weight_DF, preferred_element_type=jnp.float32)


def _product(x_TD: jax.Array, weights: tuple[jax.Array, ...], count: int) -> jax.Array:
    (T, D), (_, F), dtype, tile = x_TD.shape, weights[0].shape, weights[0].dtype, tiles()
    scaled = dtype.itemsize == 1
    pairs = has_pairs(x_TD.dtype if scaled else dtype)
    if pairs:
        x_TD = x_TD.astype(jnp.bfloat16)
        # Whole pairs, and at least a register of columns; usually, nothing is added.
        more = (0, D % 2), (0, max(PAIRS - F, 0))
        x_TD = jnp.pad(x_TD, ((0, 0), more[0]))
        weights = tuple(jnp.pad(w, more[-w.ndim :]) for w in weights)
    elif dtype == jnp.bfloat16:
        # Not by casts, which XLA may leave out.
        x_TD = jax.lax.reduce_precision(x_TD.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    else:
        x_TD = x_TD.astype(jnp.float32)
    most, columns = tile.matmul, SCALED_COLUMNS
    in_place, large = few_rows(D, weights[0].shape[1], dtype, pairs)
    packed = tile.panel > 0 and in_place < T
    if scaled and not packed:
        most = tile.scaled
    # As few tiles of rows as possible, with as few rows as possible.
    rows = -(-T // -(-T // most))
    if packed or not scaled:
        columns = min(tile.vectors, tile.sums // rows) * tile.lanes
    wide = weights[0].shape[1]
    columns = min(columns, wide // PAIRS * PAIRS if pairs else wide)
    streamed = large and not packed
    sizes = MatmulSizes(rows, columns, dtype.name, count == 2, packed, pairs, streamed)
    high = x_TD.shape[1] // 2 if pairs else D
    depth = min(DEPTH, high) if large else high
    floats = count * columns * (STREAMS if streamed else depth)
    each = _tiles_of_unit(-(-wide // columns), floats) if packed or streamed else 1
    sums = each * (-(-T // rows) if depth < high else 1) * (1 + streamed)
    scratch = count * rows * columns * sums + packed * each * count * columns * depth
    args = x_TD, *weights, jnp.array([each, depth], jnp.int32)
    return call(_matmul(sizes), (T, wide), scratch, *args)[:, :F]


def few_rows(D: int, F: int, dtype: jnp.dtype, pairs: bool) -> tuple[int, bool]:
    """Return the largest number of rows for which a weight is read in place, and whether it is
    large.

    This depends only on the weight's bytes: a row's sums do not depend on other rows.
    """
    tile, size = tiles(), D * F * dtype.itemsize
    if dtype.itemsize == 1:
        few = tile.sums // 2
    elif pairs:
        few = tile.matmul
    else:
        few = next((rows for rows, most in tile.in_place if size <= most), FEW)
    return few, size > LARGE


def _tiles_of_unit(count: int, floats: int) -> int:
    """Return the tiles of columns that a unit packs: at most a panel, divided evenly over units."""
    units = -(-count // max(tiles().panel // floats, 1))
    return -(-count // (-(-units // threads()) * threads()))
