"""Checks keys of a GGUF file that change the computation, and reads its rotation of positions."""

import math
from dataclasses import dataclass

import numpy as np

from jaxinfer.models.config import Rope
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.rope import plain, yarn

# Keys under the architecture's name that are read here or in ``checkpoint_gguf``.
_READ = frozenset(
    {
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.layer_norm_rms_epsilon", "attention.value_length", "block_count",
        "context_length", "embedding_length", "expert_count", "feed_forward_length",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.attn_factor",
        "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.type",
        "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor", "vocab_size",
    }
)  # fmt: skip
_READ_OF = {
    "gemma3": {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
    },
}
# Keys that do not change the logits of these architectures; experts are excluded before.
_HARMLESS = frozenset(
    {
        "attention.layer_norm_epsilon", "expert_feed_forward_length", "expert_gating_func",
        "expert_group_count", "expert_group_used_count", "expert_shared_count",
        "expert_shared_feed_forward_length", "expert_used_count", "expert_weights_norm",
        "expert_weights_scale", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout",
    }
)  # fmt: skip
# Values that mean the same as a missing key.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}


def check_keys(keys: Keys, kind: str) -> None:
    """Refuse keys that ask for a variant of the architecture ``kind`` that is not implemented.

    Raises:
        JaxinferError: a key asks for such a variant, or is unknown and might ask for one.
    """
    known = _READ | _HARMLESS | _READ_OF.get(kind, set())
    for key, value in keys.values.items():
        name = key.removeprefix(f"{kind}.")
        if name == key or name in known:
            continue
        neutral = _NEUTRAL.get(name, ())
        if value not in neutral:
            listed = "".join(f"{each!r} or " for each in neutral)
            raise keys.wrong(key, value, f"{listed}absent: nothing else is implemented")


@dataclass(frozen=True)
class Rotation:
    """The rotary positions that a GGUF file's keys describe.

    Attributes:
        rope: rotary positions of layers with full attention.
        local_rope: rotary positions of layers with a window, which are not stretched.
    """

    rope: Rope
    local_rope: Rope


def read_rotation(keys: Keys, kind: str, head_dim: int, divisors: np.ndarray) -> Rotation:
    """Read the keys ``rope.*``; an absent key has llama.cpp's default.

    Args:
        divisors: divisors of the frequencies, [H / 2] or one, as in Llama 3.1's files.

    Raises:
        JaxinferError: a rule is not implemented, or a number is wrong.
    """
    prefix = f"{kind}.rope."
    theta = keys.number(prefix + "freq_base", 1e6 if kind == "gemma3" else 1e4)
    scaling = keys.get(prefix + "scaling.type", "linear")
    # 0 means absent; then the key of files from before August 2023 applies.
    factor = keys.get(prefix + "scaling.factor") or keys.get(prefix + "scale_linear") or 1.0
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise keys.wrong(prefix + "scaling.factor", factor, "a positive number")
    attention = keys.number(prefix + "scaling.attn_factor", 1.0)
    attention *= keys.number(prefix + "scaling.yarn_attn_factor", 1.0)
    match scaling:
        case "none":
            frequency = plain(theta, head_dim)
        case "linear":
            frequency = plain(theta, head_dim) / factor
        case "yarn" if kind != "gemma3":
            original = keys.size(
                prefix + "scaling.original_context_length", keys.size(f"{kind}.context_length")
            )
            fast = keys.number(prefix + "scaling.yarn_beta_fast", 32.0)
            slow = keys.number(prefix + "scaling.yarn_beta_slow", 1.0)
            frequency = yarn(theta, head_dim, factor, original, fast, slow)
            attention *= 1 + 0.1 * math.log(max(factor, 1.0))
        case _:
            names = "none or linear" if kind == "gemma3" else "none, linear or yarn"
            raise keys.wrong(prefix + "scaling.type", scaling, names)
    # The share of YaRN's ramp that is applied.
    extrapolation = float(scaling == "yarn")
    if (given := keys.get(prefix + "scaling.yarn_ext_factor", -1)) not in (-1, extrapolation):
        raise keys.wrong(
            prefix + "scaling.yarn_ext_factor", given, f"{extrapolation} with {scaling}"
        )
    local_theta = keys.number(prefix + "freq_base_swa", 1e4)
    return Rotation(
        Rope(tuple((frequency / divisors).tolist()), attention),
        Rope(tuple(plain(local_theta, head_dim).tolist()), attention),
    )
