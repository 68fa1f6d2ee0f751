"""A feed-forward layer that is a mixture of experts (Shazeer et al., 2017): Mixtral's, Qwen 3's.

Suffixes are those of ``layers.py``; X is the number of experts of a token, and R = T x X the number
of rows.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.expert_places import expert_places
from jaxinfer.models.grouped_experts import experts_on_mesh, sorted_experts
from jaxinfer.models.layers import alone, dense, init_weight, project
from jaxinfer.models.layouts import LAYOUTS, Layout, ways
from jaxinfer.models.sharding import place
from jaxinfer.models.weights import stacked, transposed
from jaxinfer.pallas_kernels.choice import grouped


class Experts(nnx.Module):
    """The sum of each token's likeliest experts, weighted by the router.

    If the kernels have grouped products, an expert computes only the tokens sent to it; on a mesh,
    see ``experts_on_mesh``. Otherwise every expert computes every token: ``all_experts``.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F, E = config.hidden_size, config.intermediate_size, config.num_experts
        self.per_token, self.normalised = config.num_experts_per_tok, config.norm_topk_prob
        self.kernels, self.layout = config.kernels, config.layout
        self.router_DE = init_weight(rngs, (D, E))
        self.gate_EDF = init_weight(rngs, (E, D, F))
        self.up_EDF = init_weight(rngs, (E, D, F))
        self.down_EFD = init_weight(rngs, (E, F, D))

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Compute each token separately."""
        x_TD = place(self.layout, "ffn_inputs", x_TD)
        logit_TE = dense(x_TD, self.router_DE[...], self.kernels, rounds=False)
        route = partial(likeliest, count=self.per_token, normalised=self.normalised)
        weights = self.gate_EDF[...], self.up_EDF[...], self.down_EFD[...]
        mesh, (_, D, F) = jax.sharding.get_abstract_mesh(), weights[0].shape
        cuts = expert_places(self.layout, mesh.axis_names).weights
        D, F = D // ways(cuts["D"], mesh.shape), F // ways(cuts["F"], mesh.shape)
        own = grouped(self.kernels, weights[0].dtype, D, F)
        if own and alone():
            return sorted_experts(x_TD, *route(logit_TE), *weights, own)
        if own:
            out_TD = experts_on_mesh(x_TD, logit_TE, *weights, route, own, self.layout)
        else:
            out_TD = all_experts(x_TD, *route(logit_TE), *weights, self.layout)
        return place(self.layout, "residual", out_TD)


def likeliest(logit_TE: jax.Array, count: int, normalised: bool) -> tuple[jax.Array, jax.Array]:
    """Choose each token's likeliest experts; return shares (float32) and experts (int32), [T, X].

    Args:
        normalised: whether shares add up to 1; otherwise they are probabilities among all experts.
    """
    top_TX, expert_TX = jax.lax.top_k(logit_TE, count)
    if normalised:
        return jax.nn.softmax(top_TX), expert_TX
    return jnp.exp(top_TX - jax.nn.logsumexp(logit_TE, 1, keepdims=True)), expert_TX


def all_experts(
    x_TD: jax.Array,
    share_TX: jax.Array,
    expert_TX: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    layout: Layout = LAYOUTS["megatron"],
) -> jax.Array:
    """Let every expert compute every token, with weight 0 for tokens not sent to it: [T, D].

    Exact under any sharding, with E / X times as many products.
    """
    chosen_TXE = jax.nn.one_hot(expert_TX, len(gate_EDF))
    share_TE = jnp.einsum("tx,txe->te", share_TX, chosen_TXE)
    gate_TEF = jax.nn.silu(project("td,edf->tef", x_TD, gate_EDF))
    up_TEF = project("td,edf->tef", x_TD, up_EDF)
    weighted_TEF = place(layout, "experts", gate_TEF * up_TEF * share_TE[..., None])
    return project("tef,efd->td", weighted_TEF, down_EFD)


def with_experts(
    specs: dict[str, WeightSpec], config: ModelConfig, layer: str, names: Sequence[str]
) -> dict[str, WeightSpec]:
    """Replace the feed-forward layers in Llama's parameters by experts.

    Args:
        layer: Hugging Face's name of the feed-forward layer.
        names: names of an expert's gate, up and down.
    """
    D, F, E = config.hidden_size, config.intermediate_size, config.num_experts
    gate, up, down = (f"experts.{{}}.{name}.weight" for name in names)
    specs = {path: spec for path, spec in specs.items() if ".mlp." not in path}
    for i in range(config.num_hidden_layers):
        ours, hf = f"layers.{i}.mlp.", f"model.layers.{i}.{layer}."
        specs |= {
            ours + "router_DE": transposed(hf + "gate.weight", E, D),
            ours + "gate_EDF": stacked(hf + gate, E, F, D),
            ours + "up_EDF": stacked(hf + up, E, F, D),
            ours + "down_EFD": stacked(hf + down, E, D, F),
        }
    return specs
