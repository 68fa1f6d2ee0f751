"""From a planned batch to the arrays of one compiled step, padded to a bucket.

Shape suffixes: T tokens, S sequences, C chunks, M pages per sequence at most.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.models.layers import PagedBatch
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.steps.shapes import StepLimits, StepShape


class StepInputs(NamedTuple):
    """Arguments of one step besides parameters, KV pages and the previous step's tokens.

    Attributes:
        token_T: int32 input tokens, where they are known to the host.
        source_T: int32, the previous step's sample that is the input instead; -1 for none.
        sample_row_S: int32, the rows of T to sample from.
    """

    token_T: np.ndarray
    source_T: np.ndarray
    batch: PagedBatch
    sample_row_S: np.ndarray


def empty_inputs(shape: StepShape, limits: StepLimits) -> StepInputs:
    """All padding: what a step is compiled with, and what ``build_inputs`` fills."""
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
        sample_slots: request id -> its place among the previous step's samples.
        shard: the stage, whose pages are read and written.
    """
    inputs = empty_inputs(shape, limits)
    singles = sum(row.count == 1 for row in batch.rows)
    inputs.batch.chunk_row_C1[:] = singles
    chunks = samples = 0
    for at, row in zip(row_starts(batch), batch.rows, strict=True):
        if row.count == 1:
            _fill_single(inputs, at, row, sample_slots, row.hold.tables[shard][0])
        else:
            _fill_chunk(inputs, chunks, at, row, row.hold.tables[shard][0], limits.page_size)
            chunks += 1
            inputs.batch.chunk_row_C1[chunks:] = at + row.count
        if row.samples:
            inputs.sample_row_S[samples] = at + row.count - 1
            samples += 1
    _place_singles(inputs.batch, singles, limits.page_size)
    return inputs


def row_starts(batch: Batch) -> list[int]:
    """Where each row's tokens begin among the step's: single tokens first, then chunks."""
    single, chunk = 0, sum(row.count == 1 for row in batch.rows)
    starts = []
    for row in batch.rows:
        starts.append(single if row.count == 1 else chunk)
        single, chunk = (single + 1, chunk) if row.count == 1 else (single, chunk + row.count)
    return starts


def _fill_single(
    inputs: StepInputs, i: int, row: Row, sample_slots: Mapping[str, int], pages: Sequence[int]
) -> None:
    if row.input_pending:
        inputs.source_T[i] = sample_slots[row.request.id]
    else:
        inputs.token_T[i] = row.request.known_tokens(row.start, row.start + 1)[0]
    inputs.batch.position_T[i] = row.start
    inputs.batch.decode_table_SM[i, : len(pages)] = pages
    inputs.batch.decode_length_S[i] = row.start + 1


def _fill_chunk(
    inputs: StepInputs, c: int, at: int, row: Row, table: Sequence[int], page_size: int
) -> None:
    stop = row.start + row.count
    pages = np.asarray(table, np.int32)
    position = np.arange(row.start, stop, dtype=np.int32)
    where = slice(at, at + row.count)
    inputs.token_T[where] = row.request.known_tokens(row.start, stop)
    inputs.batch.position_T[where] = position
    inputs.batch.page_T[where] = pages[position // page_size]
    inputs.batch.offset_T[where] = position % page_size
    inputs.batch.chunk_table_CM[c, : len(pages)] = pages
    inputs.batch.chunk_start_C[c] = row.start


def _place_singles(batch: PagedBatch, singles: int, page_size: int) -> None:
    """Where the KV entries of the first tokens go."""
    column, batch.offset_T[:singles] = np.divmod(batch.position_T[:singles], page_size)
    batch.page_T[:singles] = batch.decode_table_SM[np.arange(singles), column]
