"""Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases of queries, keys and values.

Qwen 3 (Yang et al., 2025): Llama with normalised queries and keys.
"""

from functools import partial

from jaxinfer.models.llama import Layer, Llama, hf_weights

Qwen2 = partial(Llama, layer=partial(Layer, qkv_bias=True))
Qwen3 = partial(Llama, layer=partial(Layer, qk_norm=True))
qwen2_weights = partial(hf_weights, qkv_bias=True)
qwen3_weights = partial(hf_weights, qk_norm=True)
