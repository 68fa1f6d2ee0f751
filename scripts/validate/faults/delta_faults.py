"""Faults of deltas: hand-offs that leave out the pages that the destination's cache has."""

from collections.abc import Iterator

from jaxinfer.lab.conformance.golden import GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout
from jaxinfer.lab.conformance.mover import Mover
from jaxinfer.lab.conformance.side import Side
from scripts.validate.faults.mistake import Mistake
from scripts.validate.faults.scenario import DEST_ONLY, LENGTHS, UNKNOWN, cached_of


def delta_faults(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """Deltas that begin late, and bases that were wrong or were given away."""
    B, cached = dest.page_size, cached_of(dest.page_size)
    base = cached[1]

    def late(self: Mover, request: int) -> int:
        return Mover.first(self, request) + B * (request == 1)

    def edited(side: Side) -> None:
        side.write(UNKNOWN, side.tables[1], 0, base)

    def too_few(side: Side) -> None:
        side.write(side.former, side.tables[1], base - B, base)

    def another(mover: Mover) -> None:
        mover.dest.write(DEST_ONLY, mover.dest.tables[1], 0, base)

    def reused(mover: Mover) -> None:
        mover.dest.write(DEST_ONLY, mover.dest.tables[1], 0, B)

    if base + B < LENGTHS[1]:
        words = "begins one page after the base"
        yield Mistake("delta begins late", words, {"first": late}, cached=cached)
    name = "stale base"
    yield Mistake(name, "base of an edited turn", cached=cached, before=edited)
    yield Mistake(name, "base with a page fewer than was counted", cached=cached, before=too_few)
    name = "base evicted"
    yield Mistake(name, "base given to another request on the way", after=another, cached=cached)
    yield Mistake(name, "the base's first page given away", after=reused, cached=cached)
