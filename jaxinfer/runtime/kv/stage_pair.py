"""Pairs of stages that have layers in common, and slabs on their way between them."""

from dataclasses import dataclass
from itertools import count

import numpy as np

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv.slab import SlabFormat
from jaxinfer.runtime.stage.stage_plan import StageFacts
from jaxinfer.serving.batch import Transfer

# Numbers of ends; none is used twice in a process.
_ends = count()


@dataclass(frozen=True, eq=False)
class StagePair:
    """A stage of the source and a stage of the destination, and the layers that both have.

    Attributes:
        form: format of slabs between them.
        page_size: page size of the destination.
        groups: device groups of the two stages.
        link: link between these groups, if emulated.
        source_end: number by which messages name the source's end.
        dest_end: number by which messages name the destination's end.
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
        source: StageFacts,
        dest: StageFacts,
        source_shard: int,
        dest_shard: int,
        groups: tuple[str, str],
        link: LinkConfig | None,
    ) -> "StagePair":
        """Pair two stages by their plans."""
        ends = next(_ends), next(_ends)
        size = dest.limits.page_size
        form = SlabFormat.between(source, dest)
        return cls(form, source_shard, dest_shard, size, groups, link, *ends)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token."""
        return self.form.token_bytes


@dataclass(eq=False)
class Slab:
    """A part of a transfer on its way: tokens ``start`` to ``stop`` of a pair's layers.

    Attributes:
        number: unique number, never reused.
        checksum_LT: checksum of what was sent, if transfers are verified.
        is_pulled: whether the slab has reached the destination's side.
    """

    number: int
    transfer: Transfer
    pair: StagePair
    start: int
    stop: int
    checksum_LT: np.ndarray | None = None
    is_pulled: bool = False
