"""The seam to an engine: four methods, of about twenty lines in all."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxinfer.conformance.check import Finding, check
from jaxinfer.conformance.golden import FORMER, GoldenModel
from jaxinfer.conformance.layout import KVLayout, LayerPages
from jaxinfer.conformance.side import Pool, Side

Pools = Mapping[LayerPages, tuple[Pool, Pool]]


class HandOffEngine(Protocol):
    """An end of a hand-off in the engine under test.

    Attributes:
        layout: how its pools lie.
        num_pages: of each pool.
    """

    layout: KVLayout
    num_pages: int

    def write(self, pools: Pools) -> None:
        """Set all pages of the engine, keys and values of each layer and device."""

    def read(self) -> Pools:
        """The pages as they are now."""

    def reserve(self, request: int, length: int) -> list[int]:
        """The pages that the engine gives to a request of that length."""


class HandOff(Protocol):
    """The hand-off under test."""

    def __call__(self, request: int, length: int) -> None:
        """Move a request's entries; return when they lie in the destination's pages."""


def hand_over(
    model: GoldenModel,
    source: HandOffEngine,
    dest: HandOffEngine,
    transfer: HandOff,
    lengths: Sequence[int] = (75, 50),
    *,
    whole_pages: bool = False,
) -> list[Finding]:
    """Have an engine hand over golden requests, one after another; return what is wrong.

    Raises:
        ValueError: there are more requests than golden entries tell from what pools held before.
    """
    if len(lengths) > FORMER:
        raise ValueError(f"lengths has {len(lengths)} requests, must have at most {FORMER}")
    sides = []
    for number, engine in enumerate((source, dest)):
        side = Side(model, engine.layout, engine.num_pages, FORMER + number)
        for request, length in enumerate(lengths):
            side.add(request, length, engine.reserve(request, length))
        sides.append(side)
    given, taken = sides
    for request in range(len(lengths)):
        given.fill(request)
    before = taken.copy()
    source.write(given.pools)
    dest.write(taken.pools)
    for request, length in enumerate(lengths):
        transfer(request, length)
    taken.load(dest.read())
    return check(given, taken, range(len(lengths)), before=before, whole_pages=whole_pages)
