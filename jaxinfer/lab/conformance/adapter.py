"""The interface to an engine: four methods, about twenty lines in total."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from jaxinfer.lab.conformance.check import Finding, check
from jaxinfer.lab.conformance.golden import FORMER, GoldenModel, check_counts
from jaxinfer.lab.conformance.layout import KVLayout, LayerPages
from jaxinfer.lab.conformance.side import Pool, Side

Pools = Mapping[LayerPages, tuple[Pool, Pool]]


class HandOffEngine(Protocol):
    """One end of a hand-off in the engine under test.

    Attributes:
        layout: layout of its pools.
        num_pages: number of pages of each pool.
    """

    layout: KVLayout
    num_pages: int

    def write(self, pools: Pools) -> None:
        """Set all pages of the engine: keys and values of each layer and device."""

    def read(self) -> Pools:
        """Return the current pages."""

    def reserve(self, request: int, length: int) -> list[int]:
        """Return the pages that the engine gives to a request of that length."""


class HandOff(Protocol):
    """The hand-off under test."""

    def __call__(self, request: int, length: int) -> None:
        """Move a request's entries; return when they are in the destination's pages."""


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Name the adapter's method in the error of an invalid value."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def hand_over(
    model: GoldenModel,
    source: HandOffEngine,
    dest: HandOffEngine,
    transfer: HandOff,
    lengths: Sequence[int] = (75, 50),
    *,
    whole_pages: bool = False,
) -> list[Finding]:
    """Let an engine hand over golden requests, one after another; return the faults.

    Raises:
        ValueError: there are no requests, or more than golden entries can distinguish from the
            former contents of pools; or an adapter's method returns an invalid value, and is named.
    """
    if not 1 <= len(lengths) <= FORMER:
        raise ValueError(f"lengths has {len(lengths)} requests, must have 1 to {FORMER}")
    check_counts("hand_over", {f"lengths[{n}]": length for n, length in enumerate(lengths)})
    sides = []
    for number, (end, engine) in enumerate({"source": source, "dest": dest}.items()):
        if not isinstance(engine.layout, KVLayout):
            raise ValueError(f"{end}.layout is {type(engine.layout).__name__}, must be a KVLayout")
        with _naming(f"{end}.num_pages"):
            side = Side(model, engine.layout, engine.num_pages, FORMER + number)
        for request, length in enumerate(lengths):
            pages = engine.reserve(request, length)
            with _naming(f"{end}.reserve({request}, {length})"):
                side.add(request, length, pages)
        sides.append(side)
    given, taken = sides
    for request in range(len(lengths)):
        given.fill(request)
    before = taken.copy()
    source.write(given.pools)
    dest.write(taken.pools)
    for request, length in enumerate(lengths):
        transfer(request, length)
    found = dest.read()
    with _naming("dest.read()"):
        taken.load(found)
    return check(given, taken, range(len(lengths)), before=before, whole_pages=whole_pages)
