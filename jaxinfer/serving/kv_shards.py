"""Holders of the pages of KV cache in all shards of an instance."""

from collections.abc import Callable, Collection, Iterable, Sequence

from jaxinfer.serving.page_pool import Shard
from jaxinfer.serving.prefix_cache import CachedPage, PrefixCache

# For each shard of an instance, the slices of KV heads that a request has there.
Placement = Sequence[Collection[int]]
# From one shard to another, which slices.
SliceMove = tuple[int, int, tuple[int, ...]]


class HeldPages:
    """The pages that one request has in all the shards of one instance.

    Attributes:
        kv: where the pages are.
        tables: for each shard, slice -> page numbers in token order.
        copies: likewise, where slices are on their way to; no step uses those. Empty if none is.
        num_pages: pages per slice, the same for all.
        capacity: KV entries that they hold.
        cached: those of the pages, by their index, that the prefix cache has, and others may
            share.
        num_hashed: pages that the prefix cache has been offered.
        users: unfinished steps and transfers that read or write these pages.
        released: the request has given them up; they come free with the last user.
    """

    __slots__ = (
        "cached",
        "capacity",
        "copies",
        "kv",
        "num_hashed",
        "num_pages",
        "released",
        "tables",
        "users",
    )

    def __init__(
        self, kv: "KVShards", placement: Placement, cached: Sequence[CachedPage] = ()
    ) -> None:
        self.kv = kv
        self.cached = dict(enumerate(cached))
        self.tables: list[dict[int, list[int]]] = [
            {piece: [page.pages[number][piece] for page in cached] for piece in pieces}
            for number, pieces in enumerate(placement)
        ]
        self.copies: list[dict[int, list[int]]] = []
        for shard, pieces in zip(kv.shards, placement, strict=True):
            shard.num_pairs += len(pieces)
        self.num_pages = self.num_hashed = len(cached)
        self.capacity = self.num_pages * kv.page_size
        self.users = 0
        self.released = False

    def grow(self, num_tokens: int) -> bool:
        """Extend to ``num_tokens`` KV entries; False, and no change, where a shard lacks room."""
        if num_tokens <= self.capacity:
            return True
        kv = self.kv
        extra = -(-num_tokens // kv.page_size) - self.num_pages
        # Not zip: most have one shard, and a simulation grows at each page of each request.
        for number, shard in enumerate(kv.shards):
            slices = self._num_slices(number) if self.copies else len(self.tables[number])
            if shard.pool.num_free < extra * slices:
                return False
        for tables in (self.tables, self.copies) if self.copies else (self.tables,):
            for number, shard in enumerate(kv.shards):
                for pages in tables[number].values():
                    pages += shard.pool.take(extra)
        self.num_pages += extra
        self.capacity = self.num_pages * kv.page_size
        return True

    def lacking(self, num_tokens: int) -> list[int]:
        """Numbers of the shards without room for ``num_tokens`` KV entries."""
        extra = self.kv.pages_for(num_tokens) - self.num_pages
        return [
            number
            for number, shard in enumerate(self.kv.shards)
            if shard.pool.num_free < extra * self._num_slices(number)
        ]

    def _num_slices(self, number: int) -> int:
        """Number of slices that have pages in a shard, copies included."""
        here = len(self.tables[number])
        return here + len(self.copies[number]) if self.copies else here

    def pin(self) -> None:
        """Count one more user: a step or a transfer that starts."""
        self.users += 1

    def unpin(self) -> None:
        """Count one user fewer; the last one frees pages that were given up meanwhile."""
        self.users -= 1
        if self.released:
            self.free_if_unused()

    def free_if_unused(self) -> None:
        """Free pages that were given up, unless a user is left."""
        if self.users == 0:
            self._count_pinned(-1)
            self._free()

    def release(self) -> None:
        """Give the pages up: free now, or when their last user is done."""
        assert not self.released, "pages released twice"
        self.released = True
        self.kv.reserved.pop(self, None)
        if self.users:
            self._count_pinned(1)
        else:
            self._free()

    def _count_pinned(self, by: int) -> None:
        for number, shard in enumerate(self.kv.shards):
            shard.pool.num_pinned += by * self.num_pages * self._num_slices(number)

    def _free(self) -> None:
        self._free_copies()
        for shard, table in zip(self.kv.shards, self.tables, strict=True):
            shard.num_pairs -= len(table)
            for pages in table.values():
                shard.pool.give([p for i, p in enumerate(pages) if i not in self.cached])
        # The last pages first: without those before them they would not be found.
        for index in sorted(self.cached, reverse=True):
            assert self.kv.cache
            self.kv.cache.drop(self.cached[index])
        self.kv.on_free()

    def keep(self, digests: Sequence[bytes]) -> None:
        """Offer the first pages, whose entries exist by now, to the prefix cache."""
        assert self.kv.cache
        for index in range(self.num_hashed, len(digests)):
            pages = [{s: p[index] for s, p in table.items()} for table in self.tables]
            if page := self.kv.cache.add(digests[index], pages):
                self.cached[index] = page
        self.num_hashed = max(self.num_hashed, len(digests))

    def can_move(self, moves: Iterable[SliceMove]) -> bool:
        """Tell whether sources have the slices, and no other shard of a stage gets or has them."""
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
        """Reserve room where slices are to go; False, and no change, without room for all.

        Until they are there, ``tables`` have them where they were, and both places grow.
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
        """Have slices be where their copies are, and free what they leave behind."""
        for source, dest, slices in moves:
            shard = self.kv.shards[source]
            for piece in slices:
                shard.pool.give(self.tables[source].pop(piece))
                self.tables[dest][piece] = self.copies[dest].pop(piece)
            shard.num_pairs -= len(slices)
        self.copies = []
        self.kv.on_free()

    def drop_copies(self) -> None:
        """Have slices stay where they are; pages that were given up come free with the others."""
        if self.copies and not self.released:
            self._free_copies()
            self.kv.on_free()

    def _free_copies(self) -> None:
        for shard, table in zip(self.kv.shards, self.copies, strict=False):
            shard.num_pairs -= len(table)
            for pages in table.values():
                shard.pool.give(pages)
        self.copies = []


class KVShards:
    """The shards of one instance; a request needs room in every one of them.

    Args:
        caching: keep full pages after their request's end, for requests that begin alike.

    Attributes:
        cache: the pages kept, or None.
        is_spread: whether a stage has its slices in several shards.
        on_free: called when pages have come free.
        reserved: holds of requests that are still elsewhere -> how to have one given back.
    """

    def __init__(self, shards: list[Shard], caching: bool = False) -> None:
        self.shards = shards
        self.cache = PrefixCache(shards) if caching else None
        self.page_size = shards[0].pool.page_size
        if any(shard.pool.page_size != self.page_size for shard in shards):
            raise ValueError("the shards of one instance must have one page size")
        self.on_free: Callable[[], None] = lambda: None
        self.reserved: dict[HeldPages, Callable[[], None]] = {}
        self._own = [shard.slices for shard in shards]
        self._stages = _stages(shards)
        self.is_spread = any(len(stage) > 1 for stage in self._stages)
        if caching and self.is_spread:
            raise ValueError("requests share pages only where all slices of a stage lie together")

    def pages_for(self, num_tokens: int) -> int:
        """Pages per slice that ``num_tokens`` KV entries take."""
        return -(-num_tokens // self.page_size)

    def pages_to_take(self, num_tokens: int, cached: Sequence[CachedPage] = ()) -> int:
        """Free pages per slice that go into a hold whose first pages are cached."""
        in_use = sum(page.holds > 0 for page in cached)
        return self.pages_for(num_tokens) - in_use

    def reserve(
        self,
        num_tokens: int,
        cached: Sequence[CachedPage] = (),
        placement: Placement | None = None,
    ) -> HeldPages | None:
        """Pages for ``num_tokens`` KV entries, or None where some shard lacks them.

        Args:
            cached: pages that the prefix cache has for the first of these entries.
            placement: of the slices; by default each lies where it belongs or, without room there,
                in the next shard of its stage that has some.
        """
        extra = self.pages_to_take(num_tokens, cached)
        if placement is None:
            placement = self._placement(extra) if self.is_spread else self._own
        for shard, pieces in zip(self.shards, placement, strict=True):
            if shard.pool.num_free < extra * len(pieces):
                return None
        for page in cached:
            assert self.cache
            self.cache.acquire(page)
        hold = HeldPages(self, placement, cached)
        grown = hold.grow(num_tokens)
        assert grown, "the room was counted above"
        return hold

    def _placement(self, extra: int) -> Placement:
        """Slices of so many pages where they belong, or where there is room."""
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
            found[stage[0]] += homeless  # Without room anywhere, which the caller finds.
        return found

    def is_placement(self, placement: Placement) -> bool:
        """Tell whether each slice of a stage lies in one shard of that stage, and no others do."""
        if len(placement) != len(self.shards):
            return False
        return all(
            sorted(piece for number in stage for piece in placement[number])
            == sorted(piece for number in stage for piece in self._own[number])
            for stage in self._stages
        )

    def describe_slices(self) -> str:
        """Say which slices the shards of each stage have."""
        stages = [
            f"shards {stage} have {[piece for n in stage for piece in self._own[n]]}"
            for stage in self._stages
        ]
        return ", ".join(stages)

    def clear(self) -> None:
        """Have all pages free and none cached, as at the start; no hold is to be used any more.

        What its steps in flight have pinned would never come free: they never end.
        """
        self.reserved.clear()
        for shard in self.shards:
            shard.pool.clear()
            shard.num_pairs = 0
        if self.cache:
            self.cache = PrefixCache(self.shards)

    def take_back_reserved(self) -> bool:
        """Have the latest reservation given back, if there is one."""
        if self.reserved:
            next(reversed(self.reserved.values()))()
            return True
        return False

    @property
    def num_pages(self) -> int:
        """Pages per slice of the largest request that can be held."""
        if len(self.shards) == 1:  # Asked for each leg.
            shard = self.shards[0]
            return shard.pool.num_usable // len(shard.slices)
        return self._most([shard.pool.num_usable for shard in self.shards])

    @property
    def num_free(self) -> int:
        """Pages per slice of the largest request for which there is room now."""
        if len(self.shards) == 1:  # Asked at each step.
            shard = self.shards[0]
            return shard.pool.num_free // len(shard.slices)
        return self._most([shard.pool.num_free for shard in self.shards])

    def _most(self, pages: Sequence[int]) -> int:
        if not self.is_spread:
            return min(p // len(pieces) for p, pieces in zip(pages, self._own, strict=True))
        return min(
            most_pages([pages[n] for n in stage], sum(len(self._own[n]) for n in stage))
            for stage in self._stages
        )

    @property
    def num_pinned(self) -> int:
        """Pages given up, over all shards, that a step or transfer still uses."""
        return sum(shard.pool.num_pinned for shard in self.shards)

    @property
    def num_in_use(self) -> int:
        """Pages that are not free, over all shards."""
        return sum(s.pool.num_usable - s.pool.num_free for s in self.shards)


def most_pages(pages: Sequence[int], num_slices: int) -> int:
    """Most pages that each of ``num_slices`` can have, each slice all of its own in one pool.

    Args:
        pages: of each pool.
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
    """Numbers of the shards of each stage.

    Raises:
        ValueError: a stage has no slices, or one of them twice.
    """
    stages: dict[int, list[int]] = {}
    for number, shard in enumerate(shards):
        stages.setdefault(shard.stage, []).append(number)
    for stage, numbers in stages.items():
        pieces = [piece for number in numbers for piece in shards[number].slices]
        if not pieces or len(set(pieces)) < len(pieces):
            raise ValueError(f"the shards of stage {stage} have the slices {pieces}")
    return list(stages.values())
