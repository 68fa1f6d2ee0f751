"""Turns a planned batch into the inputs of attention on each device of a spread stage.

A pair is a token of the step and a KV head. Each device has the pairs of the heads whose entries it
stores. Its attention sees each pair as a token with one KV head, and each chunk as one chunk per
head on the device.

Shape suffixes: T tokens of the step, K KV heads, W devices, R pairs of one device, S decodes, M
pages per sequence at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxinfer.models.layers import HostOrTraced, PagedBatch
from jaxinfer.runtime.stage.step_inputs import empty_inputs, fill_tokens, row_starts
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.steps.shapes import StepLimits, StepShape

# Largest shares of a step's pairs that one device has; each is a bucket to compile for.
SHARES = (0.25, 0.5, 1.0)


class SpreadInputs(NamedTuple):
    """The arrays that one step of a spread stage takes.

    Attributes:
        pairs: bucket to which each device's pairs are padded.
        token_T, source_T, position_T, sample_row_S: see ``StepInputs`` and ``PagedBatch``.
        layout: int32 [W * R + T * K]: for each device its pairs, as token * K + head; then for each
            pair its place, as device * R + place, or W * R if no device has it.
        counts: number of pairs on each device, without padding.
        tables: for each device its pages and lengths, see ``pack``; None if it has no pair.
    """

    pairs: StepShape
    token_T: np.ndarray
    source_T: np.ndarray
    position_T: np.ndarray
    sample_row_S: np.ndarray
    layout: np.ndarray
    counts: Sequence[int]
    tables: Sequence[np.ndarray | None]


@dataclass(frozen=True)
class _Row:
    """A row's KV heads on one device: its first token, number of tokens, earlier entries, pages."""

    at: int
    count: int
    start: int
    head_n: np.ndarray
    page_nM: np.ndarray


@dataclass(frozen=True)
class _Known:
    lists: Sequence[list[int]]
    num_pages: int
    head_n: np.ndarray
    page_nM: np.ndarray


class PageTables:
    """Requests' pages on one device as arrays, kept from step to step.

    Args:
        shard: number of the device's shard within the instance.
        num_heads: number of KV heads of the model; slice ``stage * num_heads + head`` is one of
            them.
    """

    def __init__(self, shard: int, num_heads: int) -> None:
        self._shard, self._num_heads = shard, num_heads
        self._known: dict[str, _Known] = {}

    def rows(self, batch: Batch, starts: Sequence[int]) -> list[_Row]:
        """Return the rows of a batch that have KV heads on this device."""
        found = {}
        rows = []
        for at, row in zip(starts, batch.rows, strict=True):
            if not row.hold.tables[self._shard]:
                continue
            found[row.request.id] = known = self._arrays(row.request.id, row.hold)
            rows.append(_Row(at, row.count, row.start, known.head_n, known.page_nM))
        if len(self._known) > 4 * len(found) + 64:
            self._known = found  # Most of the others have ended.
        return rows

    def _arrays(self, request: str, hold: HeldPages) -> _Known:
        table = hold.tables[self._shard]
        known = self._known.get(request)
        # A growing request has the same lists, but longer; a moved one has other lists.
        if (
            known is None
            or known.num_pages != hold.num_pages
            or len(known.lists) != len(table)
            or any(a is not b for a, b in zip(known.lists, table.values(), strict=True))
        ):
            head_n = np.array([piece % self._num_heads for piece in table], np.int32)
            page_nM = np.array(list(table.values()), np.int32)
            known = _Known(list(table.values()), hold.num_pages, head_n, page_nM)
            self._known[request] = known
        return known


def pair_shapes(shape: StepShape, num_heads: int) -> list[StepShape]:
    """Return the buckets to which a device's pairs may be padded in such a step, smallest first."""
    shapes = []
    for share in SHARES:
        rows, tokens, chunks = (-int(-share * num_heads * count // 1) for count in shape)
        shapes.append(StepShape(rows, tokens, chunks))
    return list(dict.fromkeys(shapes))


def empty_spread_inputs(
    shape: StepShape, pairs: StepShape, limits: StepLimits, num_heads: int, devices: int
) -> SpreadInputs:
    """Return inputs that hold only padding, on all devices.

    Args:
        num_heads: number of KV heads, including padding.
    """
    plain = empty_inputs(shape, limits)
    tables = pack(empty_inputs(pairs, limits).batch)
    size = devices * pairs.tokens
    layout = np.zeros(size + shape.tokens * num_heads, np.int32)
    layout[size:] = size
    return SpreadInputs(
        pairs,
        plain.token_T,
        plain.source_T,
        plain.batch.position_T,
        plain.sample_row_S,
        layout,
        [0] * devices,
        [tables] * devices,
    )


def build_spread_inputs(
    batch: Batch,
    shape: StepShape,
    limits: StepLimits,
    sample_slots: Mapping[str, int],
    devices: Sequence[PageTables],
    num_heads: tuple[int, int],
) -> SpreadInputs:
    """Fill a step's arrays, in the smallest bucket of pairs that fits on all devices.

    Args:
        sample_slots: request id -> the request's place among the previous step's samples.
        num_heads: numbers of KV heads, without and with padding.
    """
    starts = row_starts(batch)
    rows = [device.rows(batch, starts) for device in devices]
    pairs = next(s for s in pair_shapes(shape, num_heads[0]) if all(_fits(r, s) for r in rows))
    K, R = num_heads[1], pairs.tokens
    plain = empty_inputs(shape, limits)
    fill_tokens(plain, batch, starts, sample_slots)
    layout = np.zeros(len(devices) * R + shape.tokens * K, np.int32)
    cut_WR = layout[: len(devices) * R].reshape(-1, R)
    place_P = layout[cut_WR.size :]
    place_P[:] = cut_WR.size
    counts: list[int] = []
    tables: list[np.ndarray | None] = []
    for number, here in enumerate(rows):
        if not here:
            counts.append(0)
            tables.append(None)
            continue
        filled, pair_r = _attention(here, pairs, limits, K)
        counts.append(len(pair_r))
        tables.append(pack(filled))
        cut_WR[number, : len(pair_r)] = pair_r
        place_P[pair_r] = number * R + np.arange(len(pair_r))
    return SpreadInputs(
        pairs,
        plain.token_T,
        plain.source_T,
        plain.batch.position_T,
        plain.sample_row_S,
        layout,
        counts,
        tables,
    )


def _fits(rows: Sequence[_Row], pairs: StepShape) -> bool:
    singles = sum(len(row.head_n) for row in rows if row.count == 1)
    chunks = sum(len(row.head_n) for row in rows if row.count > 1)
    tokens = sum(len(row.head_n) * row.count for row in rows)
    # Among the pairs, decodes come first, and then any chunks.
    return singles <= pairs.rows and tokens <= pairs.tokens and chunks <= pairs.chunks


def _attention(
    rows: Sequence[_Row], pairs: StepShape, limits: StepLimits, K: int
) -> tuple[PagedBatch, np.ndarray]:
    """Return a device's pairs as a batch for attention, and each pair's token * K + head."""
    batch = empty_inputs(pairs, limits).batch
    size = limits.page_size
    singles = [row for row in rows if row.count == 1]
    counts = [len(row.head_n) for row in singles]
    pair_r = [row.at * K + row.head_n for row in singles]
    used = sum(counts)
    begin = 0
    for row, count in zip(singles, counts, strict=True):
        batch.decode_table_SM[begin : begin + count, : row.page_nM.shape[1]] = row.page_nM
        begin += count
    position_s = np.repeat(np.array([row.start for row in singles], np.int32), counts)
    batch.decode_length_S[:used] = position_s + 1
    column_s, batch.offset_T[:used] = np.divmod(position_s, size)
    batch.page_T[:used] = batch.decode_table_SM[np.arange(used), column_s]
    batch.chunk_row_C1[:] = used
    chunk = 0
    for row in rows:
        if row.count == 1:
            continue
        n, width = row.page_nM.shape
        token_t = np.arange(row.at, row.at + row.count)
        column_t, offset_t = np.divmod(np.arange(row.start, row.start + row.count), size)
        where = slice(used, used + n * row.count)
        batch.page_T[where] = row.page_nM[:, column_t].ravel()
        batch.offset_T[where] = np.tile(offset_t, n)
        batch.chunk_table_CM[chunk : chunk + n, :width] = row.page_nM
        batch.chunk_start_C[chunk : chunk + n] = row.start
        ends = used + row.count * np.arange(1, n + 1)
        batch.chunk_row_C1[chunk + 1 : chunk + n + 1] = ends
        batch.chunk_row_C1[chunk + n + 1 :] = ends[-1]
        pair_r.append((token_t * K + row.head_n[:, None]).ravel())
        used, chunk = where.stop, chunk + n
    return batch, np.concatenate(pair_r)


def pack(batch: PagedBatch) -> np.ndarray:
    """Pack all of a device's tables into one int32 array, so that one copy suffices."""
    return np.concatenate([np.ravel(part) for part in batch[1:]]).astype(np.int32)


def unpack(packed: HostOrTraced, pairs: StepShape, limits: StepLimits) -> PagedBatch:
    """Unpack the result of ``pack``, without positions, which attention does not use."""
    like = empty_inputs(pairs, limits).batch
    parts, begin = [], 0
    for part in like[1:]:
        parts.append(packed[begin : begin + part.size].reshape(part.shape))
        begin += part.size
    return PagedBatch(like.position_T, *parts)
