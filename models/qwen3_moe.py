"""Qwen 3 MoE (Yang et al., 2025): Qwen 3 whose feed-forward layers are mixtures of experts."""

from functools import partial

from jaxinfer.models import llama
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.experts import Experts, with_experts

Qwen3Moe = partial(llama.Llama, layer=partial(llama.Layer, mlp=Experts, qk_norm=True))


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Map parameters to Hugging Face's tensors."""
    specs = llama.hf_weights(config, qk_norm=True)
    return with_experts(specs, config, "mlp", ("gate_proj", "up_proj", "down_proj"))
