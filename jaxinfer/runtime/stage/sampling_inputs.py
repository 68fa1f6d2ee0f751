"""Turns a planned batch into the arrays of one compiled sampler.

Shape suffixes: S sequences, E edits, L tokens of a history.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.runtime.stage.sampler import SamplerShape, SamplingInputs
from jaxinfer.runtime.stage.step_inputs import row_starts
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.request_state import RequestState

# A token beyond every vocabulary, which fills the rest of edits and histories.
NO_TOKEN = 2**31 - 1
# Below this, only the likeliest token is left, and the float32 arrays would have infinities or 0.
_LEAST = 1e-30


def sampling_of(request: RequestState) -> Sampling:
    """Return the request's sampling parameters."""
    assert isinstance(request.payload, Sampling)
    return request.payload


def sampler_shape(requests: Iterable[RequestState]) -> SamplerShape:
    """Return the smallest shape, among a few, that serves all of the requests."""
    edits = history = top = prompt_top = 0
    greedy = drawn = top_k = top_p = False
    for request in requests:
        sampling = sampling_of(request)
        params = sampling.params
        edits = max(
            edits, len(params.logit_bias) + bool(params.min_tokens) * len(sampling.end_token_ids)
        )
        if params.has_penalties:
            history = max(history, request.peak_tokens)
        if params.logprobs is not None:
            top = max(top, params.logprobs, 1)
        if params.prompt_logprobs is not None:
            prompt_top = max(prompt_top, params.prompt_logprobs, 1)
        draws = params.temperature > 0
        greedy, drawn = greedy or not draws, drawn or draws
        top_k |= draws and params.top_k > 0
        top_p |= draws and params.top_p < 1
    return SamplerShape(
        _power_of_two(edits, smallest=16),
        _power_of_two(history, smallest=256),
        _power_of_two(top, smallest=8),
        _power_of_two(prompt_top, smallest=8),
        greedy,
        drawn,
        top_k,
        top_p,
    )


def sampler_for(batch: Batch, sampler: SamplerShape) -> SamplerShape:
    """Return the sampler that the batch needs: the greedy one if none of its rows draws."""
    *greedy, other = sampler.samplers()
    if not greedy or any(row.samples and _params(row).temperature > 0 for row in batch.rows):
        return other
    return greedy[0]


def _params(row: Row) -> SamplingParams:
    return sampling_of(row.request).params


def _power_of_two(count: int, smallest: int) -> int:
    return max(smallest, 1 << (count - 1).bit_length()) if count else 0


def empty_sampling(rows: int, shape: SamplerShape) -> SamplingInputs:
    """Return rows of padding: greedy, without any option."""
    zeros, floats = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    return SamplingInputs(
        temperature_S=floats.copy(),
        top_k_S=zeros.copy(),
        top_p_S=floats + 1,
        min_p_S=floats.copy(),
        seed_S2=np.zeros((rows, 2), np.uint32),
        position_S=zeros.copy(),
        edit_token_SE=np.full((rows, shape.edits), NO_TOKEN, np.int32),
        edit_SE=np.zeros((rows, shape.edits), np.float32),
        history_SL=np.full((rows, shape.history), NO_TOKEN, np.int32),
        prompt_len_S=zeros.copy(),
        pending_S=zeros - 1,
        repetition_S=floats + 1,
        presence_S=floats.copy(),
        frequency_S=floats.copy(),
    )


def build_sampling(
    batch: Batch, rows: int, shape: SamplerShape, sample_slots: Mapping[str, int]
) -> SamplingInputs:
    """Fill a sampler's arrays, one row per sampling row of the batch.

    Args:
        sample_slots: request id -> the request's place among the previous step's samples.
    """
    inputs = empty_sampling(rows, shape)
    for i, row in enumerate(row for row in batch.rows if row.samples):
        params = _params(row)
        if params.temperature > 0:
            assert shape.drawn, "the sampler was prepared for greedy requests alone"
            _fill_draw(inputs, i, row)
        if params.logit_bias or params.min_tokens:
            _fill_edits(inputs, i, row)
        if params.has_penalties:
            _fill_history(inputs, i, row, sample_slots)
    return inputs


def _fill_draw(inputs: SamplingInputs, i: int, row: Row) -> None:
    sampling = sampling_of(row.request)
    params, seed = sampling.params, sampling.seed
    inputs.temperature_S[i] = max(params.temperature, _LEAST)
    inputs.top_k_S[i] = min(max(params.top_k, 0), NO_TOKEN)
    inputs.top_p_S[i] = max(params.top_p, _LEAST)
    inputs.min_p_S[i] = params.min_p
    inputs.seed_S2[i] = seed >> 32, seed & 0xFFFFFFFF
    inputs.position_S[i] = row.start + row.count


def _fill_edits(inputs: SamplingInputs, i: int, row: Row) -> None:
    sampling = sampling_of(row.request)
    edits = list(sampling.params.logit_bias.items())
    if row.start + row.count - row.request.prompt_len < sampling.params.min_tokens:
        edits += [(token, -np.inf) for token in sampling.end_token_ids]
    for e, (token, value) in enumerate(edits):
        inputs.edit_token_SE[i, e] = token
        inputs.edit_SE[i, e] = value


def _fill_history(
    inputs: SamplingInputs, i: int, row: Row, sample_slots: Mapping[str, int]
) -> None:
    request = row.request
    params = sampling_of(request).params
    known = request.num_known
    assert row.start + row.count <= known + row.input_pending, "two tokens are unknown"
    inputs.history_SL[i, : request.prompt_len] = request.prompt_token_ids
    inputs.history_SL[i, request.prompt_len : known] = request.output_token_ids
    inputs.prompt_len_S[i] = request.prompt_len
    if row.input_pending:
        inputs.pending_S[i] = sample_slots[request.id]
    inputs.repetition_S[i] = params.repetition_penalty
    inputs.presence_S[i] = params.presence_penalty
    inputs.frequency_S[i] = params.frequency_penalty


def prompt_positions(row: Row) -> range:
    """Return the row's positions that precede a prompt token whose probability is requested."""
    if sampling_of(row.request).params.prompt_logprobs is None:
        return range(0)
    return range(row.start, min(row.start + row.count, row.request.prompt_len - 1))


def next_prompt_tokens(batch: Batch, tokens: int) -> np.ndarray:
    """Return, for each token of the step, the next prompt token if its probability is requested.

    The result is int32 [T], 0 where none is requested; rows are in the order of
    ``step_inputs.build_inputs``.
    """
    target_T = np.zeros(tokens, np.int32)
    for at, row in zip(row_starts(batch), batch.rows, strict=True):
        positions = prompt_positions(row)
        known = row.request.prompt_token_ids
        target_T[at : at + len(positions)] = [known[p + 1] for p in positions]
    return target_T
