"""Linear weights of 8 bits, with a float32 scale for each output channel.

A weight is ``values * scale``: a channel's largest weight becomes the largest number of the format.
Embeddings, heads, norms and biases stay unchanged. Scales are separate parameters, named by their
axes, such as ``q_scale_NH`` for ``q_DNH``, so that layouts can place them.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import EightBits, ModelConfig

# Weights of linear layers, whose first axes are those of their inputs, and their scales.
SCALES = {
    "q_DNH": "q_scale_NH",
    "k_DKH": "k_scale_KH",
    "v_DKH": "v_scale_KH",
    "qkv_DKXH": "qkv_scale_KXH",
    "o_NHD": "o_scale_D",
    "gate_DF": "gate_scale_F",
    "up_DF": "up_scale_F",
    "down_FD": "down_scale_D",
}
_NAMES = frozenset(SCALES.values())
# The value that a channel's largest weight becomes.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Scaled(NamedTuple):
    """A weight of 8 bits.

    Attributes:
        values: values, with the axes of inputs and outputs.
        scale: float32, with the axes of outputs.
        computed: dtype in which it is multiplied.
    """

    values: jax.Array
    scale: jax.Array
    computed: jnp.dtype


Weight = jax.Array | Scaled


def scale_path(path: str) -> str | None:
    """Return the path of a weight's scale; None for parameters that have none."""
    module, dot, name = path.rpartition(".")
    return f"{module}{dot}{SCALES[name]}" if name in SCALES else None


def own_scale(path: str, config: ModelConfig) -> str | None:
    """Return the path of a weight's scale if the config gives it 8 bits; otherwise None."""
    is_narrow = config.eight_bits is not None and path not in config.wide_weights
    return scale_path(path) if is_narrow else None


def is_scale(path: str) -> bool:
    """Tell whether a path names a scale."""
    return path.rpartition(".")[2] in _NAMES


def add_scales(model: nnx.Module, bits: EightBits, wide: Collection[str] = ()) -> None:
    """Give each linear weight of a model a scale of ones, except those with a path in ``wide``."""
    for path, module in nnx.iter_graph(model):
        for name, scale in SCALES.items():
            is_wide = ".".join(map(str, [*path, name])) in wide
            if isinstance(module, nnx.Module) and hasattr(module, name) and not is_wide:
                shape = getattr(module, name).shape
                outputs = shape[len(shape) - len(scale.rpartition("_")[2]) :]
                setattr(module, scale, nnx.Param(jnp.ones(outputs)))
                module.computed = bits.computed  # type: ignore[attr-defined]


def weight(module: Any, name: str) -> Weight:
    """Return a module's weight as it is multiplied, with its scale if it has one."""
    values: jax.Array = getattr(module, name)[...]
    scale = getattr(module, SCALES[name], None)
    return values if scale is None else Scaled(values, scale[...], jnp.dtype(module.computed))


def as_matrix(weight: Weight) -> Weight:
    """Merge the input axes of a weight that has one output axis, so that it becomes a matrix."""
    if isinstance(weight, Scaled):
        return weight._replace(values=weight.values.reshape(-1, weight.values.shape[-1]))
    return weight.reshape(-1, weight.shape[-1])


def quantise(x: Any, outputs: int, dtype: jnp.dtype, xp: Any = jnp) -> tuple[Any, Any]:
    """Return a weight's values in 8 bits, and its scales.

    Args:
        x: weight of any float dtype; its last ``outputs`` axes are output axes.
        xp: array module, ``numpy`` or ``jax.numpy``.
    """
    x, largest = x.astype(xp.float32), LARGEST[jnp.dtype(dtype).name]
    scale = xp.max(xp.abs(x), axis=tuple(range(x.ndim - outputs))) / xp.float32(largest)
    # Multiplied by the reciprocal, a largest weight could exceed the range of fp8.
    shares = xp.clip(x / xp.where(scale > 0, scale, xp.float32(1)), -largest, largest)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return (xp.round(shares) if is_integer else shares).astype(dtype), scale
