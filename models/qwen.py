"""Qwen 2 and 2.5 (Yang et al., 2024): Llama with a bias of queries, keys and values.

Qwen 3 (Yang et al., 2025): Llama with queries and keys normalised.
"""

from dataclasses import replace
from functools import partial

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.llama import Layer, Llama, hf_weights, read_sizes, read_windows
from jaxinfer.models.rope import rope_keys

Qwen2 = partial(Llama, layer=partial(Layer, qkv_bias=True))
Qwen3 = partial(Llama, layer=partial(Layer, qk_norm=True))
qwen2_weights = partial(hf_weights, qkv_bias=True)
qwen3_weights = partial(hf_weights, qk_norm=True)


def read_qwen2(keys: Keys) -> ModelConfig:
    """Read ``config.json``, with transformers' defaults where a key is absent.

    Raises:
        JaxinferError: a size is missing, a value is wrong, or something is not implemented.
    """
    keys.only("hidden_act", "silu")
    keys.only("dual_chunk_attention_config", None)
    config = read_sizes(keys, rope_keys(keys))
    if not keys.flag("use_sliding_window", False):
        return config
    first = keys.count("max_window_layers", 28)
    sliding = [i >= first for i in range(config.num_hidden_layers)]
    return replace(config, windows=read_windows(keys, keys.window(default=4096), sliding))


def read_qwen3(keys: Keys) -> ModelConfig:
    """Read ``config.json`` as Qwen 2's, without the option of biases."""
    keys.only("attention_bias", False)
    return read_qwen2(keys)
