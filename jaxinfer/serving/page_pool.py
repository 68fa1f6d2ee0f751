"""Pages of KV cache: which are free."""

import heapq
from collections.abc import Callable

from jaxinfer.serving.step_fit import AttentionFit


class PagePool:
    """The free pages of one shard, lowest number first; then the idle ones of a prefix cache.

    Page 0 is never handed out: padding rows write there.

    Args:
        num_pages: size of the pool, page 0 included.
        page_size: tokens per page.

    Attributes:
        num_free: pages that can be handed out now, idle ones included.
        num_pinned: pages given up that wait for a last user.
        num_idle: cached pages that no request holds; ``evict`` frees one.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing")
        self.num_free = self.num_usable = self._size = num_pages - 1
        self.page_size = page_size
        self.num_pinned = 0
        self.num_idle = 0
        self.evict: Callable[[], None] = _nothing_to_evict
        self._free = list(range(1, num_pages))

    def take(self, count: int) -> list[int]:
        """Hand out the ``count`` lowest free pages; the caller checks that enough are free."""
        while len(self._free) < count:
            self.evict()
        self.num_free -= count
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self.num_free += len(pages)
        for page in pages:
            heapq.heappush(self._free, page)

    def clear(self) -> None:
        """Make all pages free again, including those in use."""
        self.num_pinned = self.num_idle = 0
        self.num_free = self.num_usable
        self._free = list(range(1, self.num_usable + 1))

    def close(self) -> None:
        """Hand out no page any more, and forget those that were."""
        self.num_usable = 0
        self.clear()

    def open(self) -> None:
        """Have all pages again, all free, after ``close``."""
        self.num_usable = self._size
        self.clear()

    @property
    def is_closed(self) -> bool:
        """True if it has no pages."""
        return not self.num_usable


class CountedPages(PagePool):
    """Pages without numbers, for simulations: all have the number 0."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._free.clear()

    def take(self, count: int) -> list[int]:
        """Hand out pages; the caller checks that enough are free."""
        while self.num_free - self.num_idle < count:
            self.evict()
        self.num_free -= count
        return [0] * count

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self.num_free += len(pages)

    def clear(self) -> None:
        """Make all pages free again, including those in use."""
        super().clear()
        self._free.clear()


def _nothing_to_evict() -> None:
    raise RuntimeError("more pages taken than are free")


class Shard:
    """The piece of an instance's KV cache behind one pool: a stage, or where some heads of one lie.

    Args:
        pool: its pages.
        slices: the slices of KV heads that a request has here unless placed elsewhere. A page holds
            ``page_size`` tokens of one slice. Most shards have one slice: all their heads. Where a
            stage's heads lie in several shards, slice ``stage * K + head`` is one of its K heads.
        stage: pipeline stage whose layers it has. Slices go to any shard of their stage.
        group: name of its device group, if needed; ``device``: number of its device in the group,
            if each has a shard of its own.
        fit: how long attention takes here, where that has been profiled.
        layers: number of the model's layers in this stage, if stages share device groups.
        dense: seconds of one layer without attention, as a function of a step's tokens; given for a
            stage's own shard if steps may be computed as two halves.

    Attributes:
        num_pairs: slices that lie here, over all requests.
    """

    def __init__(
        self,
        pool: PagePool,
        slices: tuple[int, ...] = (0,),
        stage: int = 0,
        group: str = "",
        fit: AttentionFit | None = None,
        layers: int = 1,
        dense: Callable[[float], float] | None = None,
        device: int = 0,
    ) -> None:
        self.pool = pool
        self.slices = slices
        self.stage = stage
        self.group = group
        self.fit = fit
        self.layers = layers
        self.dense = dense
        self.device = device
        self.num_pairs = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool, free or not."""
        return self.pool.num_usable

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now."""
        return self.pool.num_free
