"""Sends batches to another process as differences from the previous one."""

import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import cast

from jaxinfer.runtime.processes.messages import Launch, NewPages, NewRequest
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState


class _Ref(weakref.ref[RequestState]):
    """A weak reference to a request, with the key of what was sent of it."""

    __slots__ = ("key",)
    key: int


@dataclass(slots=True)
class _Told:
    """The part of a request that was already sent: pages of a hold, and output tokens.

    Attributes:
        slices: lists of the pages of slices, if slices may move.
    """

    number: int
    request: _Ref
    hold: HeldPages | None = None
    slices: list[list[int]] = field(default_factory=list)
    pages: int = 0
    tokens: int = 0


class BatchEncoder:
    """Encodes successive batches as differences from the previous one, in the loop's process.

    Args:
        shards: numbers of the instance's KV shards that the other process has.
    """

    def __init__(self, shards: slice = slice(None)) -> None:
        self._shards = shards
        self._told: dict[int, _Told] = {}
        # Requests that were freed. A list's own method records them, because Ctrl-C could interrupt
        # a Python function halfway, and the error would be lost.
        self._dead: list[_Ref] = []
        self._numbers = 0

    def encode(self, batch: Batch, step: int, origin: float) -> Launch:
        """Return the message from which the decoder makes its own copy of a batch."""
        new: list[NewRequest] = []
        pages: list[tuple[int, int, Sequence[NewPages]]] = []
        tokens: list[tuple[int, list[int]]] = []
        rows: list[int] = []
        # Removed one by one, because a request may be freed at any moment, in any thread. This
        # comes first, because its key may be used again.
        dead = (self._dead.pop() for _ in range(len(self._dead)))
        gone = [self._told.pop(ref.key).number for ref in dead]
        spread = any(row.hold.kv.is_spread for row in batch.rows[:1])
        for row in batch.rows:  # Rows are the most frequent, so most of them make no call.
            request, hold = row.request, row.hold
            told = self._told.get(id(request)) or self._introduce(request, new)
            number, outputs, token = told.number, request.output_token_ids, -1
            if told.tokens < len(outputs):
                if told.tokens == len(outputs) - 1:
                    token = outputs[-1]
                else:
                    tokens.append((number, outputs[told.tokens :]))
                told.tokens = len(outputs)
            if told.hold is not hold or told.pages < hold.num_pages or spread:
                pages += self._new_pages(told, hold)
            flags = row.samples, row.input_pending
            rows += number, token, row.start, row.count, *flags, row.epoch
        halves = [_numbers(half, batch.rows) for half in batch.halves]
        packed = struct.pack(f"{len(rows)}q", *rows)
        return Launch(batch.instance, step, origin, new, gone, tokens, packed, pages, halves)

    def _introduce(self, request: RequestState, new: list[NewRequest]) -> _Told:
        ref = _Ref(request, self._dead.append)
        ref.key = id(request)
        told = self._told[ref.key] = _Told(self._numbers, ref)
        self._numbers += 1
        new.append(
            NewRequest(
                told.number,
                request.id,
                request.prompt_len,
                request.max_tokens,
                request.prompt_token_ids,
                request.payload,
            )
        )
        return told

    def _new_pages(
        self, told: _Told, hold: HeldPages
    ) -> Iterator[tuple[int, int, Sequence[NewPages]]]:
        if told.hold is not hold:
            told.hold, told.pages = hold, 0
        tables = hold.tables[self._shards]
        if hold.kv.is_spread:
            slices = [p for table in tables for p in table.values()]
            if len(slices) != len(told.slices) or any(map(is_not, slices, told.slices)):
                told.slices, told.pages = slices, 0  # Some have moved.
        known, told.pages = told.pages, hold.num_pages
        if known == told.pages:
            return
        if hold.kv.is_spread:
            pages = [{piece: p[known:] for piece, p in table.items()} for table in tables]
            yield told.number, known, pages
        else:
            yield told.number, known, [table[0][known:] for table in tables]


def _numbers(half: Sequence[Row], rows: Sequence[Row]) -> list[int]:
    at = {id(row): number for number, row in enumerate(rows)}
    return [at[id(row)] for row in half]


class _Pages:
    """The tables of a hold, by shard and then by slice (0 if a stage has only one)."""

    __slots__ = ("num_pages", "tables")

    def __init__(self, num_shards: int) -> None:
        self.tables: list[dict[int, list[int]]] = [{} for _ in range(num_shards)]
        self.num_pages = 0

    def grow(self, known: int, pages: Sequence[NewPages]) -> None:
        """Add pages from number ``known`` on; a hold that is new, or has moved, begins with 0."""
        for number, new in enumerate(pages):
            by_slice = new if isinstance(new, dict) else {0: new}
            if not known:
                self.tables[number] = by_slice
            for piece, more in by_slice.items() if known else ():
                self.tables[number][piece][known:] = more
            for more in by_slice.values():
                self.num_pages = known + len(more)


class BatchDecoder:
    """Decodes the messages of a ``BatchEncoder`` to batches, in the worker's process.

    Args:
        num_shards: number of shards of the instance's KV, one for each stage.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._requests: dict[int, RequestState] = {}
        self._pages: dict[int, _Pages] = {}

    def decode(self, told: Launch) -> Batch:
        """Return the batch that a message describes; it is valid for one step."""
        for number in told.gone:  # The process may not know one whose message was interrupted.
            self._requests.pop(number, None)
            self._pages.pop(number, None)
        for new in told.new:
            self._requests[new.number] = RequestState(
                new.id, new.prompt_len, new.max_tokens, 0.0, new.prompt_token_ids, new.payload
            )
            self._pages[new.number] = _Pages(self._num_shards)
        for number, tokens in told.tokens:
            self._requests[number].output_token_ids += tokens
        for number, known, pages in told.pages:
            self._pages[number].grow(known, pages)
        requests, holds = self._requests, cast("dict[int, HeldPages]", self._pages)
        rows, ints = [], iter(struct.unpack(f"{len(told.rows) // 8}q", told.rows))
        for number, token, start, count, samples, pending, epoch in zip(*[ints] * 7, strict=True):
            request = requests[number]
            if token >= 0:
                request.output_token_ids.append(token)
            row = Row(request, start, count, samples > 0, pending > 0, epoch, holds[number])
            rows.append(row)
        batch = Batch(told.instance, rows, 0, 0, 0)
        if told.halves:
            batch.halves = [[batch.rows[number] for number in half] for half in told.halves]
        return batch
