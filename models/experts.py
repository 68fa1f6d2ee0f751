"""A feed-forward layer that is a mixture of experts (Shazeer et al., 2017): Mixtral's, Qwen 3's.

Suffixes are those of ``layers.py``; X is the experts that a token is sent to, R = T x X its rows.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.layers import alone, dense, init_weight, project
from jaxinfer.models.layouts import LAYOUTS, Layout, named, table_in_use, ways
from jaxinfer.models.sharding import place, spec
from jaxinfer.models.weights import stacked, transposed
from jaxinfer.pallas_kernels.choice import Grouped, grouped


class Experts(nnx.Module):
    """The sum of each token's likeliest experts, weighted by the router.

    Where kernels have grouped products, an expert computes the tokens that are sent to it; on a
    mesh, see ``experts_on_mesh``. Elsewhere every expert computes every token: ``all_experts``.
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
        """Token-wise."""
        x_TD = place(self.layout, "ffn_inputs", x_TD)
        logit_TE = dense(x_TD, self.router_DE[...], self.kernels)
        share_TX, expert_TX = likeliest(logit_TE, self.per_token, self.normalised)
        weights = self.gate_EDF[...], self.up_EDF[...], self.down_EFD[...]
        mesh, cuts = jax.sharding.get_abstract_mesh(), weight_cuts(self.layout)
        _, D, F = weights[0].shape
        D, F = D // ways(cuts["D"], mesh.shape), F // ways(cuts["F"], mesh.shape)
        own = grouped(self.kernels, weights[0].dtype, D, F)
        if own and alone():
            return sorted_experts(x_TD, share_TX, expert_TX, *weights, own)
        compute = partial(experts_on_mesh, products=own) if own else all_experts
        out_TD = compute(x_TD, share_TX, expert_TX, *weights, layout=self.layout)
        return place(self.layout, "residual", out_TD)


def likeliest(logit_TE: jax.Array, count: int, normalised: bool) -> tuple[jax.Array, jax.Array]:
    """Choose each token's likeliest experts [T, X], and their shares: float32, int32.

    Args:
        normalised: shares add up to 1; else they are probabilities among all experts.
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
    """Every expert computes every token, and weighs by 0 what is not sent to it: [T, D].

    Exact under any sharding, for E / X times the products.
    """
    chosen_TXE = jax.nn.one_hot(expert_TX, len(gate_EDF))
    share_TE = jnp.einsum("tx,txe->te", share_TX, chosen_TXE)
    gate_TEF = jax.nn.silu(project("td,edf->tef", x_TD, gate_EDF))
    up_TEF = project("td,edf->tef", x_TD, up_EDF)
    weighted_TEF = place(layout, "experts", gate_TEF * up_TEF * share_TE[..., None])
    return project("tef,efd->td", weighted_TEF, down_EFD)


def sorted_experts(
    x_TD: jax.Array,
    share_TX: jax.Array,
    expert_TX: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    products: Grouped,
    partial_over: tuple[str, ...] = (),
) -> jax.Array:
    """The same on one device, where each expert computes the tokens that are sent to it: [T, D].

    Args:
        expert_TX: at most E, which is an expert that lies elsewhere, and adds nothing here.
        partial_over: axes of the mesh that D is cut over: sums over D are parts of whole ones.
    """
    E, expert_R = len(gate_EDF), expert_TX.reshape(-1)
    order_R = jnp.argsort(expert_R)
    count_E = jnp.sum(expert_R[:, None] == jnp.arange(E), 0, dtype=jnp.int32)
    x_RD = x_TD.astype(jnp.float32)[order_R // expert_TX.shape[1]]
    if partial_over:
        parts = [products.matmul(x_RD, weight, count_E) for weight in (gate_EDF, up_EDF)]
        gate_RF, up_RF = jax.lax.psum(parts, partial_over)
        x_RF = jax.nn.silu(gate_RF) * up_RF
    else:
        x_RF = products.gated(x_RD, gate_EDF, up_EDF, count_E)
    out_RD = products.matmul(x_RF, down_EFD, count_E)
    out_TXD = out_RD[jnp.argsort(order_R)].reshape(*expert_TX.shape, -1)
    # Nobody has written the rows of experts that lie elsewhere.
    out_TXD = jnp.where((expert_TX < E)[..., None], out_TXD, 0)
    return jnp.sum(out_TXD * share_TX[..., None], 1)


def weight_cuts(layout: Layout) -> dict[str, tuple[str, ...]]:
    """The mesh's axes that cut E, D and F of a mixture's weights as they are multiplied.

    Those of the first layer's gate: others that a layout puts elsewhere are moved there.
    """
    axes = jax.sharding.get_abstract_mesh().axis_names
    table = table_in_use("layers.0.mlp.gate_EDF", layout, axes)
    return {letter: named(table.get(letter, ()), axes) for letter in "EDF"}


def experts_on_mesh(
    x_TD: jax.Array,
    share_TX: jax.Array,
    expert_TX: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    products: Grouped,
    layout: Layout,
) -> jax.Array:
    """The same on a mesh, of whose devices each has its part of the weights: [T, D].

    That is whole experts or some columns of all, for all tokens, whose results are summed; or,
    where the layout cuts the tokens of ``ffn_inputs`` over other axes than weights, for some.
    """
    axes, cuts = jax.sharding.get_abstract_mesh().axis_names, weight_cuts(layout)
    tokens = named(layout.activations.get("ffn_inputs", {}).get("T", ()), axes)
    of_weights = {axis for each in cuts.values() for axis in each}
    places = {**cuts, "T": tuple(axis for axis in tokens if axis not in of_weights)}

    def here(
        x_TD: jax.Array,
        share_TX: jax.Array,
        expert_TX: jax.Array,
        gate_EDF: jax.Array,
        up_EDF: jax.Array,
        down_EFD: jax.Array,
    ) -> jax.Array:
        E, weights = len(gate_EDF), (gate_EDF, up_EDF, down_EFD)
        if cuts["E"]:
            expert_TX -= jax.lax.axis_index(cuts["E"]) * E
            expert_TX = jnp.where(expert_TX < 0, E, jnp.minimum(expert_TX, E))
        out_TD = sorted_experts(x_TD, share_TX, expert_TX, *weights, products, cuts["D"])
        return jax.lax.psum(out_TD, (*cuts["E"], *cuts["F"]))

    specs = [spec(letters, places, axes) for letters in ("TD", "TX", "TX", "EDF", "EDF", "EFD")]
    on_mesh = jax.shard_map(here, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)
    return on_mesh(x_TD, share_TX, expert_TX, gate_EDF, up_EDF, down_EFD)


def read_counts(keys: Keys, name: str, experts: int, chosen: int) -> tuple[int, int]:
    """Experts, and how many of them a token is sent to; the numbers are those of absent keys.

    Args:
        name: the key of the first.

    Raises:
        JaxinferError: a token is sent to more experts than there are.
    """
    experts, chosen = keys.size(name, experts), keys.size("num_experts_per_tok", chosen)
    if chosen > experts:
        raise keys.wrong("num_experts_per_tok", chosen, f"at most {name}, {experts}")
    return experts, chosen


def with_experts(
    specs: dict[str, WeightSpec], config: ModelConfig, layer: str, names: Sequence[str]
) -> dict[str, WeightSpec]:
    """Llama's parameters with experts instead of its feed-forward layers.

    Args:
        layer: Hugging Face's name of the feed-forward layer.
        names: of an expert's gate, up and down.
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
