"""Counts the memory that plans of a cluster will take, before anything is loaded."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import jax
import jax.numpy as jnp

from jaxinfer.runtime.stage.kv_cache import memory_of

# A parameter on its devices: its path in the whole model, its goal there, and the dtype in which
# weights of 8 bits are multiplied. Stages with equal ones share one array (``load_weights``).
Wanted = tuple[str, jax.ShapeDtypeStruct, jnp.dtype]


class TakenMemory:
    """Counts the bytes taken of each GPU's memory, and of the host's, which CPU devices share."""

    def __init__(self) -> None:
        self._bytes: Counter[jax.Device | None] = Counter()
        self.parameters: set[Wanted] = set()

    def of(self, device: jax.Device) -> int:
        """Return the bytes taken of a device's memory."""
        return self._bytes[_memory_of(device)]

    def add(
        self,
        devices: Sequence[jax.Device],
        parameters: Mapping[str, jax.ShapeDtypeStruct],
        dtype: jnp.dtype,
        kv_bytes: int,
    ) -> None:
        """Add the bytes of a plan's weights, each once even if several plans use it, and pages.

        Args:
            kv_bytes: bytes of KV on one device, or on all devices if they share the host's memory.
        """
        size = new_bytes(parameters, dtype, self.parameters) + kv_bytes
        self.parameters |= {(path, array, dtype) for path, array in parameters.items()}
        for memory in dict.fromkeys(map(_memory_of, devices)):
            self._bytes[memory] += size

    def add_pool(self, device: jax.Device, kv_bytes: int) -> None:
        """Add the bytes of pages on a device that has no weights of the plan."""
        self._bytes[_memory_of(device)] += kv_bytes


def new_bytes(
    parameters: Mapping[str, jax.ShapeDtypeStruct], dtype: jnp.dtype, there: Set[Wanted]
) -> int:
    """Return the bytes of parameters that are not counted yet, as ``memory_of`` counts them."""
    return memory_of(
        array for path, array in parameters.items() if (path, array, dtype) not in there
    )


def _memory_of(device: jax.Device) -> jax.Device | None:
    return None if device.platform == "cpu" else device
