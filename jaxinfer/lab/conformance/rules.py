"""Names of faults, each with a test that a wrong block must pass.

Every test uses only where a block's entries came from, not how a fault was made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.lab.conformance.compare import Wrong
from jaxinfer.lab.conformance.layout import KVLayout
from jaxinfer.lab.conformance.side import Side

Named = tuple[str, np.ndarray, str]


@dataclass(frozen=True)
class Case:
    """The wrong blocks that are not yet explained, and what is known about both sides.

    Attributes:
        base: number of the request's first tokens that the destination had before.
        was_wrong: whether each block was wrong before the hand-off, too; None if it is not known.
    """

    wrong: Wrong
    source: Side
    dest: Side
    slab_tokens: int
    freed: Sequence[int]
    base: int = 0
    was_wrong: np.ndarray | None = None

    def without(self, mask: np.ndarray) -> "Case":
        """Return the case without the blocks that a mask explains."""
        was = None if self.was_wrong is None else self.was_wrong[~mask]
        return replace(self, wrong=self.wrong.take(~mask), was_wrong=was)

    @property
    def own(self) -> np.ndarray:
        """The blocks that hold entries of their own request."""
        return self.wrong.origin.request == self.wrong.request

    def differs(self, *names: str) -> np.ndarray:
        """Return own blocks whose origin differs from their place in just these coordinates."""
        found = self.own.copy()
        for name in ("layer", "part", "token", "head", "block"):
            apart = getattr(self.wrong.origin, name) != getattr(self.wrong, name)
            found &= apart if name in names else ~apart
        return found


def by_base(case: Case) -> Iterator[Named]:
    """Name wrong entries that a delta builds on, and first entries that it should have sent."""
    if not case.base:
        return
    wrong = case.wrong
    inside = wrong.token < case.base
    if case.was_wrong is not None:
        yield "stale base", inside & case.was_wrong, "was wrong before the hand-off, which kept it"
        yield (
            "base evicted",
            inside & ~case.was_wrong & ~case.own,
            "was right before the hand-off, and holds entries of {request} now",
        )
    never = ~inside & (wrong.origin.request == case.dest.former)
    tokens = np.unique(wrong.token[never])
    starts = len(tokens) and tokens[0] == case.base and tokens[-1] < tokens[0] + len(tokens)
    if starts and tokens[-1] < case.dest.lengths[wrong.request] - 1:
        yield "delta begins late", never, "holds what the destination's page held before"


def by_owner(case: Case) -> Iterator[Named]:
    """Name entries that belong to another request."""
    owner = case.wrong.origin.request
    yield (
        "late write after free",
        np.isin(owner, case.freed),
        "holds entries of {request}, whose pages had been freed",
    )
    yield "sent too early", owner == case.source.former, "holds what the source's page held before"
    pasts = [case.source.former, case.dest.former]
    yield (
        "page of another request",
        (owner >= 0) & ~case.own & ~np.isin(owner, [*pasts, *case.freed]),
        "holds entries of {request}, layer {layer}, token {token}",
    )


def by_absence(case: Case) -> Iterator[Named]:
    """Name entries that were never written, so that a page still has its former contents."""
    wrong = case.wrong
    length, B = case.dest.lengths[wrong.request], case.dest.layout.page_size
    never = wrong.origin.request == case.dest.former
    if (wrong.token[wrong.zero] == length - 1).all():
        never |= wrong.zero  # An 8-bit page is cleared from the end of its last write.
    if not never.any():
        return
    text = "holds what the destination's page held before, or zeros"
    # A head or layer of which nothing has arrived, on a device to which other entries have come.
    whole = _whole_parts(case, never)
    yield "part never sent", never & whole, text
    never = never & ~whole
    last = never & (wrong.token == length - 1)
    others = never & ~last
    if not others.any():
        yield "missing last token", last, text
        return
    paged = np.zeros(len(wrong), bool)
    for page in np.unique(wrong.token[never] // B):
        here = never & (wrong.token // B == page)
        expected = range(page * B, min((page + 1) * B, length))
        if set(expected) <= set(wrong.token[here].tolist()):
            paged |= here
    yield "stale page", paged, text
    yield "missing last token", last & ~paged, text
    yield "missing tokens", others & ~paged, text


def _whole_parts(case: Case, never: np.ndarray) -> np.ndarray:
    """Return blocks of keys or values of a device's head in a layer that lacks all tokens."""
    wrong, length = case.wrong, case.dest.lengths[case.wrong.request]
    whole = np.zeros(len(wrong), bool)
    if length < 2:
        return whole
    key = np.stack([wrong.shard, wrong.part, wrong.index], -1)
    for shard, part, index in np.unique(key[never], axis=0):
        here = never & (wrong.shard == shard) & (wrong.part == part) & (wrong.index == index)
        first = case.dest.model.first_needed(wrong.shards[shard].layer, length)
        if len(np.unique(wrong.token[here])) == length - first:
            whole |= here
    return whole


def by_coordinate(case: Case) -> Iterator[Named]:
    """Name the request's own entries that come from a place that differs in one coordinate."""
    text = "holds that of layer {layer}, {part}, token {token}, head {head}"
    yield "head order", case.differs("head"), text
    yield "layer shifted", case.differs("layer"), text
    yield "keys and values swapped", case.differs("part"), text
    yield "channel blocks swapped", case.differs("block"), text
    tokens = case.differs("token")
    if not tokens.any():
        return
    wrong = case.wrong
    shift = wrong.origin.token - wrong.token
    values, counts = np.unique(shift[tokens], return_counts=True)
    most = values[counts.argmax()]
    sizes = case.dest.layout.page_size, case.source.layout.page_size
    if all(most % size for size in sizes):
        off = "page offset off by one" if abs(most) == 1 else "page offset"
        yield off, tokens & (shift == most), text
    yield "slab swapped", tokens & _exchanged(case, shift), text
    paged = np.any([shift % size == 0 for size in sizes], axis=0)
    yield "page order", tokens & paged, text


def _exchanged(case: Case, shift: np.ndarray) -> np.ndarray:
    """Return blocks whose token belongs to another slab, at the same place in it."""
    slab = case.slab_tokens
    return (shift % slab == 0) & (shift != 0) & _covers_slabs(case, shift)


def _covers_slabs(case: Case, shift: np.ndarray) -> np.ndarray:
    """Tell whether all tokens of a block's slab have moved in the same way."""
    wrong, slab = case.wrong, case.slab_tokens
    length = case.dest.lengths[wrong.request]
    found = np.zeros(len(wrong), bool)
    for number in np.unique(wrong.token // slab):
        here = wrong.token // slab == number
        for by in np.unique(shift[here]):
            moved = here & (shift == by)
            stop = min((number + 1) * slab, length, length - int(by))
            found |= moved & (set(range(number * slab, stop)) <= set(wrong.token[moved].tolist()))
    return found


def by_order(case: Case) -> Iterator[Named]:
    """Name the request's own entries that are where another order of a page's axes puts them."""
    text = "holds that of token {token}, head {head}: pages are {order}, taken for {other}"
    for side, ours in ((case.dest, True), (case.source, False)):
        for part in (0, 1):
            order = side.layout.order(part)
            for other in {"NHD", "HND"} - {order}:
                if order != "HDN":
                    mask = _misread(case, side.layout, order, other, ours) & (
                        case.wrong.part == part
                    )
                    said = text.replace("{order}", order).replace("{other}", other)
                    yield "order of axes misread", mask & ~case.differs(), said


def _misread(case: Case, layout: KVLayout, order: str, other: str, ours: bool) -> np.ndarray:
    """Return blocks whose origin is explained by mistaking one order of a page for another."""
    wrong, model, B = case.wrong, case.dest.model, layout.page_size
    if ours:
        index, heads_of = wrong.index, wrong.shards
        ranks = np.array([shard.rank for shard in heads_of])[wrong.shard]
    else:
        ranks, index = _places(layout, model.heads, wrong.head)
    width = len(layout.heads_of(model, 0))
    page, offset = np.divmod(wrong.token, B)
    # The reader expects ``order`` at the destination, and ``other`` at the source.
    here, there = (order, other) if ours else (other, order)
    flat = index * B + offset if here == "HND" else offset * width + index
    if there == "HND":
        index, offset = np.divmod(flat, B)
    else:
        offset, index = np.divmod(flat, width)
    heads = np.stack([layout.heads_of(model, rank) for rank in range(layout.tp)])
    token, head = page * B + offset, heads[ranks, index]
    return case.own & (wrong.origin.token == token) & (wrong.origin.head == head)


def _places(layout: KVLayout, num_heads: int, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first rank that has each head, and the head's index there."""
    if layout.tp > num_heads:
        return head * (layout.tp // num_heads), np.zeros_like(head)
    return np.divmod(head, -(-num_heads // layout.tp))


def by_value(case: Case) -> Iterator[Named]:
    """Name entries that have the right code but wrong values."""
    here = case.own & case.differs()
    scaled = here & (np.abs(np.log2(np.maximum(case.wrong.ratio, 1e-9))) > 0.35)
    name = "scale of another page" if _by_page(case, scaled) else "scaled"
    yield name, scaled, "is {ratio:.3g} times what it should be"
    yield "rounded", here & ~scaled, "is rounded to a narrower format, or cut off"
    yield "zeros", case.wrong.zero, "holds zeros"


def _by_page(case: Case, scaled: np.ndarray) -> bool:
    """Tell whether a side has scales, and several pages are wrong by different factors."""
    if all(
        pool.scale_PK is None
        for side in (case.source, case.dest)
        for pair in side.pools.values()
        for pool in pair
    ):
        return False
    ratio, pages = case.wrong.ratio[scaled], case.wrong.token[scaled] // case.dest.layout.page_size
    one_factor = len(ratio) and ratio.max() < 1.2 * ratio.min()
    return not (one_factor and len(np.unique(pages)) > 1 and _is_everywhere(case, scaled))


def _is_everywhere(case: Case, here: np.ndarray) -> bool:
    """Tell whether each token that the request needs has some of these blocks."""
    length = case.dest.lengths[case.wrong.request]
    layers = np.unique(case.wrong.layer[here])
    first = min(case.dest.model.first_needed(layer, length) for layer in layers)
    return len(np.unique(case.wrong.token[here])) >= length - first


def by_rest(case: Case) -> Iterator[Named]:
    """Name the remaining faults, in groups."""
    yield (
        "misplaced",
        case.own & ~case.differs(),
        "holds that of layer {layer}, {part}, token {token}, head {head}",
    )
    yield "changed", np.ones(len(case.wrong), bool), "holds nobody's entries"


# From the most specific rule to the least: the first one that explains as much as any other wins.
RULES: Sequence[Callable[[Case], Iterator[Named]]] = (
    by_base,
    by_owner,
    by_absence,
    by_coordinate,
    by_order,
    by_value,
)
