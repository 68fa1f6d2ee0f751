"""Buckets, and the arrays of a step against the batch they stand for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.runtime.stage.sampler import SamplerShape, SamplingInputs
from jaxinfer.runtime.stage.sampling_inputs import (
    NO_TOKEN,
    build_sampling,
    next_prompt_tokens,
    prompt_positions,
    sampler_for,
    sampler_shape,
    sampling_of,
)
from jaxinfer.runtime.stage.step_inputs import build_inputs
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState
from jaxinfer.steps.shapes import StepLimits

PAGE = 4


@st.composite
def batches(draw: st.DrawFn) -> tuple[StepLimits, Batch, dict[str, int]]:
    """A batch such as the policies form: within the limits, mixed, some inputs on the device."""
    max_seqs = draw(st.integers(1, 70))
    budget = draw(st.integers(1, 300))
    limits = StepLimits(max_seqs, budget, max_pages=80, page_size=PAGE)
    kv = KVShards([Shard(PagePool(80 * 70 + 1, PAGE))])
    rows: list[Row] = []
    slots: dict[str, int] = {}
    left = budget
    for i in range(draw(st.integers(1, max_seqs))):
        if not left:
            break
        start = draw(st.integers(0, 200))
        count = draw(st.one_of(st.just(1), st.integers(1, min(left, 90))))
        left -= count
        pending = count == 1 and start > 0 and draw(st.booleans())
        known = start + count - pending
        prompt = draw(st.integers(1, max(known, 1)))
        params = SamplingParams(
            temperature=i % 3 / 2,
            top_k=i,
            max_tokens=500,
            min_tokens=i % 4 * 50,
            logit_bias={5: 0.5} if i % 5 == 1 else {},
            frequency_penalty=0.25 * (i % 2),
        )
        payload = Sampling(params, 2**33 * i + i, (7, 8))
        request = RequestState(
            f"r{i}", prompt, 500, prompt_token_ids=range(1000, 1000 + prompt), payload=payload
        )
        request.output_token_ids = list(range(1000 + prompt, 1000 + known))
        hold = kv.reserve(start + count)
        assert hold
        if pending:
            slots[request.id] = len(slots)
        samples = pending or draw(st.booleans())
        rows.append(Row(request, start, count, samples, pending, 0, hold))
    return limits, Batch("engine", rows, 0, len(rows), 0), slots


def check_sampling(inputs: SamplingInputs, i: int, row: Row, slots: dict[str, int]) -> None:
    """Row i of the sampler's arrays against the request that it draws for."""
    sampling = sampling_of(row.request)
    params, drawn = sampling.params, row.start + row.count
    assert inputs.temperature_S[i] == params.temperature
    if params.temperature:
        high, low = (int(word) for word in inputs.seed_S2[i])
        assert high * 2**32 + low == sampling.seed
        assert inputs.position_S[i] == drawn
        assert inputs.top_k_S[i] == params.top_k
    edits = dict(zip(inputs.edit_token_SE[i].tolist(), inputs.edit_SE[i].tolist(), strict=True))
    edits.pop(NO_TOKEN, None)
    early = drawn - row.request.prompt_len < params.min_tokens
    assert edits == params.logit_bias | (dict.fromkeys((7, 8), -np.inf) if early else {})
    if params.has_penalties:
        # The token at position p is 1000 + p; the last may still be on the device.
        known = inputs.history_SL[i][inputs.history_SL[i] != NO_TOKEN].tolist()
        assert known == list(range(1000, 1000 + drawn - row.input_pending))
        assert inputs.pending_S[i] == (slots[row.request.id] if row.input_pending else -1)
        assert inputs.prompt_len_S[i] == row.request.prompt_len
    else:
        assert (inputs.history_SL[i] == NO_TOKEN).all()


@pytest.mark.parametrize(("drawn", "early"), [(3, True), (4, False)])
def test_ends_are_held_back_until_there_are_enough_tokens(drawn: int, early: bool) -> None:
    """A stop token after a 6-token prompt is held back until ``min_tokens`` have been drawn."""
    params = SamplingParams(max_tokens=9, min_tokens=4)
    request = RequestState(
        "r", 6, 9, prompt_token_ids=range(6), payload=Sampling(params, 0, (7, 8))
    )
    request.output_token_ids = list(range(drawn))
    row = Row(request, 5 + drawn, 1, True, False, 0, None)  # type: ignore[arg-type]
    sampling = build_sampling(Batch("x", [row], 0, 1, 0), 1, sampler_shape([request]), {})
    found = sampling.edit_token_SE[0]
    assert found[found != NO_TOKEN].tolist() == [7, 8] * early


def drawing(temperature: float, samples: bool = True, **options: Any) -> Row:
    params = SamplingParams(temperature=temperature, **options)
    request = RequestState("r", 6, 9, payload=Sampling(params, 0, ()))
    return Row(request, 5, 1, samples, False, 0, None)  # type: ignore[arg-type]


GREEDY, FREE = drawing(0, top_p=0.5), drawing(1.0, min_p=0.5, top_k=-1)
TOP_K, TOP_P = drawing(0.5, top_k=3), drawing(2.0, top_p=0.5)


@pytest.mark.parametrize(
    ("rows", "samplers"),
    [
        ([], ["greedy"]),
        ([GREEDY], ["greedy"]),
        ([FREE], ["drawn"]),
        ([TOP_K, FREE], ["drawn top_k"]),
        ([GREEDY, FREE], ["greedy", "drawn"]),
        ([GREEDY, TOP_P, FREE], ["greedy", "drawn top_p"]),
        ([TOP_P, GREEDY, TOP_K], ["greedy", "drawn top_k top_p"]),
    ],
)
def test_samplers_of_requests_and_of_their_batches(rows: list[Row], samplers: list[str]) -> None:
    """Two at most: a batch has the greedy one, if there is one, where no row of it is drawn."""
    sampler = sampler_shape(row.request for row in rows)._replace(edits=16)
    flags = {name: SamplerShape(16)._replace(greedy=False) for name in samplers}
    wanted = [flags[name]._replace(**dict.fromkeys(name.split(), True)) for name in samplers]
    assert sampler.samplers() == wanted
    assert [each.samplers() for each in wanted] == [[each] for each in wanted]

    def chosen(*rows: Row) -> SamplerShape:
        return sampler_for(Batch("x", list(rows), 0, 1, 0), sampler)

    assert chosen(*rows) == wanted[-1]
    idle = drawing(1.0, samples=False)
    assert chosen() == chosen(idle) == chosen(GREEDY, idle) == wanted[0]
    for row in rows:
        assert chosen(GREEDY, row, GREEDY) == wanted[0 if row is GREEDY else -1]


def test_a_draw_by_a_sampler_for_greedy_requests_alone() -> None:
    with pytest.raises(AssertionError, match="prepared for greedy requests alone"):
        build_sampling(Batch("x", [FREE], 0, 1, 0), 1, SamplerShape(), {})


@examples(150)
@given(batches())
def test_every_row_finds_its_tokens_places_and_sample(
    case: tuple[StepLimits, Batch, dict[str, int]],
) -> None:
    limits, batch, slots = case
    shape = limits.shape_for(batch)
    assert shape in limits.shapes()
    inputs = build_inputs(batch, shape, limits, slots)
    sampler = sampler_shape(row.request for row in batch.rows)
    sampling = build_sampling(batch, shape.rows, sampler, slots)
    paged = inputs.batch
    used = np.zeros(len(inputs.token_T), bool)
    singles = chunks = samples = 0
    for row in batch.rows:
        if row.count == 1:
            where = np.array([singles])
            table, last = paged.decode_table_SM[singles], paged.decode_length_S[singles] - 1
            singles += 1
        else:
            where = np.arange(*paged.chunk_row_C1[chunks : chunks + 2])
            table, last = paged.chunk_table_CM[chunks], paged.position_T[where[-1]]
            assert paged.chunk_start_C[chunks] == row.start
            chunks += 1
        assert len(where) == row.count
        assert not used[where].any()
        used[where] = True
        position = np.arange(row.start, row.start + row.count)
        np.testing.assert_array_equal(paged.position_T[where], position)
        assert last == position[-1]
        pages = row.hold.tables[0][0]
        np.testing.assert_array_equal(table[: len(pages)], pages)
        np.testing.assert_array_equal(paged.page_T[where], np.array(pages)[position // PAGE])
        np.testing.assert_array_equal(paged.offset_T[where], position % PAGE)
        if row.input_pending:
            assert inputs.source_T[where[0]] == slots[row.request.id]
        else:
            # The token at position p is 1000 + p, in prompt and output alike.
            np.testing.assert_array_equal(inputs.token_T[where], 1000 + position)
            assert (inputs.source_T[where] == -1).all()
        if row.samples:
            assert inputs.sample_row_S[samples] == where[-1]
            check_sampling(sampling, samples, row, slots)
            samples += 1
    # Padding writes to page 0 and sees nothing.
    assert (paged.page_T[~used] == 0).all()
    assert (paged.decode_length_S[singles:] == 0).all()
    assert (paged.chunk_row_C1[chunks:] == paged.chunk_row_C1[chunks]).all()


@pytest.mark.parametrize(
    ("start", "count", "asked", "positions"),
    [
        (0, 4, True, range(4)),
        (4, 5, True, range(4, 9)),
        # The last token's next one is none of the prompt's, nor is any behind it.
        (6, 4, True, range(6, 9)),
        (9, 1, True, range(0)),
        (11, 1, True, range(0)),
        (0, 4, False, range(0)),
    ],
)
def test_what_is_reported_on_of_a_prompt(
    start: int, count: int, asked: bool, positions: range
) -> None:
    params = SamplingParams(prompt_logprobs=2 if asked else None)
    ids = list(range(100, 110))
    request = RequestState("a", 10, 5, prompt_token_ids=ids, payload=Sampling(params, seed=0))
    hold = KVShards([Shard(PagePool(9, PAGE))]).reserve(16)
    assert hold
    row = Row(request, start, count, False, False, 0, hold)
    assert list(prompt_positions(row)) == list(positions)
    wanted = [101 + p for p in positions]
    found = next_prompt_tokens(Batch("x", [row], 0, 0, 0), 8)
    assert found.tolist() == wanted + [0] * (8 - len(wanted))


def test_a_stage_s_entries_lie_in_its_own_pages() -> None:
    """The second stage's first three pages are another's; a chunk of six, then a decode."""
    limits = StepLimits(4, 16, max_pages=3, page_size=PAGE)
    kv = KVShards([Shard(PagePool(20, PAGE)), Shard(PagePool(20, PAGE), stage=1)])
    kv.shards[1].pool.take(3)
    rows = []
    for name, start, count in (("chunk", 3, 6), ("decode", 4, 1)):
        request = RequestState(name, 9, 5, prompt_token_ids=range(9))
        hold = kv.reserve(start + count)
        assert hold
        rows.append(Row(request, start, count, False, False, 0, hold))
    batch = Batch("engine", rows, 0, 2, 0)
    for shard, first in ((0, 1), (1, 4)):
        paged = build_inputs(batch, limits.shape_for(batch), limits, {}, shard).batch
        assert paged.chunk_table_CM[0].tolist() == [first, first + 1, first + 2]
        assert paged.decode_table_SM[0, :2].tolist() == [first + 3, first + 4]
        # The decode's entry 4, then the chunk's 3 to 8.
        assert paged.page_T[:7].tolist() == [first + n for n in (4, 0, 1, 1, 1, 1, 2)]
        assert paged.offset_T[:7].tolist() == [0, 3, 0, 1, 2, 3, 0]


def test_buckets() -> None:
    limits = StepLimits(64, 512, max_pages=8, page_size=64)
    assert limits.row_buckets == [4, 16, 64]
    assert limits.token_buckets == [128, 512]
    assert limits.shapes() == [
        (64, 512, 64),
        (64, 128, 64),
        (64, 64, 0),
        (16, 16, 0),
        (4, 4, 0),
    ]
    more_seqs = StepLimits(64, 23, max_pages=8, page_size=64)
    assert more_seqs.shapes() == [(23, 23, 11), (23, 23, 0), (5, 5, 0)]
    assert StepLimits(8, 1, max_pages=8, page_size=64).shapes() == [(1, 1, 0)]
