"""The page pool's arrays: how large they may be, and their allocation."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import psutil

from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layers import KVPages

DEFAULT_MEMORY_FRACTION = {"cpu": 0.2, "gpu": 0.9}


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    entry = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return config.num_hidden_layers * page_size * entry


def memory_left(device: jax.Device, fraction: float | None) -> int:
    """Bytes that pages may take: the fraction of a GPU's memory less what is in use.

    A CPU shares its memory with the rest of the machine: there it is the fraction of what is
    available.
    """
    if fraction is None:
        fraction = DEFAULT_MEMORY_FRACTION[device.platform]
    if device.platform == "cpu":
        return int(psutil.virtual_memory().available * fraction)
    stats = device.memory_stats()
    return int(stats["bytes_limit"] * fraction) - stats["bytes_in_use"]


def pool_size(
    config: ModelConfig,
    page_size: int,
    dtype: jnp.dtype,
    devices: Sequence[jax.Device],
    memory_fraction: float | None,
    most_useful: int,
) -> int:
    """Pages that fit into memory, the padding sink included; not more than are of use.

    Raises:
        JaxinferError: not even one page fits.
    """
    # CPU devices share one memory; other devices have a share of each page.
    sharers = 1 if devices[0].platform == "cpu" else len(devices)
    each = page_bytes(config, page_size, dtype) // sharers
    fits = min(memory_left(device, memory_fraction) for device in devices) // each
    if fits < 2:
        raise JaxinferError(
            f"memory_fraction {memory_fraction} leaves room for {max(fits, 0)} KV pages of "
            f"{each / 2**20:.1f} MiB; raise it, or give num_pages"
        )
    return min(fits, most_useful)


def allocate_pages(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
) -> list[KVPages]:
    """Zeroed pages, keys [P, K, H, B] and values [P, K, B, H], one pair of arrays per layer.

    Separate arrays, because a step that is handed one array of all layers copies it.

    Raises:
        JaxinferError: the pages would not fit into the device's memory.
    """
    device: jax.Device = next(iter(sharding.device_set))
    sharers = 1 if device.platform == "cpu" else len(sharding.device_set)
    size = num_pages * page_bytes(config, page_size, dtype) // sharers
    if size > (room := memory_left(device, 1.0)):
        raise JaxinferError(
            f"num_pages {num_pages} of {page_size} tokens takes {size / 2**30:.1f} GiB, "
            f"{room / 2**30:.1f} GiB are free"
        )
    K, B, H = config.num_key_value_heads, page_size, config.head_dim

    @partial(jax.jit, out_shardings=sharding)
    def zeros() -> KVPages:
        return jnp.zeros((num_pages, K, H, B), dtype), jnp.zeros((num_pages, K, B, H), dtype)

    return [zeros() for _ in range(config.num_hidden_layers)]
