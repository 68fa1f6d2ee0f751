"""Mixtral (Jiang et al., 2024): Mistral whose feed-forward layer is a mixture of experts."""

from functools import partial

from jaxinfer.models import llama
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.experts import Experts, with_experts

Mixtral = partial(llama.Llama, layer=partial(llama.Layer, mlp=Experts))


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Map parameters to Hugging Face's tensors."""
    specs = llama.hf_weights(config)
    return with_experts(specs, config, "block_sparse_moe", ("w1", "w3", "w2"))
