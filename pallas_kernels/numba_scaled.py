"""Products of a step's rows with weights of 8 bits on a CPU, compiled by numba and called by XLA.

As ``numba_matmul``, but for the weights: int8, or fp8 (e4m3), which become float32 in the core's
registers, so that a weight moves one byte from memory. A column's scale is that of its sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.numba_matmul import in_blocks
from jaxinfer.pallas_kernels.numba_vectors import FP8_UNIT, RowProduct, has_avx512, silu
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

# Columns of a tile: a cache line.
COLUMNS = 64


class ScaledSizes(NamedTuple):
    """Sizes that a kernel is compiled for: rows and columns of a tile; fp8 or int8; gated."""

    rows: int
    columns: int
    is_float: bool
    gated: bool


@compiled_once
def _register(sizes: ScaledSizes) -> NativeCode:
    rows, columns, is_float, gated = sizes
    product = in_blocks(RowProduct(rows, columns, 8, is_float=is_float))
    weights = 1 + gated
    unit = np.float32(FP8_UNIT if is_float else 1)

    @part
    def units(args: int) -> int:
        return -(-dim(args, 1, 1) // columns)

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        T, D, F = dim(args, 0, 0), dim(args, 1, 0), dim(args, 1, 1)
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        found = nb.carray(pointer(scratch, np.float32(0)), (2, rows, columns))
        out = nb.carray(pointer(data(rets, 0), np.float32(0)), (T, F))
        scale = nb.carray(pointer(data(args, 2), np.float32(0)), (F,))
        # That of what is let through; where there is no gate, it is not used.
        other = nb.carray(pointer(data(args, 2 * weights), np.float32(0)), (F,))
        while True:
            # The last columns, and the last rows, may be some that were computed already.
            column = min(mine * columns, F - columns)
            following = min((mine + dim(rets, 1, 0)) * columns, F - columns)
            for i in range((T + rows - 1) // rows):
                row = min(i * rows, T - rows)
                for g in range(weights):
                    weight = data(args, 1 + 2 * g)
                    sums = scratch + 4 * g * rows * columns
                    x = data(args, 0) + 4 * D * row
                    product(x, weight + column, D, F, sums, weight + following)
                for r in range(rows):
                    for c in range(columns):
                        y = found[0, r, c] * scale[column + c] * unit
                        if gated:
                            y = silu(y) * found[1, r, c] * other[column + c] * unit
                        out[row + r, column + c] = y
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target("scaled_" + "_".join(str(int(x)) for x in sizes), units, work)


def _call(x_TD: jax.Array, *weights: jax.Array) -> jax.Array:
    T, F = len(x_TD), weights[0].shape[1]
    is_float = weights[0].dtype == jnp.float8_e4m3fn
    rows = min(6 if has_avx512() else 3, T)
    sizes = ScaledSizes(rows, min(COLUMNS, F), is_float, len(weights) > 2)
    scratch = 2 * sizes.rows * sizes.columns
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((T, F), (threads(), scratch))]
    out, _ = jax.ffi.ffi_call(_register(sizes).name, shapes)(x_TD, *weights)
    return out


def matmul(x_TD: jax.Array, weight_DF: jax.Array, scale_F: jax.Array) -> jax.Array:
    """``x_TD @ weight_DF * scale_F``: float32, but for the weight's int8 or float8_e4m3fn."""
    return _call(x_TD, weight_DF, scale_F)


def gated(
    x_TD: jax.Array,
    gate_DF: jax.Array,
    gate_scale_F: jax.Array,
    up_DF: jax.Array,
    up_scale_F: jax.Array,
) -> jax.Array:
    """``silu(gate) * up`` of both products, as ``matmul`` has them."""
    return _call(x_TD, gate_DF, gate_scale_F, up_DF, up_scale_F)
