"""Faults of hand-offs, from a grammar of where one can go wrong: a step, an object, a mistake.

Each is a mover with one step wrong; the check knows none of this. Reports of other engines that a
production is modelled on stand beside it: a repository and the number of an issue or a change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.conformance.check import Finding
from jaxinfer.conformance.formats import FORMATS, decode, encode
from jaxinfer.conformance.golden import BLOCK
from jaxinfer.conformance.layout import Layout, Shard, from_order, to_order
from jaxinfer.conformance.mover import Mover
from jaxinfer.conformance.scenario import (
    DEST_ONLY,
    FREED,
    LENGTHS,
    OTHER_LENGTH,
    PAIRS,
    SOURCE_ONLY,
    Scenario,
    scenario,
)

Step = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One step of a hand-off that is wrong.

    Attributes:
        name: what a check is to call it; ``mistake``: in words.
        steps: in place of the mover's methods of these names; ``after``: done at the end.
    """

    name: str
    mistake: str
    source: Layout
    dest: Layout
    steps: dict[str, Step] = field(default_factory=dict)
    after: Callable[[Mover], None] | None = None

    def __str__(self) -> str:
        return f"{self.source} to {self.dest}: {self.mistake}"

    def findings(self) -> list[Finding]:
        """Hand over with this fault, and check."""
        case = scenario(self.source, self.dest)
        return case.run(_Faulty(case, self))


class _Faulty(Mover):
    """A mover with some steps replaced."""

    def __init__(self, case: Scenario, fault: Fault) -> None:
        super().__init__(case.source, case.dest, case.slab_tokens)
        self._fault = fault
        for name, step in fault.steps.items():
            # Bound to the mover, as the method is.
            setattr(self, name, step.__get__(self))

    def move(self, request: int) -> None:
        super().move(request)
        if self._fault.after and request == max(LENGTHS):
            self._fault.after(self)


Production = Callable[[Layout, Layout], Iterator[tuple[str, str, dict[str, Step], Any]]]


def all_faults() -> list[Fault]:
    """Every production of the grammar on each pair of layouts that it is a fault of."""
    return [
        Fault(name, mistake, source, dest, steps, after)
        for source, dest in PAIRS
        for production in _PRODUCTIONS
        for name, mistake, steps, after in production(source, dest)
    ]


def _step(name: str, mistake: str, after: Any = None, **steps: Step) -> Any:
    return name, mistake, steps, after


# Finding the entries at the source.


def _heads(source: Layout, dest: Layout) -> Iterator[Any]:
    """SGLang 22145: heads of a device counted wrongly where devices have copies."""

    def mapped(heads: dict[int, int], layers: tuple[int, ...] = (0, 1, 2, 3)) -> Step:
        def find(self: Mover, layer: int, head: int) -> Any:
            return Mover.find(self, layer, heads[head] if layer in layers else head)

        return find

    orders = {
        "rotated by one": {k: (k + 1) % 4 for k in range(4)},
        "reversed": {k: 3 - k for k in range(4)},
        "two swapped": {0: 0, 1: 2, 2: 1, 3: 3},
    }
    for words, heads in orders.items():
        yield _step("head order", f"heads {words}", find=mapped(heads))
    yield _step("head order", "heads of one layer reversed", find=mapped(orders["reversed"], (2,)))
    if source.tp > 4 or dest.tp > 4:
        wrapped = {k: k * 2 % 4 for k in range(4)}
        yield _step("head order", "copies of heads counted round", find=mapped(wrapped))


def _layers(source: Layout, dest: Layout) -> Iterator[Any]:
    """vllm-ascend 15900: stages of one side paired with those of the other by position."""

    def mapped(layers: list[int]) -> Step:
        return lambda self, layer, head: Mover.find(self, layers[layer], head)

    yield _step("layer shifted", "the layer before", find=mapped([3, 0, 1, 2]))
    yield _step("layer shifted", "two layers swapped", find=mapped([0, 2, 1, 3]))
    if dest.stages:
        local = [i for count in dest.stages for i in range(count)]
        yield _step("layer shifted", "layers counted from their stage's first", find=mapped(local))


def _parts(source: Layout, dest: Layout) -> Iterator[Any]:
    def swapped(layers: tuple[int, ...]) -> Step:
        def take(self: Mover, shard: Shard, request: int, tokens: range) -> Any:
            found = Mover.take(self, shard, request, tokens)
            return found[::-1] if shard.layer in layers else found

        return take

    name = "keys and values swapped"
    yield _step(name, "keys sent as values", take=swapped((0, 1, 2, 3)))
    yield _step(name, "keys sent as values in one layer", take=swapped((1,)))


# Tables of pages, at either end.


def _tables(source: Layout, dest: Layout) -> Iterator[Any]:
    """Dynamo 8419: the last pages where the first ones were meant."""
    for end, layout in (("source", source), ("dest", dest)):
        count = LENGTHS[1] // layout.page_size
        if count < 2:
            continue
        method = getattr(Mover, f"{end}_table")

        def changed(change: Callable[[list[int]], list[int]], method: Step = method) -> Step:
            def table(self: Mover, request: int) -> list[int]:
                return change(method(self, request)) if request == 1 else method(self, request)

            return table

        mistakes: dict[str, Callable[[list[int]], list[int]]] = {
            "two pages swapped": lambda table: [table[1], table[0], *table[2:]],
            "pages from the second on": lambda table: [*table[1:], table[0]],
        }
        for words, change in mistakes.items():
            # A slab of one page swapped is the same thing.
            yield _step("page order", f"{end}: {words}", **{f"{end}_table": changed(change)})


def _other_tables(source: Layout, dest: Layout) -> Iterator[Any]:
    def neighbour(self: Mover, request: int) -> list[int]:
        table = Mover.source_table(self, request)
        return self.source.tables[SOURCE_ONLY][:2] + table[2:] if request == 1 else table

    yield _step(
        "page of another request", "source: two pages of a neighbour's", source_table=neighbour
    )

    def reused(self: Mover, request: int) -> None:
        """Before request 2 is sent, its pages are given to another one."""
        if request == 2:
            pages = self.source.tables[2]
            stop = min(OTHER_LENGTH, len(pages) * self.source.layout.page_size)
            self.source.write(SOURCE_ONLY, pages, 0, stop)
        Mover.move(self, request)

    yield _step(
        "page of another request", "source: pages given away before they are sent", move=reused
    )

    def overwritten(mover: Mover) -> None:
        pages = mover.dest.tables[1]
        mover.dest.write(DEST_ONLY, pages, 0, min(OTHER_LENGTH, LENGTHS[1]))

    yield _step(
        "page of another request", "dest: pages that two requests have", after=overwritten
    )


# The range of tokens.


def _offsets(source: Layout, dest: Layout) -> Iterator[Any]:
    for by in (1, -1, 3):
        name = "page offset off by one" if abs(by) == 1 else "page offset"

        def read(self: Mover, layer: int, rank: int, table: list[int], tokens: range,
                 by: int = by) -> Any:  # fmt: skip
            last = len(table) * self.source.layout.page_size - 1
            found = Mover.read(self, layer, rank, table, range(last + 1))
            return found[:, np.clip(np.array(tokens) + by, 0, last)]

        yield _step(name, f"source: read {by:+} tokens on", read=read)

        def put(self: Mover, shard: Shard, request: int, tokens: range, slab: Any,
                by: int = by) -> None:  # fmt: skip
            room = len(self.dest.tables[request]) * self.dest.layout.page_size
            first = max(0, tokens.start + by)
            skip = first - (tokens.start + by)
            slab = slab[:, skip : skip + room - first]
            Mover.put(self, shard, request, range(first, first + slab.shape[1]), slab)

        if not FORMATS[dest.kv_dtype].scaled:
            yield _step(name, f"dest: written {by:+} tokens on", put=put)


def _missing(source: Layout, dest: Layout) -> Iterator[Any]:
    """SGLang 30233: less has arrived than the request has."""

    def without(skips: Callable[[Mover, Shard, int, int], bool]) -> Step:
        def put(self: Mover, shard: Shard, request: int, tokens: range, slab: Any) -> None:
            run: list[int] = []
            for token in [*tokens, -1]:
                if token >= 0 and not skips(self, shard, request, token):
                    run.append(token)
                elif run:
                    first = run[0] - tokens.start
                    part = slab[:, first : first + len(run)]
                    Mover.put(self, shard, request, range(run[0], run[-1] + 1), part)
                    run = []

        return put

    B = dest.page_size
    last = LENGTHS[1] - 1
    yield _step(
        "missing last token", "the last token left out",
        put=without(lambda self, shard, request, token: request == 1 and token == last),
    )  # fmt: skip
    yield _step(
        "missing last token", "the last token of one layer left out",
        put=without(lambda self, shard, request, token: shard.layer == 3
                    and token == LENGTHS[request] - 1),
    )  # fmt: skip
    if LENGTHS[1] >= 2 * B and not FORMATS[dest.kv_dtype].scaled:
        yield _step(
            "stale page", "a page in the middle left out",
            put=without(lambda self, shard, request, token: request == 1 and token // B == 1),
        )  # fmt: skip
    if LENGTHS[2] % B > 1 and LENGTHS[2] > B:
        yield _step(
            "stale page", "rounded down to whole pages",
            put=without(lambda self, shard, request, token: request == 2
                        and token >= LENGTHS[2] // B * B),
        )  # fmt: skip
    for words, skipped in (
        ("a layer", lambda self, shard, request, token: shard.layer == 1),
        ("a device", lambda self, shard, request, token: shard.rank == self.dest.layout.tp - 1),
    ):
        if words == "a layer" or dest.tp > 1:
            yield _step("part never sent", f"{words} left out", put=without(skipped))


def _early(source: Layout, dest: Layout) -> Iterator[Any]:
    """vLLM 49250: entries taken as there that have not been loaded."""
    for words, first in (("its last step", 64), ("any of its steps", 0)):

        def early(self: Mover, request: int, first: int = first) -> None:
            if request == 1:
                side = self.source
                table, B = side.tables[request], side.layout.page_size
                for token in range(first, LENGTHS[request]):
                    page, offset = table[token // B], token % B
                    del page, offset
                _uncompute(self, request, first)
            Mover.move(self, request)

        yield _step("sent too early", f"sent before {words} has ended", move=early)


def _uncompute(mover: Mover, request: int, first: int) -> None:
    """Have the source's pages hold, from a token on, what they held before."""
    side = mover.source
    B = side.layout.page_size
    for page in range(first // B, len(side.tables[request])):
        number = side.tables[request][page]
        start = number * B
        identity = list(range(side.num_pages))
        if page * B >= first:
            side.write(side.former, identity, start, start + B)


# On the way.


def _slabs(source: Layout, dest: Layout) -> Iterator[Any]:
    def swapped(parts: tuple[int, ...], layers: tuple[int, ...]) -> Step:
        def take(self: Mover, shard: Shard, request: int, tokens: range) -> Any:
            found = Mover.take(self, shard, request, tokens)
            S = self.slab_tokens
            if request == 1 and tokens.stop <= 2 * S and shard.layer in layers:
                other = range(S - tokens.start, 2 * S - tokens.start)
                theirs = Mover.take(self, shard, request, other)
                for part in parts:
                    found[part] = theirs[part]
            return found

        return take

    yield _step("slab swapped", "the first two slabs swapped",
                take=swapped((0, 1), (0, 1, 2, 3)))  # fmt: skip
    yield _step("slab swapped", "values of the first two slabs of a layer swapped",
                take=swapped((1,), (2,)))  # fmt: skip

    def lost(self: Mover, shard: Shard, request: int, tokens: range) -> Any:
        found = Mover.take(self, shard, request, tokens)
        return found * (tokens.start > 0)

    yield _step("zeros", "the first slab's buffer sent before it is filled", take=lost)


def _wire(source: Layout, dest: Layout) -> Iterator[Any]:
    if source.kv_dtype == dest.kv_dtype == "float32":
        for name in ("bfloat16", "float16"):
            yield _step("rounded", f"sent as {name}",
                        travel=lambda self, slab, name=name: decode(encode(slab, name), name))  # fmt: skip
    for name, other in (("bfloat16", "float16"), ("float16", "bfloat16")):
        if source.kv_dtype == name:
            def travel(self: Mover, slab: Any, name: str = name, other: str = other) -> Any:
                bits = encode(slab, name).view(FORMATS[other].storage)
                return decode(bits, other)

            yield _step("dtype reinterpreted", f"{name} taken for {other}", travel=travel)
    for by in (1, 5):
        yield _step("channel offset", f"sent from {by} channels on",
                    travel=lambda self, slab, by=by: _rolled(slab, by))  # fmt: skip


def _rolled(slab: np.ndarray, by: int) -> np.ndarray:
    return np.roll(slab, by, axis=-1)


# At the destination.


def _orders(source: Layout, dest: Layout) -> Iterator[Any]:
    """TensorRT-LLM 6507: pages of [token, head] split as if they were [head, token]."""
    for end, layout in (("source", source), ("dest", dest)):
        heads = len(layout.heads_of(scenario(source, dest).source.model, 0))
        for other in ("HND", "NHD", "HDN"):
            if other == layout.keys or (other != "HDN" and layout.keys == "HDN") or (
                heads == 1 and "HDN" not in (other, layout.keys)
            ):
                continue
            if other == "HDN" and end == "source":
                continue  # What arrives then is nobody's, in any reading of the destination.
            if end == "source":
                yield _step("order of axes misread", f"source: read as {other}",
                            move=_misread_source(other))  # fmt: skip
            else:
                yield _step("order of axes misread", f"dest: written as {other}",
                            after=_miswritten(other))  # fmt: skip


def _misordered(pages: np.ndarray, order: str, other: str) -> np.ndarray:
    """Pages of an order as a writer of another one would have left them."""
    right = from_order(pages, order)
    return to_order(right, other).reshape(pages.shape)


def _misread_source(other: str) -> Step:
    def move(self: Mover, request: int) -> None:
        if request == min(LENGTHS):
            for pair in self.source.pools.values():
                order = self.source.layout.keys
                # Its own reader then sees what one of another order sees.
                seen = from_order(pair[0].pages.reshape(
                    to_order(from_order(pair[0].pages, order), other).shape), other)
                pair[0].pages = to_order(seen, order)
        Mover.move(self, request)

    return move


def _miswritten(other: str) -> Callable[[Mover], None]:
    def after(mover: Mover) -> None:
        own = sorted({page for r in LENGTHS for page in mover.dest.tables[r]})
        for keys, _ in mover.dest.pools.values():
            keys.pages[own] = _misordered(keys.pages[own], mover.dest.layout.keys, other)

    return after


def _scales(source: Layout, dest: Layout) -> Iterator[Any]:
    if not FORMATS[dest.kv_dtype].scaled:
        return

    def rolled(mover: Mover, parts: tuple[int, ...] = (0, 1)) -> None:
        for pair in mover.dest.pools.values():
            for part in parts:
                scale_PK = pair[part].scale_PK
                assert scale_PK is not None
                pages = mover.dest.tables[1]
                scale_PK[pages] = scale_PK[np.roll(pages, 1)]

    def kept(mover: Mover) -> None:
        """The pages' former scales stay."""
        former = scenario(source, dest).before
        for shard, pair in mover.dest.pools.items():
            for pool, was in zip(pair, former.pools[shard], strict=True):
                assert pool.scale_PK is not None
                assert was.scale_PK is not None
                pages = mover.dest.tables[1]
                pool.scale_PK[pages] = was.scale_PK[pages]

    def crossed(mover: Mover) -> None:
        for keys, values in mover.dest.pools.values():
            assert keys.scale_PK is not None
            assert values.scale_PK is not None
            pages = mover.dest.tables[1]
            keys.scale_PK[pages] = values.scale_PK[pages]

    name = "scale of another page"
    yield _step(name, "scales of the page before", after=rolled)
    yield _step(name, "keys' scales of the page before",
                after=lambda mover: rolled(mover, (0,)))  # fmt: skip
    yield _step(name, "scales not sent", after=kept)
    yield _step(name, "values' scales for keys", after=crossed)


def _bytes(source: Layout, dest: Layout) -> Iterator[Any]:
    """Pages copied byte by byte between formats."""
    for name, form in FORMATS.items():
        mine = FORMATS[dest.kv_dtype]
        if name == dest.kv_dtype or form.storage.itemsize != mine.storage.itemsize:
            continue

        def after(mover: Mover, name: str = name) -> None:
            pages = mover.dest.tables[1]
            for pair in mover.dest.pools.values():
                for pool in pair:
                    x = decode(pool.pages[pages], dest.kv_dtype)
                    if FORMATS[name].scaled:
                        x = x / np.abs(x).max() * FORMATS[name].largest
                    pool.pages[pages] = encode(x, name).view(pool.pages.dtype)

        yield _step("dtype reinterpreted", f"bytes of {name} copied", after=after)
    if dest.kv_dtype == "bfloat16" and dest.values == "HND":

        def wide(mover: Mover) -> None:
            """Halves of float32: what fits of a page."""
            pages = mover.dest.tables[1]
            for pair in mover.dest.pools.values():
                pool = pair[1]
                x = decode(pool.pages[pages], dest.kv_dtype).reshape(len(pages), -1)
                half = np.ascontiguousarray(x[:, : x.shape[1] // 2])
                pool.pages[pages] = half.view(np.uint16).reshape(pool.pages[pages].shape)

        yield _step("dtype reinterpreted", "bytes of float32 copied", after=wide)


def _late(source: Layout, dest: Layout) -> Iterator[Any]:
    """SGLang 24527: a writer whose pages were given to another request meanwhile."""
    for words, request in (("another request that is there", 2), ("a request on its way", 1)):

        def late(mover: Mover, request: int = request) -> None:
            pages = mover.dest.tables[request]
            room = min(OTHER_LENGTH, len(pages) * mover.dest.layout.page_size)
            mover.dest.write(FREED, pages, 0, room)

        yield _step("late write after free", f"pages of {words}", after=late)


def _outside(source: Layout, dest: Layout) -> Iterator[Any]:
    def tail(mover: Mover) -> None:
        side, B = mover.dest, mover.dest.layout.page_size
        length = LENGTHS[1]
        stop = -(-length // B) * B
        for shard in side.pools:
            entries = mover.source.model.entries(
                mover.source.former, shard.layer, np.arange(length, stop),
                np.maximum(side.layout.heads_of(side.model, shard.rank), 0),
            )  # fmt: skip
            side.put(shard, side.tables[1], length, entries)

    if LENGTHS[1] % dest.page_size:
        yield _step("past the length", "a last page filled from the source's", after=tail)

    def beyond(mover: Mover) -> None:
        spare = next(p for p in range(1, mover.dest.num_pages)
                     if not any(p in table for table in mover.dest.tables.values()))  # fmt: skip
        mover.dest.write(1, [spare], 0, mover.dest.layout.page_size)

    yield _step("outside its pages", "a page too many written", after=beyond)

    def bystander(mover: Mover) -> None:
        mover.dest.write(1, mover.dest.tables[DEST_ONLY], 0, BLOCK // 2)

    yield _step("outside its pages", "a page of a request that was there", after=bystander)


def _bits(source: Layout, dest: Layout) -> Iterator[Any]:
    def flip(mover: Mover) -> None:
        rng = np.random.default_rng(0)
        pages = mover.dest.tables[1][:1]
        for pair in mover.dest.pools.values():
            raw = pair[1].pages[pages].view(np.uint8)
            pair[1].pages[pages] = rng.permutation(raw.ravel()).reshape(raw.shape).view(
                pair[1].pages.dtype
            )

    yield _step("changed", "bytes of a page shuffled", after=flip)


_PRODUCTIONS: tuple[Production, ...] = (
    _heads, _layers, _parts, _tables, _other_tables, _offsets, _missing, _early, _slabs, _wire,
    _orders, _scales, _bytes, _late, _outside, _bits,
)  # fmt: skip
