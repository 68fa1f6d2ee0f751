"""A correct hand-off between any two layouts, in steps that ``faults`` can get wrong."""

from collections.abc import Mapping

import numpy as np

from jaxinfer.lab.conformance.formats import FORMATS, decode, encode
from jaxinfer.lab.conformance.layout import LayerPages
from jaxinfer.lab.conformance.side import Side

SLAB_TOKENS = 32


class Mover:
    """Moves requests' entries from one side's pages to another's, in slabs of tokens.

    Args:
        cached: by request, the number of first tokens that the destination has already.
    """

    def __init__(self, source: Side, dest: Side, cached: Mapping[int, int] | None = None) -> None:
        self.source, self.dest = source, dest
        self.cached = cached or {}
        self.wire = narrower(source.layout.kv_dtype, dest.layout.kv_dtype)

    def move(self, request: int) -> None:
        """Move those of a request's entries that the destination lacks to its pages there."""
        self.send(request, self.first(request), self.source.lengths[request])

    def first(self, request: int) -> int:
        """Return the first token whose entries are sent."""
        return self.cached.get(request, 0)

    def send(self, request: int, first: int, stop: int) -> None:
        """Move a request's entries of the tokens from ``first`` up to ``stop``."""
        for shard in self.dest.pools:
            for start in range(first, stop, SLAB_TOKENS):
                tokens = range(start, min(start + SLAB_TOKENS, stop))
                self.put(shard, request, tokens, self.travel(self.take(shard, request, tokens)))

    def finish(self) -> None:
        """Called after all requests have been moved; does nothing here."""

    def take(self, shard: LayerPages, request: int, tokens: range) -> np.ndarray:
        """Return [2, T, K, H]: entries for a destination's shard, from the source's pages."""
        heads = self.dest.layout.heads_of(self.dest.model, shard.rank)
        found = np.zeros((2, len(tokens), len(heads), self.dest.model.head_dim), np.float32)
        for index, head in enumerate(heads.tolist()):
            if head >= 0:
                found[:, :, index] = self.take_head(shard, head, request, tokens)
        return found

    def take_head(self, shard: LayerPages, head: int, request: int, tokens: range) -> np.ndarray:
        """Return [2, T, H]: the entries of one head, read from the source's pages."""
        layer, rank, place = self.find(shard.layer, head)
        table = self.source_table(request)
        return self.read(layer, rank, table, tokens)[:, :, place]

    def find(self, layer: int, head: int) -> tuple[int, int, int]:
        """Return where the source has a head: its layer, rank and index on the rank."""
        layout, model = self.source.layout, self.source.model
        for rank in range(layout.tp):
            (index,) = np.nonzero(layout.heads_of(model, rank) == head)
            if len(index):
                return layer, rank, int(index[0])
        raise AssertionError(f"no rank has head {head}")

    def source_table(self, request: int) -> list[int]:
        """Return the request's pages at the source."""
        return self.source.tables[request]

    def dest_table(self, request: int) -> list[int]:
        """Return the request's pages at the destination."""
        return self.dest.tables[request]

    def read(self, layer: int, rank: int, table: list[int], tokens: range) -> np.ndarray:
        """Return [2, T, K, H]: entries of one of the source's shards."""
        (shard,) = (s for s in self.source.pools if (s.layer, s.rank) == (layer, rank))
        return self.source.get(shard, table, tokens.start, tokens.stop)

    def travel(self, slab: np.ndarray) -> np.ndarray:
        """Return the entries of a slab as they arrive."""
        return decode(encode(slab, self.wire), self.wire)

    def put(self, shard: LayerPages, request: int, tokens: range, slab: np.ndarray) -> None:
        """Write a slab to the destination's pages."""
        self.dest.put(shard, self.dest_table(request), tokens.start, slab)


def narrower(one: str, other: str) -> str:
    """Return the narrower of two formats, in which entries are sent between them."""
    sizes = [
        ("float32" if FORMATS[name].scaled else name) for name in (one, other)
    ]  # It is dequantised at the source.
    return min(sizes, key=lambda name: FORMATS[name].storage.itemsize)


def move(source: Side, dest: Side, request: int) -> None:
    """Move a request's entries as a correct hand-off does."""
    Mover(source, dest).move(request)
