"""Chooses a device's functions for attention and products: plain JAX, or kernels."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.pallas_kernels import kv_pages, reference
from jaxinfer.pallas_kernels.kv_pages import KVPages

Kernels = Literal["plain", "numba", "generic", "ampere", "hopper", "interpret"]
# NVIDIA's assembler, which Mosaic GPU calls, makes wrong code from CUDA 12.8.0 up to, but not with,
# 12.9.1: jax's own attention refuses causal masks there.
WRONG_FROM, RIGHT_FROM = (12, 8, 0), (12, 9, 86)
PACKAGE = "nvidia-cuda-nvcc-cu12"
# Compute capabilities of NVIDIA GPUs: the first with products of bfloat16 matrices, the first with
# fp8, and the one with wgmma.
_BF16, _FP8, _HOPPER = 8.0, 8.9, 9.0


class AttentionKernels(NamedTuple):
    """Functions for attention and for writing KV entries; see ``reference`` and ``kv_pages``."""

    decode: Callable[..., jax.Array]
    chunks: Callable[..., jax.Array]
    write: Callable[..., KVPages]


def attention(kernels: str) -> AttentionKernels:
    """Return the attention functions of these kernels."""
    if kernels == "plain":
        return AttentionKernels(
            reference.decode_attention, reference.chunk_attention, kv_pages.write_kv
        )
    if kernels == "numba":
        from jaxinfer.pallas_kernels import numba_cpu, numba_write

        return AttentionKernels(
            numba_cpu.decode_attention, numba_cpu.chunk_attention, numba_write.write_kv
        )
    from jaxinfer.pallas_kernels import generic, write

    if kernels == "hopper":
        from jaxinfer.pallas_kernels import hopper

        return AttentionKernels(hopper.decode, hopper.chunk_attention, write.write_kv)
    if kernels == "ampere":
        from jaxinfer.pallas_kernels import ampere_decode

        return AttentionKernels(
            ampere_decode.decode_attention, generic.chunk_attention, write.write_kv
        )
    interpret = kernels == "interpret"
    return AttentionKernels(
        partial(generic.decode_attention, interpret=interpret),
        partial(generic.chunk_attention, interpret=interpret),
        partial(write.write_kv, interpret=interpret),
    )


class Products(NamedTuple):
    """Products of rows with weights; see ``numba_matmul``."""

    matmul: Callable[..., jax.Array]
    gated: Callable[..., jax.Array]
    logits: Callable[..., jax.Array]


def products(kernels: str, dtype: jnp.dtype) -> Products | None:
    """Return these kernels' products for weights of this dtype; None to use XLA's own."""
    if kernels != "numba" or dtype not in (jnp.float32, jnp.bfloat16):
        return None
    from jaxinfer.pallas_kernels import numba_logits, numba_matmul

    return Products(numba_matmul.matmul, numba_matmul.gated, numba_logits.logits)


class ScaledProducts(NamedTuple):
    """Products of rows with weights of 8 bits and their scales; see ``numba_matmul``."""

    matmul: Callable[..., jax.Array]
    gated: Callable[..., jax.Array]


def scaled_products(kernels: str, dtype: jnp.dtype) -> ScaledProducts | None:
    """Return these kernels' products for weights of this dtype; None to use XLA's own."""
    if kernels != "numba":
        return None
    from jaxinfer.pallas_kernels import numba_matmul

    return ScaledProducts(numba_matmul.matmul, numba_matmul.gated)


class Grouped(NamedTuple):
    """Products of rows with the weights of their experts; see ``numba_grouped``.

    Attributes:
        rounds: whether these functions round rows, and perhaps the result of ``gated``, to the
            weights' dtype.
    """

    matmul: Callable[..., jax.Array]
    gated: Callable[..., jax.Array]
    rounds: bool


def grouped(kernels: str, dtype: jnp.dtype, D: int, F: int) -> Grouped | None:
    """Return these kernels' grouped products for experts of D x F on one device.

    None means that all experts must compute all rows. XLA's own ``jax.lax.ragged_dot`` is not used:
    on CPUs and GPUs alike, XLA multiplies each row by every expert and masks, so computing all
    experts is faster by a token's number of experts.
    """
    if kernels == "numba" and dtype in (jnp.float32, jnp.bfloat16):
        from jaxinfer.pallas_kernels import numba_grouped

        return Grouped(numba_grouped.matmul, numba_grouped.gated, rounds=False)
    if kernels in ("plain", "numba"):
        return None
    from jaxinfer.pallas_kernels import grouped

    if grouped.why_not(D, F):
        return None
    interpret = kernels == "interpret"
    return Grouped(
        partial(grouped.matmul, interpret=interpret),
        partial(grouped.gated, interpret=interpret),
        rounds=True,
    )


def keys_by_token(kernels: str) -> bool:
    """Tell whether a page's keys are stored as [K, B, H], like values, instead of [K, H, B]."""
    return kernels not in ("plain", "numba")


def choose_kernels(
    wanted: Kernels | Literal["auto"],
    device: jax.Device,
    dtype: jnp.dtype,
    head_dim: int,
    group: int,
    page_size: int,
) -> Kernels:
    """Choose a device's kernels; ``auto`` prefers compiled kernels, on GPUs only for 16 and 8 bits.

    Args:
        dtype: dtype of KV entries.
        group: number of query heads that share a KV head.

    Raises:
        JaxinferError: the device cannot run the requested kernels.
    """
    # Only kernels that may be chosen are checked, because a check may import them.
    why_not: dict[Kernels, Callable[[], str | None]] = {
        "hopper": lambda: _why_not_hopper(device, dtype, head_dim, group, page_size),
        "generic": lambda: _why_not_generic(device, dtype, head_dim),
        "numba": lambda: _why_not_numba(device, dtype),
    }
    # Never chosen by default, because no GPU has measured it yet.
    asked_for: dict[Kernels, Callable[[], str | None]] = {
        "ampere": lambda: _why_not_ampere(device, dtype, head_dim, group, page_size),
    }
    if wanted == "auto":
        if device.platform == "gpu" and dtype.itemsize == 4:
            return "plain"
        return next((name for name, reason in why_not.items() if reason() is None), "plain")
    reasons = why_not | asked_for
    if wanted in reasons and (reason := reasons[wanted]()):
        raise JaxinferError(f"kernels is {wanted}, {reason}: auto, plain or interpret would do")
    return wanted


def _capability(device: jax.Device) -> float:
    """Return the compute capability of an NVIDIA GPU; 0 for other devices."""
    if device.platform != "gpu":
        return 0.0
    return float(getattr(device, "compute_capability", 0))


def _why_not_generic(device: jax.Device, dtype: jnp.dtype, head_dim: int) -> str | None:
    """Return why a device cannot run these kernels, or None."""
    least = _FP8 if dtype == jnp.float8_e4m3fn else _BF16
    if _capability(device) < least:
        of_dtype = " with fp8 entries" if least == _FP8 else ""
        return f"{_name(device)}, they need compute capability {least} or more{of_dtype}"
    if head_dim % 16 or head_dim > 512:
        return f"head_dim is {head_dim}, no multiple of 16 up to 512"
    return None


def _why_not_hopper(
    device: jax.Device, dtype: jnp.dtype, head_dim: int, group: int, page_size: int
) -> str | None:
    if _capability(device) != _HOPPER:
        return f"{_name(device)}, they need compute capability {_HOPPER}, an H100 or H200"
    from jaxinfer.pallas_kernels import hopper

    if reason := hopper.why_not(head_dim, group, page_size, dtype):
        return reason
    if reason := wrong_assembler(ptxas_version()):
        # The GPU is one that they support.
        _note(f"kernels for Hopper are left out: {reason}")
    return reason


def _why_not_ampere(
    device: jax.Device, dtype: jnp.dtype, head_dim: int, group: int, page_size: int
) -> str | None:
    capability = _capability(device)
    if not _BF16 <= capability < _HOPPER:
        return f"{_name(device)}, they need compute capability {_BF16} to {_FP8}"
    from jaxinfer.pallas_kernels import ampere_decode

    return ampere_decode.why_not(head_dim, group, page_size, dtype)


def _why_not_numba(device: jax.Device, dtype: jnp.dtype) -> str | None:
    if device.platform != "cpu":
        return f"{_name(device)}, it needs a CPU"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"KV entries are {dtype}, it needs float32 or bfloat16"
    if not find_spec("numba"):
        return "numba is not installed (pip install 'jaxinfer[cpu]')"
    if reason := _why_numba_fails():
        # It was installed in order to be used.
        _note(f"kernels of numba are left out: {reason}")
    return reason


def _why_numba_fails() -> str | None:
    """Return the reason why an installed numba cannot be used, for any exception on import."""
    try:
        from jaxinfer.pallas_kernels import (
            numba_cpu,
            numba_grouped,
            numba_logits,
            numba_matmul,
            numba_write,
            xla_call,
        )
    except Exception as error:
        return f"numba cannot be imported: {type(error).__name__}: {one_line(error)}"
    del numba_cpu, numba_grouped, numba_logits, numba_matmul, numba_write
    return xla_call.why_not()


@cache
def _note(line: str) -> None:
    """Print a line once per process."""
    print(f"jaxinfer: {line}", file=sys.stderr, flush=True)


def _name(device: jax.Device) -> str:
    if device.platform != "gpu":
        return f"the device is a {device.platform}"
    return f"{device.device_kind} has compute capability {_capability(device)}"


def wrong_assembler(found: tuple[int, ...] | None) -> str | None:
    """Return why NVIDIA's assembler would miscompile causal kernels for Hopper, or None.

    Args:
        found: ptxas's version; None where it is unknown, and taken to be right.
    """
    if found is None or not WRONG_FROM <= found < RIGHT_FROM:
        return None
    at_least = ".".join(map(str, RIGHT_FROM))
    return (
        f"ptxas {'.'.join(map(str, found))} makes wrong code of causal masks: "
        f"pip install '{PACKAGE}>={at_least}'"
    )


@cache
def ptxas_version() -> tuple[int, ...] | None:
    """Return the version of the ptxas on PATH, else of NVIDIA's wheel; None if there is neither."""
    if path := shutil.which("ptxas"):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"V(\d+\.\d+\.\d+)", said.stdout)
        return tuple(map(int, found[1].split("."))) if found else None
    try:
        return tuple(map(int, version(PACKAGE).split(".")[:3]))
    except PackageNotFoundError:
        return None
