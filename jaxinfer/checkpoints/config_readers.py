"""Readers of ``config.json``, one per architecture, for real and modelled runs.

An absent key, and null, mean the same as in transformers' configuration classes, except that the
sizes of tensors are required. Values that those classes refuse are refused. This file needs no JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.rope import rope_keys, rope_of, stretched

LOCAL_THETA, GLOBAL_THETA = 1e4, 1e6
_KINDS = ("full_attention", "sliding_attention")


def _read_llama(keys: Keys) -> ModelConfig:
    keys.only("mlp_bias", False)
    keys.only("hidden_act", "silu")
    bias = keys.flag("attention_bias", False)
    config = _read_sizes(keys, rope_keys(keys), _heads(keys), 2048, bos=1, eos=[2])
    return replace(_in_all_layers(keys, config, None), attention_bias=bias)


def _read_mistral(keys: Keys) -> ModelConfig:
    keys.only("hidden_act", "silu")
    config = _read_sizes(keys, rope_keys(keys), _heads(keys, 8), 131072, bos=1, eos=[2])
    return _in_all_layers(keys, config, keys.window(4096))


def _read_mixtral(keys: Keys) -> ModelConfig:
    experts, chosen = _read_experts(keys, "num_local_experts", 8, 2)
    keys.only("hidden_act", "silu")
    config = _read_sizes(
        keys, rope_keys(keys, 1e6), _heads(keys, 8), 131072, eps=1e-5, bos=1, eos=[2]
    )
    config = _in_all_layers(keys, config, keys.window(None))
    return replace(config, num_experts=experts, num_experts_per_tok=chosen)


def _read_qwen2(keys: Keys, head_dim: int | None = None) -> ModelConfig:
    """Read Qwen 2's configuration.

    Args:
        head_dim: default of an absent key (not of null); by default it follows from the widths.
    """
    keys.only("hidden_act", "silu")
    keys.only("dual_chunk_attention_config", None)
    heads = _heads(keys, 32, is_null_known=True)
    config = _read_sizes(keys, rope_keys(keys), heads, 32768, head_dim)
    layers, first = config.num_hidden_layers, keys.count("max_window_layers", 28)
    is_on, window = keys.flag("use_sliding_window", False), keys.window(4096)
    if not is_on or window is None:
        keys.only("layer_types", None, [_KINDS[0]] * layers)
        return config
    return replace(config, windows=_windows(keys, window, [i >= first for i in range(layers)]))


def _read_qwen3(keys: Keys) -> ModelConfig:
    keys.only("attention_bias", False)
    return _read_qwen2(keys, head_dim=128)


def _read_qwen3_moe(keys: Keys) -> ModelConfig:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("decoder_sparse_step", 1)
    keys.only("mlp_only_layers", [], None)
    # Transformers 5 knows both names.
    name = "num_experts" if "num_experts" in keys.values else "num_local_experts"
    experts, chosen = _read_experts(keys, name, 128, 8)
    config = _read_sizes(keys, rope_keys(keys), _heads(keys, 4), 32768)
    is_on, window = keys.flag("use_sliding_window", False), keys.window(4096)
    return replace(
        _in_all_layers(keys, config, window if is_on else None),
        intermediate_size=keys.size("moe_intermediate_size", 768),
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=keys.flag("norm_topk_prob", False),
    )


def _read_gemma3(keys: Keys) -> ModelConfig:
    keys.only("attention_bias", False)
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("attn_logit_softcapping", None)
    keys.only("final_logit_softcapping", None)
    keys.only("use_bidirectional_attention", False, None)
    local_theta = keys.number("rope_local_base_freq", LOCAL_THETA)
    per_kind = keys.within("rope_parameters")
    if per_kind.values.keys() & set(_KINDS):
        keys.only("rope_scaling", None)
        keys.only("partial_rotary_factor", 1.0, None)
        full = _with_theta(per_kind.within(_KINDS[0]), GLOBAL_THETA)
        local = _with_theta(per_kind.within(_KINDS[1]), local_theta)
    else:
        full = rope_keys(keys, GLOBAL_THETA)
        local = Keys(keys.path, {"rope_theta": local_theta})
    config = _read_sizes(keys, full, _heads(keys, 4), 131072, 256, tied=True, bos=2, eos=[1])
    every = keys.size("sliding_window_pattern", 6)
    sliding = [(i + 1) % every != 0 for i in range(config.num_hidden_layers)]
    return replace(
        config,
        windows=_windows(keys, keys.size("sliding_window", 4096), sliding),
        local_rope=rope_of(local, config.head_dim, config.max_position_embeddings),
        attention_scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def _read_opt(keys: Keys) -> ModelConfig:
    num_heads, hidden_size = keys.size("num_attention_heads"), keys.size("hidden_size")
    num_layers = keys.size("num_hidden_layers")
    # OPT 350M has norms after the layers, and embeddings of another size.
    keys.only("do_layer_norm_before", True)
    keys.only("word_embed_proj_dim", hidden_size, None)
    keys.only("_remove_final_layer_norm", False)
    keys.only("enable_bias", True)
    keys.only("layer_norm_elementwise_affine", True)
    keys.only("activation_function", "relu")
    return ModelConfig(
        architecture=_name(keys),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("ffn_dim"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=keys.size("max_position_embeddings", 2048),
        norm_eps=1e-5,
        tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        bos_token_id=keys.token("bos_token_id", 2),
        eos_token_ids=tuple(keys.tokens("eos_token_id", [2])),
        windows=(None,) * num_layers,
    )


READERS: Mapping[str, Callable[[Keys], ModelConfig]] = {
    "LlamaForCausalLM": _read_llama,
    "Qwen2ForCausalLM": _read_qwen2,
    "Qwen3ForCausalLM": _read_qwen3,
    "Qwen3MoeForCausalLM": _read_qwen3_moe,
    "MistralForCausalLM": _read_mistral,
    "MixtralForCausalLM": _read_mixtral,
    "Gemma3ForCausalLM": _read_gemma3,
    "OPTForCausalLM": _read_opt,
}


def read_architecture(keys: Keys) -> ModelConfig:
    """Read the configuration of the architecture that ``config.json`` names.

    Raises:
        JaxinferError: the architecture is unknown, a size is missing, a value is wrong, or a
            feature is not implemented.
    """
    names = keys.get("architectures")
    if not (isinstance(names, list) and names and names[0] in list(READERS)):
        raise keys.wrong("architectures", names, f"one of: {', '.join(READERS)}")
    return READERS[names[0]](keys)


def _name(keys: Keys) -> str:
    name: str = keys.get("architectures")[0]
    return name


def _heads(keys: Keys, groups: int | None = None, is_null_known: bool = False) -> tuple[int, int]:
    """Return the numbers of query heads and of KV heads.

    Args:
        groups: number of KV heads if the key is absent; by default one per query head, as for null.
        is_null_known: whether null is allowed, whatever an absent key means.
    """
    return keys.heads("num_attention_heads", "num_key_value_heads", groups, is_null_known)


def _read_sizes(
    keys: Keys,
    rope: Keys,
    heads: tuple[int, int],
    longest: int,
    head_dim: int | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    bos: int | None = None,
    eos: Sequence[int] = (),
) -> ModelConfig:
    """Read the keys shared by architectures with rotary positions; every layer sees all tokens.

    Args:
        rope: keys of the rotation of positions.
        heads: numbers of query heads and of KV heads.
        longest: largest number of positions if the key is absent.
        head_dim, tied, eps, bos, eos: values of absent keys.
    """
    hidden_size, num_layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    by_widths = hidden_size // heads[0]
    head_dim = keys.size("head_dim", head_dim or by_widths, None if head_dim else by_widths)
    if head_dim % 2:
        raise keys.wrong("head_dim", head_dim, "even, since positions rotate pairs")
    longest = keys.size("max_position_embeddings", longest)
    return ModelConfig(
        architecture=_name(keys),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        max_position_embeddings=stretched(rope, longest),
        norm_eps=keys.number("rms_norm_eps", eps),
        tie_word_embeddings=keys.flag("tie_word_embeddings", tied),
        bos_token_id=keys.token("bos_token_id", bos),
        eos_token_ids=tuple(keys.tokens("eos_token_id", eos)),
        windows=(None,) * num_layers,
        rope=rope_of(rope, head_dim, longest),
    )


def _in_all_layers(keys: Keys, config: ModelConfig, window: int | None) -> ModelConfig:
    """Return the config with one window in all layers, or none; ``layer_types`` must agree."""
    layers = config.num_hidden_layers
    keys.only("layer_types", None, [_KINDS[window is not None]] * layers)
    return replace(config, windows=(window,) * layers)


def _windows(keys: Keys, window: int, sliding: Sequence[bool]) -> tuple[int | None, ...]:
    """Read each layer's window, from ``layer_types`` or else from ``sliding``."""
    kinds = keys.get("layer_types", [_KINDS[slides] for slides in sliding])
    listed = isinstance(kinds, list) and len(kinds) == len(sliding)
    if not listed or any(kind not in _KINDS for kind in kinds):
        raise keys.wrong("layer_types", kinds, f"{len(sliding)} of {' or '.join(_KINDS)}")
    return tuple(window if kind == _KINDS[1] else None for kind in kinds)


def _read_experts(keys: Keys, name: str, experts: int, chosen: int) -> tuple[int, int]:
    """Return the numbers of experts and of experts per token, with defaults for absent keys."""
    experts, chosen = keys.size(name, experts), keys.size("num_experts_per_tok", chosen)
    if chosen > experts:
        raise keys.wrong("num_experts_per_tok", chosen, f"at most {name}, {experts}")
    return experts, chosen


def _with_theta(keys: Keys, theta: float) -> Keys:
    return Keys(keys.path, {"rope_theta": theta, **keys.values}, keys.prefix)
