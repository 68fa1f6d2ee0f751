"""The architectures that jaxinfer runs, by Hugging Face's class name."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from jaxinfer.models import gemma3, llama, mixtral, opt, qwen, qwen3_moe
from jaxinfer.models.config import ModelConfig, WeightSpec


class Architecture(NamedTuple):
    """Model and weights of an architecture; ``checkpoints/config_readers.py`` reads its config.

    Attributes:
        model: makes the model. Its ``embed`` takes one step's tokens and a ``PagedBatch``; its call
            takes that result and KV pages; its ``logits`` takes the result of the call. A layer's
            call is attention between its ``before``, which takes one of the model's ``ropes``, and
            its ``after``.
        hf_weights: returns Hugging Face's tensors for each parameter, by its path.
    """

    model: Callable[[ModelConfig, nnx.Rngs], Any]
    hf_weights: Callable[[ModelConfig], dict[str, WeightSpec]]


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama.Llama, llama.hf_weights),
    "Qwen2ForCausalLM": Architecture(qwen.Qwen2, qwen.qwen2_weights),
    "Qwen3ForCausalLM": Architecture(qwen.Qwen3, qwen.qwen3_weights),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe.Qwen3Moe, qwen3_moe.hf_weights),
    # Llama, with a window over the last tokens in all layers or in none (Jiang et al., 2023).
    "MistralForCausalLM": Architecture(llama.Llama, llama.hf_weights),
    "MixtralForCausalLM": Architecture(mixtral.Mixtral, mixtral.hf_weights),
    "Gemma3ForCausalLM": Architecture(gemma3.Gemma3, gemma3.hf_weights),
    "OPTForCausalLM": Architecture(opt.OPT, opt.hf_weights),
}
