"""Products of rows with their experts' weights by ``jax.lax.ragged_dot``, for GPUs.

XLA:CPU multiplies every row by every expert and masks, which takes eight times as long as all
experts do without it.
"""

import jax
import jax.numpy as jnp


def matmul(x_RD: jax.Array, weight_EDF: jax.Array, count_E: jax.Array) -> jax.Array:
    """Each row by its expert's weights, in their dtype: float32 [R, F].

    Args:
        x_RD: the first expert's rows first.
        count_E: rows of each expert, R together.
    """
    x_RD = x_RD.astype(weight_EDF.dtype)
    return jax.lax.ragged_dot(x_RD, weight_EDF, count_E, preferred_element_type=jnp.float32)


def gated(x_RD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, count_E: jax.Array) -> jax.Array:
    """``silu(x gate) * (x up)``, as ``matmul`` has its products."""
    return jax.nn.silu(matmul(x_RD, gate_EDF, count_E)) * matmul(x_RD, up_EDF, count_E)
