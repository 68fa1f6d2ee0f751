"""Full pages that outlive their request and are found again by their tokens.

A page is identified by a digest of its tokens and of all tokens before them, so that equal digests
mean equal KV entries. Only pages whose entries exist are kept; they are never written again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from jaxinfer.serving.page_pool import Shard


class CachedPage:
    """A page of tokens in every shard.

    Attributes:
        pages: for each shard, slice -> page number.
        holds: number of holds that use it now; without any it is idle, and may be evicted.
        is_kept: whether the cache has it.
    """

    __slots__ = ("digest", "holds", "is_kept", "pages")

    def __init__(self, digest: bytes, pages: list[dict[int, int]]) -> None:
        self.digest = digest
        self.pages = pages
        self.holds = 1
        self.is_kept = True


class IdlePages(Protocol):
    """Pages that no request holds; ``popitem(last=False)`` removes the one to evict."""

    def __setitem__(self, page: CachedPage, value: None) -> None: ...
    def __delitem__(self, page: CachedPage) -> None: ...
    def __iter__(self) -> Iterator[CachedPage]: ...
    def __len__(self) -> int: ...
    def popitem(self, last: bool = ...) -> tuple[CachedPage, None]: ...  # noqa: D102


class PrefixCache:
    """The cached pages of one instance; the least recently used idle one is evicted first.

    Args:
        shards: shards of the instance; each counts its idle pages as free.
        twins: whether to keep several pages with the same tokens; requests get the oldest one.
        idle: empty; keeps idle pages in another order of eviction (``caches/eviction.py``).

    Attributes:
        pin: pins a session's pages; None if ``idle`` pins none.
    """

    def __init__(
        self, shards: list[Shard], twins: bool = False, idle: IdlePages | None = None
    ) -> None:
        self._shards, self._keeps_twins = shards, twins
        # By digest, the oldest; then all younger ones, where there are any.
        self._pages: dict[bytes, CachedPage] = {}
        self._twins: dict[bytes, list[CachedPage]] = {}
        self._idle: IdlePages = OrderedDict() if idle is None else idle
        self.pin: Callable[[str, Sequence[CachedPage]], None] | None = getattr(idle, "pin", None)
        for shard in shards:
            shard.pool.evict = self.evict

    def match(self, digests: Sequence[bytes]) -> list[CachedPage]:
        """Return the pages of the longest prefix of ``digests`` that is cached."""
        found = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
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
        """Count one hold fewer for each page."""
        idle, gone = 0, []
        for page in pages:
            page.holds -= 1
            if page.holds:
                continue
            if page.is_kept:
                self._idle[page] = None
                idle += 1
            else:
                gone.append(page)
        self._give(gone)
        if idle:
            self._count_idle(pages[0], idle)

    def add(self, digest: bytes, pages: list[dict[int, int]]) -> CachedPage | None:
        """Add a page that one hold uses; return None if it has a twin and twins are not kept."""
        if digest not in self._pages:
            page = self._pages[digest] = CachedPage(digest, pages)
            return page
        if not self._keeps_twins:
            return None
        page = CachedPage(digest, pages)
        self._twins.setdefault(digest, []).append(page)
        return page

    def evict(self, count: int = 1) -> None:
        """Free idle pages, about ``count`` of each shard: by default those idle for longest."""
        each = max(len(shard.slices) for shard in self._shards)
        gone = [self._idle.popitem(last=False)[0] for _ in range(-(-count // each))]
        for page in gone:
            twins = self._twins.get(page.digest)
            if twins is None:
                del self._pages[page.digest]
                continue
            if self._pages[page.digest] is page:
                self._pages[page.digest] = twins.pop(0)
            else:
                twins.remove(page)
            if not twins:
                del self._twins[page.digest]
        self._count_idle(gone[0], -len(gone))
        self._give(gone)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Remove these pages from the cache; those that no request holds are freed."""
        for digest in digests:
            if page := self._pages.pop(digest, None):
                for each in (page, *self._twins.pop(digest, ())):
                    self._forget(each)

    def _forget(self, page: CachedPage) -> None:
        page.is_kept = False
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
