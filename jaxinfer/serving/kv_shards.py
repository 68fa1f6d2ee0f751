"""The pages that requests hold in all shards of an instance."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from jaxinfer.serving.features.head_slices import HeldSlices, PlacedSlices, Placement
from jaxinfer.serving.page_pool import CountedPages, Shard
from jaxinfer.serving.paging import Paging
from jaxinfer.serving.prefix_cache import CachedPage, IdlePages, PrefixCache


class HeldPages(HeldSlices):
    """The pages that one request has in all the shards of one instance.

    Attributes:
        kv: shards that hold the pages.
        num_pages: number of pages per slice, the same for all slices.
        capacity: number of KV entries that the pages can hold.
        cached: pages that the prefix cache also has, by their index; other requests may share them.
        num_hashed: number of pages that have been offered to the prefix cache.
        users: number of unfinished steps and transfers that read or write these pages.
        transfers: number of transfers among the users.
        released: whether the request has given the pages up; they are freed with the last user that
            is waited for.
        session: session whose pages the prefix cache pins when they are freed; None if it pins
            none.
    """

    __slots__ = ("_pinned", "cached", "capacity", "num_hashed", "session", "transfers", "users")

    def __init__(
        self, kv: "KVShards", placement: Placement, cached: Sequence[CachedPage] = ()
    ) -> None:
        self.kv: KVShards = kv
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
        self.users = self.transfers = 0
        self.session: str | None = None
        self.released = self._pinned = False

    @property
    def num_cached(self) -> int:
        """Number of KV entries in pages that a new hold got from the prefix cache."""
        return len(self.cached) * self.kv.page_size

    def grow(self, num_tokens: int) -> bool:
        """Extend to ``num_tokens`` KV entries; return False, without a change, if a shard lacks
        room.
        """
        if num_tokens <= self.capacity:
            return True
        kv = self.kv
        extra = -(-num_tokens // kv.page_size) - self.num_pages
        # This avoids zip, because most instances have one shard, and simulations grow requests at
        # each page.
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

    def has_taken(self, num_tokens: int) -> None:
        """Record pages for ``num_tokens`` KV entries that the pool has already counted as taken."""
        if num_tokens > self.capacity:
            extra = self.kv.pages_for(num_tokens) - self.num_pages
            for pages in self.tables[0].values():
                pages += [0] * extra
            self.num_pages += extra
            self.capacity = self.num_pages * self.kv.page_size

    def lacking(self, num_tokens: int) -> list[int]:
        """Return the numbers of the shards that lack room for ``num_tokens`` KV entries."""
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
        """Add a user: a step or a transfer that starts."""
        self.users += 1

    def unpin(self) -> None:
        """Remove a user; the last one frees pages that were given up."""
        self.users -= 1
        if self.released:
            self.free_if_unused()

    def free_if_unused(self) -> None:
        """Free pages that were given up, unless they are free or still in use."""
        if self._pinned and self.users == 0:
            self._pinned = False
            self._count_pinned(-1)
            self._free()

    def release(self) -> None:
        """Give up the pages: they are freed now, or when their last user is done."""
        assert not self.released, "pages released twice"
        self.released = True
        self.kv.reserved.pop(self, None)
        if self.users and not (self.kv.frees_at_once and not self.transfers):
            self._pinned = True
            self._count_pinned(1)
        else:
            self._free()

    def _count_pinned(self, by: int) -> None:
        for number, shard in enumerate(self.kv.shards):
            shard.pool.num_pinned += by * self.num_pages * self._num_slices(number)

    def _free(self) -> None:
        self.free_copies()
        for shard, table in zip(self.kv.shards, self.tables, strict=True):
            shard.num_pairs -= len(table)
            for pages in table.values():
                if self.cached:
                    pages = [p for i, p in enumerate(pages) if i not in self.cached]
                shard.pool.give(pages)
        # The last pages are dropped first; without those before them, they could not be found.
        if self.cached:
            cache = self.kv.cache
            assert cache
            last_first = [self.cached[index] for index in sorted(self.cached, reverse=True)]
            if self.session is not None and cache.pin:
                cache.pin(self.session, last_first)
            cache.drop(*last_first)
        self.kv.on_free()

    def keep(self, digests: Sequence[bytes]) -> None:
        """Offer the first pages to the prefix cache; their KV entries exist by now."""
        assert self.kv.cache
        numbered = self.kv.has_numbers
        pages = [dict.fromkeys(table, 0) for table in self.tables]
        for index in range(self.num_hashed, len(digests)):
            if numbered:
                pages = [{s: p[index] for s, p in table.items()} for table in self.tables]
            if page := self.kv.cache.add(digests[index], pages):
                self.cached[index] = page
        self.num_hashed = max(self.num_hashed, len(digests))


class KVShards(PlacedSlices):
    """The shards of one instance; a request needs room in every one of them.

    Args:
        caching: keep full pages after their request has ended, for requests with the same prefix.
        paging: when pages are taken, cached and freed.
        new_idle: makes the collection of the prefix cache's idle pages; by default, pages are
            evicted in the order in which they became idle.

    Attributes:
        cache: the kept pages, or None.
        has_numbers: whether pages have numbers.
        on_free: called when pages have been freed.
        reserved: holds whose pages running requests may take, each with a function that gives it
            up. Some are reserved for requests that are still on other instances; from others,
            waiting requests on other instances will fetch cached pages.
        frees_at_once: whether pages that are given up become free before steps in flight end.
    """

    def __init__(
        self,
        shards: list[Shard],
        caching: bool = False,
        paging: Paging | None = None,
        new_idle: Callable[[], IdlePages] = OrderedDict,
    ) -> None:
        self.page_size = shards[0].pool.page_size
        if any(shard.pool.page_size != self.page_size for shard in shards):
            raise ValueError("the shards of one instance must have one page size")
        super().__init__(shards)
        self.has_numbers = not all(isinstance(shard.pool, CountedPages) for shard in shards)
        self.paging = paging or Paging()
        self.frees_at_once = self.paging.free == "at_once"
        self._new_idle = new_idle
        self.cache = PrefixCache(shards, self.paging.twins, new_idle()) if caching else None
        self.on_free: Callable[[], None] = lambda: None
        self.reserved: dict[HeldPages, Callable[[], None]] = {}
        if caching and self.is_spread:
            raise ValueError("requests share pages only where all slices of a stage lie together")

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages per slice that ``num_tokens`` KV entries need."""
        return -(-num_tokens // self.page_size)

    def pages_to_take(self, num_tokens: int, cached: Sequence[CachedPage] = ()) -> int:
        """Return the free pages per slice that a hold needs if its first pages are cached."""
        in_use = sum(page.holds > 0 for page in cached)
        return self.pages_for(num_tokens) - in_use

    def reserve(
        self,
        num_tokens: int,
        cached: Sequence[CachedPage] = (),
        placement: Placement | None = None,
        by_step: bool = False,
    ) -> HeldPages | None:
        """Reserve pages for ``num_tokens`` KV entries; return None if a shard lacks room.

        Args:
            cached: pages that the prefix cache has for the first of these entries.
            by_step: take only the cached pages now; each step then takes the pages that it needs.
            placement: shard of each slice; by default a slice's own shard or, if that is full, the
                next shard of its stage with room.
        """
        extra = self.pages_to_take(num_tokens, cached)
        if placement is None:
            placement = self.spread_placement(extra) if self.is_spread else self.own
        for shard, pieces in zip(self.shards, placement, strict=True):
            if shard.pool.num_free < extra * len(pieces):
                return None
        hold = self.hold_cached(cached, placement)
        grown = by_step or hold.grow(num_tokens)
        assert grown, "the room was counted above"
        return hold

    def hold_cached(
        self, cached: Sequence[CachedPage], placement: Placement | None = None
    ) -> HeldPages:
        """Hold pages of the prefix cache, and no others."""
        if cached:
            assert self.cache
            self.cache.acquire(*cached)
        return HeldPages(self, placement or self.own, cached)

    def clear(self) -> None:
        """Free all pages and empty the cache, as at the start; existing holds become invalid.

        Pages pinned by steps in flight must be freed this way, because those steps never end.
        """
        self.reserved.clear()
        for shard in self.shards:
            shard.pool.clear()
            shard.num_pairs = 0
        if self.cache:
            self.cache = PrefixCache(self.shards, self.paging.twins, self._new_idle())

    def take_back_reserved(self) -> bool:
        """Take back the latest reservation; return False if there is none."""
        if self.reserved:
            next(reversed(self.reserved.values()))()
            return True
        return False

    @property
    def num_pages(self) -> int:
        """Pages per slice of the largest request that the shards can hold."""
        if len(self.shards) == 1:  # It is asked for each leg.
            shard = self.shards[0]
            return shard.pool.num_usable // len(shard.slices)
        return self.most_pages([shard.pool.num_usable for shard in self.shards])

    @property
    def num_free(self) -> int:
        """Pages per slice of the largest request that fits now."""
        if len(self.shards) == 1:  # It is asked in each step.
            shard = self.shards[0]
            return shard.pool.num_free // len(shard.slices)
        return self.most_pages([shard.pool.num_free for shard in self.shards])

    @property
    def num_pinned(self) -> int:
        """Number of pages, over all shards, that were given up but are still used by a step or
        transfer.
        """
        return sum(shard.pool.num_pinned for shard in self.shards)

    @property
    def num_in_use(self) -> int:
        """Number of pages that are not free, over all shards."""
        return sum(s.pool.num_usable - s.pool.num_free for s in self.shards)
