"""Parts of the kernels for NVIDIA Ampere and Ada in Mosaic GPU: cp.async, mma.sync, and neither.

A product has 16 rows; of its columns, the four warps of a warpgroup have different ones. What
Mosaic's interpret mode does not know is done otherwise there: copies at once, products by XLA.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from jaxinfer.pallas_kernels.gpu_work import Ref

# As jax 0.11 has it: type checkers may see an older one.
plgpu: Any = mosaic_gpu
# Rows of a product, those of padding included.
ROWS = 16


class Lie(NamedTuple):
    """How a product's operands and sums lie in registers."""

    left: Any
    right: Any
    sums: Any

    @property
    def of_rows(self) -> Any:
        """How a number for each row of the sums lies."""
        return self.sums.reduce(1)


class OnGpu:
    """Operations as a GPU has them.

    Args:
        dtype: of the operands of products.
    """

    def __init__(self, dtype: jnp.dtype) -> None:
        layout = plgpu.Layout
        names = layout.MMA_LHS, layout.MMA_RHS, layout.MMA_ACC
        self.lie = Lie(*(name(dtype, m_warps=1) for name in names))

    def copy(self, pages: Ref, shared: Ref) -> None:
        """Start a group of copies from the GPU's memory."""
        mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(pages, shared, oob_mode=mode)

    def wait(self, groups: int) -> None:
        """Wait until at most this number of groups is in flight."""
        plgpu.wait_gmem_to_smem(groups)

    def load(self, x: Ref, layout: Any) -> jax.Array:
        """Load from shared memory, without conflicts of banks."""
        found: jax.Array = plgpu.load(x, layout=layout)
        return found

    def fetch(self, x: Ref, layout: Any) -> jax.Array:
        """Load from the GPU's memory."""
        found: jax.Array = plgpu.load(x, layout=layout, optimized=False)
        return found

    def store(self, x: Ref, value: jax.Array) -> None:
        """Store to the GPU's memory: some sectors in two parts, which jax 0.12 wants to be told."""
        if hasattr(plgpu, "store"):
            plgpu.store(x, value, optimized=False)
        else:
            x[...] = value

    def add_product(self, sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """Return sums + left right."""
        found: jax.Array = plgpu.mma(sums, left, right)
        return found

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """Equal float32 numbers: sums [rows, columns], or one for each row."""
        layout = self.lie.sums if len(shape) == 2 else self.lie.of_rows
        found: jax.Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
        return found

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """Numbers along an axis, int32."""
        found: jax.Array = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        return found


class Interpreted(OnGpu):
    """The same in Mosaic's interpret mode."""

    def copy(self, pages: Ref, shared: Ref) -> None:
        """Copy at once."""
        shared[...] = pages[...]

    def wait(self, groups: int) -> None:
        """All is there."""

    def load(self, x: Ref, layout: Any) -> jax.Array:
        """Load, whatever the layout."""
        return x[...]

    fetch = load

    def store(self, x: Ref, value: jax.Array) -> None:
        """Store, whatever the layout."""
        x[...] = value

    def add_product(self, sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """Add a product that XLA computes."""
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """Without a layout."""
        return jnp.full(shape, value, jnp.float32)

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """Without a layout."""
        return lax.broadcasted_iota(jnp.int32, shape, axis)


def copy_tile(
    how: OnGpu, pages_PKBH: Ref, shared_JH: Ref, table_M: Ref, head: jax.Array, tile: jax.Array
) -> None:
    """Start the copies of a tile's tokens, one group for each page that they lie in."""
    B, size = pages_PKBH.shape[2], shared_JH.shape[0]
    unit = min(B, size)
    for part in range(size // unit):
        token = tile * size + part * unit
        # A tile may reach past the table's end, where there are no tokens.
        page = table_M[jnp.minimum(lax.div(token, B), table_M.shape[0] - 1)]
        at = pl.ds(lax.rem(token, B), unit) if size < B else slice(None)
        how.copy(pages_PKBH.at[page, head, at], shared_JH.at[pl.ds(part * unit, unit)])


def rows(x_R: jax.Array, like_RX: jax.Array) -> jax.Array:
    """A number for each row, for all of its columns."""
    return lax.broadcast_in_dim(x_R, like_RX.shape, [0])


def shared(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory that is written and read without conflicts of banks."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))
