"""Mixtral (Jiang et al., 2024): Mistral whose feed-forward layer is a mixture of experts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models import llama
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.layers import init_weight, project
from jaxinfer.models.rope import rope_keys
from jaxinfer.models.sharding import place
from jaxinfer.models.weights import stacked, transposed


class Experts(nnx.Module):
    """The sum of each token's likeliest experts, weighted by the router.

    Every expert computes every token and weighs what was not sent to it by 0: exact under any
    sharding, for E / k times the products that prefill would need. A decode reads all experts'
    weights in any case, once its batch has sent tokens to each.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F, E = config.hidden_size, config.intermediate_size, config.num_experts
        self.layout = config.layout
        self.per_token = config.num_experts_per_tok
        self.router_DE = init_weight(rngs, (D, E))
        self.gate_EDF = init_weight(rngs, (E, D, F))
        self.up_EDF = init_weight(rngs, (E, D, F))
        self.down_EFD = init_weight(rngs, (E, F, D))

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Token-wise."""
        x_TD = place(self.layout, "ffn_inputs", x_TD)
        share_TE = self._shares(project("td,de->te", x_TD, self.router_DE[...]))
        gate_TEF = jax.nn.silu(project("td,edf->tef", x_TD, self.gate_EDF[...]))
        up_TEF = project("td,edf->tef", x_TD, self.up_EDF[...])
        weighted_TEF = place(self.layout, "experts", gate_TEF * up_TEF * share_TE[..., None])
        out_TD = project("tef,efd->td", weighted_TEF, self.down_EFD[...])
        return place(self.layout, "residual", out_TD)

    def _shares(self, logit_TE: jax.Array) -> jax.Array:
        """Softmax over the likeliest experts; 0 for the others."""
        top_TX, expert_TX = jax.lax.top_k(logit_TE, self.per_token)
        chosen_TXE = jax.nn.one_hot(expert_TX, logit_TE.shape[1])
        return jnp.einsum("tx,txe->te", jax.nn.softmax(top_TX), chosen_TXE)


Mixtral = partial(llama.Llama, layer=partial(llama.Layer, mlp=Experts))


def read_config(keys: Keys) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        JaxinferError: a size is missing, a value is wrong, or something is not implemented.
    """
    experts, chosen = keys.size("num_local_experts", 8), keys.size("num_experts_per_tok", 2)
    if chosen > experts:
        raise keys.wrong("num_experts_per_tok", chosen, f"at most num_local_experts, {experts}")
    keys.only("hidden_act", "silu")
    config = llama.read_sizes(keys, rope_keys(keys, 1e6), eps=1e-5)
    return replace(
        config,
        windows=(keys.window(default=None),) * config.num_hidden_layers,
        num_experts=experts,
        num_experts_per_tok=chosen,
    )


def hf_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Parameter -> Hugging Face's tensors."""
    D, F, E = config.hidden_size, config.intermediate_size, config.num_experts
    specs = llama.hf_weights(config)
    for i in range(config.num_hidden_layers):
        ours, hf = f"layers.{i}.mlp.", f"model.layers.{i}.block_sparse_moe."
        for dense in ("gate_DF", "up_DF", "down_FD"):
            del specs[ours + dense]
        specs |= {
            ours + "router_DE": transposed(hf + "gate.weight", E, D),
            ours + "gate_EDF": stacked(hf + "experts.{}.w1.weight", E, F, D),
            ours + "up_EDF": stacked(hf + "experts.{}.w3.weight", E, F, D),
            ours + "down_EFD": stacked(hf + "experts.{}.w2.weight", E, D, F),
        }
    return specs
