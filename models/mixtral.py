"""Mixtral (Jiang et al., 2024): Mistral whose feed-forward layer is a mixture of experts."""

from dataclasses import replace
from functools import partial

from jaxinfer.models import llama
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.experts import Experts, read_counts, with_experts
from jaxinfer.models.rope import rope_keys

Mixtral = partial(llama.Llama, layer=partial(llama.Layer, mlp=Experts))


def read_config(keys: Keys) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        JaxinferError: a size is missing, a value is wrong, or something is not implemented.
    """
    experts, chosen = read_counts(keys, "num_local_experts", 8, 2)
    keys.only("hidden_act", "silu")
    config = llama.read_sizes(keys, rope_keys(keys, 1e6), eps=1e-5)
    return replace(
        config,
        windows=(keys.window(default=None),) * config.num_hidden_layers,
        num_experts=experts,
        num_experts_per_tok=chosen,
    )


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Parameter -> Hugging Face's tensors."""
    specs = llama.hf_weights(config)
    return with_experts(specs, config, "block_sparse_moe", ("w1", "w3", "w2"))
