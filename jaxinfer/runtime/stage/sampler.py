"""Samples tokens on the device.

A sample depends only on the logits, the request's own tokens and options, its seed, and the token's
position. Other requests in the batch, order, chunking and preemption do not change it.

Shape suffixes: S sequences, V vocabulary, E edits, L tokens of a history, B tokens of a block.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.layers import HostOrTraced


class SamplerShape(NamedTuple):
    """The parts with which a sampler is compiled, besides its rows; 0 and False omit a part.

    Attributes:
        edits: number of logits changed per row: a bias, or a token forbidden for now.
        history: tokens of the longest request that has penalties.
        top: number of likeliest tokens to report.
        prompt_top: number of likeliest tokens to report at each position of the prompt.
        greedy: whether some requests take the likeliest token.
        drawn: whether some requests draw their tokens.
        top_k: whether some draw from the k likeliest tokens.
        top_p: whether some draw from the likeliest tokens that reach a probability.
    """

    edits: int = 0
    history: int = 0
    top: int = 0
    prompt_top: int = 0
    greedy: bool = True
    drawn: bool = False
    top_k: bool = False
    top_p: bool = False

    def widened(self, other: "SamplerShape") -> "SamplerShape":
        """Return the smallest shape that covers both."""
        larger: Iterator[Any] = map(max, self, other)
        return SamplerShape(*larger)

    def samplers(self) -> list["SamplerShape"]:
        """Return the samplers to compile: one for greedy steps, one for steps with a drawn row.

        There are never more than two, so a truncation that one request needs costs time for all
        drawn rows.
        """
        found = []
        if self.greedy or not self.drawn:
            found.append(self._replace(greedy=True, drawn=False, top_k=False, top_p=False))
        if self.drawn:
            found.append(self._replace(greedy=False))
        return found


PLAIN_SAMPLER = SamplerShape()


class SamplingInputs(NamedTuple):
    """Inputs of the sampler, a row per token to sample.

    Attributes:
        temperature_S: float32; 0 is greedy.
        top_k_S: int32; 0 keeps all.
        top_p_S: float32 in (0, 1]; 1 keeps all.
        min_p_S: float32 in [0, 1]; 0 keeps all.
        seed_S2: uint32, the high and low words of the seed.
        position_S: int32, the position that the sampled token will have.
        edit_token_SE: int32, tokens whose logits change; a token beyond the vocabulary is ignored.
        edit_SE: float32, added to these logits.
        history_SL: int32, prompt and output tokens of rows with penalties; entries beyond the
            vocabulary are ignored.
        prompt_len_S: int32, how many of them are the prompt's.
        pending_S: int32, index of the previous step's sample that follows the history; -1 for none.
        repetition_S: float32, divides the positive and multiplies the negative logits of tokens in
            the history (Keskar et al., 2019); 1 changes nothing.
        presence_S: float32, subtracted once from the logits of tokens in the output (as in the
            OpenAI API); 0 changes nothing.
        frequency_S: float32, subtracted from a token's logit once for each time that the token
            occurs in the output (as in the OpenAI API); 0 changes nothing.
    """

    temperature_S: HostOrTraced
    top_k_S: HostOrTraced
    top_p_S: HostOrTraced
    min_p_S: HostOrTraced
    seed_S2: HostOrTraced
    position_S: HostOrTraced
    edit_token_SE: HostOrTraced
    edit_SE: HostOrTraced
    history_SL: HostOrTraced
    prompt_len_S: HostOrTraced
    pending_S: HostOrTraced
    repetition_S: HostOrTraced
    presence_S: HostOrTraced
    frequency_S: HostOrTraced


class Samples(NamedTuple):
    """Tokens, sampled or given, with their probabilities under the model before any option.

    Attributes:
        token_S: int32.
        logprob_S: float32, natural logarithm of the token's probability.
        rank_S: int32, 1 for the likeliest token; zeros if no likeliest tokens are reported.
        top_token_SN: likeliest tokens, in order.
        top_logprob_SN: their log probabilities.
    """

    token_S: HostOrTraced
    logprob_S: HostOrTraced
    rank_S: HostOrTraced
    top_token_SN: HostOrTraced
    top_logprob_SN: HostOrTraced


def sample(
    logits_SV: jax.Array, previous_S: jax.Array, inputs: SamplingInputs, sampler: SamplerShape
) -> Samples:
    """Sample one token per row.

    The order is vLLM's: edits, penalties, temperature, min_p, top_k, top_p. The host decides which
    parts a step has, because a condition on a GPU would make the step wait.

    Args:
        logits_SV: float32.
        previous_S: int32, tokens that the previous step has sampled.
        sampler: parts that the rows need; rows are greedy if not ``drawn``.
    """
    chosen_SV = _penalise(_edit(logits_SV, inputs), previous_S, inputs)
    token_S = argmax(chosen_SV)
    if sampler.drawn:
        drawn_S = _draw(chosen_SV, token_S, inputs, sampler)
        token_S = jnp.where(inputs.temperature_S > 0, drawn_S, token_S)
    return look_up(logits_SV, token_S, sampler.top)


def look_up(logits_SV: jax.Array, token_S: jax.Array, top: int) -> Samples:
    """Return these tokens' log probabilities and ranks, and the ``top`` likeliest tokens."""
    # top_k sorts 0 before -0; other comparisons treat them as equal.
    logits_SV = jnp.where(logits_SV == 0, 0.0, logits_SV)
    max_S1 = logits_SV.max(-1, keepdims=True)
    log_sum_S1 = jnp.log(jnp.exp(logits_SV - max_S1).sum(-1, keepdims=True)) + max_S1
    logit_S1 = jnp.take_along_axis(logits_SV, token_S[:, None], -1)
    rank_S = jnp.zeros_like(token_S)
    if top:
        # Of equal logits, the lower token comes first, as in top_k.
        before_SV = jnp.arange(logits_SV.shape[1]) < token_S[:, None]
        ahead_SV = (logits_SV > logit_S1) | (logits_SV == logit_S1) & before_SV
        rank_S = 1 + ahead_SV.sum(-1, dtype=jnp.int32)
    top_SN, top_token_SN = jax.lax.top_k(logits_SV, min(top, logits_SV.shape[1]))
    return Samples(
        token_S, (logit_S1 - log_sum_S1)[:, 0], rank_S, top_token_SN, top_SN - log_sum_S1
    )


def _edit(logits_SV: jax.Array, inputs: SamplingInputs) -> jax.Array:
    if not inputs.edit_SE.shape[1]:
        return logits_SV
    row_S1 = jnp.arange(len(logits_SV))[:, None]
    return logits_SV.at[row_S1, inputs.edit_token_SE].add(inputs.edit_SE, mode="drop")


def _penalise(logits_SV: jax.Array, previous_S: jax.Array, inputs: SamplingInputs) -> jax.Array:
    if not inputs.history_SL.shape[1]:
        return logits_SV
    V = logits_SV.shape[1]
    pending_S = jnp.where(inputs.pending_S >= 0, previous_S[inputs.pending_S], V)
    token_SL = jnp.concatenate([inputs.history_SL, pending_S[:, None]], 1)
    in_output_SL = jnp.arange(token_SL.shape[1]) >= inputs.prompt_len_S[:, None]
    row_S1 = jnp.arange(len(logits_SV))[:, None]
    seen_SV = jnp.zeros(logits_SV.shape, bool).at[row_S1, token_SL].set(True, mode="drop")
    in_output_SV = jnp.zeros(logits_SV.shape, jnp.int32)
    in_output_SV = in_output_SV.at[row_S1, token_SL].add(in_output_SL, mode="drop")
    factor_S1 = inputs.repetition_S[:, None]
    repeated_SV = jnp.where(logits_SV > 0, logits_SV / factor_S1, logits_SV * factor_S1)
    logits_SV = jnp.where(seen_SV, repeated_SV, logits_SV)
    logits_SV -= inputs.frequency_S[:, None] * in_output_SV
    return logits_SV - inputs.presence_S[:, None] * (in_output_SV > 0)


def argmax(x_SV: jax.Array) -> jax.Array:
    """Return the first index of each row's maximum.

    The search takes two levels of plain reductions, which XLA's CPU backend vectorises. It
    allocates no array as large as x, whose pages would be faulted in at every step.
    """
    S, V = x_SV.shape
    block = math.gcd(V, 512)
    best_SW = x_SV.reshape(S, -1, block).max(-1)
    first_S1 = _first_max(best_SW)[:, None]
    x_SB = jnp.take_along_axis(x_SV, first_S1 * block + jnp.arange(block), -1)
    return first_S1[:, 0] * block + _first_max(x_SB)


def _first_max(x_SV: jax.Array) -> jax.Array:
    index_V = jnp.arange(x_SV.shape[-1], dtype=jnp.int32)
    is_max_SV = x_SV == x_SV.max(-1, keepdims=True)
    return jnp.min(jnp.where(is_max_SV, index_V, x_SV.shape[-1] - 1), -1)


def _draw(
    logits_SV: jax.Array, likeliest_S: jax.Array, inputs: SamplingInputs, sampler: SamplerShape
) -> jax.Array:
    """Apply temperature and the three truncations, then draw with the Gumbel-max method."""
    temperature_S = jnp.where(inputs.temperature_S > 0, inputs.temperature_S, 1.0)
    scaled_SV = logits_SV / temperature_S[:, None]
    max_S1 = jnp.take_along_axis(scaled_SV, likeliest_S[:, None], -1)
    scaled_SV = keep_min_p(scaled_SV, max_S1, inputs.min_p_S)
    if sampler.top_k:
        scaled_SV = keep_top_k(scaled_SV, inputs.top_k_S)
    if sampler.top_p:
        scaled_SV = keep_top_p(scaled_SV, max_S1, inputs.top_p_S)

    def noise(seed_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), scaled_SV.shape[-1:])

    noise_SV = jax.vmap(noise)(inputs.seed_S2, inputs.position_S)
    return argmax(scaled_SV + noise_SV)


def keep_min_p(logits_SV: jax.Array, max_S1: jax.Array, min_p_S: jax.Array) -> jax.Array:
    """Mask tokens that are less likely than ``min_p`` times the likeliest (Nguyen et al., 2024)."""
    threshold_S1 = max_S1 + jnp.log(min_p_S)[:, None]
    return jnp.where(logits_SV >= threshold_S1, logits_SV, -jnp.inf)


def keep_top_k(logits_SV: jax.Array, top_k_S: jax.Array) -> jax.Array:
    """Mask all but the k largest logits (and those equal to the k-th); a k of 0 keeps all."""
    key_SV = _ordered_int(logits_SV)
    wanted_S = jnp.where(top_k_S > 0, top_k_S, logits_SV.shape[-1])
    threshold_S = _largest(key_SV, jnp.ones_like(key_SV), wanted_S)
    return jnp.where(key_SV >= threshold_S[:, None], logits_SV, -jnp.inf)


def keep_top_p(logits_SV: jax.Array, max_S1: jax.Array, top_p_S: jax.Array) -> jax.Array:
    """Mask all but the likeliest tokens that together reach ``top_p``; 1 keeps all.

    Probabilities are rounded to multiples of 2^-30, so that their sums are the same in any order.
    The error is at most 2^-31 per token: 6e-5 for a vocabulary of 128,256, and usually 1e-7.
    """
    p_SV = jnp.exp(logits_SV - max_S1)
    p_SV *= 2.0**30 / p_SV.sum(-1, keepdims=True)
    weight_SV = jnp.round(p_SV).astype(jnp.int32)
    # At least the likeliest token is kept.
    wanted_S = jnp.maximum((top_p_S * weight_SV.sum(-1)).astype(jnp.int32), 1)
    key_SV = _ordered_int(logits_SV)
    threshold_S = _largest(key_SV, weight_SV, wanted_S)
    keep_SV = (key_SV >= threshold_S[:, None]) | (top_p_S >= 1)[:, None]
    return jnp.where(keep_SV, logits_SV, -jnp.inf)


def _ordered_int(x: jax.Array) -> jax.Array:
    """Map float32 to int32 in the same order (except NaN); 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest(key_SV: jax.Array, weight_SV: jax.Array, wanted_S: jax.Array) -> jax.Array:
    """Return each row's largest threshold (int32) above which keys weigh at least ``wanted``.

    If there is none, returns the smallest int32. Each pass over the keys finds 4 bits. There is no
    loop, because a GPU's command buffers leave loops out. The 15 sums of a pass are one reduction,
    which reads the keys once; XLA's CPU backend vectorises it only for integers.
    """
    least = jnp.iinfo(jnp.int32).min
    low_S = jnp.full(wanted_S.shape, least, jnp.int32)
    for shift in range(28, -1, -4):
        steps = np.arange(1, 16, dtype=np.int32) << shift
        above = [jnp.where(key_SV >= (low_S + step)[:, None], weight_SV, 0) for step in steps]
        found = jax.lax.reduce(above, [np.int32(0)] * len(above), _add_each, [1])
        low_S += sum((sum_S >= wanted_S).astype(jnp.int32) for sum_S in found) << shift
    return low_S


def _add_each(left: Any, right: Any) -> Any:
    return [a + b for a, b in zip(left, right, strict=True)]
