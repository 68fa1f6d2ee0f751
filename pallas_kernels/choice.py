"""Which functions attend on a device: plain JAX, or kernels where they run."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.errors import JaxinferError
from jaxinfer.pallas_kernels import kv_pages, reference
from jaxinfer.pallas_kernels.kv_pages import KVPages

Kernels = Literal["plain", "pallas", "interpret"]
# The first NVIDIA GPUs with products of bfloat16 matrices.
_CAPABILITY = 8.0


class Attention(NamedTuple):
    """What attends, and writes KV entries; see ``reference`` and ``kv_pages``."""

    decode: Callable[..., jax.Array]
    chunks: Callable[..., jax.Array]
    write: Callable[..., KVPages]


def attention(kernels: str) -> Attention:
    """The functions of that name."""
    if kernels == "plain":
        return Attention(
            reference.decode_attention, reference.chunk_attention, kv_pages.write_kv
        )
    from jaxinfer.pallas_kernels import generic, write

    run = partial(partial, interpret=kernels == "interpret")
    return Attention(
        run(generic.decode_attention), run(generic.chunk_attention), run(write.write_kv)
    )


def keys_by_token(kernels: str) -> bool:
    """Whether a page's keys lie as [K, B, H], as its values do, and not as [K, H, B]."""
    return kernels != "plain"


def choose_kernels(
    wanted: Kernels | Literal["auto"], device: jax.Device, dtype: jnp.dtype, head_dim: int
) -> Kernels:
    """``auto``: kernels for 16-bit floats on NVIDIA GPUs from sm_80 on, else plain JAX.

    Raises:
        JaxinferError: kernels are asked for that the device cannot run.
    """
    reason = _why_not(device, head_dim)
    if wanted == "pallas" and reason:
        raise JaxinferError(f"kernels is pallas, {reason}: auto, plain or interpret would do")
    if wanted == "auto":
        return "pallas" if reason is None and dtype.itemsize == 2 else "plain"
    return wanted


def _why_not(device: jax.Device, head_dim: int) -> str | None:
    """Why a device cannot run the kernels, in words; None if it can."""
    if device.platform != "gpu":
        return f"the device is a {device.platform}"
    capability = getattr(device, "compute_capability", "0")
    if float(capability) < _CAPABILITY:
        return f"{device.device_kind} has compute capability {capability}, below {_CAPABILITY}"
    if head_dim % 16:
        return f"head_dim is {head_dim}, no multiple of 16"
    return None
