"""Weights of queries, keys and values joined into one array, which GPUs multiply at once.

XLA also combines three products of the same rows, but copies their weights next to each other in
every step. ``qkv_DKXH`` has, for each KV head, its queries, its key and its value; their number is
X = G + 2. A mesh cuts it by KV heads, so that a head stays with its own queries.

Suffixes are those of ``layers.py``.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eight_bits import weight
from jaxinfer.models.layers import ON_GPUS, dense
from jaxinfer.models.layouts import Layout
from jaxinfer.models.sharding import place

T = TypeVar("T")
# Weights that are joined, and their scales if they have 8 bits.
PARTS = {
    "qkv_DKXH": ("q_DNH", "k_DKH", "v_DKH"),
    "qkv_scale_KXH": ("q_scale_NH", "k_scale_KH", "v_scale_KH"),
}
# Kernels with which weights are joined. Products on CPUs choose by the size of a weight.
_KERNELS = (*ON_GPUS, "interpret")


def query_key_value(
    module: nnx.Module, x_TD: jax.Array, kernels: str, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries [T, N, H], keys and values [T, K, H] of a module, joined or not."""
    if hasattr(module, "qkv_DKXH"):
        out_TKXH = dense(x_TD, weight(module, "qkv_DKXH"), kernels)
        T, _, _, H = out_TKXH.shape
        q_TNH = out_TKXH[:, :, :-2].reshape(T, -1, H)
        k_TKH, v_TKH = out_TKXH[:, :, -2], out_TKXH[:, :, -1]
    else:
        names = PARTS["qkv_DKXH"]
        q_TNH, k_TKH, v_TKH = (dense(x_TD, weight(module, name), kernels) for name in names)
    keys, values = (place(layout, "new_kv", each) for each in (k_TKH, v_TKH))
    return place(layout, "queries", q_TNH), keys, values


def joinable(
    config: ModelConfig, parameters: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[str, ...]:
    """Return the paths, with their last dot, of modules whose weights should be joined.

    All three weights of such a module exist, with one dtype and equal sharding, and none is
    gathered before it is used.
    """
    if config.kernels not in _KERNELS or config.layout.gathered != ():
        return ()
    query, *others = PARTS["qkv_DKXH"]
    found = []
    for path, q in parameters.items():
        module, _, name = path.rpartition(".")
        if name == query:
            rest = [parameters[f"{module}.{other}"] for other in others]
            if all(x.dtype == q.dtype and x.sharding == q.sharding for x in rest):
                found.append(f"{module}.")
    return tuple(found)


def join(query: Any, key: Any, value: Any) -> Any:
    """Join weights [D, heads, H], or their scales [heads, H], by KV heads."""
    *rows, N, H = query.shape
    K = key.shape[-2]
    q = query.reshape(*rows, K, N // K, H)
    return jnp.concatenate([q, key[..., None, :], value[..., None, :]], -2)


def with_joined(
    leaves: Mapping[str, T], modules: Collection[str], together: Callable[[T, T, T], T]
) -> dict[str, T]:
    """Return parameters by path, with those of ``modules`` (see ``joinable``) put ``together``."""
    found = dict(leaves)
    for module in modules:
        for name, parts in PARTS.items():
            if module + parts[0] in found:
                query, key, value = (found.pop(module + part) for part in parts)
                found[module + name] = together(query, key, value)
    return found


def join_modules(model: nnx.Module, modules: Collection[str]) -> None:
    """Replace the three weights of each of these modules by one joined weight."""
    for path, module in list(nnx.iter_graph(model)):
        if "".join(f"{part}." for part in path) in modules and isinstance(module, nnx.Module):
            for name, parts in PARTS.items():
                if hasattr(module, parts[0]):
                    three = (getattr(module, part)[...] for part in parts)
                    setattr(module, name, nnx.Param(join(*three)))
                    for part in parts:
                        delattr(module, part)
