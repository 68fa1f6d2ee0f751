"""KV entries out of one stage's pages, and into another's.

The source gathers a request's pages into slabs of ``SLAB_TOKENS`` tokens, in token order; the
destination scatters these into its own. Token order makes unequal page sizes, dtypes, tensor
parallelism and pipeline cuts all the same case. Slabs have real heads only.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.models.sharding import HEADS_AXIS
from jaxinfer.pallas_kernels.choice import keys_by_token
from jaxinfer.pallas_kernels.kv_pages import KVPages, write_kv
from jaxinfer.runtime.plan import Plan
from jaxinfer.runtime.stage import Stage
from jaxinfer.runtime.transfer_check import checksum, probe
from jaxinfer.serving.batch import Transfer

SLAB_TOKENS = 256


def gather(
    num_heads: int,
    dtype: jnp.dtype,
    by_token: bool,
    kv: list[KVPages],
    pages_M: jax.Array,
    offset: jax.Array,
) -> jax.Array:
    """A slab [2, L, T, K, H] of the entries in some layers' pages, from ``offset`` on.

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
    page_T: jax.Array,
    offset_T: jax.Array,
) -> list[KVPages]:
    """Write a slab's entries to their places; padding goes to page 0. ``kv`` is to be donated."""
    heads = kv[0].keys.shape[1] - slab_2LTKH.shape[3]
    slab_2LTKH = jnp.pad(slab_2LTKH, [(0, 0)] * 3 + [(0, heads), (0, 0)])
    k_LTKH, v_LTKH = slab_2LTKH
    return [
        write_kv(pages, k, v, page_T, offset_T, by_token)
        for pages, k, v in zip(kv, k_LTKH, v_LTKH, strict=True)
    ]


@dataclass(frozen=True)
class Slab:
    """One piece of a transfer on its way: tokens ``start`` to ``stop`` of some layers.

    It leaves when ``after`` is done: the part of a step that computes it.
    """

    transfer: Transfer
    lane: "Lane"
    array: jax.Array
    start: int
    stop: int
    checksum: jax.Array | None
    after: "Future[None] | None"


class Lane:
    """The layers that one stage of the source and one stage of the destination share.

    Attributes:
        token_bytes: KV bytes per token.
        groups: of the two stages.
        link: between these groups, where it is emulated.

    Args:
        verify: compare checksums of what was sent and what lies in the destination's pages.
    """

    def __init__(
        self,
        source: Stage,
        dest: Stage,
        source_shard: int,
        dest_shard: int,
        groups: tuple[str, str],
        link: LinkConfig | None,
        verify: bool,
    ) -> None:
        self.groups, self.link = groups, link
        self._first_layer = max(source.plan.layers.start, dest.plan.layers.start)
        self.source, self.dest = source, dest
        self.source_shard, self.dest_shard = source_shard, dest_shard
        first = self._first_layer
        stop = min(source.plan.layers.stop, dest.plan.layers.stop)
        self._source_slice, self._dest_slice = (
            slice(first - plan.layers.start, stop - plan.layers.start)
            for plan in (source.plan, dest.plan)
        )
        self.num_layers = stop - first
        dtypes = source.plan.dtype, dest.plan.dtype
        self.dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        K, H = source.plan.num_kv_heads, source.plan.config.head_dim
        self.token_bytes = 2 * self.num_layers * K * H * self.dtype.itemsize
        self.shape = 2, self.num_layers, SLAB_TOKENS, K, H
        self.dest_sharding = _by_heads(dest.plan, K)
        self._gather = self._compile_gather(source.plan, self._source_slice)
        self._scatter = self._compile_scatter()
        self._read_back = None
        if verify:
            self._read_back = self._compile_gather(dest.plan, self._dest_slice)
            self._checksum = jax.jit(checksum)

    def probe(self, names: str) -> float:
        """10^9 bytes per second; raises JaxinferError where a known slab does not arrive."""
        source_sharding = _by_heads(self.source.plan, self.shape[3])
        return probe(self.shape, self.dtype, source_sharding, self.dest_sharding, names)

    def _compile_gather(self, plan: Plan, layers: slice) -> jax.stages.Compiled:
        num_heads = self.shape[3]
        jitted = jax.jit(
            partial(gather, num_heads, self.dtype, keys_by_token(plan.config.kernels)),
            out_shardings=_by_heads(plan, num_heads),
        )
        pages = np.zeros(_pages_of_slab(plan), np.int32)
        with jax.set_mesh(plan.mesh):
            return jitted.lower(plan.pages[layers], pages, np.int32(0)).compile()

    def _compile_scatter(self) -> jax.stages.Compiled:
        plan = self.dest.plan
        pages = plan.pages[self._dest_slice]
        jitted = jax.jit(
            partial(scatter, keys_by_token(plan.config.kernels)),
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda x: x.sharding, pages),
        )
        slab = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.dest_sharding)
        places = np.zeros(SLAB_TOKENS, np.int32)
        with jax.set_mesh(plan.mesh):
            return jitted.lower(pages, slab, places, places).compile()

    def take(self, transfer: Transfer, start: int, stop: int, after: "Future[None] | None") -> Slab:
        """Launch the gather of up to ``SLAB_TOKENS`` tokens; returns at once."""
        pages, offset = _where(
            self.source.plan, transfer.source_hold.tables[self.source_shard][0], start, stop
        )
        array = self._gather(self.source.kv[self._source_slice], pages, offset)
        sent = self._checksum(array) if self._read_back else None
        return Slab(transfer, self, array, start, stop, sent, after)

    def place(self, slab: Slab, array: jax.Array) -> jax.Array | None:
        """Launch the scatter of what has arrived; returns at once.

        Where transfers are verified, returns the checksum of what lies in the pages then.
        """
        table = slab.transfer.dest_hold.tables[self.dest_shard][0]
        size = self.dest.plan.limits.page_size
        position = np.arange(slab.start, slab.stop)
        page_T, offset_T = np.zeros((2, SLAB_TOKENS), np.int32)
        page_T[: len(position)] = np.asarray(table, np.int32)[position // size]
        offset_T[: len(position)] = position % size
        self.dest.kv[self._dest_slice] = self._scatter(
            self.dest.kv[self._dest_slice], array, page_T, offset_T
        )
        if self._read_back is None:
            return None
        pages, offset = _where(self.dest.plan, table, slab.start, slab.stop)
        return self._checksum(self._read_back(self.dest.kv[self._dest_slice], pages, offset))

    def compare(self, slab: Slab, arrived: jax.Array) -> None:
        """Wait for the checksum of what has arrived.

        Raises:
            JaxinferError: it is not that of what was sent; names the first layer and page.
        """
        assert slab.checksum is not None
        count = slab.stop - slab.start
        wrong = np.asarray(slab.checksum)[:, :count] != np.asarray(arrived)[:, :count]
        if wrong.any():
            layer, token = (int(n) for n in np.argwhere(wrong)[0])
            t, position = slab.transfer, slab.start + token
            table = t.dest_hold.tables[self.dest_shard][0]
            page = table[position // self.dest.plan.limits.page_size]
            raise JaxinferError(
                f"transfer of request {t.request.id!r} from {t.source} to {t.dest}: "
                f"layer {self._first_layer + layer}, page {page} of {t.dest} "
                f"(token {position}) is not what was sent"
            )


def _pages_of_slab(plan: Plan) -> int:
    """Pages that a slab's tokens lie in at most."""
    return -(-SLAB_TOKENS // plan.limits.page_size) + 1


def _where(
    plan: Plan, table: Sequence[int], start: int, stop: int
) -> tuple[np.ndarray, np.integer]:
    """The pages of some tokens, padded, and where in the first one they begin."""
    size = plan.limits.page_size
    pages = np.zeros(_pages_of_slab(plan), np.int32)
    here = table[start // size : -(-stop // size)]
    pages[: len(here)] = here
    return pages, np.int32(start % size)


def _by_heads(plan: Plan, num_heads: int) -> NamedSharding:
    """Of a slab: by heads where the devices divide them, else whole on every device."""
    divides = num_heads % len(plan.devices) == 0
    return NamedSharding(plan.mesh, PartitionSpec(*[None] * 3, HEADS_AXIS if divides else None))
