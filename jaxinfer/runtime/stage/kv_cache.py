"""The arrays of a page pool, and the memory that arrays take."""

import math
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sharding import pages_sharding
from jaxinfer.models.stage import Layers
from jaxinfer.pallas_kernels.choice import keys_by_token
from jaxinfer.pallas_kernels.kv_pages import KVPages


def available_memory() -> int:
    """Return the bytes of the host's memory that can be used without swapping."""
    return int(psutil.virtual_memory().available)


def shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Return the bytes that an array takes on one device."""
    assert array.sharding
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def memory_of(arrays: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Return the bytes that arrays take in one device's memory or, on CPUs, in the host's."""
    total = 0
    for array in arrays:
        assert array.sharding
        devices: list[jax.Device] = list(array.sharding.device_set)
        total += shard_bytes(array) * (len(devices) if devices[0].platform == "cpu" else 1)
    return total


def abstract_pages(
    config: ModelConfig,
    layers: Layers,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
) -> list[KVPages]:
    """Return the shapes of each layer's keys and values and, for entries of 8 bits, scales.

    Each layer has separate arrays, because a step would copy a single array for all layers.
    """
    K, B, H = config.num_key_value_heads, page_size, config.head_dim
    array = partial(jax.ShapeDtypeStruct, sharding=pages_sharding(mesh, config.layout))
    by_token = keys_by_token(config.kernels)
    keys = array((num_pages, K, B, H) if by_token else (num_pages, K, H, B), dtype)
    scale = array((num_pages, K), jnp.float32) if dtype.itemsize == 1 else None
    pages = KVPages(keys, array((num_pages, K, B, H), dtype), scale, scale)  # type: ignore[arg-type]
    return [pages] * (layers.stop - layers.start)


def allocate(pages: list[KVPages]) -> list[KVPages]:
    """Return zeroed pages of the shapes from ``abstract_pages``."""

    def zeros(array: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.jit(lambda: jnp.zeros(array.shape, array.dtype), out_shardings=array.sharding)()

    return [jax.tree.map(zeros, layer) for layer in pages]
