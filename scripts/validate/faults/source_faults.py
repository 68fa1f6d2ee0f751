"""Faults at the source: wrong entries, wrong pages, or a wrong time.

If a fault is modelled on a report about another engine, its docstring has the report's number.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxinfer.lab.conformance.formats import FORMATS
from jaxinfer.lab.conformance.golden import GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout, LayerPages, from_order, to_order
from jaxinfer.lab.conformance.mover import Mover
from scripts.validate.faults.mistake import Mistake, Production, Step, afterwards, replacing
from scripts.validate.faults.scenario import (
    DEST_ONLY,
    LENGTHS,
    OTHER_LENGTH,
    SOURCE_ONLY,
    UNKNOWN,
)


def _heads(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """SGLang 22145: a device's heads counted wrongly if devices have copies."""
    K = model.heads

    def mapped(heads: Mapping[int, int], layers: range = range(model.layers)) -> Step:
        return lambda self, layer, head: Mover.find(
            self, layer, heads[head] if layer in layers else head
        )

    reverse = {k: K - 1 - k for k in range(K)}
    yield replacing(
        "head order", "heads rotated by one", find=mapped({k: (k + 1) % K for k in range(K)})
    )
    yield replacing("head order", "heads reversed", find=mapped(reverse))
    yield replacing(
        "head order",
        "two heads swapped",
        find=mapped(reverse | {0: 0, K - 1: K - 1} if K > 3 else {0: 1, 1: 0, 2: 2}),
    )
    yield replacing("head order", "heads of one layer reversed", find=mapped(reverse, range(2, 3)))
    if source.tp > K or dest.tp > K:
        wrapped = {k: k * 2 % K for k in range(K)}
        yield replacing("head order", "copies of heads counted round", find=mapped(wrapped))


def _layers(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """vllm-ascend 15900: stages of one side paired with those of the other by position."""

    def mapped(layers: list[int]) -> Step:
        return lambda self, layer, head: Mover.find(self, layers[layer], head)

    yield replacing("layer shifted", "the layer before", find=mapped([3, 0, 1, 2]))
    yield replacing("layer shifted", "two layers swapped", find=mapped([0, 2, 1, 3]))
    if dest.stages:
        local = [layer for count in dest.stages for layer in range(count)]
        yield replacing(
            "layer shifted", "layers counted from their stage's first", find=mapped(local)
        )


def _parts(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    def swapped(layers: range) -> Step:
        def take(self: Mover, shard: LayerPages, request: int, tokens: range) -> np.ndarray:
            found = Mover.take(self, shard, request, tokens)
            return found[::-1] if shard.layer in layers else found

        return take

    name = "keys and values swapped"
    yield replacing(name, "keys sent as values", take=swapped(range(4)))
    yield replacing(name, "keys sent as values in one layer", take=swapped(range(1, 2)))


def _tables(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """Dynamo 8419: the last pages instead of the first ones, at either end."""
    changes: dict[str, Callable[[list[int]], list[int]]] = {
        "two pages swapped": lambda table: [table[1], table[0], *table[2:]],
        "pages from the second on": lambda table: [*table[1:], table[0]],
    }
    for end, layout in (("source", source), ("dest", dest)):
        if LENGTHS[1] < 2 * layout.page_size:
            continue
        for words, change in changes.items():

            def table(self: Mover, request: int, end: str = end, change: Any = change) -> Any:
                right = getattr(Mover, f"{end}_table")(self, request)
                return change(right) if request == 1 else right

            yield replacing("page order", f"{end}: {words}", **{f"{end}_table": table})


def _other_tables(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """Dynamo 15079: the entries of another request."""
    name = "page of another request"

    def neighbour(self: Mover, request: int) -> list[int]:
        table = Mover.source_table(self, request)
        theirs = self.source.tables[SOURCE_ONLY][:2]
        return theirs + table[len(theirs) :] if request == 1 else table

    def reused(self: Mover, request: int) -> None:
        if request == 2:
            pages = self.source.tables[2]
            room = len(pages) * self.source.layout.page_size
            self.source.write(SOURCE_ONLY, pages, 0, min(OTHER_LENGTH, room))
        Mover.move(self, request)

    def unknown(self: Mover, shard: LayerPages, request: int, tokens: range) -> np.ndarray:
        heads = np.maximum(self.dest.layout.heads_of(model, shard.rank), 0)
        return model.entries(UNKNOWN, shard.layer, np.array(tokens), heads)

    def overwritten(mover: Mover) -> None:
        mover.dest.write(DEST_ONLY, mover.dest.tables[1], 0, OTHER_LENGTH)

    yield replacing(name, "source: first pages of a neighbour's", source_table=neighbour)
    yield replacing(name, "source: pages given away before they are sent", move=reused)
    yield replacing(name, "source: entries of a request that no table has", take=unknown)
    yield afterwards(name, "dest: pages that two requests have", overwritten)


def _offsets(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    for by in (1, -1, 3):
        name = "page offset off by one" if abs(by) == 1 else "page offset"

        def read(
            self: Mover, layer: int, rank: int, table: list[int], tokens: range, by: int = by
        ) -> np.ndarray:
            room = len(table) * self.source.layout.page_size
            found = Mover.read(self, layer, rank, table, range(room))
            return found[:, np.clip(np.array(tokens) + by, 0, room - 1)]

        def put(
            self: Mover,
            shard: LayerPages,
            request: int,
            tokens: range,
            slab: np.ndarray,
            by: int = by,
        ) -> None:
            room = len(self.dest.tables[request]) * self.dest.layout.page_size
            first = max(0, tokens.start + by)
            slab = slab[:, first - (tokens.start + by) :][:, : room - first]
            Mover.put(self, shard, request, range(first, first + slab.shape[1]), slab)

        yield replacing(name, f"source: read {by:+} tokens on", read=read)
        if not FORMATS[dest.kv_dtype].scaled:
            yield replacing(name, f"dest: written {by:+} tokens on", put=put)


def _early(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """vLLM 49250: entries that are used before they have arrived."""
    for words, first in (("its last step", 64), ("any of its steps", 0)):

        def early(self: Mover, request: int, first: int = first) -> None:
            side, B = self.source, self.source.layout.page_size
            if request == 1:
                everything = list(range(side.num_pages))
                for page in side.tables[request][-(-first // B) :]:
                    side.write(side.former, everything, page * B, (page + 1) * B)
            Mover.move(self, request)

        if first + source.page_size <= LENGTHS[1]:
            yield replacing("sent too early", f"sent before {words} has ended", move=early)


def _orders(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """TensorRT-LLM 6507: pages of [token, head] split as if they were [head, token]."""
    if len(source.heads_of(model, 0)) == 1 or source.keys == "HDN":
        return
    order = source.keys
    other = "NHD" if order == "HND" else "HND"

    def move(self: Mover, request: int) -> None:
        if request == min(LENGTHS):
            for keys, _ in self.source.pools.values():
                shape = to_order(from_order(keys.pages, order), other).shape
                keys.pages = to_order(from_order(keys.pages.reshape(shape), other), order)
        Mover.move(self, request)

    yield replacing("order of axes misread", f"source: read as {other}", move=move)


SOURCE_PRODUCTIONS: tuple[Production, ...] = (
    _heads, _layers, _parts, _tables, _other_tables, _offsets, _early, _orders,
)  # fmt: skip
