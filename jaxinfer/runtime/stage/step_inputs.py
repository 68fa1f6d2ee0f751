"""Turns a planned batch into the arrays of one compiled step, padded to a bucket.

Shape suffixes: T tokens, S sequences, C chunks, M pages per sequence at most.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.models.layers import PagedBatch
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.steps.shapes import StepLimits, StepShape


class StepInputs(NamedTuple):
    """The arrays that a step takes, except parameters, KV pages and the previous step's tokens.

    Attributes:
        token_T: int32, input tokens known to the host.
        source_T: int32, index of the previous step's sample that is the input instead; -1 for none.
        sample_row_S: int32, the rows of T to sample from.
    """

    token_T: np.ndarray
    source_T: np.ndarray
    batch: PagedBatch
    sample_row_S: np.ndarray


def empty_inputs(shape: StepShape, limits: StepLimits) -> StepInputs:
    """Return inputs that hold only padding, to compile a step or for ``build_inputs`` to fill."""
    S, T, C, M = *shape, limits.max_pages
    zeros = lambda *dims: np.zeros(dims, np.int32)  # noqa: E731
    return StepInputs(
        token_T=zeros(T),
        source_T=np.full(T, -1, np.int32),
        batch=PagedBatch(
            position_T=zeros(T),
            page_T=zeros(T),
            offset_T=zeros(T),
            decode_table_SM=zeros(S, M),
            decode_length_S=zeros(S),
            chunk_table_CM=zeros(C, M),
            chunk_start_C=zeros(C),
            chunk_row_C1=zeros(C + 1),
        ),
        sample_row_S=zeros(S),
    )


def build_inputs(
    batch: Batch,
    shape: StepShape,
    limits: StepLimits,
    sample_slots: Mapping[str, int],
    shard: int = 0,
) -> StepInputs:
    """Fill a step's arrays.

    Args:
        sample_slots: request id -> the request's place among the previous step's samples.
        shard: number of the stage whose pages are read and written.
    """
    inputs = empty_inputs(shape, limits)
    starts = row_starts(batch)
    fill_tokens(inputs, batch, starts, sample_slots)
    singles = sum(row.count == 1 for row in batch.rows)
    inputs.batch.chunk_row_C1[:] = singles
    chunks = 0
    for at, row in zip(starts, batch.rows, strict=True):
        pages = row.hold.tables[shard][0]
        if row.count == 1:
            inputs.batch.decode_table_SM[at, : len(pages)] = pages
            inputs.batch.decode_length_S[at] = row.start + 1
        else:
            _fill_chunk(inputs.batch, chunks, at, row, pages, limits.page_size)
            chunks += 1
            inputs.batch.chunk_row_C1[chunks:] = at + row.count
    _place_singles(inputs.batch, singles, limits.page_size)
    return inputs


def fill_tokens(
    inputs: StepInputs, batch: Batch, starts: Sequence[int], sample_slots: Mapping[str, int]
) -> None:
    """Fill in a step's tokens, their positions, and the rows to sample from.

    Args:
        starts: see ``row_starts``.
    """
    samples = 0
    for at, row in zip(starts, batch.rows, strict=True):
        if row.count == 1:
            inputs.batch.position_T[at] = row.start
            if row.input_pending:
                inputs.source_T[at] = sample_slots[row.request.id]
            else:
                inputs.token_T[at] = row.request.known_tokens(row.start, row.start + 1)[0]
        else:
            stop = row.start + row.count
            inputs.token_T[at : at + row.count] = row.request.known_tokens(row.start, stop)
            inputs.batch.position_T[at : at + row.count] = np.arange(row.start, stop)
        if row.samples:
            inputs.sample_row_S[samples] = at + row.count - 1
            samples += 1


def row_starts(batch: Batch) -> list[int]:
    """Return where each row's tokens begin in the step: single tokens first, then chunks."""
    single, chunk = 0, sum(row.count == 1 for row in batch.rows)
    starts = []
    for row in batch.rows:
        starts.append(single if row.count == 1 else chunk)
        single, chunk = (single + 1, chunk) if row.count == 1 else (single, chunk + row.count)
    return starts


def _fill_chunk(
    batch: PagedBatch, c: int, at: int, row: Row, table: Sequence[int], page_size: int
) -> None:
    pages = np.asarray(table, np.int32)
    where = slice(at, at + row.count)
    column, batch.offset_T[where] = np.divmod(batch.position_T[where], page_size)
    batch.page_T[where] = pages[column]
    batch.chunk_table_CM[c, : len(pages)] = pages
    batch.chunk_start_C[c] = row.start


def _place_singles(batch: PagedBatch, singles: int, page_size: int) -> None:
    """Fill in pages and offsets for the KV entries of the single tokens, which come first."""
    column, batch.offset_T[:singles] = np.divmod(batch.position_T[:singles], page_size)
    batch.page_T[:singles] = batch.decode_table_SM[np.arange(singles), column]
