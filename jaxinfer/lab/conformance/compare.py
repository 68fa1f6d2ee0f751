"""Compares the KV that arrived with the expected KV; finds wrong blocks and their owners."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.lab.conformance.formats import FORMATS, decode, encode
from jaxinfer.lab.conformance.golden import BLOCK, Origin
from jaxinfer.lab.conformance.layout import KVLayout, LayerPages
from jaxinfer.lab.conformance.mover import narrower
from jaxinfer.lab.conformance.side import Side

# Entries of an 8-bit page may be rounded once more if two slabs write to it.
_ROUNDINGS = 2
# Rounding of float32 products and quotients by a scale.
_FLOAT32 = 1e-6


@dataclass
class Wrong:
    """A request's blocks with wrong contents; the arrays have one element per block.

    Attributes:
        shards: the shards that the numbers in ``shard`` refer to.
        index: index of the head on its device.
        origin: owner of the entries.
        zero: whether a block is all 0.
        ratio: ratio of a block's unit to that of its origin's golden entries; 0 without an origin.
    """

    request: int
    shards: Sequence[LayerPages]
    shard: np.ndarray
    layer: np.ndarray
    part: np.ndarray
    token: np.ndarray
    head: np.ndarray
    index: np.ndarray
    block: np.ndarray
    origin: Origin
    zero: np.ndarray
    ratio: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, mask: np.ndarray) -> "Wrong":
        """Return the blocks that a mask selects."""
        arrays = {
            name: getattr(self, name)[mask]
            for name in ("shard", "layer", "part", "token", "head", "index", "block", "zero",
                         "ratio")
        }  # fmt: skip
        return replace(self, origin=self.origin.at(mask), **arrays)

    def also_in(self, other: "Wrong") -> np.ndarray:
        """Return a mask of the blocks that another comparison of the request finds wrong, too."""
        there = set(other.places())
        return np.array([place in there for place in self.places()], dtype=bool)

    def places(self) -> Iterator[tuple[int, ...]]:
        """Yield the shard, part, token, index of the head, and block of each wrong block."""
        columns = self.shard, self.part, self.token, self.index, self.block
        return zip(*(column.tolist() for column in columns), strict=True)


def wrong_blocks(source: KVLayout, dest: Side, request: int, wire: str | None) -> Wrong:
    """Find a request's blocks at the destination that differ by more than rounding allows."""
    shards = list(dest.pools)
    formats = source, wire or narrower(source.kv_dtype, dest.layout.kv_dtype), dest.layout
    rows = [_of_shard(number, shard, dest, request, formats) for number, shard in enumerate(shards)]
    *at, found = (np.concatenate(column) for column in zip(*rows, strict=True))
    origin = dest.model.origins(found)
    origin = origin.at(np.s_[:, 0])
    expected = dest.model.unit(*(x.clip(0) for x in origin[1:5]))
    ratio = np.where(origin.request >= 0, origin.unit / expected, 0)
    shard, layer, part, token, head, index, block = at
    zero = np.all(found == 0, axis=-1)
    place = shard, layer, part, token, head, index, block
    return Wrong(request, shards, *place, origin, zero, ratio)


def _of_shard(
    number: int,
    shard: LayerPages,
    dest: Side,
    request: int,
    formats: tuple[KVLayout, str, KVLayout],
) -> Iterator[np.ndarray]:
    """Yield seven coordinates and the entries [N, 16] of the wrong blocks on one device."""
    model, length = dest.model, dest.lengths[request]
    heads = dest.layout.heads_of(model, shard.rank)
    golden = model.entries(request, shard.layer, np.arange(length), np.maximum(heads, 0))
    found = dest.get(shard, dest.tables[request], 0, length)
    with np.errstate(invalid="ignore"):
        right = np.abs(found - golden) <= allowed_change(golden, *formats)
    right[:, : model.first_needed(shard.layer, length)] = True
    right[:, :, heads < 0] = True
    blocks = right.reshape(*right.shape[:3], -1, BLOCK).all(-1)
    part, token, index, block = np.nonzero(~blocks)
    same = np.full_like(part, number), np.full_like(part, shard.layer)
    yield from (*same, part, token, heads[index], index, block)
    yield found.reshape(*blocks.shape, BLOCK)[~blocks]


def allowed_change(golden: np.ndarray, source: KVLayout, wire: str, dest: KVLayout) -> np.ndarray:
    """Return [2, T, K, H]: the largest difference from golden entries that the formats allow.

    Without scales, an entry is rounded to the nearest number in each format in turn, so that the
    difference is exactly known. In 8 bits, it may differ by as much as that format allows, and by
    the same amount again in each narrower format.
    """
    allowed, nearest, size = np.zeros_like(golden), golden, np.abs(golden)
    is_known = True
    for name, page_size in (
        (source.kv_dtype, source.page_size),
        (wire, 1),
        (dest.kv_dtype, dest.page_size),
    ):
        form = FORMATS[name]
        if form.scaled:
            largest = _largest_of_pages(size, page_size)
            once = np.maximum(form.relative * size, form.absolute * largest)
            allowed += _ROUNDINGS * once + _FLOAT32 * largest
            is_known = False
        elif is_known:
            nearest = decode(encode(nearest, name), name)
        else:
            allowed += form.relative * size
    return allowed + np.abs(nearest - golden)


def _largest_of_pages(size_2TKH: np.ndarray, page_size: int) -> np.ndarray:
    """Return the largest number in each token's page and head."""
    pages = np.arange(0, size_2TKH.shape[1], page_size)
    by_page = np.maximum.reduceat(size_2TKH.max(-1, keepdims=True), pages, axis=1)
    return np.repeat(by_page, page_size, axis=1)[:, : size_2TKH.shape[1]]


def changed_elsewhere(
    before: Side, dest: Side, requests: Sequence[int]
) -> Iterator[tuple[str, Origin, np.ndarray]]:
    """Yield the entries outside the requests' own that a hand-off changed, by place.

    Yields:
        ``tail`` (in a request's last page past its length) or ``other`` (in another page); the
        owner of the entries there; and where: [N, 2], pages and offsets.
    """
    tails = {
        dest.tables[r][dest.lengths[r] // dest.layout.page_size]: dest.lengths[r]
        % dest.layout.page_size
        for r in requests
        if dest.lengths[r] % dest.layout.page_size
    }
    # An entry's place among all of the pool's, page by page.
    B = dest.layout.page_size
    place = np.arange(dest.num_pages * B)
    own = {0} | {page for r in requests for page in dest.tables[r]}
    kind = np.array(["other"] * len(place), dtype=object)
    for page in own:
        kind[page * B : (page + 1) * B] = "own"
    for page, offset in tails.items():
        kind[page * B + offset : (page + 1) * B] = "tail"
    everything = list(range(dest.num_pages))
    for shard in dest.pools:
        found, was = (side.get(shard, everything, 0, len(place)) for side in (dest, before))
        differs = (found != was).any((0, 2, 3))
        for name in ("tail", "other"):
            at = np.nonzero(differs & (kind == name))[0]
            if not len(at):
                continue
            blocks = found[:, at].reshape(-1, BLOCK)
            changed = (found[:, at] != was[:, at]).reshape(-1, BLOCK).any(-1)
            # The rest of a last page may be cleared.
            changed &= blocks.any(-1) if name == "tail" else True
            origin = dest.model.origins(blocks[changed]).at(np.s_[:, 0])
            of_token = found[0, 0].size // BLOCK
            where = np.repeat(np.tile(at, 2), of_token)[changed]
            if changed.any():
                yield name, origin, np.stack(np.divmod(where, B), -1)
