"""Pages of KV cache: which are free, who holds them, and which may not be reused yet."""

import heapq
from collections.abc import Callable, Sequence

from jaxinfer.serving.prefix_cache import CachedPage, PrefixCache


class PagePool:
    """The free pages of one shard, lowest number first; then the idle ones of a prefix cache.

    Page 0 is never handed out: padding rows write there.

    Args:
        num_pages: size of the pool, page 0 included.
        page_size: tokens per page.

    Attributes:
        num_pinned: pages given up that wait for a last user.
        num_idle: cached pages that nobody holds; ``evict`` frees one.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing")
        self.num_usable = num_pages - 1
        self.page_size = page_size
        self.num_pinned = 0
        self.num_idle = 0
        self.evict: Callable[[], None] = _nothing_to_evict
        self._free = list(range(1, num_pages))

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free) + self.num_idle

    def take(self, count: int) -> list[int]:
        """Hand out the ``count`` lowest free pages; the caller knows that there are so many."""
        while len(self._free) < count:
            self.evict()
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        for page in pages:
            heapq.heappush(self._free, page)


class CountedPages(PagePool):
    """Pages that nobody looks at, as in a simulation: all have the number 0."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._free.clear()
        self._left = self.num_usable

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return self._left

    def take(self, count: int) -> list[int]:
        """Hand out pages, of which the caller knows that there are so many."""
        self._left -= count
        return [0] * count

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self._left += len(pages)


def _nothing_to_evict() -> None:
    raise RuntimeError("more pages taken than are free")


class Shard:
    """The piece of an instance's KV cache behind one pool: a stage, or a range of heads.

    Args:
        pool: its pages.
        slices: the slices of KV heads that a request has here unless moved. A page holds
            ``page_size`` tokens of one slice. Most shards have one slice: all their heads.
    """

    def __init__(self, pool: PagePool, slices: tuple[int, ...] = (0,)) -> None:
        self.pool = pool
        self.slices = slices


class Hold:
    """The pages that one request has in all the shards of one instance.

    Attributes:
        kv: where the pages are.
        tables: for each shard, slice -> page numbers in token order.
        num_pages: pages per slice, the same for all.
        capacity: KV entries that they hold.
        cached: those of the pages, by their index, that the prefix cache has, and others may
            share.
        num_hashed: pages that the prefix cache has been offered.
        users: unfinished steps and transfers that read or write these pages.
        released: the request has given them up; they come free with the last user.
    """

    __slots__ = (
        "cached", "capacity", "kv", "num_hashed", "num_pages", "released", "tables", "users",
    )  # fmt: skip

    def __init__(self, kv: "KVShards", cached: Sequence[CachedPage] = ()) -> None:
        self.kv = kv
        self.cached = dict(enumerate(cached))
        self.tables: list[dict[int, list[int]]] = [
            {piece: [page.pages[number][piece] for page in cached] for piece in shard.slices}
            for number, shard in enumerate(kv.shards)
        ]
        self.num_pages = self.num_hashed = len(cached)
        self.capacity = self.num_pages * kv.page_size
        self.users = 0
        self.released = False

    def grow(self, num_tokens: int) -> bool:
        """Extend to ``num_tokens`` KV entries; False, and no change, where a shard lacks room."""
        extra = self.kv.pages_for(num_tokens) - self.num_pages
        if extra <= 0:
            return True
        shards, tables = self.kv.shards, self.tables
        for shard, table in zip(shards, tables, strict=True):
            if shard.pool.num_free < extra * len(table):
                return False
        for shard, table in zip(shards, tables, strict=True):
            for pages in table.values():
                pages += shard.pool.take(extra)
        self.num_pages += extra
        self.capacity = self.num_pages * self.kv.page_size
        return True

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
        for shard, table in zip(self.kv.shards, self.tables, strict=True):
            shard.pool.num_pinned += by * self.num_pages * len(table)

    def _free(self) -> None:
        for shard, table in zip(self.kv.shards, self.tables, strict=True):
            for pages in table.values():
                shard.pool.give([p for i, p in enumerate(pages) if i not in self.cached])
        # The last pages first: without those before them they would not be found.
        for index in sorted(self.cached, reverse=True):
            assert self.kv.cache
            self.kv.cache.drop(self.cached[index])
        self.kv.on_free()

    def can_move(self, source: int, dest: int, slices: tuple[int, ...]) -> bool:
        """Whether shard ``source`` has the slices, and another shard ``dest`` has none of them."""
        if not (0 <= source < len(self.tables) and 0 <= dest < len(self.tables)):
            return False
        here, there = self.tables[source], self.tables[dest]
        return all(piece in here and piece not in there for piece in slices)

    def copy_slices(self, source: int, dest: int, slices: tuple[int, ...]) -> bool:
        """Reserve room in shard ``dest`` for slices of shard ``source``; False without room."""
        pool = self.kv.shards[dest].pool
        if pool.num_free < self.num_pages * len(slices):
            return False
        assert self.can_move(source, dest, slices)
        for piece in slices:
            self.tables[dest][piece] = pool.take(self.num_pages)
        return True

    def drop_slices(self, shard: int, slices: tuple[int, ...]) -> None:
        """Free one shard's copy of some slices."""
        for piece in slices:
            self.kv.shards[shard].pool.give(self.tables[shard].pop(piece))
        self.kv.on_free()


class KVShards:
    """All the shards of one instance; a request needs room in every one of them.

    Args:
        caching: keep full pages after their request's end, for requests that begin alike.

    Attributes:
        cache: the pages kept, or None.
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
        self.reserved: dict[Hold, Callable[[], None]] = {}
        self._filled = [shard for shard in shards if shard.slices]

    def pages_for(self, num_tokens: int) -> int:
        """Pages per slice that ``num_tokens`` KV entries take."""
        return -(-num_tokens // self.page_size)

    def pages_to_take(self, num_tokens: int, cached: Sequence[CachedPage] = ()) -> int:
        """Free pages per slice that go into a hold whose first pages are cached."""
        in_use = sum(page.holds > 0 for page in cached)
        return self.pages_for(num_tokens) - in_use

    def reserve(self, num_tokens: int, cached: Sequence[CachedPage] = ()) -> Hold | None:
        """Pages for ``num_tokens`` KV entries, or None where some shard lacks them.

        Args:
            cached: pages that the prefix cache has for the first of these entries.
        """
        extra = self.pages_to_take(num_tokens, cached)
        if any(shard.pool.num_free < extra * len(shard.slices) for shard in self.shards):
            return None
        for page in cached:
            assert self.cache
            self.cache.acquire(page)
        hold = Hold(self, cached)
        grown = hold.grow(num_tokens)
        assert grown, "the room was counted above"
        return hold

    def take_back_reserved(self) -> bool:
        """Have the latest reservation given back, if there is one."""
        if self.reserved:
            next(reversed(self.reserved.values()))()
            return True
        return False

    @property
    def num_pages(self) -> int:
        """Pages per slice that the smallest shard has."""
        return min(shard.pool.num_usable // len(shard.slices) for shard in self._filled)

    @property
    def num_free(self) -> int:
        """Pages per slice that are free in every shard."""
        return min(shard.pool.num_free // len(shard.slices) for shard in self._filled)

    @property
    def num_pinned(self) -> int:
        """Pages given up, over all shards, that a step or transfer still uses."""
        return sum(shard.pool.num_pinned for shard in self.shards)

    @property
    def num_in_use(self) -> int:
        """Pages that are not free, over all shards."""
        return sum(s.pool.num_usable - s.pool.num_free for s in self.shards)
