"""Faults on the way and at the destination: entries lost, misread, or written to wrong places.

If a fault is modelled on a report about another engine, its docstring has the report's number.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxinfer.lab.conformance.formats import FORMATS, decode, encode
from jaxinfer.lab.conformance.golden import BLOCK, GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout, LayerPages, from_order, to_order
from jaxinfer.lab.conformance.mover import SLAB_TOKENS, Mover
from scripts.validate.faults.mistake import Mistake, Production, Step, afterwards, replacing
from scripts.validate.faults.scenario import DEST_ONLY, FREED, LENGTHS, OTHER_LENGTH, scenario

Skips = Callable[[Mover, LayerPages, int, int], bool]


def _without(skips: Skips) -> Step:
    """Return a step that writes all tokens but some."""

    def put(self: Mover, shard: LayerPages, request: int, tokens: range, slab: np.ndarray) -> None:
        run: list[int] = []
        for token in [*tokens, -1]:
            if token >= 0 and not skips(self, shard, request, token):
                run.append(token)
            elif run:
                part = slab[:, run[0] - tokens.start :][:, : len(run)]
                Mover.put(self, shard, request, range(run[0], run[-1] + 1), part)
                run = []

    return put


def _missing(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """SGLang 30233: less has arrived than the request has."""
    B, plain = dest.page_size, not FORMATS[dest.kv_dtype].scaled
    skips: list[tuple[str, str, bool, Skips]] = [
        ("missing last token", "the last token left out", True,
         lambda m, shard, request, token: request == 1 and token == LENGTHS[1] - 1),
        ("missing last token", "the last token of one layer left out", True,
         lambda m, shard, request, token: shard.layer == 3 and token == LENGTHS[request] - 1),
        ("stale page", "a page in the middle left out",
         LENGTHS[1] >= 2 * B and plain,
         lambda m, shard, request, token: request == 1 and token // B == 1),
        ("stale page", "rounded down to whole pages", LENGTHS[2] % B > 1 and LENGTHS[2] > B,
         lambda m, shard, request, token: request == 2 and token >= LENGTHS[2] // B * B),
        ("part never sent", "a layer left out", True,
         lambda m, shard, request, token: shard.layer == 1),
        ("part never sent", "a device left out", dest.tp > 1,
         lambda m, shard, request, token: shard.rank == 0),
        ("missing tokens", "a window one token too short", bool(model.windows) and plain,
         lambda m, shard, request, token: token <= model.first_needed(
             shard.layer, LENGTHS[request]) != 0),
    ]  # fmt: skip
    for name, words, applies, skipped in skips:
        if applies:
            yield replacing(name, words, put=_without(skipped))


def _slabs(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    def swapped(parts: slice, layers: range) -> Step:
        def take(self: Mover, shard: LayerPages, request: int, tokens: range) -> np.ndarray:
            found, S = Mover.take(self, shard, request, tokens), SLAB_TOKENS
            if request == 1 and tokens.stop <= 2 * S and shard.layer in layers:
                other = range(S - tokens.start, 2 * S - tokens.start)
                found[parts] = Mover.take(self, shard, request, other)[parts]
            return found

        return take

    def lost(self: Mover, shard: LayerPages, request: int, tokens: range) -> np.ndarray:
        return Mover.take(self, shard, request, tokens) * (tokens.start > 0)

    everything = slice(0, 2)
    yield replacing("slab swapped", "first two slabs", take=swapped(everything, range(4)))
    yield replacing("slab swapped", "values of a layer", take=swapped(slice(1, 2), range(2, 3)))
    yield replacing("zeros", "the first slab's buffer sent before it is filled", take=lost)


def _wire(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    if source.kv_dtype == "float32" and dest.kv_dtype == "bfloat16":
        yield replacing(
            "rounded",
            "cut to bfloat16, not rounded",
            travel=lambda m, slab: (slab.view(np.uint32) & 0xFFFF0000).view(np.float32),
        )
    if source.kv_dtype == dest.kv_dtype == "float32":
        for name in ("bfloat16", "float16"):
            yield replacing(
                "rounded",
                f"sent as {name}",
                travel=lambda m, slab, n=name: decode(encode(slab, n), n),
            )
    for name, other in (("bfloat16", "float16"), ("float16", "bfloat16")):
        # An error that is then rounded to 8 bits cannot be distinguished from noise.
        if source.kv_dtype == name and not FORMATS[dest.kv_dtype].scaled:

            def travel(self: Mover, slab: Any, name: str = name, other: str = other) -> Any:
                return decode(encode(slab, name).view(FORMATS[other].storage), other)

            yield replacing("dtype reinterpreted", f"{name} taken for {other}", travel=travel)
    for by in (1, 5):
        yield replacing(
            "channel offset",
            f"sent from {by} channels on",
            travel=lambda m, slab, by=by: np.roll(slab, by, axis=-1),
        )
    dim = model.head_dim
    for words, channels in (
        ("even channels first", np.arange(dim).reshape(-1, 2).T.ravel()),
        ("halves interleaved", np.arange(dim).reshape(2, -1).T.ravel()),
    ):
        yield replacing(
            "channel order",
            f"sent with {words}",
            travel=lambda m, slab, c=channels: Mover.travel(m, slab)[..., c],
        )
    if source.kv_dtype == dest.kv_dtype == "float32":
        yield replacing(
            "scaled",
            "keys sent times a quarter",
            travel=lambda m, slab: slab * np.array([0.25, 1], np.float32)[:, None, None, None],
        )
    if model.head_dim > BLOCK:
        yield replacing(
            "channel blocks swapped",
            "halves of a head swapped",
            travel=lambda m, slab: np.roll(slab, BLOCK, axis=-1),
        )


def _orders(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """TensorRT-LLM 6507, at the destination; also keys with a channel's tokens side by side."""
    order = dest.keys
    alike = len(dest.heads_of(model, 0)) == 1
    for other in {
        "HND": ["HDN"] + ["NHD"] * (not alike),
        "NHD": ["HND"] * (not alike),
        "HDN": ["HND"],
    }[order]:

        def after(mover: Mover, other: str = other) -> None:
            own = sorted({page for request in LENGTHS for page in mover.dest.tables[request]})
            for keys, _ in mover.dest.pools.values():
                right = from_order(keys.pages[own], order)
                keys.pages[own] = to_order(right, other).reshape(keys.pages[own].shape)

        yield afterwards("order of axes misread", f"dest: written as {other}", after)


def _scales(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """vLLM 42179: entries of 8 bits with scales of other entries."""
    # Large pages all have the same largest entry, and therefore one scale.
    if not FORMATS[dest.kv_dtype].scaled or dest.page_size > 24:
        return

    def changed(change: Callable[[list[Any], list[Any], list[int]], None]) -> Any:
        def after(mover: Mover) -> None:
            former = scenario(source, dest, model).before
            for shard, pair in mover.dest.pools.items():
                mine = [pool.scale_PK for pool in pair]
                was = [pool.scale_PK for pool in former.pools[shard]]
                change(mine, was, mover.dest.tables[1])

        return after

    def rolled(parts: range) -> Any:
        def change(mine: list[Any], was: list[Any], pages: list[int]) -> None:
            for part in parts:
                mine[part][pages] = mine[part][np.roll(pages, 1)]

        return change

    def kept(mine: list[Any], was: list[Any], pages: list[int]) -> None:
        for scale_PK, before_PK in zip(mine, was, strict=True):
            scale_PK[pages] = before_PK[pages]

    def crossed(mine: list[Any], was: list[Any], pages: list[int]) -> None:
        mine[0][pages] = mine[1][pages]

    name = "scale of another page"
    yield afterwards(name, "scales of the page before", changed(rolled(range(2))))
    yield afterwards(name, "keys' scales of the page before", changed(rolled(range(1))))
    yield afterwards(name, "scales not sent", changed(kept))
    yield afterwards(name, "values' scales for keys", changed(crossed))


def _bytes(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """Pages copied byte by byte between formats."""
    mine = FORMATS[dest.kv_dtype]
    for name, form in FORMATS.items():
        if name == mine.name or form.storage.itemsize != mine.storage.itemsize:
            continue

        def after(mover: Mover, name: str = name) -> None:
            pages, largest = mover.dest.tables[1], FORMATS[name].largest
            for pair in mover.dest.pools.values():
                for pool in pair:
                    x = decode(pool.pages[pages], mine.name)
                    x = x / np.abs(x).max() * largest if largest else x
                    pool.pages[pages] = encode(x, name).view(mine.storage)

        yield afterwards("dtype reinterpreted", f"bytes of {name} copied", after)
    if mine.name == "bfloat16":

        def wide(mover: Mover) -> None:
            """Copy as much float32 data as fits into a page."""
            pages = mover.dest.tables[1]
            for _, pool in mover.dest.pools.values():
                x = decode(pool.pages[pages], mine.name).reshape(len(pages), -1)
                half = np.ascontiguousarray(x[:, : x.shape[1] // 2]).view(np.uint16)
                pool.pages[pages] = half.reshape(pool.pages[pages].shape)

        yield afterwards("dtype reinterpreted", "bytes of float32 copied", wide)


def _late(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    """SGLang 24527: a write to pages that meanwhile belong to another request."""
    for request in LENGTHS:

        def late(mover: Mover, request: int = request) -> None:
            mover.dest.write(FREED, mover.dest.tables[request], 0, OTHER_LENGTH)

        yield afterwards("late write after free", f"pages that request {request} has now", late)


def _outside(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    def tail(mover: Mover) -> None:
        side, B = mover.dest, dest.page_size
        tokens = np.arange(LENGTHS[1], -(-LENGTHS[1] // B) * B)
        for shard in side.pools:
            heads = np.maximum(dest.heads_of(model, shard.rank), 0)
            entries = model.entries(mover.source.former, shard.layer, tokens, heads)
            side.put(shard, side.tables[1], LENGTHS[1], entries)

    def beyond(mover: Mover) -> None:
        taken = {page for table in mover.dest.tables.values() for page in table}
        spare = min(set(range(1, mover.dest.num_pages)) - taken)
        mover.dest.write(1, [spare], 0, dest.page_size)

    def neighbour(mover: Mover) -> None:
        mover.dest.write(1, mover.dest.tables[DEST_ONLY], 0, 8)

    if LENGTHS[1] % dest.page_size:
        yield afterwards("past the length", "a last page filled from the source's", tail)
    yield afterwards("outside its pages", "a page too many written", beyond)
    yield afterwards("outside its pages", "a page of a request that was there", neighbour)


def _shuffled(source: KVLayout, dest: KVLayout, model: GoldenModel) -> Iterator[Mistake]:
    def shuffle(mover: Mover) -> None:
        rng, page = np.random.default_rng(0), mover.dest.tables[1][0]
        for _, pool in mover.dest.pools.values():
            raw = pool.pages[page].view(np.uint8)
            mixed = rng.permutation(raw.ravel()).reshape(raw.shape)
            pool.pages[page] = mixed.view(pool.pages.dtype)

    yield afterwards("changed", "bytes of a page shuffled", shuffle)


DEST_PRODUCTIONS: tuple[Production, ...] = (
    _missing, _slabs, _wire, _orders, _scales, _bytes, _late, _outside, _shuffled,
)  # fmt: skip
