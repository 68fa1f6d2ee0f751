"""Drawing tokens on the device.

A draw depends on the logits, the request's seed and the token's position alone, so batch mates,
order, chunking and preemption do not change it.

Shape suffixes: S sequences, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models.layers import HostOrTraced


class SamplingInputs(NamedTuple):
    """One row per token to draw.

    Attributes:
        temperature_S: float32; 0 is greedy.
        top_k_S: int32; 0 keeps all.
        top_p_S: float32 in (0, 1]; 1 keeps all.
        seed_S2: uint32, the high and low words of the seed.
        position_S: int32, the position that the drawn token will have.
    """

    temperature_S: HostOrTraced
    top_k_S: HostOrTraced
    top_p_S: HostOrTraced
    seed_S2: HostOrTraced
    position_S: HostOrTraced


def sample(logits_SV: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row.

    Returns:
        token_S int32, and logprob_S float32: the natural log of the token's probability under
        the model itself, before temperature and truncation.
    """
    max_S1 = logits_SV.max(-1, keepdims=True)
    # Outside the branches, where XLA:CPU spreads it over the cores.
    greedy_S = argmax(logits_SV)
    token_S = jax.lax.cond(
        jnp.any(inputs.temperature_S > 0),
        lambda: jnp.where(inputs.temperature_S > 0, _draw(logits_SV, inputs), greedy_S),
        lambda: greedy_S,
    )
    chosen_S = jnp.take_along_axis(logits_SV, token_S[:, None], -1)[:, 0]
    log_sum_S = jnp.log(jnp.exp(logits_SV - max_S1).sum(-1)) + max_S1[:, 0]
    return token_S, chosen_S - log_sum_S


def argmax(x_SV: jax.Array) -> jax.Array:
    """First index of each row's maximum.

    In two levels, of plain reductions: XLA:CPU vectorises those, and no array as large as x is
    made (its pages would be faulted in at every step).
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


def _draw(logits_SV: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Temperature, then top-k, then top-p of what is left, then a Gumbel-max draw."""
    temperature_S = jnp.where(inputs.temperature_S > 0, inputs.temperature_S, 1.0)
    scaled_SV = logits_SV / temperature_S[:, None]
    scaled_SV = jax.lax.cond(
        jnp.any(inputs.top_k_S > 0), keep_top_k, lambda x, _: x, scaled_SV, inputs.top_k_S
    )
    scaled_SV = jax.lax.cond(
        jnp.any(inputs.top_p_S < 1), keep_top_p, lambda x, _: x, scaled_SV, inputs.top_p_S
    )

    def noise(seed_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), scaled_SV.shape[-1:])

    noise_SV = jax.vmap(noise)(inputs.seed_S2, inputs.position_S)
    return argmax(scaled_SV + noise_SV)


def keep_top_k(logits_SV: jax.Array, top_k_S: jax.Array) -> jax.Array:
    """Mask all but the k largest logits (and the k-th one's equals); a k of 0 keeps all."""
    wanted_S = jnp.where(top_k_S > 0, top_k_S, logits_SV.shape[-1])
    key_SV = _ordered_int(logits_SV)
    threshold_S = _largest(lambda t_S: (key_SV >= t_S[:, None]).sum(-1) >= wanted_S, wanted_S.shape)
    return jnp.where(key_SV >= threshold_S[:, None], logits_SV, -jnp.inf)


def keep_top_p(logits_SV: jax.Array, top_p_S: jax.Array) -> jax.Array:
    """Mask all but the likeliest tokens that together reach ``top_p``; 1 keeps all."""
    p_SV = jax.nn.softmax(logits_SV, -1)
    key_SV = _ordered_int(logits_SV)

    def reaches(t_S: jax.Array) -> jax.Array:
        return jnp.where(key_SV >= t_S[:, None], p_SV, 0).sum(-1) >= top_p_S

    threshold_S = _largest(reaches, top_p_S.shape)
    keep_SV = (key_SV >= threshold_S[:, None]) | (top_p_S >= 1)[:, None]
    return jnp.where(keep_SV, logits_SV, -jnp.inf)


def _ordered_int(x: jax.Array) -> jax.Array:
    """Float32 to int32, order kept (NaN aside)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest int32 per row for which ``holds``, true below it, is true: 32 bisections."""
    info = jnp.iinfo(jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The mean of two int32, rounded up, without overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle - 1)

    bounds = jnp.full(shape, info.min, jnp.int32), jnp.full(shape, info.max, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, bounds)[0]
