"""Products of experts with which layers are compiled: the engine's or XLA's."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp

from jaxinfer.lab.sharding.targets import CompileTarget
from jaxinfer.pallas_kernels.choice import Grouped, grouped


def ragged_matmul(x_RD: jax.Array, weight_EDF: jax.Array, count_E: jax.Array) -> jax.Array:
    """Multiply rows by their experts' weights with XLA, in the weights' dtype."""
    x_RD = x_RD.astype(weight_EDF.dtype)
    return jax.lax.ragged_dot(x_RD, weight_EDF, count_E, preferred_element_type=jnp.float32)


def ragged_gated(
    x_RD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, count_E: jax.Array
) -> jax.Array:
    """Multiply rows by their experts' gate and up weights with XLA, and apply the gate."""
    gate_RF, up_RF = (ragged_matmul(x_RD, weight, count_E) for weight in (gate_EDF, up_EDF))
    return jax.nn.silu(gate_RF) * up_RF


RAGGED = Grouped(ragged_matmul, ragged_gated, rounds=True)


def expert_products(target: CompileTarget, dtype: jnp.dtype, D: int, F: int) -> Grouped:
    """Return the kernels that multiply experts of D x F per device in an engine on these devices.

    Returns XLA's own products if there are no kernels: on TPUs, and on CPUs without numba.
    """
    kernels = "plain"
    if target.is_cpu and find_spec("numba"):
        kernels = "numba"
    elif target.is_gpu:
        kernels = "generic"
    return grouped(kernels, dtype, D, F) or RAGGED
