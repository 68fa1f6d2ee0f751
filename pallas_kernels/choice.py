"""Which functions attend on a device: plain JAX, or kernels where they run."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.errors import JaxinferError
from jaxinfer.pallas_kernels import reference

Kernels = Literal["plain", "pallas", "interpret"]
# The first NVIDIA GPUs with products of bfloat16 matrices.
_CAPABILITY = 8.0


class Attention(NamedTuple):
    """Decode and chunked-prefill attention; see ``reference`` for arguments and results."""

    decode: Callable[..., jax.Array]
    chunks: Callable[..., jax.Array]


def attention(kernels: str) -> Attention:
    """The functions of that name."""
    if kernels == "plain":
        return Attention(reference.decode_attention, reference.chunk_attention)
    from jaxinfer.pallas_kernels import generic

    interpret = kernels == "interpret"
    return Attention(
        partial(generic.decode_attention, interpret=interpret),
        partial(generic.chunk_attention, interpret=interpret),
    )


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
