"""Slabs of KV entries: gathered from one instance's pages, scattered into another's.

The two ends know nothing of each other except the format of a slab, so they may be in two
processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.sharding import spec
from jaxinfer.pallas_kernels.choice import keys_by_token
from jaxinfer.pallas_kernels.kv_pages import KVPages, write_kv
from jaxinfer.runtime.kv.checksums import checksum
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.stage_plan import StageFacts, StagePlan

SLAB_TOKENS = 256


def gather(
    num_heads: int,
    dtype: jnp.dtype,
    by_token: bool,
    kv: list[KVPages],
    pages_M: jax.Array,
    offset: jax.Array,
) -> jax.Array:
    """Return a slab [2, L, T, K, H] of the entries in some layers' pages, from ``offset`` on.

    Args:
        by_token: see ``choice.keys_by_token``.
    """

    def in_token_order(pages_PKBH: jax.Array, scale_PK: jax.Array | None) -> jax.Array:
        x_MKBH = pages_PKBH[pages_M, :num_heads]
        if scale_PK is not None:
            x_MKBH = x_MKBH.astype(jnp.float32) * scale_PK[pages_M, :num_heads, None, None]
        x_MBKH = jnp.swapaxes(x_MKBH, 1, 2).astype(dtype)
        x_XKH = x_MBKH.reshape(-1, *x_MBKH.shape[2:])
        return jax.lax.dynamic_slice_in_dim(x_XKH, offset, SLAB_TOKENS)

    def keys(pages: KVPages) -> jax.Array:
        return pages.keys if by_token else jnp.swapaxes(pages.keys, 2, 3)

    k_LTKH = [in_token_order(keys(pages), pages.key_scale_PK) for pages in kv]
    v_LTKH = [in_token_order(pages.values, pages.value_scale_PK) for pages in kv]
    return jnp.stack([jnp.stack(k_LTKH), jnp.stack(v_LTKH)])


def scatter(
    by_token: bool,
    kv: list[KVPages],
    slab_2LTKH: jax.Array,
    pages_M: jax.Array,
    offset: jax.Array,
    count: jax.Array,
) -> list[KVPages]:
    """Write a slab's first entries to pages, from ``offset`` on; ``kv`` should be donated.

    Padding goes to page 0.
    """
    heads, page_size = kv[0].values.shape[1:3]
    slab_2LTKH = jnp.pad(slab_2LTKH, [(0, 0)] * 3 + [(0, heads - slab_2LTKH.shape[3]), (0, 0)])
    k_LTKH, v_LTKH = slab_2LTKH
    token_T = jnp.arange(SLAB_TOKENS)
    position_T = jnp.where(token_T < count, offset + token_T, 0)
    page_T = jnp.where(token_T < count, pages_M[position_T // page_size], 0)
    offset_T = position_T % page_size
    return [
        write_kv(pages, k, v, page_T, offset_T, by_token)
        for pages, k, v in zip(kv, k_LTKH, v_LTKH, strict=True)
    ]


@dataclass(frozen=True)
class SlabFormat:
    """The format of slabs between two stages: which entries they contain, of layers that both have.

    Attributes:
        first: first layer, in the whole model.
        stop: end of the layers, in the whole model.
        num_heads: number of the model's KV heads, without padding.
        dtype: the narrower of the two stages' types.
        shards: number of pieces into which both stages' pages can be divided by heads.
    """

    first: int
    stop: int
    num_heads: int
    head_dim: int
    dtype: jnp.dtype
    shards: int

    @classmethod
    def between(cls, source: StageFacts, dest: StageFacts) -> "SlabFormat":
        """Make the format for two stages that have layers in common."""
        shards = math.gcd(source.kv_ways, dest.kv_ways, source.num_kv_heads)
        return cls(
            max(source.layers.start, dest.layers.start),
            min(source.layers.stop, dest.layers.stop),
            source.num_kv_heads,
            source.config.head_dim,
            min(source.dtype, dest.dtype, key=lambda dtype: dtype.itemsize),
            shards,
        )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a slab, [2, L, T, K, H], with keys first and values second."""
        return 2, self.stop - self.first, SLAB_TOKENS, self.num_heads, self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token."""
        layers = self.stop - self.first
        return 2 * layers * self.num_heads * self.head_dim * self.dtype.itemsize

    def sharding(self, plan: StagePlan) -> NamedSharding:
        """Return the sharding of a slab by heads, like the stage's pages, or a replicated one."""
        table = plan.config.layout.kv if self.num_heads % plan.kv_ways == 0 else {}
        return NamedSharding(
            plan.mesh, PartitionSpec(*[None] * 3, *spec("K", table, plan.mesh.axis_names))
        )

    def layers_of(self, plan: StageFacts) -> slice:
        """Return the range of the stage's layers that a slab holds."""
        return slice(self.first - plan.layers.start, self.stop - plan.layers.start)


class SlabSource:
    """Gathers slabs from a stage's pages.

    Args:
        verify: compute a checksum of each slab.
    """

    def __init__(self, stage: Stage, form: SlabFormat, verify: bool) -> None:
        self._stage, self._layers = stage, form.layers_of(stage.plan)
        self._gather = compiled_gather(stage, form)
        self._checksum = jax.jit(checksum) if verify else None

    def take(
        self, table: Sequence[int], start: int, stop: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Launch the gather of up to ``SLAB_TOKENS`` tokens, and the checksum; return at once.

        Args:
            table: pages of the request, in token order.
        """
        pages, offset = _where(self._stage.plan, table, start, stop)
        array = self._gather(self._stage.kv[self._layers], pages, offset)
        return array, self._checksum(array) if self._checksum else None


class SlabDest:
    """Writes slabs to a stage's pages.

    Args:
        verify: read the pages back after writing.

    Attributes:
        sharding: sharding of a slab to be written.
    """

    def __init__(self, stage: Stage, form: SlabFormat, verify: bool) -> None:
        self._stage, self._layers = stage, form.layers_of(stage.plan)
        self.sharding = form.sharding(stage.plan)
        self._scatter = compiled_scatter(stage, form)
        self._read_back = compiled_gather(stage, form) if verify else None
        self._checksum = jax.jit(checksum)

    def place(
        self, array: jax.Array, table: Sequence[int], start: int, stop: int
    ) -> jax.Array | None:
        """Launch the scatter of a slab that has arrived; return at once.

        The result is the checksum of the entries in the pages after writing, if transfers are
        verified.
        """
        plan, kv, layers = self._stage.plan, self._stage.kv, self._layers
        pages, offset = _where(plan, table, start, stop)
        kv[layers] = self._scatter(kv[layers], array, pages, offset, np.int32(stop - start))
        if self._read_back is None:
            return None
        return self._checksum(self._read_back(kv[layers], pages, offset))


def compiled_gather(stage: Stage, form: SlabFormat) -> jax.stages.Compiled:
    """Compile ``gather`` on a stage's pages, for all slabs of this format."""
    key = "gather", form
    if key not in stage.transfers:
        plan = stage.plan
        jitted = jax.jit(
            partial(gather, form.num_heads, form.dtype, keys_by_token(plan.config.kernels)),
            out_shardings=form.sharding(plan),
        )
        pages = np.zeros(_pages_of_slab(plan), np.int32)
        with jax.set_mesh(plan.mesh):
            lowered = jitted.lower(plan.pages[form.layers_of(plan)], pages, np.int32(0))
            stage.transfers[key] = lowered.compile()
    return stage.transfers[key]


def compiled_scatter(stage: Stage, form: SlabFormat) -> jax.stages.Compiled:
    """Compile ``scatter`` into a stage's pages, for all slabs of this format."""
    key = "scatter", form
    if key not in stage.transfers:
        plan = stage.plan
        pages = plan.pages[form.layers_of(plan)]
        jitted = jax.jit(
            partial(scatter, keys_by_token(plan.config.kernels)),
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda x: x.sharding, pages),
        )
        slab = jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=form.sharding(plan))
        places, number = np.zeros(_pages_of_slab(plan), np.int32), np.int32(0)
        with jax.set_mesh(plan.mesh):
            stage.transfers[key] = jitted.lower(pages, slab, places, number, number).compile()
    return stage.transfers[key]


def _pages_of_slab(plan: StagePlan) -> int:
    """Return the largest number of pages that a slab's tokens can lie in."""
    return -(-SLAB_TOKENS // plan.limits.page_size) + 1


def _where(
    plan: StagePlan, table: Sequence[int], start: int, stop: int
) -> tuple[np.ndarray, np.integer]:
    """Return the pages of some tokens, padded, and their offset in the first page."""
    size = plan.limits.page_size
    pages = np.zeros(_pages_of_slab(plan), np.int32)
    here = table[start // size : -(-stop // size)]
    pages[: len(here)] = here
    return pages, np.int32(start % size)
