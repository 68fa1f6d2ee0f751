"""Slices of KV heads: the shard that holds each slice, and copies that are being moved."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from jaxinfer.serving.page_pool import Shard

# The slices of KV heads that a request has in each shard of an instance.
Placement = Sequence[Collection[int]]
# The slices that move from one shard to another.
SliceMove = tuple[int, int, tuple[int, ...]]


class _Shards(Protocol):
    shards: list[Shard]
    on_free: Callable[[], None]


class HeldSlices:
    """The slices of one request: where each has its pages, and where some are being moved to.

    Attributes:
        kv: the instance's shards.
        tables: for each shard, slice -> page numbers in token order.
        copies: the same at the destinations of slices that are being moved; no step uses these
            pages. Empty if no slice is being moved.
        num_pages: number of pages per slice.
        released: whether the request has given up its pages.
    """

    __slots__ = ("copies", "kv", "num_pages", "released", "tables")

    kv: _Shards
    tables: list[dict[int, list[int]]]
    copies: list[dict[int, list[int]]]
    num_pages: int
    released: bool

    def can_move(self, moves: Iterable[SliceMove]) -> bool:
        """Tell whether sources have the slices, and no shard gets a slice that is already there."""
        shards, coming = range(len(self.tables)), set()
        for source, dest, slices in moves:
            if source not in shards or dest not in shards:
                return False
            if self.kv.shards[source].stage != self.kv.shards[dest].stage:
                return False
            for piece in slices:
                if piece not in self.tables[source] or piece in self.tables[dest]:
                    return False
                if (source, piece) in coming:
                    return False
                coming.add((source, piece))
        return True

    def copy_slices(self, moves: Sequence[SliceMove]) -> bool:
        """Reserve pages at the destinations; return False, without a change, if some lack room.

        Until the move has ended, ``tables`` lists slices in their old places, and both places grow.
        """
        assert self.can_move(moves)
        assert not self.copies, "other slices of the request are on their way"
        shards = self.kv.shards
        wanted = [0] * len(shards)
        for _, dest, slices in moves:
            wanted[dest] += self.num_pages * len(slices)
        if any(shard.pool.num_free < count for shard, count in zip(shards, wanted, strict=True)):
            return False
        self.copies = [{} for _ in shards]
        for _, dest, slices in moves:
            for piece in slices:
                self.copies[dest][piece] = shards[dest].pool.take(self.num_pages)
            shards[dest].num_pairs += len(slices)
        return True

    def take_copies(self, moves: Iterable[SliceMove]) -> None:
        """Make copies the current places of their slices, and free the old pages."""
        for source, dest, slices in moves:
            shard = self.kv.shards[source]
            for piece in slices:
                shard.pool.give(self.tables[source].pop(piece))
                self.tables[dest][piece] = self.copies[dest].pop(piece)
            shard.num_pairs -= len(slices)
        self.copies = []
        self.kv.on_free()

    def drop_copies(self) -> None:
        """Cancel a move; a request that has given up its pages frees its copies with them."""
        if self.copies and not self.released:
            self.free_copies()
            self.kv.on_free()

    def free_copies(self) -> None:
        """Free the pages at the destinations of slices that are being moved."""
        for shard, table in zip(self.kv.shards, self.copies, strict=False):
            shard.num_pairs -= len(table)
            for pages in table.values():
                shard.pool.give(pages)
        self.copies = []


class PlacedSlices:
    """The shards of one instance, and the slices that belong to each.

    Attributes:
        own: for each shard, the slices that lie there by default.
        is_spread: whether a stage has its slices in several shards.
    """

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.own = [shard.slices for shard in shards]
        self._stages = _stages(shards)
        self.is_spread = any(len(stage) > 1 for stage in self._stages)

    def spread_placement(self, extra: int) -> Placement:
        """Place slices of ``extra`` pages in their own shards or, if these are full, in others."""
        found: list[list[int]] = [[] for _ in self.shards]
        for stage in self._stages:
            room = [self.shards[number].pool.num_free // max(extra, 1) for number in stage]
            homeless: list[int] = []
            for number, most in zip(stage, room, strict=True):
                own = self.shards[number].slices
                found[number] += own[:most]
                homeless += own[most:]
            for number, most in zip(stage, room, strict=True):
                while homeless and len(found[number]) < most:
                    found[number].append(homeless.pop(0))
            found[stage[0]] += homeless  # If there is no room anywhere, the caller notices.
        return found

    def is_placement(self, placement: Placement) -> bool:
        """Tell whether each slice of a stage lies in exactly one shard of that stage."""
        if len(placement) != len(self.shards):
            return False
        return all(
            sorted(piece for number in stage for piece in placement[number])
            == sorted(piece for number in stage for piece in self.own[number])
            for stage in self._stages
        )

    def describe_slices(self) -> str:
        """Return a text that names the slices of each shard, by stage."""
        stages = [
            f"shards {stage} have {[piece for n in stage for piece in self.own[n]]}"
            for stage in self._stages
        ]
        return ", ".join(stages)

    def most_pages(self, pages: Sequence[int]) -> int:
        """Return the pages per slice of the largest request that fits into ``pages`` pages per
        shard.
        """
        if not self.is_spread:
            return min(p // len(pieces) for p, pieces in zip(pages, self.own, strict=True))
        return min(
            most_pages([pages[n] for n in stage], sum(len(self.own[n]) for n in stage))
            for stage in self._stages
        )


def most_pages(pages: Sequence[int], num_slices: int) -> int:
    """Return the most pages that each of ``num_slices`` slices can have, each within one pool.

    Args:
        pages: number of pages of each pool.
    """
    low, high = 0, sum(pages) // num_slices
    while low < high:
        middle = (low + high + 1) // 2
        if sum(count // middle for count in pages) >= num_slices:
            low = middle
        else:
            high = middle - 1
    return low


def _stages(shards: Sequence[Shard]) -> list[list[int]]:
    """Return the numbers of each stage's shards.

    Raises:
        ValueError: a stage has no slices, or has one of them twice.
    """
    stages: dict[int, list[int]] = {}
    for number, shard in enumerate(shards):
        stages.setdefault(shard.stage, []).append(number)
    for stage, numbers in stages.items():
        pieces = [piece for number in numbers for piece in shards[number].slices]
        if not pieces or len(set(pieces)) < len(pieces):
            raise ValueError(f"the shards of stage {stage} have the slices {pieces}")
    return list(stages.values())
