"""Full pages that outlive their request, found again by the tokens they hold.

A page is known by a digest of its tokens and of all tokens before them, so that equal digests
mean equal KV entries. Only pages whose entries exist are kept; nobody writes to them again.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.serving.page_pool import Hold, Shard
    from jaxinfer.serving.request_state import RequestState


class CachedPage:
    """One page's worth of tokens in every shard.

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
        shards: of the instance; each counts its idle pages as free.
    """

    def __init__(self, shards: "list[Shard]") -> None:
        self._shards = shards
        self._pages: dict[bytes, CachedPage] = {}
        self._idle: dict[bytes, CachedPage] = {}
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

    def acquire(self, page: CachedPage) -> None:
        """Count one more hold."""
        if not page.holds:
            del self._idle[page.digest]
            self._count_idle(page, -1)
        page.holds += 1

    def drop(self, page: CachedPage) -> None:
        """Count one hold fewer."""
        page.holds -= 1
        if not page.holds:
            self._idle[page.digest] = page
            self._count_idle(page, 1)

    def keep(self, hold: "Hold", digests: Sequence[bytes]) -> None:
        """Take in the first pages of a hold, whose entries exist by now, less those known."""
        for index in range(hold.num_hashed, len(digests)):
            if digests[index] not in self._pages:
                pages = [{s: p[index] for s, p in table.items()} for table in hold.tables]
                page = hold.cached[index] = CachedPage(digests[index], pages)
                self._pages[page.digest] = page
        hold.num_hashed = max(hold.num_hashed, len(digests))

    def evict(self) -> None:
        """Free the page that has been idle for longest."""
        digest, page = next(iter(self._idle.items()))
        del self._idle[digest], self._pages[digest]
        self._count_idle(page, -1)
        for shard, table in zip(self._shards, page.pages, strict=True):
            shard.pool.give(list(table.values()))

    def _count_idle(self, page: CachedPage, by: int) -> None:
        for shard, table in zip(self._shards, page.pages, strict=True):
            shard.pool.num_idle += by * len(table)


def page_digests(request: "RequestState", page_size: int, count: int) -> list[bytes]:
    """Digests of the request's first ``count`` pages, whose tokens are all known."""
    digests = request.page_digests.setdefault(page_size, [])
    for index in range(len(digests), count):
        tokens = request.known_tokens(index * page_size, (index + 1) * page_size)
        before = digests[-1] if digests else b""
        digests.append(blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest())
    return digests[:count]
