"""Qwen 3 MoE (Yang et al., 2025): Qwen 3 whose feed-forward layers are mixtures of experts."""

from dataclasses import replace
from functools import partial

from jaxinfer.models import llama
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.experts import Experts, read_counts, with_experts
from jaxinfer.models.rope import rope_keys

Qwen3Moe = partial(llama.Llama, layer=partial(llama.Layer, mlp=Experts, qk_norm=True))


def read_config(keys: Keys) -> ModelConfig:
    """Read ``config.json``, with transformers' defaults where a key is absent.

    Raises:
        JaxinferError: a size is missing, a value is wrong, or something is not implemented, such
            as layers without experts.
    """
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("decoder_sparse_step", 1)
    keys.only("mlp_only_layers", [])
    # Transformers 5 knows both names.
    name = "num_experts" if keys.get("num_experts") is not None else "num_local_experts"
    experts, chosen = read_counts(keys, name, 128, 8)
    config = llama.read_sizes(keys, rope_keys(keys))
    window = keys.window(default=4096) if keys.flag("use_sliding_window", False) else None
    return replace(
        config,
        intermediate_size=keys.size("moe_intermediate_size", 768),
        windows=(window,) * config.num_hidden_layers,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=keys.flag("norm_topk_prob", False),
    )


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Parameter -> Hugging Face's tensors."""
    specs = llama.hf_weights(config, qk_norm=True)
    return with_experts(specs, config, "mlp", ("gate_proj", "up_proj", "down_proj"))
