"""The architectures that jaxinfer runs, by Hugging Face's class name."""

from collections.abc import Callable
from typing import NamedTuple

from flax import nnx

from jaxinfer.models import llama
from jaxinfer.models.config import ModelConfig, WeightSpec


class Architecture(NamedTuple):
    """A model class and the map from Hugging Face's tensors to its parameters."""

    model: Callable[[ModelConfig, nnx.Rngs], llama.Llama]
    hf_weights: Callable[[ModelConfig], dict[str, WeightSpec]]


ARCHITECTURES = {"LlamaForCausalLM": Architecture(llama.Llama, llama.hf_weights)}
