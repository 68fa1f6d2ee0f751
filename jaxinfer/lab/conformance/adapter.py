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
    cached: Sequence[int] = (),
    whole_pages: bool = False,
) -> list[Finding]:
    """Let one engine hand golden requests over to another, one by one; return the faults found.

    Args:
        cached: for each request, the number of its first tokens that the destination has from the
            start, and that the transfer must leave out.

    Raises:
        ValueError: there are no requests, or more than golden entries can distinguish from the
            former contents of pools; or an adapter's method returns an invalid value, and is named.
    """
    if not 1 <= len(lengths) <= FORMER:
        raise ValueError(f"lengths has {len(lengths)} requests, must have 1 to {FORMER}")
    check_counts("hand_over", {f"lengths[{n}]": length for n, length in enumerate(lengths)})
    if cached:
        check_counts("hand_over", {f"cached[{n}]": each for n, each in enumerate(cached)}, least=0)
        if len(cached) != len(lengths):
            raise ValueError(f"cached has {len(cached)} requests, lengths has {len(lengths)}")
        for request, (count, length) in enumerate(zip(cached, lengths, strict=True)):
            if count >= length:
                raise ValueError(
                    f"hand_over: cached[{request}] is {count}, must be below the length, {length}"
                )
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
    for request, count in enumerate(cached):
        taken.write(request, taken.tables[request], 0, count)
    before = taken.copy()
    source.write(given.pools)
    dest.write(taken.pools)
    for request, length in enumerate(lengths):
        transfer(request, length)
    found = dest.read()
    with _naming("dest.read()"):
        taken.load(found)
    return check(
        given,
        taken,
        range(len(lengths)),
        before=before,
        cached=dict(enumerate(cached)),
        whole_pages=whole_pages,
    )
