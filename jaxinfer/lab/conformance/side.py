"""A side of a hand-off: pools of pages, and each request's pages."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.lab.conformance.formats import FORMATS, decode, encode
from jaxinfer.lab.conformance.golden import FORMER, MAX_REQUESTS, GoldenModel, check_counts
from jaxinfer.lab.conformance.layout import KVLayout, LayerPages, from_order, to_order


@dataclass
class Pool:
    """A shard's pages of keys or of values.

    Attributes:
        pages: pages as stored, in the layout's order.
        scale_PK: scales; None for entries without scales.
    """

    pages: np.ndarray
    scale_PK: np.ndarray | None = None

    def __str__(self) -> str:
        scales = "no scales" if self.scale_PK is None else f"scales {_facts(self.scale_PK)}"
        return f"pages {_facts(self.pages)}, {scales}"


def _facts(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"


@dataclass
class Side:
    """One engine's KV: its pools, and the pages of its requests.

    Attributes:
        num_pages: number of pages of each pool; page 0 belongs to no request and may hold anything.
        former: number of the first of those golden requests that the pools held before.
        tables: each request's pages in token order.
        lengths: each request's number of tokens.
        pools: keys and values of each shard.
    """

    model: GoldenModel
    layout: KVLayout
    num_pages: int
    former: int = FORMER
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    pools: dict[LayerPages, tuple[Pool, Pool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill the pools with entries of former requests, so that stale contents are recognised."""
        check_counts("Side", {"num_pages": self.num_pages})
        if not FORMER <= self.former < MAX_REQUESTS:
            raise ValueError(
                f"former is {self.former}, must be from {FORMER} to {MAX_REQUESTS - 1}"
            )
        tokens = self.num_pages * self.layout.page_size
        if tokens > self.model.max_tokens:
            raise ValueError(
                f"a pool of {self.num_pages} pages holds {tokens} tokens, the model has codes for "
                f"{self.model.max_tokens}"
            )
        if not self.pools:
            for shard in self.layout.shards(self.model):
                self.pools[shard] = self._empty(shard, 0), self._empty(shard, 1)
            everything = list(range(self.num_pages))
            self.write(self.former, everything, 0, self.num_pages * self.layout.page_size)

    def _empty(self, shard: LayerPages, part: int) -> Pool:
        form, B = FORMATS[self.layout.kv_dtype], self.layout.page_size
        heads = len(self.layout.heads_of(self.model, shard.rank))
        pages = np.zeros((self.num_pages, heads, B, self.model.head_dim), form.storage)
        scale_PK = np.ones((self.num_pages, heads), np.float32) if form.scaled else None
        return Pool(to_order(pages, self.layout.order(part)), scale_PK)

    def add(self, request: int, length: int, pages: list[int]) -> None:
        """Register a request and its pages; their contents do not change.

        Raises:
            ValueError: the request is already registered or has no golden entries, or the pages are
                invalid.
        """
        check_counts("add", {"request": request}, least=0)
        check_counts(f"request {request}", {"length": length})
        if request in self.tables:
            raise ValueError(f"request {request} is there already")
        if request >= FORMER:
            raise ValueError(
                f"request is {request}, must be below {FORMER}: others are pools' pasts"
            )
        if not isinstance(pages, Sequence | np.ndarray) or isinstance(pages, str):
            raise ValueError(
                f"pages of request {request} are {pages!r}, must be a list of integers"
            )
        table, needed = list(pages), -(-length // self.layout.page_size)
        check_counts(f"request {request}", {f"pages[{n}]": p for n, p in enumerate(table)}, least=0)
        if len(table) < needed:
            raise ValueError(
                f"request {request} of {length} tokens has {len(table)} pages of "
                f"{self.layout.page_size}, needs {needed}"
            )
        if max(table) >= self.num_pages:
            raise ValueError(
                f"request {request} has page {max(table)}, the last one is {self.num_pages - 1}"
            )
        if len({*table}) < len(table):
            twice = next(page for page in table if table.count(page) > 1)
            raise ValueError(f"request {request} has page {twice} twice")
        self.tables[request], self.lengths[request] = table, length

    def fill(self, request: int) -> None:
        """Write all golden entries of a request, as its prefill would."""
        self.write(request, self.tables[request], 0, self.lengths[request])

    def write(self, request: int, table: list[int], start: int, stop: int) -> None:
        """Write golden entries of a request's tokens ``start`` to ``stop`` to these pages."""
        for shard in self.pools:
            heads = self.layout.heads_of(self.model, shard.rank)
            entries = self.model.entries(
                request, shard.layer, np.arange(start, stop), np.maximum(heads, 0)
            )
            entries[:, :, heads < 0] = 0
            self.put(shard, table, start, entries)

    def put(
        self, shard: LayerPages, table: list[int], start: int, entries_2TKH: np.ndarray
    ) -> None:
        """Write entries of the heads that a device has itself; pages of 8 bits get new scales."""
        tokens = start + np.arange(entries_2TKH.shape[1])
        page_T, offset_T = np.divmod(tokens, self.layout.page_size)
        page_T = np.asarray(table)[page_T]
        for part, x_TKH in enumerate(entries_2TKH):
            pool, order = self.pools[shard][part], self.layout.order(part)
            if pool.scale_PK is None:
                stored = from_order(pool.pages, order)
                stored[page_T, :, offset_T] = encode(x_TKH, self.layout.kv_dtype)
            else:
                self._rescale(pool, order, page_T, offset_T, x_TKH)

    def _rescale(
        self, pool: Pool, order: str, page_T: np.ndarray, offset_T: np.ndarray, x_TKH: np.ndarray
    ) -> None:
        """Write to pages of 8 bits; entries before a page's first token are rounded again."""
        assert pool.scale_PK is not None
        name = self.layout.kv_dtype
        pages, at_T = np.unique(page_T, return_inverse=True)
        first = np.full(len(pages), self.layout.page_size)
        np.minimum.at(first, at_T, offset_T)
        stored = from_order(pool.pages, order)
        x_MKBH = decode(stored[pages], name) * pool.scale_PK[pages][..., None, None]
        later = np.arange(self.layout.page_size) >= first[:, None]
        x_MKBH[np.broadcast_to(later[:, None, :], x_MKBH.shape[:3])] = 0
        x_MKBH[at_T, :, offset_T] = x_TKH
        scale_MK = np.maximum(np.abs(x_MKBH).max((2, 3)), 1e-30) / (FORMATS[name].largest or 1)
        stored[pages] = encode(x_MKBH / scale_MK[..., None, None], name)
        pool.scale_PK[pages] = scale_MK

    def get(self, shard: LayerPages, table: list[int], start: int, stop: int) -> np.ndarray:
        """Return float32 [2, T, K, H] for the heads that a device has itself, in token order."""
        page_T, offset_T = np.divmod(np.arange(start, stop), self.layout.page_size)
        page_T = np.asarray(table)[page_T]
        found = []
        for part, pool in enumerate(self.pools[shard]):
            stored = from_order(pool.pages, self.layout.order(part))
            x_TKH = decode(stored[page_T, :, offset_T], self.layout.kv_dtype)
            if pool.scale_PK is not None:
                x_TKH = x_TKH * pool.scale_PK[page_T][:, :, None]
            found.append(x_TKH)
        return np.stack(found)

    def take_pages(self, other: "Side", request: int) -> None:
        """Use the pages that a request has on the other side, which uses the same pools."""
        table = other.tables[request]
        for shard, pair in other.pools.items():
            for mine, theirs in zip(self.pools[shard], pair, strict=True):
                mine.pages[table] = theirs.pages[table]
                if mine.scale_PK is not None and theirs.scale_PK is not None:
                    mine.scale_PK[table] = theirs.scale_PK[table]

    def copy(self) -> "Side":
        """Return a copy with its own pages."""
        return copy.deepcopy(self)

    def load(self, pools: Mapping[LayerPages, tuple[Pool, Pool]]) -> None:
        """Replace the contents of all pools by those of an engine.

        Raises:
            ValueError: shards, shapes, dtypes or scales do not match the layout.
        """
        if not isinstance(pools, Mapping):
            raise ValueError(f"pools are {type(pools).__name__}, must be a mapping")
        if apart := pools.keys() ^ self.pools.keys():
            whose = "the layout" if min(apart, key=str) in self.pools else "the engine"
            raise ValueError(f"{min(apart, key=str)}: {whose} alone has it")
        for shard, pair in pools.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(f"{shard}: must have keys and values")
            for mine, theirs in zip(self.pools[shard], pair, strict=True):
                if not isinstance(theirs, Pool) or not isinstance(theirs.pages, np.ndarray):
                    inner = f" of {type(theirs.pages).__name__}" if isinstance(theirs, Pool) else ""
                    raise ValueError(
                        f"{shard}: the engine has {type(theirs).__name__}{inner}, must "
                        "be a Pool of numpy's arrays"
                    )
                if str(theirs) != str(mine):
                    raise ValueError(f"{shard}: the engine has {theirs}, the layout {mine}")
                mine.pages[:] = theirs.pages
                if mine.scale_PK is not None:
                    mine.scale_PK[:] = theirs.scale_PK
