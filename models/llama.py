"""Llama (Touvron et al., 2023): pre-norm, rotary positions, grouped KV heads, gated MLP.

Several architectures are Llama with a change: see ``qwen.py`` and ``mixtral.py``. Mistral only adds
a window in its configuration.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.eight_bits import as_matrix, weight
from jaxinfer.models.joined import query_key_value
from jaxinfer.models.layers import (
    PagedBatch,
    RMSNorm,
    apply_rope,
    dense,
    gated,
    head,
    init_weight,
    paged_attention,
    rope_tables,
)
from jaxinfer.models.sharding import place
from jaxinfer.models.weights import heads_bias, heads_in, heads_out, same, transposed
from jaxinfer.pallas_kernels.kv_pages import KVPages

Tables = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Grouped-query attention over paged KV.

    Args:
        qkv_bias: whether queries, keys and values have a bias.
        qk_norm: whether queries and keys are normalised, head by head, before they are rotated.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        qkv_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        D, H = config.hidden_size, config.head_dim
        N, K = config.num_attention_heads, config.num_key_value_heads
        self.scale, self.kernels = config.attention_scale, config.kernels
        self.layout = config.layout
        self.q_DNH = init_weight(rngs, (D, N, H))
        self.k_DKH = init_weight(rngs, (D, K, H))
        self.v_DKH = init_weight(rngs, (D, K, H))
        self.o_NHD = init_weight(rngs, (N, H, D))
        self.qkv_bias, self.qk_norm = qkv_bias or config.attention_bias, qk_norm
        self.o_bias = config.attention_bias
        if self.qkv_bias:
            self.q_bias_NH = init_weight(rngs, (N, H))
            self.k_bias_KH = init_weight(rngs, (K, H))
            self.v_bias_KH = init_weight(rngs, (K, H))
        if self.o_bias:
            self.o_bias_D = init_weight(rngs, (D,))
        if qk_norm:
            self.q_norm = RMSNorm(H, config.norm_eps)
            self.k_norm = RMSNorm(H, config.norm_eps)

    def __call__(
        self, x_TD: jax.Array, rope: Tables, kv: KVPages, batch: PagedBatch, window: int | None
    ) -> tuple[jax.Array, KVPages]:
        """Attend, and write the tokens' KV entries to their pages."""
        q_TNH, k_TKH, v_TKH = self.before(x_TD, rope)
        out_TNH, kv = paged_attention(
            q_TNH, k_TKH, v_TKH, kv, batch, self.kernels, self.scale, window, self.layout
        )
        return self.after(out_TNH), kv

    def before(self, x_TD: jax.Array, rope: Tables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [T, N, H], keys and values [T, K, H]."""
        layout = self.layout
        x_TD = place(layout, "attention_inputs", x_TD)
        q_TNH, k_TKH, v_TKH = query_key_value(self, x_TD, self.kernels, layout)
        if self.qkv_bias:
            q_TNH += self.q_bias_NH[...]
            k_TKH += self.k_bias_KH[...]
            v_TKH += self.v_bias_KH[...]
        if self.qk_norm:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = apply_rope(q_TNH, *rope), apply_rope(k_TKH, *rope)
        keys, values = (place(layout, "kv", x) for x in (k_TKH, v_TKH))
        return place(layout, "heads", q_TNH), keys, values

    def after(self, out_TNH: jax.Array) -> jax.Array:
        """Return what the heads' results add to the residual stream, [T, D]."""
        # As a matrix product, because XLA:CPU would transpose a weight with two such axes in every
        # step.
        out_TNH = place(self.layout, "heads", out_TNH)
        out_TNH = place(self.layout, "attention_outputs", out_TNH)
        out_TE = out_TNH.reshape(len(out_TNH), -1)
        out_TD = dense(out_TE, as_matrix(weight(self, "o_NHD")), self.kernels)
        out_TD = place(self.layout, "residual", out_TD)
        return out_TD + self.o_bias_D[...] if self.o_bias else out_TD


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ) -> None:
        D, F = config.hidden_size, config.intermediate_size
        self.activation, self.kernels = activation, config.kernels
        self.layout = config.layout
        self.gate_DF = init_weight(rngs, (D, F))
        self.up_DF = init_weight(rngs, (D, F))
        self.down_FD = init_weight(rngs, (F, D))

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Compute each token separately."""
        x_TD = place(self.layout, "ffn_inputs", x_TD)
        gate_DF, up_DF = weight(self, "gate_DF"), weight(self, "up_DF")
        x_TF = gated(x_TD, gate_DF, up_DF, self.activation, self.kernels)
        x_TF = place(self.layout, "ffn_outputs", place(self.layout, "ffn", x_TF))
        return place(self.layout, "residual", dense(x_TF, weight(self, "down_FD"), self.kernels))


class Layer(nnx.Module):
    """A transformer block.

    Args:
        mlp: makes the feed-forward layer.
        attention: options of ``Attention``.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        mlp: Callable[[ModelConfig, nnx.Rngs], Any] = MLP,
        **attention: bool,
    ) -> None:
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layout = config.layout
        self.attn = Attention(config, rngs, **attention)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp(config, rngs)

    def __call__(
        self, x_TD: jax.Array, rope: Tables, kv: KVPages, batch: PagedBatch, window: int | None
    ) -> tuple[jax.Array, KVPages]:
        """Return the residual stream after this layer, and the updated pages."""
        x_TD, y_TD, kv = self.attended(x_TD, rope, kv, batch, window)
        return self.with_ffn(x_TD, self.mlp(y_TD)), kv

    def attended(
        self, x_TD: jax.Array, rope: Tables, kv: KVPages, batch: PagedBatch, window: int | None
    ) -> tuple[jax.Array, jax.Array, KVPages]:
        """Return the residual stream after attention, the FFN's input, and the updated pages."""
        y_TD, kv = self.attn(self.attn_norm(x_TD), rope, kv, batch, window)
        x_TD = place(self.layout, "residual", x_TD + y_TD)
        return x_TD, self.mlp_norm(x_TD), kv

    def with_ffn(self, x_TD: jax.Array, y_TD: jax.Array) -> jax.Array:
        """Return the residual stream after this layer, given the FFN's output."""
        return place(self.layout, "residual", x_TD + y_TD)

    def before(self, x_TD: jax.Array, rope: Tables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [T, N, H], keys and values [T, K, H] for attention."""
        return self.attn.before(self.attn_norm(x_TD), rope)

    def after(self, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array:
        """Return the layer's output, from its input and attention's result."""
        x_TD = place(self.layout, "residual", x_TD + self.attn.after(out_TNH))
        return self.with_ffn(x_TD, self.mlp(self.mlp_norm(x_TD)))


class Llama(nnx.Module):
    """A decoder-only transformer whose forward pass takes one step's flat tokens.

    Args:
        layer: makes one block.
        embed_scale: factor of the embeddings before the first block.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        layer: Callable[[ModelConfig, nnx.Rngs], Any] = Layer,
        embed_scale: float = 1.0,
    ) -> None:
        self.config = config
        self.embed_scale = embed_scale
        self.embed_VD = init_weight(rngs, (config.vocab_size, config.hidden_size))
        self.layers = nnx.List([layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tie_word_embeddings:
            self.head_VD = init_weight(rngs, (config.vocab_size, config.hidden_size))

    def embed(self, token_T: jax.Array, batch: PagedBatch) -> jax.Array:
        """Return the residual stream [T, D] before the first layer, in float32."""
        return self.embed_VD[...][token_T].astype(jnp.float32) * self.embed_scale

    def __call__(
        self, x_TD: jax.Array, kv: list[KVPages], batch: PagedBatch
    ) -> tuple[jax.Array, list[KVPages]]:
        """Return the residual stream after the layers, and the updated pages."""
        x_TD, ropes = place(self.config.layout, "residual", x_TD), self.ropes(batch.position_T)
        new_kv = []
        for layer, pages, window in zip(self.layers, kv, self.config.windows, strict=True):
            x_TD, pages = layer(x_TD, ropes[bool(window)], pages, batch, window)
            new_kv.append(pages)
        return x_TD, new_kv

    def ropes(self, position_T: jax.Array) -> tuple[Tables, Tables]:
        """Return the rotations of positions, for layers without and with a window."""
        config = self.config
        assert config.rope
        rope = local_rope = rope_tables(position_T, config.rope)
        if config.local_rope:
            local_rope = rope_tables(position_T, config.local_rope)
        return rope, local_rope

    def logits(self, x_TD: jax.Array) -> jax.Array:
        """Return logits [T, V] in float32 from hidden states before the final norm."""
        head_VD = self.embed_VD if self.config.tie_word_embeddings else self.head_VD
        logits_TV = head(self.norm(x_TD), head_VD[...], self.config.kernels)
        return place(self.config.layout, "logits", logits_TV)


def hf_weights(
    config: ModelConfig, qkv_bias: bool = False, qk_norm: bool = False
) -> dict[str, WeightSpec]:
    """Map parameters of ``Llama`` to Hugging Face's tensors."""
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    specs = {
        "embed_VD": same("model.embed_tokens.weight", V, D),
        "norm.scale_D": same("model.norm.weight", D),
    }
    if not config.tie_word_embeddings:
        specs["head_VD"] = same("lm_head.weight", V, D)
    for i in range(config.num_hidden_layers):
        ours, hf = f"layers.{i}.", f"model.layers.{i}."
        specs |= {
            ours + "attn_norm.scale_D": same(hf + "input_layernorm.weight", D),
            ours + "attn.q_DNH": heads_out(hf + "self_attn.q_proj.weight", N, H, D),
            ours + "attn.k_DKH": heads_out(hf + "self_attn.k_proj.weight", K, H, D),
            ours + "attn.v_DKH": heads_out(hf + "self_attn.v_proj.weight", K, H, D),
            ours + "attn.o_NHD": heads_in(hf + "self_attn.o_proj.weight", N, H, D),
            ours + "mlp_norm.scale_D": same(hf + "post_attention_layernorm.weight", D),
            ours + "mlp.gate_DF": transposed(hf + "mlp.gate_proj.weight", F, D),
            ours + "mlp.up_DF": transposed(hf + "mlp.up_proj.weight", F, D),
            ours + "mlp.down_FD": transposed(hf + "mlp.down_proj.weight", D, F),
        }
        if config.attention_bias:
            specs[ours + "attn.o_bias_D"] = same(hf + "self_attn.o_proj.bias", D)
        if qkv_bias or config.attention_bias:
            specs |= {
                ours + "attn.q_bias_NH": heads_bias(hf + "self_attn.q_proj.bias", N, H),
                ours + "attn.k_bias_KH": heads_bias(hf + "self_attn.k_proj.bias", K, H),
                ours + "attn.v_bias_KH": heads_bias(hf + "self_attn.v_proj.bias", K, H),
            }
        if qk_norm:
            specs |= {
                ours + "attn.q_norm.scale_D": same(hf + "self_attn.q_norm.weight", H),
                ours + "attn.k_norm.scale_D": same(hf + "self_attn.k_norm.weight", H),
            }
    return specs
