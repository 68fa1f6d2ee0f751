"""Products of rows with their experts' weights on NVIDIA GPUs, in generic Pallas (Triton).

As in ``numba_grouped``, but rows are rounded to the weights' dtype. The rows of an expert are
consecutive. A program multiplies a tile of one expert's rows by some columns of its weights (or of
two weights), summed in float32. A tile's rows are looked up in a table, so that launches depend
only on the number of rows. An expert without rows is not read.

Suffixes are those of ``models/layers.py``; R is rows, I tiles.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxinfer.pallas_kernels.gpu_work import Ref, pieces, whole
from jaxinfer.pallas_kernels.reference import work_items

# Largest numbers of rows and columns of a tile, and rows of weights at a time. Three such blocks
# are on their way or multiplied: 96 KB of 16-bit floats, which an L4 has. Float32 uses registers,
# and no tensor cores.
ROWS, COLUMNS, DEPTH = 128, 128, 64
ROWS_FLOAT32, COLUMNS_FLOAT32, DEPTH_FLOAT32 = 32, 64, 32
STAGES = 3
# Smallest size of a matrix product along each axis.
LEAST = 16
# Number of tiles of rows that pass the columns together. Programs that run at once share what they
# read: 8 tiles share their weights, and some 30 columns' programs share their rows.
TOGETHER = 8


class RowTiles(NamedTuple):
    """Tiles of rows of one expert, all int32 [I].

    Attributes:
        expert: expert of each tile.
        row: its first row.
        size: number of rows; 0 for padding.
    """

    expert: jax.Array
    row: jax.Array
    size: jax.Array


def row_tiles(count_E: jax.Array, R: int, rows: int) -> RowTiles:
    """Cut experts' rows into tiles of at most ``rows``; pad the tiles to multiples of ``TOGETHER``.

    Args:
        R: number of rows, which bounds the sum over experts.
    """
    most = pl.cdiv(R, rows) + min(R, len(count_E))
    most = pl.cdiv(most, TOGETHER) * TOGETHER
    expert_I, index_I, _ = work_items(pl.cdiv(count_E, rows), most)
    # Padding belongs to the last expert, after its rows.
    size_I = jnp.clip(count_E[expert_I] - index_I * rows, 0, rows)
    row_E = jnp.cumsum(count_E) - count_E
    return RowTiles(expert_I, row_E[expert_I] + index_I * rows, size_I)


def why_not(D: int, F: int) -> str | None:
    """Return why weights of D x F are not supported, or None."""
    if D % LEAST or F % LEAST:
        return f"experts are of {D} x {F}, no multiples of {LEAST}"
    return None


@partial(jax.jit, static_argnames="interpret")
def matmul(
    x_RD: jax.Array, weight_EDF: jax.Array, count_E: jax.Array, interpret: bool = False
) -> jax.Array:
    """See ``numba_grouped.matmul``; D and F must be multiples of 16.

    Rows after the last expert's are undefined.
    """
    return _call(x_RD, (weight_EDF,), count_E, jnp.dtype("float32"), interpret)


@partial(jax.jit, static_argnames="interpret")
def gated(
    x_RD: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    count_E: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Return ``silu(x gate) * (x up)`` in the weights' dtype; see ``matmul``."""
    return _call(x_RD, (gate_EDF, up_EDF), count_E, gate_EDF.dtype, interpret)


def _call(
    x_RD: jax.Array,
    weights: tuple[jax.Array, ...],
    count_E: jax.Array,
    dtype: jnp.dtype,
    interpret: bool,
) -> jax.Array:
    R, (E, _, F) = len(x_RD), weights[0].shape
    is_float32 = weights[0].dtype == jnp.float32
    most = ROWS_FLOAT32 if is_float32 else ROWS
    # Half of an expert's mean number of rows, because its last tile is half empty.
    rows = min(max(pl.next_power_of_2(pl.cdiv(R, 2 * E)), LEAST), most)
    columns = (COLUMNS_FLOAT32 if is_float32 else COLUMNS) // len(weights)
    columns = min(columns, pieces(F)[0][1])
    tiles = row_tiles(count_E, R, rows)
    inputs = tiles, x_RD.astype(weights[0].dtype), *weights
    result = jax.ShapeDtypeStruct((R, F), dtype)
    return pl.pallas_call(
        partial(_product, rows=rows, columns=columns),
        grid=(TOGETHER, pl.cdiv(F, columns), len(tiles.size) // TOGETHER),
        in_specs=list(jax.tree.map(whole, inputs)),
        out_specs=whole(result),
        out_shape=result,
        compiler_params=triton.CompilerParams(num_warps=max(rows // 16, 4), num_stages=STAGES),
        interpret=interpret,
        name="grouped_gated" if len(weights) > 1 else "grouped_matmul",
    )(*inputs)


def _product(tiles: RowTiles, x_RD: Ref, *refs: Ref, rows: int, columns: int) -> None:
    *weights, out_RF = refs
    i = pl.program_id(2) * TOGETHER + pl.program_id(0)
    (R, D), F = x_RD.shape, out_RF.shape[1]
    expert, size = tiles.expert[i], tiles.size[i]
    row = tiles.row[i] + jnp.arange(rows)
    # Rows beyond the end, and the last columns, are computed twice; the stored values are the same.
    from_row = jnp.minimum(row, R - 1)[:, None]
    column = jnp.minimum(pl.program_id(1) * columns, F - columns) + jnp.arange(columns)[None, :]

    def add(
        start: jax.Array | int, count: int, sums: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        depth = start + jnp.arange(count)
        x = x_RD[from_row, depth[None, :]]
        return tuple(
            total + triton.dot(x, weight[expert, depth[:, None], column], allow_tf32=False)
            for total, weight in zip(sums, weights, strict=True)
        )

    @pl.when(size > 0)
    def multiply() -> None:
        depth = DEPTH_FLOAT32 if x_RD.dtype == jnp.float32 else DEPTH
        sums = tuple(jnp.zeros((rows, columns), jnp.float32) for _ in weights)
        sums = jax.lax.fori_loop(0, D // depth, lambda k, s: add(k * depth, depth, s), sums)
        for start, count in pieces(D % depth):
            sums = add(D - D % depth + start, count, sums)
        out = jax.nn.silu(sums[0]) * sums[1] if len(sums) > 1 else sums[0]
        stored = jnp.broadcast_to((jnp.arange(rows) < size)[:, None], out.shape)
        triton.store(out_RF.at[row[:, None], column], out.astype(out_RF.dtype), mask=stored)
