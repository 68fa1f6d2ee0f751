"""A mixture whose experts compute only the tokens sent to them, on one device or on a mesh.

Suffixes are those of ``experts.py``. In an exchange, T is the number of one device's tokens, P that
of devices, and J that of slots for tokens that a device sends to another in a round.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.models.expert_places import expert_places, slots
from jaxinfer.models.layouts import Layout
from jaxinfer.models.sharding import spec
from jaxinfer.pallas_kernels.choice import Grouped

# Returns shares and experts of tokens from their logits.
Route = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
# Returns the results [R, D] of one device's experts for rows, their shares and their experts.
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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
    """Compute a mixture on one device; each expert computes the tokens sent to it: [T, D].

    Args:
        expert_TX: number of each token's experts; E means an expert on another device, which adds
            nothing here.
        partial_over: axes of the mesh that cut D; sums over D are then partial sums.
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
    # Rows of experts on other devices have not been written.
    out_TXD = jnp.where((expert_TX < E)[..., None], out_TXD, 0)
    return jnp.sum(out_TXD * share_TX[..., None], 1)


def experts_on_mesh(
    x_TD: jax.Array,
    logit_TE: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    route: Route,
    products: Grouped,
    layout: Layout,
) -> jax.Array:
    """Compute a mixture on a mesh whose devices each have a part of the weights: [T, D].

    A device's part is whole experts, or some columns of all experts. It applies them to all tokens,
    and the devices sum their results. Where ``expert_places`` says so, experts instead get only the
    tokens sent to them. Each device routes its own tokens.
    """
    axes = jax.sharding.get_abstract_mesh().axis_names
    places = expert_places(layout, axes)

    def here(
        x_TD: jax.Array,
        logit_TE: jax.Array,
        gate_EDF: jax.Array,
        up_EDF: jax.Array,
        down_EFD: jax.Array,
    ) -> jax.Array:
        E, weights = len(gate_EDF), (gate_EDF, up_EDF, down_EFD)

        def compute(x_RD: jax.Array, share_RX: jax.Array, expert_RX: jax.Array) -> jax.Array:
            if places.weights["E"]:
                expert_RX -= jax.lax.axis_index(places.weights["E"]) * E
                expert_RX = jnp.where(expert_RX < 0, E, jnp.minimum(expert_RX, E))
            partial_over = places.weights["D"]
            return sorted_experts(x_RD, share_RX, expert_RX, *weights, products, partial_over)

        if products.rounds:
            x_TD = x_TD.astype(gate_EDF.dtype)
        computed = partial(exchange, E, places.exchanged, compute) if places.exchanged else compute
        return jax.lax.psum(computed(x_TD, *route(logit_TE)), places.summed)

    tables = {**places.weights, "T": places.tokens}
    x_spec, *weight_specs = (spec(each, tables, axes) for each in ("TD", "EDF", "EDF", "EFD"))
    logit_spec = spec("T", tables, axes)
    on_mesh = jax.shard_map(
        here, in_specs=(x_spec, logit_spec, *weight_specs), out_specs=x_spec, check_vma=False
    )
    return on_mesh(x_TD, logit_TE, gate_EDF, up_EDF, down_EFD)


def exchange(
    experts: int,
    over: tuple[str, ...],
    compute: Compute,
    x_TD: jax.Array,
    share_TX: jax.Array,
    expert_TX: jax.Array,
) -> jax.Array:
    """Send each token once to each device that has some of its experts, and sum the results.

    All devices know the routes of all tokens, and therefore what arrives and in how many rounds.
    Nothing is dropped.

    Args:
        experts: number of experts of one device.
        over: axes that cut the experts.
    """
    (T, X), P, me = share_TX.shape, jax.lax.axis_size(over), jax.lax.axis_index(over)
    routed_TX = jnp.concatenate([share_TX, expert_TX.astype(share_TX.dtype)], 1)
    share_PTX, expert_PTX = jnp.split(jax.lax.all_gather(routed_TX, over), 2, 2)
    expert_PTX = expert_PTX.astype(expert_TX.dtype)
    goes_PTP = jnp.any(expert_PTX[..., None] // experts == jnp.arange(P), 2)
    J = int(slots(T, P, experts * P, X))
    sent_PT, come_PT = (in_turn(goes_PT, J) for goes_PT in (goes_PTP[me].T, goes_PTP[:, :, me]))

    def one_round(number: jax.Array | int, out_TD: jax.Array) -> jax.Array:
        sent_PJ, come_PJ = (
            jax.lax.dynamic_slice_in_dim(each, number * J, J, 1) for each in (sent_PT, come_PT)
        )
        x_PJD = x_TD.at[sent_PJ].get(mode="fill", fill_value=0)
        x_PJD = jax.lax.all_to_all(x_PJD, over, 0, 0)
        share_PJX, expert_PJX = (
            jnp.take_along_axis(each, come_PJ[..., None], 1, mode="fill", fill_value=-1)
            for each in (share_PTX, expert_PTX)
        )
        rows = (each.reshape(P * J, -1) for each in (x_PJD, share_PJX, expert_PJX))
        out_PJD = compute(*rows).reshape(P, J, -1)
        return out_TD.at[sent_PJ].add(jax.lax.all_to_all(out_PJD, over, 0, 0), mode="drop")

    out_TD = jnp.zeros(x_TD.shape, jnp.float32)
    if J == T:
        return one_round(0, out_TD)
    rounds = (jnp.max(jnp.sum(goes_PTP, 1)) + J - 1) // J
    return jax.lax.fori_loop(0, rounds, one_round, out_TD)


def in_turn(goes_PT: jax.Array, J: int) -> jax.Array:
    """Return the indices of tokens sent to each device, padded with T up to whole rounds of J."""
    T = goes_PT.shape[1]
    order_PT = jnp.argsort(~goes_PT, 1, stable=True)
    order_PT = jnp.where(jnp.arange(T) < jnp.sum(goes_PT, 1)[:, None], order_PT, T)
    return jnp.pad(order_PT, ((0, 0), (0, -T % J)), constant_values=T)
