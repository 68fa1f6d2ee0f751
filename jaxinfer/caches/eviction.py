"""Eviction orders other than least recently used: by next use, or with sessions' pages last."""

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from jaxinfer.caches.later_uses import LaterUses
from jaxinfer.options.validation import OptionError, Options
from jaxinfer.serving.prefix_cache import CachedPage, IdlePages


class Eviction(Options):
    """Options for the order in which unused cached pages are evicted.

    Attributes:
        order: Page to evict first: the least recently used one (``lru``), or the one that the run's
            requests will need last (``next_use``; requests that wait for another one, such as later
            turns, do not count). With ``next_use``, a run reads all its requests before it starts.
        pin_pages: Number of pages, those of the sessions with the most recent turns, that are
            evicted only if no other page is left. A page counts once for each session.
        tier: Instance without computation that stores copies of a request's pages when the request
            ends; pages that were evicted here can be fetched from it.
        tier_takes: Requests whose pages the tier stores: ``all``, or only those of ``sessions``.
    """

    order: Literal["lru", "next_use"] = "lru"
    pin_pages: int = Field(default=0, ge=0)
    tier: str | None = None
    tier_takes: Literal["all", "sessions"] = "all"

    def model_post_init(self, context: Any, /) -> None:
        """Refuse an option that needs a tier if no tier is named."""
        if self.tier is None and self.tier_takes != "all":
            raise OptionError(
                f"tier_takes is {self.tier_takes}, must be left out without eviction.tier"
            )


class ByNextUse(OrderedDict[CachedPage, None]):
    """Holds idle pages, and evicts first the page whose next use is farthest away (Belady's rule).

    Of pages with the same next use, the one that became idle first is evicted first. The pages of a
    prompt become idle in order, its last page first.

    Args:
        next_use: returns the negative time and number of the next use of a digest.
    """

    def __init__(self, next_use: Callable[[bytes], tuple[float, int]]) -> None:
        super().__init__()
        self._next_use = next_use
        # Uses change: a page that is needed sooner than its entry says is sorted in again when it
        # comes first, and one that is needed later when there are too many entries.
        self._heap: list[tuple[tuple[float, int], int, CachedPage]] = []
        # The number of each page's entry; entries with others are of times when it was idle before.
        self._numbers: dict[CachedPage, int] = {}
        self._count = 0

    def __setitem__(self, page: CachedPage, value: None) -> None:
        super().__setitem__(page, value)
        self._count += 1
        self._numbers[page] = self._count
        heapq.heappush(self._heap, self._entry(page))
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [self._entry(each) for each in self]
            heapq.heapify(self._heap)

    def __delitem__(self, page: CachedPage) -> None:
        super().__delitem__(page)
        del self._numbers[page]

    def _entry(self, page: CachedPage) -> tuple[tuple[float, int], int, CachedPage]:
        return self._next_use(page.digest), self._numbers[page], page

    def popitem(self, last: bool = False) -> tuple[CachedPage, None]:
        """Remove and return the page whose next use is farthest away."""
        while True:
            use, number, page = heapq.heappop(self._heap)
            if number != self._numbers.get(page):
                continue
            if use == self._next_use(page.digest):
                del self[page]
                return page, None
            heapq.heappush(self._heap, self._entry(page))


class PinnedLast:
    """Holds idle pages; evicts the least recently used first, but pages of pinned sessions last.

    Args:
        limit: largest number of pinned pages; a page that several sessions use counts once for
            each. The sessions that ended a turn last are pinned.
        others: the other idle pages.
    """

    def __init__(self, limit: int, others: IdlePages) -> None:
        self._limit, self._others = limit, others
        self._idle: OrderedDict[CachedPage, None] = OrderedDict()
        self._sessions: OrderedDict[str, Sequence[CachedPage]] = OrderedDict()
        self._pins: Counter[CachedPage] = Counter()

    def pin(self, session: str, pages: Sequence[CachedPage]) -> None:
        """Pin a session's pages, the last one first, and unpin the pages of its previous turn."""
        self._pins.update(pages)
        self._unpin(self._sessions.pop(session, ()))
        self._sessions[session] = pages
        while sum(map(len, self._sessions.values())) > self._limit:
            self._unpin(self._sessions.popitem(last=False)[1])

    def _unpin(self, pages: Sequence[CachedPage]) -> None:
        for page in pages:
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]
                if page in self._idle:
                    del self._idle[page]
                    self._others[page] = None

    def __setitem__(self, page: CachedPage, value: None) -> None:
        (self._idle if page in self._pins else self._others)[page] = None

    def __delitem__(self, page: CachedPage) -> None:
        del (self._idle if page in self._pins else self._others)[page]

    def popitem(self, last: bool = False) -> tuple[CachedPage, None]:
        """Remove and return a page that is not pinned, or a pinned one if all pages are pinned."""
        return (self._others if len(self._others) else self._idle).popitem(last=False)

    def __iter__(self) -> Iterator[CachedPage]:
        yield from self._others
        yield from self._idle

    def __len__(self) -> int:
        return len(self._others) + len(self._idle)


def idle_pages(
    options: Eviction, page_size: int, instance: str, uses: LaterUses | None
) -> Callable[[], IdlePages]:
    """Return a function that makes the container for an instance's idle pages, by its options."""

    def plain() -> IdlePages:
        if options.order == "lru":
            return OrderedDict()
        assert uses
        return ByNextUse(lambda digest: uses.next_use(digest, page_size, instance))

    return lambda: PinnedLast(options.pin_pages, plain()) if options.pin_pages else plain()


def later_uses(engines: Iterable[tuple[str, Eviction, int]]) -> LaterUses | None:
    """Return the later uses that instances share; None if no instance evicts by next use."""
    sizes: set[int] = set()
    users: defaultdict[str, list[str]] = defaultdict(list)
    for name, options, size in engines:
        if options.order == "next_use":
            sizes.add(size)
        if options.tier:
            users[options.tier].append(name)
    return LaterUses(sizes, users) if sizes else None
