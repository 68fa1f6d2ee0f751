"""OPT (Zhang et al., 2022): learned positions, LayerNorm, biases everywhere, ReLU."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.eight_bits import as_matrix, weight
from jaxinfer.models.joined import query_key_value
from jaxinfer.models.layers import (
    LayerNorm,
    PagedBatch,
    dense,
    head,
    init_weight,
    paged_attention,
)
from jaxinfer.models.sharding import place
from jaxinfer.models.weights import heads_bias, heads_in, heads_out, same, transposed
from jaxinfer.pallas_kernels.kv_pages import KVPages

# Rows of the table before position 0; fairseq kept them for padding.
POSITION_OFFSET = 2


class Layer(nnx.Module):
    """A transformer block."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.intermediate_size
        N, H = config.num_attention_heads, config.head_dim
        K = config.num_key_value_heads
        self.kernels, self.layout = config.kernels, config.layout
        self.attn_norm = LayerNorm(D, config.norm_eps)
        self.q_DNH, self.q_bias_NH = init_weight(rngs, (D, N, H)), init_weight(rngs, (N, H))
        self.k_DKH, self.k_bias_KH = init_weight(rngs, (D, K, H)), init_weight(rngs, (K, H))
        self.v_DKH, self.v_bias_KH = init_weight(rngs, (D, K, H)), init_weight(rngs, (K, H))
        self.o_NHD, self.o_bias_D = init_weight(rngs, (N, H, D)), init_weight(rngs, (D,))
        self.mlp_norm = LayerNorm(D, config.norm_eps)
        self.up_DF, self.up_bias_F = init_weight(rngs, (D, F)), init_weight(rngs, (F,))
        self.down_FD, self.down_bias_D = init_weight(rngs, (F, D)), init_weight(rngs, (D,))

    def __call__(
        self, x_TD: jax.Array, kv: KVPages, batch: PagedBatch
    ) -> tuple[jax.Array, KVPages]:
        """Return the residual stream after this layer, and the updated pages."""
        q_TNH, k_TKH, v_TKH = self.before(x_TD, None)
        out_TNH, kv = paged_attention(
            q_TNH, k_TKH, v_TKH, kv, batch, kernels=self.kernels, layout=self.layout
        )
        return self.after(x_TD, out_TNH), kv

    def before(self, x_TD: jax.Array, rope: None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [T, N, H], keys and values [T, K, H] for attention."""
        layout = self.layout
        y_TD = place(layout, "attention_inputs", self.attn_norm(x_TD))
        q_TNH, k_TKH, v_TKH = query_key_value(self, y_TD, self.kernels, layout)
        q_TNH += self.q_bias_NH[...]
        k_TKH += self.k_bias_KH[...]
        v_TKH += self.v_bias_KH[...]
        return (
            place(layout, "heads", q_TNH),
            place(layout, "kv", k_TKH),
            place(layout, "kv", v_TKH),
        )

    def after(self, x_TD: jax.Array, out_TNH: jax.Array) -> jax.Array:
        """Return the layer's output, from its input and attention's result."""
        layout = self.layout
        out_TNH = place(layout, "attention_outputs", place(layout, "heads", out_TNH))
        out_TE = out_TNH.reshape(len(out_TNH), -1)
        out_TD = dense(out_TE, as_matrix(weight(self, "o_NHD")), self.kernels)
        x_TD = x_TD + place(layout, "residual", out_TD)
        x_TD = place(layout, "residual", x_TD + self.o_bias_D[...])
        y_TD = place(layout, "ffn_inputs", self.mlp_norm(x_TD))
        up_TF = dense(y_TD, weight(self, "up_DF"), self.kernels) + self.up_bias_F[...]
        up_TF = place(layout, "ffn_outputs", place(layout, "ffn", jax.nn.relu(up_TF)))
        down_TD = dense(up_TF, weight(self, "down_FD"), self.kernels)
        x_TD = x_TD + place(layout, "residual", down_TD)
        return place(layout, "residual", x_TD + self.down_bias_D[...])


class OPT(nnx.Module):
    """A decoder-only transformer whose forward pass takes one step's flat tokens."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, positions = config.hidden_size, config.max_position_embeddings + POSITION_OFFSET
        self.embed_VD = init_weight(rngs, (config.vocab_size, D))
        self.position_XD = init_weight(rngs, (positions, D))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = LayerNorm(D, config.norm_eps)
        self.tied, self.kernels = config.tie_word_embeddings, config.kernels
        self.layout = config.layout
        if not self.tied:
            self.head_VD = init_weight(rngs, (config.vocab_size, D))

    def embed(self, token_T: jax.Array, batch: PagedBatch) -> jax.Array:
        """Return the residual stream [T, D] before the first layer, in float32."""
        position_TD = self.position_XD[...][batch.position_T + POSITION_OFFSET]
        return self.embed_VD[...][token_T].astype(jnp.float32) + position_TD

    def __call__(
        self, x_TD: jax.Array, kv: list[KVPages], batch: PagedBatch
    ) -> tuple[jax.Array, list[KVPages]]:
        """Return the residual stream after the layers, and the updated pages."""
        x_TD, new_kv = place(self.layout, "residual", x_TD), []
        for layer, pages in zip(self.layers, kv, strict=True):
            x_TD, pages = layer(x_TD, pages, batch)
            new_kv.append(pages)
        return x_TD, new_kv

    def ropes(self, position_T: jax.Array) -> tuple[None, None]:
        """Return nothing: positions are in the embeddings."""
        return None, None

    def logits(self, x_TD: jax.Array) -> jax.Array:
        """Return logits [T, V] in float32 from hidden states before the final norm."""
        head_VD = self.embed_VD if self.tied else self.head_VD
        return place(self.layout, "logits", head(self.norm(x_TD), head_VD[...], self.kernels))


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Map parameters to Hugging Face's tensors."""
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    N, H = config.num_attention_heads, config.head_dim
    positions = config.max_position_embeddings + POSITION_OFFSET
    root = "model.decoder."
    specs = {
        "embed_VD": same(root + "embed_tokens.weight", V, D),
        "position_XD": same(root + "embed_positions.weight", positions, D),
        "norm.scale_D": same(root + "final_layer_norm.weight", D),
        "norm.bias_D": same(root + "final_layer_norm.bias", D),
    }
    if not config.tie_word_embeddings:
        specs["head_VD"] = same("lm_head.weight", V, D)
    for i in range(config.num_hidden_layers):
        ours, hf = f"layers.{i}.", f"{root}layers.{i}."
        specs |= {
            ours + "attn_norm.scale_D": same(hf + "self_attn_layer_norm.weight", D),
            ours + "attn_norm.bias_D": same(hf + "self_attn_layer_norm.bias", D),
            ours + "q_DNH": heads_out(hf + "self_attn.q_proj.weight", N, H, D),
            ours + "q_bias_NH": heads_bias(hf + "self_attn.q_proj.bias", N, H),
            ours + "k_DKH": heads_out(hf + "self_attn.k_proj.weight", N, H, D),
            ours + "k_bias_KH": heads_bias(hf + "self_attn.k_proj.bias", N, H),
            ours + "v_DKH": heads_out(hf + "self_attn.v_proj.weight", N, H, D),
            ours + "v_bias_KH": heads_bias(hf + "self_attn.v_proj.bias", N, H),
            ours + "o_NHD": heads_in(hf + "self_attn.out_proj.weight", N, H, D),
            ours + "o_bias_D": same(hf + "self_attn.out_proj.bias", D),
            ours + "mlp_norm.scale_D": same(hf + "final_layer_norm.weight", D),
            ours + "mlp_norm.bias_D": same(hf + "final_layer_norm.bias", D),
            ours + "up_DF": transposed(hf + "fc1.weight", F, D),
            ours + "up_bias_F": same(hf + "fc1.bias", F),
            ours + "down_FD": transposed(hf + "fc2.weight", D, F),
            ours + "down_bias_D": same(hf + "fc2.bias", D),
        }
    return specs
