"""Llama (Touvron et al., 2023): pre-norm, rotary positions, grouped KV heads, gated MLP."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.layers import (
    KVPages,
    PagedBatch,
    RMSNorm,
    apply_rope,
    init_weight,
    paged_attention,
    project,
    rope_tables,
)


class Attention(nnx.Module):
    """Grouped-query attention over paged KV."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, H = config.hidden_size, config.head_dim
        N, K = config.num_attention_heads, config.num_key_value_heads
        self.q_DNH = init_weight(rngs, (D, N, H))
        self.k_DKH = init_weight(rngs, (D, K, H))
        self.v_DKH = init_weight(rngs, (D, K, H))
        self.o_NHD = init_weight(rngs, (N, H, D))

    def __call__(
        self,
        x_TD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: KVPages,
        batch: PagedBatch,
    ) -> tuple[jax.Array, KVPages]:
        """Attend, and write the tokens' KV entries to their pages."""
        q_TNH = apply_rope(project("td,dnh->tnh", x_TD, self.q_DNH[...]), *rope)
        k_TKH = apply_rope(project("td,dkh->tkh", x_TD, self.k_DKH[...]), *rope)
        v_TKH = project("td,dkh->tkh", x_TD, self.v_DKH[...])
        out_TNH, kv = paged_attention(q_TNH, k_TKH, v_TKH, kv, batch)
        # As a matrix product: XLA:CPU transposes the weight, every step, for one over two axes.
        o_NHD = self.o_NHD[...]
        out_TE = out_TNH.reshape(len(x_TD), -1)
        return project("te,ed->td", out_TE, o_NHD.reshape(-1, o_NHD.shape[-1])), kv


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.intermediate_size
        self.gate_DF = init_weight(rngs, (D, F))
        self.up_DF = init_weight(rngs, (D, F))
        self.down_FD = init_weight(rngs, (F, D))

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Token-wise."""
        gate_TF = jax.nn.silu(project("td,df->tf", x_TD, self.gate_DF[...]))
        up_TF = project("td,df->tf", x_TD, self.up_DF[...])
        return project("tf,fd->td", gate_TF * up_TF, self.down_FD[...])


class Layer(nnx.Module):
    """One transformer block."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)


class Llama(nnx.Module):
    """A decoder-only transformer whose forward pass works on one step's flat tokens."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed_VD = init_weight(rngs, (config.vocab_size, config.hidden_size))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head_VD = init_weight(rngs, (config.vocab_size, config.hidden_size))

    def __call__(
        self, token_T: jax.Array, kv: list[KVPages], batch: PagedBatch
    ) -> tuple[jax.Array, list[KVPages]]:
        """Hidden states [T, D] in float32 before the final norm, and the updated pages."""
        x_TD = self.embed_VD[...][token_T].astype(jnp.float32)
        rope = rope_tables(batch.position_T, self.config.head_dim, self.config.rope_theta)
        new_kv = []
        for layer, pages in zip(self.layers, kv, strict=True):
            y_TD, pages = layer.attn(layer.attn_norm(x_TD), rope, pages, batch)
            x_TD = x_TD + y_TD
            x_TD = x_TD + layer.mlp(layer.mlp_norm(x_TD))
            new_kv.append(pages)
        return x_TD, new_kv

    def logits(self, x_TD: jax.Array) -> jax.Array:
        """Logits [T, V] in float32 of hidden states before the final norm."""
        head_VD = self.embed_VD if self.config.tie_word_embeddings else self.head_VD
        return project("td,vd->tv", self.norm(x_TD), head_VD[...])


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Hugging Face tensor name -> parameter of ``Llama``. Linear weights there are [out, in]."""
    D, F, H, V = (
        config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size,
    )  # fmt: skip
    N, K = config.num_attention_heads, config.num_key_value_heads

    def same(array: np.ndarray) -> np.ndarray:
        return array

    def transposed(array: np.ndarray) -> np.ndarray:
        return array.T

    def heads_out(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, H, D).transpose(2, 0, 1)

    def heads_in(array: np.ndarray) -> np.ndarray:
        return array.T.reshape(N, H, D)

    specs = {
        "model.embed_tokens.weight": WeightSpec("embed_VD", (V, D), same),
        "model.norm.weight": WeightSpec("norm.scale_D", (D,), same),
    }
    if not config.tie_word_embeddings:
        specs["lm_head.weight"] = WeightSpec("head_VD", (V, D), same)
    for i in range(config.num_hidden_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        specs |= {
            hf + "input_layernorm.weight": WeightSpec(ours + "attn_norm.scale_D", (D,), same),
            hf + "self_attn.q_proj.weight": WeightSpec(ours + "attn.q_DNH", (N * H, D), heads_out),
            hf + "self_attn.k_proj.weight": WeightSpec(ours + "attn.k_DKH", (K * H, D), heads_out),
            hf + "self_attn.v_proj.weight": WeightSpec(ours + "attn.v_DKH", (K * H, D), heads_out),
            hf + "self_attn.o_proj.weight": WeightSpec(ours + "attn.o_NHD", (D, N * H), heads_in),
            hf + "post_attention_layernorm.weight": WeightSpec(
                ours + "mlp_norm.scale_D", (D,), same
            ),
            hf + "mlp.gate_proj.weight": WeightSpec(ours + "mlp.gate_DF", (F, D), transposed),
            hf + "mlp.up_proj.weight": WeightSpec(ours + "mlp.up_DF", (F, D), transposed),
            hf + "mlp.down_proj.weight": WeightSpec(ours + "mlp.down_FD", (D, F), transposed),
        }
    return specs
