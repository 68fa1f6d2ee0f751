"""Free pages of the KV cache."""

import heapq
from collections.abc import Callable

from jaxinfer.serving.step_fit import AttentionFit


class PagePool:
    """The free pages of one shard, lowest number first, followed by idle pages of a prefix cache.

    Page 0 is never handed out: padding rows write there.

    Args:
        num_pages: size of the pool, including page 0.
        page_size: tokens per page.

    Attributes:
        num_free: number of pages that can be handed out now, including idle ones.
        num_pinned: number of pages that were given up but still have a user.
        num_idle: number of cached pages that no request holds. ``evict(count)`` frees at least one,
            and at most the pages of all slices that ``count`` pages need.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing")
        self.num_free = self.num_usable = self._size = num_pages - 1
        self.page_size = page_size
        self.num_pinned = 0
        self.num_idle = 0
        self.evict: Callable[[int], None] = _nothing_to_evict
        self._free = list(range(1, num_pages))

    def take(self, count: int) -> list[int]:
        """Hand out the ``count`` lowest free pages; the caller checks that enough are free."""
        while (lacking := count - len(self._free)) > 0:
            self.evict(lacking)
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
        """Empty the pool, and forget the pages that were handed out."""
        self.num_usable = 0
        self.clear()

    def open(self) -> None:
        """Make all pages available and free again after ``close``."""
        self.num_usable = self._size
        self.clear()

    @property
    def is_closed(self) -> bool:
        """True if the pool has no pages."""
        return not self.num_usable


class CountedPages(PagePool):
    """Pages without numbers, for simulations: each has the number 0."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._free.clear()

    def take(self, count: int) -> list[int]:
        """Hand out pages; the caller checks that enough are free."""
        while (lacking := count - self.num_free + self.num_idle) > 0:
            self.evict(lacking)
        self.num_free -= count
        return [0] * count

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self.num_free += len(pages)

    def clear(self) -> None:
        """Make all pages free again, including those in use."""
        super().clear()
        self._free.clear()


def _nothing_to_evict(count: int) -> None:
    raise RuntimeError("more pages taken than are free")


class Shard:
    """The part of an instance's KV cache behind one pool: a stage, or some heads of one.

    Args:
        pool: its pages.
        slices: slices of KV heads that a request has here unless placed elsewhere. A page holds
            ``page_size`` tokens of one slice. Most shards have one slice with all their heads. If a
            stage's heads are in several shards, slice ``stage * K + head`` is one of its K heads.
        stage: pipeline stage of the layers. A slice can be in any shard of its stage.
        group: name of the device group, if needed.
        device: number of the device in the group, if each device has its own shard.
        fit: fitted time of attention here, if profiled.
        layers: number of the model's layers in this stage, if stages share device groups.
        dense: returns the seconds of one layer without attention, from a step's tokens; given for a
            stage's own shard if steps may be computed as two halves.

    Attributes:
        num_pairs: number of slices here, over all requests.
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
        """Number of pages of the pool, free or not."""
        return self.pool.num_usable

    @property
    def num_free_pages(self) -> int:
        """Number of pages that can be handed out now."""
        return self.pool.num_free
