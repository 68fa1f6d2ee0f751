"""Building blocks for NVIDIA Ampere and Ada in Mosaic GPU: cp.async, mma.sync, and replacements.

A product has 16 rows, and the four warps of a warpgroup have different columns of it. Operations
that Mosaic's interpret mode lacks are replaced there: by immediate copies, and by XLA's products.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from jaxinfer.pallas_kernels.gpu_work import Ref

# The signature of jax 0.11; type checkers may see an older one.
plgpu: Any = mosaic_gpu
# Rows of a product, including padding.
ROWS = 16


class Lie(NamedTuple):
    """Register layouts of a product's operands and sums."""

    left: Any
    right: Any
    sums: Any

    @property
    def of_rows(self) -> Any:
        """The register layout for an array with one number per row of the sums."""
        return self.sums.reduce(1)


class OnGpu:
    """The operations that kernels use on a GPU.

    Args:
        dtype: dtype of the operands of products.
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
        """Load from shared memory, without bank conflicts."""
        found: jax.Array = plgpu.load(x, layout=layout)
        return found

    def fetch(self, x: Ref, layout: Any) -> jax.Array:
        """Load from the GPU's memory."""
        found: jax.Array = plgpu.load(x, layout=layout, optimized=False)
        return found

    def store(self, x: Ref, value: jax.Array) -> None:
        """Store to the GPU's memory.

        Some sectors take two stores, which jax 0.12 requires to be stated.
        """
        if hasattr(plgpu, "store"):
            plgpu.store(x, value, optimized=False)
        else:
            x[...] = value

    def add_product(self, sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """Return sums + left right."""
        found: jax.Array = plgpu.mma(sums, left, right)
        return found

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """Return float32 filled with ``value``: sums [rows, columns], or one number per row."""
        layout = self.lie.sums if len(shape) == 2 else self.lie.of_rows
        found: jax.Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
        return found

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """Return an int32 array with the indices along an axis."""
        found: jax.Array = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        return found


class Interpreted(OnGpu):
    """The same operations in Mosaic's interpret mode."""

    def copy(self, pages: Ref, shared: Ref) -> None:
        """Copy immediately."""
        shared[...] = pages[...]

    def wait(self, groups: int) -> None:
        """Return at once: all copies are done."""

    def load(self, x: Ref, layout: Any) -> jax.Array:
        """Load the value; the layout is ignored."""
        return x[...]

    fetch = load

    def store(self, x: Ref, value: jax.Array) -> None:
        """Store the value."""
        x[...] = value

    def add_product(self, sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """Add a product that XLA computes."""
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """Return an array filled with ``value``, without a layout."""
        return jnp.full(shape, value, jnp.float32)

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """Return the indices along an axis, without a layout."""
        return lax.broadcasted_iota(jnp.int32, shape, axis)


def copy_tile(
    how: OnGpu, pages_PKBH: Ref, shared_JH: Ref, table_M: Ref, head: jax.Array, tile: jax.Array
) -> None:
    """Start the copies of a tile's tokens, one group for each page that contains them."""
    B, size = pages_PKBH.shape[2], shared_JH.shape[0]
    unit = min(B, size)
    for part in range(size // unit):
        token = tile * size + part * unit
        # A tile may reach beyond the table's end, where there are no tokens.
        page = table_M[jnp.minimum(lax.div(token, B), table_M.shape[0] - 1)]
        at = pl.ds(lax.rem(token, B), unit) if size < B else slice(None)
        how.copy(pages_PKBH.at[page, head, at], shared_JH.at[pl.ds(part * unit, unit)])


def rows(x_R: jax.Array, like_RX: jax.Array) -> jax.Array:
    """Broadcast a number per row to all of its columns."""
    return lax.broadcast_in_dim(x_R, like_RX.shape, [0])


def shared(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Return shared memory that is written and read without bank conflicts."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))
