"""Full pages that outlive their request and are found again by their tokens.

A page is identified by a digest of its tokens and of all tokens before them, so that equal digests
mean equal KV entries. Only pages whose entries exist are kept; they are never written again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxinfer.serving.page_pool import Shard


class CachedPage:
    """A page of tokens in every shard.

    Attributes:
        pages: for each shard, slice -> page number.
        holds: number of holds that use it now; without any it is idle, and may be evicted.
    """

    __slots__ = ("digest", "holds", "pages")

    def __init__(self, digest: bytes, pages: list[dict[int, int]]) -> None:
        self.digest = digest
        self.pages = pages
        self.holds = 1


class PrefixCache:
    """The cached pages of one instance; the least recently used idle one is evicted first.

    Args:
        shards: shards of the instance; each counts its idle pages as free.
        twins: keep a page if one with the same tokens is there already; requests get the oldest.
    """

    def __init__(self, shards: list[Shard], twins: bool = False) -> None:
        self._shards, self._keeps_twins = shards, twins
        # By digest, the oldest first.
        self._pages: dict[bytes, list[CachedPage]] = {}
        self._idle: OrderedDict[CachedPage, None] = OrderedDict()
        for shard in shards:
            shard.pool.evict = self.evict

    def match(self, digests: Sequence[bytes]) -> list[CachedPage]:
        """Return the cached pages of the longest prefix."""
        found = []
        for digest in digests:
            pages = self._pages.get(digest)
            if not pages:
                break
            found.append(pages[0])
        return found

    def acquire(self, *pages: CachedPage) -> None:
        """Count one more hold of each page."""
        idle = 0
        for page in pages:
            if not page.holds:
                del self._idle[page]
                idle += 1
            page.holds += 1
        if idle:
            self._count_idle(pages[0], -idle)

    def drop(self, *pages: CachedPage) -> None:
        """Count one hold of each page fewer."""
        known, idle, gone = self._pages, 0, []
        for page in pages:
            page.holds -= 1
            if page.holds:
                continue
            if page in known.get(page.digest, ()):
                self._idle[page] = None
                idle += 1
            else:
                gone.append(page)
        self._give(gone)
        if idle:
            self._count_idle(pages[0], idle)

    def add(
        self, digests: Sequence[bytes], first: int, tables: list[dict[int, list[int]]] | None
    ) -> dict[int, CachedPage]:
        """Take in the pages that one hold has from the ``first`` on; return them by their index.

        Pages with a twin are left out, unless those are kept.

        Args:
            tables: for each shard, slice -> page numbers; None if pages have no numbers.
        """
        known, found = self._pages, {}
        pages = [dict.fromkeys(shard.slices, 0) for shard in self._shards]
        for index in range(first, len(digests)):
            twins = known.get(digests[index])
            if twins and not self._keeps_twins:
                continue
            if tables:
                pages = [{piece: table[piece][index] for piece in table} for table in tables]
            found[index] = page = CachedPage(digests[index], pages)
            if twins:
                twins.append(page)
            else:
                known[page.digest] = [page]
        return found

    def evict(self, count: int = 1) -> None:
        """Free the pages that have been idle for longest: about ``count`` of each shard."""
        each = max(len(shard.slices) for shard in self._shards)
        gone = [self._idle.popitem(last=False)[0] for _ in range(-(-count // each))]
        for page in gone:
            twins = self._pages[page.digest]
            twins.remove(page)
            if not twins:
                del self._pages[page.digest]
        self._count_idle(gone[0], -len(gone))
        self._give(gone)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Remove these pages from the cache; those that no request holds are freed."""
        for digest in digests:
            for page in self._pages.pop(digest, ()):
                self._forget(page)

    def _forget(self, page: CachedPage) -> None:
        if not page.holds:
            del self._idle[page]
            self._count_idle(page, -1)
            self._give([page])

    def _give(self, pages: Sequence[CachedPage]) -> None:
        for number, shard in enumerate(self._shards) if pages else ():
            tables = [page.pages[number].values() for page in pages]
            shard.pool.give([page for table in tables for page in table])

    def _count_idle(self, page: CachedPage, by: int) -> None:
        for shard, table in zip(self._shards, page.pages, strict=True):
            shard.pool.num_idle += by * len(table)
            shard.pool.num_free += by * len(table)
