"""Full pages that outlive their request, found again by the tokens they hold.

A page is known by a digest of its tokens and of all tokens before them, so that equal digests mean
equal KV entries. Only pages whose entries exist are kept; they are never written again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxinfer.serving.page_pool import Shard


class CachedPage:
    """A page's worth of tokens in every shard.

    Attributes:
        pages: for each shard, slice -> page number.
        holds: holds that have it now; with none it is idle, and may be evicted.
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
    """

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards
        self._pages: dict[bytes, CachedPage] = {}
        self._idle: OrderedDict[bytes, CachedPage] = OrderedDict()
        for shard in shards:
            shard.pool.evict = self.evict

    def match(self, digests: Sequence[bytes]) -> list[CachedPage]:
        """The cached pages of the longest beginning."""
        found = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def acquire(self, *pages: CachedPage) -> None:
        """Count one more hold of each."""
        idle = 0
        for page in pages:
            if not page.holds:
                del self._idle[page.digest]
                idle += 1
            page.holds += 1
        if idle:
            self._count_idle(pages[0], -idle)

    def drop(self, *pages: CachedPage) -> None:
        """Count one hold fewer of each."""
        known, idle = self._pages, 0
        for page in pages:
            page.holds -= 1
            if page.holds:
                continue
            if known.get(page.digest) is page:
                self._idle[page.digest] = page
                idle += 1
            else:
                self._give(page)
        if idle:
            self._count_idle(pages[0], idle)

    def add(self, digest: bytes, pages: list[dict[int, int]]) -> CachedPage | None:
        """Take in a page that one hold has and whose entries exist; None if its like is known."""
        if digest in self._pages:
            return None
        page = self._pages[digest] = CachedPage(digest, pages)
        return page

    def evict(self) -> None:
        """Free the page that has been idle for longest."""
        digest, page = self._idle.popitem(last=False)
        del self._pages[digest]
        self._count_idle(page, -1)
        self._give(page)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Let no further request have these pages; those that no request has now are free."""
        for digest in digests:
            page = self._pages.pop(digest, None)
            if page and not page.holds:
                del self._idle[digest]
                self._count_idle(page, -1)
                self._give(page)

    def _give(self, page: CachedPage) -> None:
        for shard, table in zip(self._shards, page.pages, strict=True):
            shard.pool.give(list(table.values()))

    def _count_idle(self, page: CachedPage, by: int) -> None:
        for shard, table in zip(self._shards, page.pages, strict=True):
            shard.pool.num_idle += by * len(table)
            shard.pool.num_free += by * len(table)
