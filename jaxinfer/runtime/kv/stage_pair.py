"""The ways of KV slabs between a stage of one instance and a stage of another."""

from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import jax
import numpy as np

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv.checksums import compare, probe
from jaxinfer.runtime.kv.slab import SlabDest, SlabFormat, SlabSource
from jaxinfer.runtime.stage.layout import PlanFacts
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.serving.batch import Transfer

# Of the ends of lanes between processes.
_ends = count()


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
        form: of its slabs.
        groups: of the two stages.
        link: between these groups, where it is emulated.
        dest_sharding: of a slab that is to be placed.

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
        self.source_shard, self.dest_shard = source_shard, dest_shard
        self.form = form = SlabFormat.between(source.plan, dest.plan)
        self._source_sharding = form.sharding(source.plan)
        self._page_size = dest.plan.limits.page_size
        self._source = SlabSource(source, form, verify)
        self._dest = SlabDest(dest, form, verify)
        self.dest_sharding = self._dest.sharding

    @property
    def token_bytes(self) -> int:
        """KV bytes per token."""
        return self.form.token_bytes

    def probe(self, names: str) -> float:
        """10^9 bytes per second; raises JaxinferError where a known slab does not arrive."""
        form = self.form
        return probe(form.shape, form.dtype, self._source_sharding, self.dest_sharding, names)

    def take(self, transfer: Transfer, start: int, stop: int, after: "Future[None] | None") -> Slab:
        """Launch the gather of up to ``SLAB_TOKENS`` tokens; returns at once."""
        table = transfer.source_hold.tables[self.source_shard][0]
        array, sent = self._source.take(table, start, stop)
        return Slab(transfer, self, array, start, stop, sent, after)

    def place(self, slab: Slab, array: jax.Array) -> jax.Array | None:
        """Launch the scatter of what has arrived; returns at once.

        Where transfers are verified, returns the checksum of what lies in the pages then.
        """
        table = slab.transfer.dest_hold.tables[self.dest_shard][0]
        return self._dest.place(array, table, slab.start, slab.stop)

    def compare(self, slab: Slab, arrived: jax.Array) -> None:
        """Wait for the checksum of what has arrived.

        Raises:
            JaxinferError: it is not that of what was sent; names the first layer and page.
        """
        assert slab.checksum is not None
        sent, found = np.asarray(slab.checksum), np.asarray(arrived)
        shard, size = self.dest_shard, self._page_size
        compare(slab.transfer, (slab.start, slab.stop), self.form.first, shard, size, sent, found)


@dataclass(frozen=True, eq=False)
class RemoteLane:
    """The layers that one stage of the source and one of the destination share; see ``Lane``.

    Attributes:
        page_size: of the destination.
        source_end, dest_end: numbers that messages to the two processes name its ends by.
    """

    form: SlabFormat
    source_shard: int
    dest_shard: int
    page_size: int
    groups: tuple[str, str]
    link: LinkConfig | None
    source_end: int
    dest_end: int

    @classmethod
    def between(
        cls,
        source: PlanFacts,
        dest: PlanFacts,
        source_shard: int,
        dest_shard: int,
        groups: tuple[str, str],
        link: LinkConfig | None,
    ) -> "RemoteLane":
        """Two stages, by their plans."""
        ends = next(_ends), next(_ends)
        size = dest.limits.page_size
        form = SlabFormat.between(source, dest)
        return cls(form, source_shard, dest_shard, size, groups, link, *ends)

    @property
    def token_bytes(self) -> int:
        """KV bytes per token."""
        return self.form.token_bytes


@dataclass(eq=False)
class RemoteSlab:
    """One piece of a transfer on its way between processes; see ``Slab``.

    Attributes:
        number: never used again.
        is_pulled: the destination's process has it.
    """

    number: int
    transfer: Transfer
    lane: RemoteLane
    start: int
    stop: int
    checksum_LT: np.ndarray | None = None
    is_pulled: bool = False
