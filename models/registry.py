"""The architectures that jaxinfer runs, by Hugging Face's class name."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from jaxinfer.models import gemma3, llama, mistral, mixtral, opt, qwen, qwen3_moe
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.config_keys import Keys


class Architecture(NamedTuple):
    """Model, config reader and weights of an architecture, one file of this package.

    Attributes:
        model: its ``embed`` takes one step's tokens and ``PagedBatch``, its call the result with
            KV pages, its ``logits`` what that returns. A layer's call is attention between its
            ``before``, which takes one of the model's ``ropes``, and its ``after``.
        read_config: from the keys of ``config.json``.
        hf_weights: Hugging Face's tensors that each parameter is made of, by its path.
    """

    model: Callable[[ModelConfig, nnx.Rngs], Any]
    read_config: Callable[[Keys], ModelConfig]
    hf_weights: Callable[[ModelConfig], dict[str, WeightSpec]]


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama.Llama, llama.read_config, llama.hf_weights),
    "Qwen2ForCausalLM": Architecture(qwen.Qwen2, qwen.read_qwen2, qwen.qwen2_weights),
    "Qwen3ForCausalLM": Architecture(qwen.Qwen3, qwen.read_qwen3, qwen.qwen3_weights),
    "Qwen3MoeForCausalLM": Architecture(
        qwen3_moe.Qwen3Moe, qwen3_moe.read_config, qwen3_moe.hf_weights
    ),
    "MistralForCausalLM": Architecture(llama.Llama, mistral.read_config, llama.hf_weights),
    "MixtralForCausalLM": Architecture(mixtral.Mixtral, mixtral.read_config, mixtral.hf_weights),
    "Gemma3ForCausalLM": Architecture(gemma3.Gemma3, gemma3.read_config, gemma3.hf_weights),
    "OPTForCausalLM": Architecture(opt.OPT, opt.read_config, opt.hf_weights),
}
