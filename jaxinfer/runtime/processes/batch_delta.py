"""Batches told to another process by what is new of them since the last one."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.runtime.processes.messages import Launch, NewRequest, RowDelta
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState


@dataclass(slots=True)
class _Told:
    """The other process's knowledge of a request: pages of a hold, and output tokens."""

    number: int
    hold: HeldPages | None = None
    pages: int = 0
    tokens: int = 0


class BatchEncoder:
    """Encodes batches as deltas, one after the other, in the loop's process.

    Args:
        shards: those of the instance's KV that the other process has.
    """

    def __init__(self, shards: slice = slice(None)) -> None:
        self._shards = shards
        self._told: weakref.WeakKeyDictionary[RequestState, _Told] = weakref.WeakKeyDictionary()
        self._gone: list[int] = []
        self._numbers = 0

    def encode(self, batch: Batch, step: int, origin: float) -> Launch:
        """Return all that the decoder needs for its own copy of the batch."""
        new: list[NewRequest] = []
        tokens: list[tuple[int, list[int]]] = []
        rows = [self._encode_row(row, new, tokens) for row in batch.rows]
        # One by one: a request may go at any moment, in any thread.
        gone = [self._gone.pop() for _ in range(len(self._gone))]
        return Launch(batch.instance, step, origin, new, gone, tokens, rows)

    def _encode_row(
        self, row: Row, new: list[NewRequest], tokens: list[tuple[int, list[int]]]
    ) -> RowDelta:
        request, hold = row.request, row.hold
        told = self._told.get(request)
        if told is None:
            told = self._told[request] = _Told(self._numbers)
            self._numbers += 1
            weakref.finalize(request, self._gone.append, told.number).atexit = False
            new.append(_introduce(told.number, request))
        outputs = request.output_token_ids
        if told.tokens < len(outputs):
            tokens.append((told.number, outputs[told.tokens :]))
            told.tokens = len(outputs)
        if told.hold is not hold:
            told.hold, told.pages = hold, 0
        known, told.pages = told.pages, hold.num_pages
        pages = (
            [table[0][known:] for table in hold.tables[self._shards]] if known < told.pages else []
        )
        return (
            told.number,
            row.start,
            row.count,
            row.samples,
            row.input_pending,
            row.epoch,
            known,
            pages,
        )


def _introduce(number: int, request: RequestState) -> NewRequest:
    return NewRequest(
        number,
        request.id,
        request.prompt_len,
        request.max_tokens,
        request.prompt_token_ids,
        request.payload,
    )


class _Pages:
    """A hold's tables, by shard and then by the one slice that a stage has here."""

    __slots__ = ("tables",)

    def __init__(self, num_shards: int) -> None:
        self.tables: list[dict[int, list[int]]] = [{0: []} for _ in range(num_shards)]

    def grow(self, known: int, pages: Sequence[Sequence[int]]) -> None:
        """Pages from the number ``known`` on; a hold that is new begins with 0."""
        for table, more in zip(self.tables, pages, strict=True):
            table[0][known:] = more


class BatchDecoder:
    """Decodes the same batches as a worker takes them, in the process that has it.

    Args:
        num_shards: pieces of the instance's KV, one for each stage.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._requests: dict[int, RequestState] = {}
        self._pages: dict[int, _Pages] = {}

    def decode(self, told: Launch) -> Batch:
        """The batch, good for one step."""
        for number in told.gone:
            del self._requests[number], self._pages[number]
        for new in told.new:
            self._requests[new.number] = RequestState(
                new.id, new.prompt_len, new.max_tokens, 0.0, new.prompt_token_ids, new.payload
            )
            self._pages[new.number] = _Pages(self._num_shards)
        for number, tokens in told.tokens:
            self._requests[number].output_token_ids += tokens
        return Batch(told.instance, [self._row(row) for row in told.rows], 0, 0, 0)

    def _row(self, told: RowDelta) -> Row:
        number, start, count, samples, input_pending, epoch, known, pages = told
        here = self._pages[number]
        if pages:
            here.grow(known, pages)
        hold: HeldPages = here  # type: ignore[assignment]
        return Row(self._requests[number], start, count, samples, input_pending, epoch, hold)
