"""Reads pages again in other layouts, if no known request owns their entries."""

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from jaxinfer.lab.conformance.compare import Wrong
from jaxinfer.lab.conformance.formats import FORMATS, decode, encode
from jaxinfer.lab.conformance.golden import BLOCK
from jaxinfer.lab.conformance.layout import from_order
from jaxinfer.lab.conformance.side import Side

# Share of a page's blocks that must be golden in another reading.
_ENOUGH = 0.4
_TWO_BYTES = ("float16", "bfloat16")


def other_readings(dest: Side, wrong: Wrong) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield faults whose reading finds the request's entries: a name, the blocks, and a text."""
    nobody = (wrong.origin.request < 0) & ~wrong.zero
    table = np.asarray(dest.tables[wrong.request])
    name = dest.layout.kv_dtype
    found: dict[tuple[str, str], np.ndarray] = {}
    places = np.stack([wrong.shard, wrong.part], -1)
    for number, part in np.unique(places[nobody], axis=0):
        here = nobody & (wrong.shard == number) & (wrong.part == part)
        pages = dest.pools[wrong.shards[number]][part].pages[
            table[np.unique(wrong.token[here] // dest.layout.page_size)]
        ]
        order = dest.layout.order(part)
        if text := _channel_order(dest, wrong.take(here)):
            found["channel order", text] = found.get(("channel order", text), False) | here
            continue
        for kind, text, blocks in _readings(pages, name, order):
            request = dest.model.origins(blocks).request
            if np.mean(request == wrong.request) >= _ENOUGH:
                found[kind, text] = found.get((kind, text), np.zeros(len(wrong), bool)) | here
                break
    for (kind, text), mask in found.items():
        yield kind, mask, text


def _readings(pages: np.ndarray, name: str, order: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield pages in other formats, in other orders, and shifted by channels."""
    for other in FORMATS:
        form = FORMATS[other]
        if other == name:
            continue
        stored = np.ascontiguousarray(pages).view(np.uint8).reshape(len(pages), -1)
        size = stored.shape[1] // (BLOCK * form.storage.itemsize)
        if not size:
            continue
        same_size = form.storage.itemsize == pages.dtype.itemsize
        if order == "HDN" and same_size:
            blocks = from_order(pages.view(form.storage), order)
        elif order != "HDN":
            blocks = stored.view(form.storage)[:, : size * BLOCK]
        else:
            continue
        text = f"holds bytes of {other}, read as {name}"
        yield "dtype reinterpreted", text, _blocks(decode(blocks, other))
    for other in ("HND", "HDN"):
        if "HDN" in (order, other) and other != order:
            P = len(pages)
            heads, tokens, dim = from_order(pages, order).shape[1:]
            shape = (P, heads, tokens, dim) if other == "HND" else (P, heads, dim, tokens)
            text = f"lies as {other}, read as {order}"
            blocks = from_order(pages.reshape(shape), other)
            yield "order of axes misread", text, _blocks(decode(blocks, name))
    x_MKBH = decode(from_order(pages, order), name)
    for one, other in permutations(_TWO_BYTES, 2):
        bits = encode(x_MKBH, other).view(FORMATS[one].storage)
        yield "dtype reinterpreted", f"was {one}, taken for {other}", _blocks(decode(bits, one))
    flat = x_MKBH.reshape(len(pages), -1)
    for by in range(1, x_MKBH.shape[-1]):
        text = f"lies {by} channels further on"
        yield "channel offset", text, _blocks(np.roll(x_MKBH, -by, axis=-1))
        yield "channel offset", text, _blocks(np.roll(flat, -by, axis=1))


def _channel_order(dest: Side, here: Wrong) -> str:
    """Return the order of channels in one part of a shard, if each block is golden in its place."""
    shard, part = here.shards[here.shard[0]], here.part[0]
    length = dest.lengths[here.request]
    x_TKH = dest.get(shard, dest.tables[here.request], 0, length)[part]
    for text, channels in _channel_orders(x_TKH.shape[-1]).items():
        origin = dest.model.origins(x_TKH[..., channels])
        own = (origin.request == here.request) & (origin.token == np.arange(length)[:, None, None])
        if own[here.token, here.index, here.block].mean() >= _ENOUGH:
            return text
    return ""


def _channel_orders(dim: int) -> dict[str, np.ndarray]:
    """Return orders of a head's channels that an engine may use, by name."""
    by_pairs = np.arange(dim).reshape(-1, 2)
    halves = np.arange(dim).reshape(2, -1)
    return {
        "lies with even channels before odd ones": halves.T.ravel(),
        "lies with its halves interleaved": by_pairs.T.ravel(),
        "lies with neighbouring channels swapped": by_pairs[:, ::-1].ravel(),
        "lies with its channels reversed": np.arange(dim)[::-1],
    }


def _blocks(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers).reshape(-1, BLOCK)
