"""Frequencies of rotary positions, and rules that stretch them to longer contexts."""

import logging
import math

import numpy as np

from jaxinfer.models.config import Rope
from jaxinfer.models.config_keys import Keys

# Keys that each rule reads, in addition to those that all rules have; transformers has the same.
_ALL_READ = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_READ = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    },
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def plain(theta: float, head_dim: int) -> np.ndarray:
    """Return theta^(-2i / H) for i below H / 2, float64 (Su et al., 2021).

    They are rounded as in Hugging Face and vLLM, whose powers and quotients are float32. With a
    single rounding, angles at position 830 would differ by up to 4e-5, and Gemma 3 270M's logits by
    three times as much.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = (theta ** exponent.astype(np.float64)).astype(np.float32)
    return (np.float32(1) / power).astype(np.float64)


def llama3(
    frequency: np.ndarray, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Apply Llama 3.1's rule: slow rotations are slowed by ``factor``, and fast ones are kept.

    Rotations between the two limits are slowed in part.

    Args:
        low: rotations within ``original`` tokens below which a frequency is slowed.
        high: rotations above which it is kept.
    """
    rotations = original * frequency / (2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / factor)


def yarn(
    theta: float, head_dim: int, factor: float, original: int, fast: float, slow: float
) -> np.ndarray:
    """Return YaRN's frequencies (Peng et al., 2023, section 3.2), with its ramp over whole pairs.

    Args:
        fast: rotations within ``original`` tokens above which a frequency is kept.
        slow: rotations below which it is divided by ``factor``.
    """

    def pair_with(rotations: float) -> float:
        """Return i, which solves rotations = original * theta^(-2i / H) / 2 pi."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(fast)), 0)
    last = min(math.ceil(pair_with(slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / (max(last - first, 0.001)), 0, 1)
    return plain(theta, head_dim) * (1 - ramp + ramp / factor)


def rope_keys(keys: Keys, default_theta: float = 10000.0) -> Keys:
    """Return Transformers 5's ``rope_parameters``, or 4's ``rope_theta`` and ``rope_scaling``."""
    keys.only("partial_rotary_factor", 1.0, None)
    both = [key for key in ("rope_parameters", "rope_scaling") if keys.get(key)]
    if len(both) > 1 and keys.get(both[0]) != keys.get(both[1]):
        raise keys.wrong(both[1], keys.get(both[1]), f"the same as {both[0]}, or absent")
    theta = keys.number("rope_theta", default_theta)
    inner = keys.within(both[0] if both else "rope_parameters")
    return Keys(keys.path, {"rope_theta": theta, **inner.values}, inner.prefix)


def stretched(keys: Keys, max_positions: int) -> int:
    """Return ``max_positions``, or YaRN's longer value; some configs give the original there."""
    if keys.get("rope_type", keys.get("type")) != "yarn":
        return max_positions
    original = keys.size("original_max_position_embeddings", max_positions)
    return max(max_positions, int(original * keys.number("factor")))


def rope_of(keys: Keys, head_dim: int, max_positions: int) -> Rope:
    """Read the keys of one ``rope_parameters``, under transformers 5's names.

    A key that the rule does not know is ignored, with a warning.

    Raises:
        JaxinferError: the rule is not implemented, or lacks a number.
    """
    keys.only("partial_rotary_factor", 1.0)
    for key, value in keys.values.items():
        if isinstance(value, dict):
            raise keys.wrong(key, value, "no object: layers of several kinds are Gemma 3's alone")
    theta = keys.number("rope_theta")
    original = keys.size("original_max_position_embeddings", max_positions)
    frequency = plain(theta, head_dim)
    attention_factor = 1.0
    match kind := keys.get("rope_type", keys.get("type", "default")):
        case "default":
            pass
        case "linear":
            frequency = frequency / keys.number("factor")
        case "llama3":
            factor, low = keys.number("factor"), keys.number("low_freq_factor")
            high = keys.number("high_freq_factor")
            if high <= low:
                raise keys.wrong("high_freq_factor", high, f"above low_freq_factor, {low}")
            frequency = llama3(frequency, factor, low, high, original)
        case "yarn":
            for key in ("mscale", "mscale_all_dim"):
                keys.only(key, None)
            keys.only("truncate", True)
            if theta <= 1:
                raise keys.wrong("rope_theta", theta, "above 1")
            factor = keys.number("factor")
            fast = keys.number("beta_fast", 32.0, null=32.0)
            slow = keys.number("beta_slow", 1.0, null=1.0)
            frequency = yarn(theta, head_dim, factor, original, fast, slow)
            usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            attention_factor = keys.number("attention_factor", usual, null=usual)
        case _:
            raise keys.wrong("rope_type", kind, f"one of: {', '.join(_READ)}")
    for key in keys.values.keys() - _ALL_READ - _READ[kind]:
        # As in transformers: some published rules have keys that no library reads.
        logging.getLogger(__name__).warning(
            "%s: %s%s is not a key of rope_type %s: left out", keys.path, keys.prefix, key, kind
        )
    return Rope(tuple(frequency.tolist()), attention_factor)
