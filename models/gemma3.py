"""Gemma 3, text only (Gemma Team, 2025): windows in five of six layers, norms on both sides.

Differences from Llama: normalised queries and keys, norms also after attention and the MLP, GELU,
embeddings scaled by sqrt(D), and positions that rotate faster in layers with a window.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from flax import nnx

from jaxinfer.models import llama
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.layers import PagedBatch, RMSNorm
from jaxinfer.models.sharding import place
from jaxinfer.models.weights import same
from jaxinfer.pallas_kernels.kv_pages import KVPages


class Layer(nnx.Module):
    """A block with norms before and after attention and MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.layout = config.layout
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps)
        self.attn_norm, self.attn_out_norm = norm(), norm()
        self.attn = llama.Attention(config, rngs, qk_norm=True)
        self.mlp_norm, self.mlp_out_norm = norm(), norm()
        self.mlp = llama.MLP(config, rngs, partial(jax.nn.gelu, approximate=True))

    def __call__(
        self,
        x_TD: jax.Array,
        rope: llama.Tables,
        kv: KVPages,
        batch: PagedBatch,
        window: int | None,
    ) -> tuple[jax.Array, KVPages]:
        """Return the residual stream after this layer, and the updated pages."""
        x_TD, y_TD, kv = self.attended(x_TD, rope, kv, batch, window)
        return self.with_ffn(x_TD, self.mlp(y_TD)), kv

    def attended(
        self,
        x_TD: jax.Array,
        rope: llama.Tables,
        kv: KVPages,
        batch: PagedBatch,
        window: int | None,
    ) -> tuple[jax.Array, jax.Array, KVPages]:
        """Return the residual stream after attention, the FFN's input, and the updated pages."""
        y_TD, kv = self.attn(self.attn_norm(x_TD), rope, kv, batch, window)
        x_TD = place(self.layout, "residual", x_TD + self.attn_out_norm(y_TD))
        return x_TD, self.mlp_norm(x_TD), kv

    def with_ffn(self, x_TD: jax.Array, y_TD: jax.Array) -> jax.Array:
        """Return the residual stream after this layer, given the FFN's output."""
        return place(self.layout, "residual", x_TD + self.mlp_out_norm(y_TD))

    def before(self, x_TD: jax.Array, rope: llama.Tables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [T, N, H], keys and values [T, K, H] for attention."""
        return self.attn.before(self.attn_norm(x_TD), rope)

    def after(self, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array:
        """Return the layer's output, from its input and attention's result."""
        y_TD = self.attn_out_norm(self.attn.after(out_TNH))
        x_TD = place(self.layout, "residual", x_TD + y_TD)
        return self.with_ffn(x_TD, self.mlp(self.mlp_norm(x_TD)))


class Gemma3(llama.Llama):
    """Llama's frame around Gemma's layers."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, Layer, embed_scale=math.sqrt(config.hidden_size))


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Map parameters to Hugging Face's tensors, in which a norm's weight is its scale minus 1."""
    specs = llama.hf_weights(config, qk_norm=True)
    D = config.hidden_size
    for i in range(config.num_hidden_layers):
        ours, hf = f"layers.{i}.", f"model.layers.{i}."
        specs |= {
            ours + "attn_out_norm.scale_D": same(hf + "post_attention_layernorm.weight", D),
            ours + "mlp_norm.scale_D": same(hf + "pre_feedforward_layernorm.weight", D),
            ours + "mlp_out_norm.scale_D": same(hf + "post_feedforward_layernorm.weight", D),
        }
    norms = {
        path: replace(spec, convert=lambda array: array.astype(np.float32) + 1)
        for path, spec in specs.items()
        if path.endswith("norm.scale_D")
    }
    return specs | norms
