"""Layers that the architectures share.

Shape suffixes: T tokens, S sequences, C chunks, M pages per sequence at most, P pages, B tokens
per page, N query heads, K KV heads, H head dim, D model dim, F feed-forward, E experts, V
vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxinfer.models.config import Rope
from jaxinfer.models.eight_bits import Scaled, Weight
from jaxinfer.models.layouts import LAYOUTS, Layout, named
from jaxinfer.models.sharding import spec
from jaxinfer.pallas_kernels.choice import (
    AttentionKernels,
    Products,
    attention,
    products,
    scaled_products,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages

# A numpy array on the host, or a jax.Array within the step.
HostOrTraced = Any
# Kernels for GPUs.
ON_GPUS = ("generic", "ampere", "hopper")


class PagedBatch(NamedTuple):
    """Positions of one step's tokens, and the places of their KV entries; all int32.

    The decodes come first, at most S and one per row of ``decode_table_SM``; then at most C prefill
    chunks; then padding.

    Attributes:
        position_T: position in the sequence.
        page_T: page to which the KV entry is written; padding writes to page 0.
        offset_T: offset in that page.
        decode_length_S: number of KV entries that a decode sees, including its own; 0 is no decode.
        chunk_start_C: position of a chunk's first token.
        chunk_row_C1: bounds of the chunks among the tokens.
    """

    position_T: HostOrTraced
    page_T: HostOrTraced
    offset_T: HostOrTraced
    decode_table_SM: HostOrTraced
    decode_length_S: HostOrTraced
    chunk_table_CM: HostOrTraced
    chunk_start_C: HostOrTraced
    chunk_row_C1: HostOrTraced


def project(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute an einsum in the weight's dtype, with float32 accumulation and result."""
    return jnp.einsum(spec, x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def dense(x_TD: jax.Array, weight: Weight, kernels: str, rounds: bool = True) -> jax.Array:
    """Multiply x by a weight whose first axis is x's last: float32 [T, the weight's other axes].

    The result is that of ``project``; on one device, ``kernels`` may have their own product.

    Args:
        rounds: whether a GPU may round the product to the weight's dtype.
    """
    if isinstance(weight, Scaled):
        return _scaled(x_TD, weight, kernels)
    if own := _own_products(kernels, weight):
        out_TF = own.matmul(x_TD, weight.reshape(len(weight), -1))
        return out_TF.reshape(len(x_TD), *weight.shape[1:])
    x_TD = x_TD.astype(weight.dtype)
    if rounds and kernels in ON_GPUS and alone():
        # Rounded as in torch, which halves the bytes to write and to read again; not on a mesh,
        # where these may be parts of sums.
        return jnp.tensordot(x_TD, weight, 1).astype(jnp.float32)
    return jnp.tensordot(x_TD, weight, 1, preferred_element_type=jnp.float32)


def _scaled(x_TD: jax.Array, weight: Scaled, kernels: str) -> jax.Array:
    """Multiply by values of 8 bits, and scale the columns of the result."""
    values, scale = weight.values, weight.scale
    own = scaled_products(kernels, values.dtype) if alone() else None
    if own:
        matrix_DF = values.reshape(len(values), -1)
        out_TF = own.matmul(x_TD.astype(weight.computed), matrix_DF, scale.reshape(-1))
        return out_TF.reshape(len(x_TD), *scale.shape)
    x_TD, values = x_TD.astype(weight.computed), values.astype(weight.computed)
    return jnp.tensordot(x_TD, values, 1, preferred_element_type=jnp.float32) * scale


def gated(
    x_TD: jax.Array,
    gate_DF: Weight,
    up_DF: Weight,
    activation: Callable[[jax.Array], jax.Array],
    kernels: str,
) -> jax.Array:
    """Return activation(x gate) * (x up) (Shazeer, 2020), in float32 [T, F].

    ``kernels`` may compute both products and SiLU in one pass.
    """
    if isinstance(gate_DF, Scaled) or isinstance(up_DF, Scaled):
        if isinstance(gate_DF, Scaled) and isinstance(up_DF, Scaled) and alone():
            scaled = scaled_products(kernels, gate_DF.values.dtype)
            if scaled and activation is jax.nn.silu:
                pairs = gate_DF[:2], up_DF[:2]
                return scaled.gated(x_TD.astype(gate_DF.computed), *pairs[0], *pairs[1])
    elif activation is jax.nn.silu and (own := _own_products(kernels, gate_DF)):
        return own.gated(x_TD, gate_DF, up_DF)
    return activation(dense(x_TD, gate_DF, kernels)) * dense(x_TD, up_DF, kernels)


def head(x_SD: jax.Array, head_VD: jax.Array, kernels: str) -> jax.Array:
    """Return logits [S, V] in float32."""
    own = _own_products(kernels, head_VD)
    if own and len(head_VD) >= 16:
        return own.logits(x_SD, head_VD)
    return project("sd,vd->sv", x_SD, head_VD)


def alone() -> bool:
    """Tell whether the computation runs on one device, not on a mesh of several."""
    return jax.sharding.get_abstract_mesh().size <= 1


def _own_products(kernels: str, weight: jax.Array) -> Products | None:
    return products(kernels, weight.dtype) if alone() else None


def init_weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], scale: float = 0.02
) -> nnx.Param[jax.Array]:
    """Return a float32 parameter drawn from a normal distribution."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        self.scale_D = nnx.Param(jnp.ones(dim))
        self.eps = eps

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Normalise over the last axis."""
        x_TD = x_TD.astype(jnp.float32)
        mean_T1 = jnp.mean(x_TD * x_TD, -1, keepdims=True)
        return x_TD * jax.lax.rsqrt(mean_T1 + self.eps) * self.scale_D[...]


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias, in float32 (Ba et al., 2016)."""

    def __init__(self, dim: int, eps: float) -> None:
        self.scale_D = nnx.Param(jnp.ones(dim))
        self.bias_D = nnx.Param(jnp.zeros(dim))
        self.eps = eps

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Normalise over the last axis."""
        x_TD = x_TD.astype(jnp.float32)
        x_TD = x_TD - jnp.mean(x_TD, -1, keepdims=True)
        variance_T1 = jnp.mean(x_TD * x_TD, -1, keepdims=True)
        return x_TD * jax.lax.rsqrt(variance_T1 + self.eps) * self.scale_D[...] + self.bias_D[...]


def rope_tables(position_T: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines [T, H/2]."""
    frequency = jnp.asarray(rope.frequencies, jnp.float32)
    angle = position_T[:, None].astype(jnp.float32) * frequency
    # A product with 1 keeps the values. XLA:CPU never fuses a matrix product into its user; it
    # would compute cosines again for every head and layer.
    factor = rope.factor * jnp.eye(len(frequency))
    return jnp.cos(angle) @ factor, jnp.sin(angle) @ factor


def apply_rope(x_TNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate each pair (i, i + H/2), as Hugging Face pairs them."""
    T, N, H = x_TNH.shape
    half_TNXH = x_TNH.reshape(T, N, 2, H // 2)
    sin_TXH = jnp.stack([-sin, sin], 1)
    # One pass over x; if two halves were joined, XLA:CPU would make three.
    turned_TNXH = half_TNXH * cos[:, None, None] + half_TNXH[:, :, ::-1] * sin_TXH[:, None]
    return turned_TNXH.reshape(T, N, H)


def paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: KVPages,
    batch: PagedBatch,
    kernels: str,
    scale: float | None = None,
    window: int | None = None,
    layout: Layout = LAYOUTS["megatron"],
) -> tuple[jax.Array, KVPages]:
    """Write the tokens' KV entries, then attend: decodes and chunks each by their own function.

    Heads are independent: on a mesh, each device attends with the heads whose KV it has. If the
    layout cuts the tokens of ``heads``, each device attends for its own rows, and has the KV of all
    tokens: new entries are gathered, and each device writes all of them to its own pages.

    Args:
        kernels: attention kernels, which also decide how keys are stored; see
            ``pallas_kernels.choice``.
        scale: scale of scores; by default 1 / sqrt(H).
        window: number of last entries that a token sees, including its own; by default all.

    Returns:
        float32 [T, N, H] and the updated pages.
    """
    scale = scale or q_TNH.shape[-1] ** -0.5
    attend = partial(_attend, scale=scale, window=window, functions=attention(kernels))
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return attend(q_TNH, k_TKH, v_TKH, kv, batch)
    axes = mesh.axis_names
    heads, whole = spec("PK", layout.kv, axes), PartitionSpec()
    rows = named(layout.activations.get("heads", {}).get("T", ()), axes)
    queries = spec("TK", {**layout.kv, "T": rows}, axes)
    if rows:
        attend = partial(_attend_rows, axes=rows, attend=attend)
    on_mesh = jax.shard_map(
        attend,
        in_specs=(queries, heads, heads, heads, whole),
        out_specs=(queries, heads),
        check_vma=False,
    )
    return on_mesh(q_TNH, k_TKH, v_TKH, kv, batch)


def _attend_rows(
    q_TNH: jax.Array,
    k_XKH: jax.Array,
    v_XKH: jax.Array,
    kv: KVPages,
    batch: PagedBatch,
    axes: tuple[str, ...],
    attend: Callable[..., tuple[jax.Array, KVPages]],
) -> tuple[jax.Array, KVPages]:
    """Attend for this device's T rows among the step's X, and write the KV entries of all."""
    T, S = len(q_TNH), batch.decode_length_S.shape[0]
    low = jax.lax.axis_index(axes) * T
    row_C1 = jnp.clip(batch.chunk_row_C1, low, low + T)

    def own(x_S: jax.Array) -> jax.Array:
        x_X = jnp.pad(x_S, [(0, len(k_XKH) - S)] + [(0, 0)] * (x_S.ndim - 1))
        return jax.lax.dynamic_slice_in_dim(x_X, low, min(S, T))

    here = batch._replace(
        decode_table_SM=own(batch.decode_table_SM),
        decode_length_S=own(batch.decode_length_S),
        chunk_start_C=batch.chunk_start_C + row_C1[:-1] - batch.chunk_row_C1[:-1],
        chunk_row_C1=row_C1 - low,
    )
    return attend(q_TNH, k_XKH, v_XKH, kv, here)


def _attend(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: KVPages,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    functions: AttentionKernels,
) -> tuple[jax.Array, KVPages]:
    kv = functions.write(kv, k_TKH, v_TKH, batch.page_T, batch.offset_T)
    S, C = batch.decode_length_S.shape[0], batch.chunk_start_C.shape[0]
    q_TNH = q_TNH * scale
    decoded_SNH = functions.decode(
        q_TNH[:S], kv, batch.decode_table_SM, batch.decode_length_S, window
    )
    if not C:
        padding = (0, len(q_TNH) - S), (0, 0), (0, 0)
        return jnp.pad(decoded_SNH, padding) if len(q_TNH) > S else decoded_SNH, kv
    out_TNH = functions.chunks(
        q_TNH, kv, batch.chunk_table_CM, batch.chunk_start_C, batch.chunk_row_C1, window
    )
    is_decode_S11 = (batch.decode_length_S > 0)[:, None, None]
    first_SNH = jnp.where(is_decode_S11, decoded_SNH, out_TNH[:S])
    # On a mesh, jax 0.11's compiler crashes if all rows are set.
    return first_SNH if len(q_TNH) == S else out_TNH.at[:S].set(first_SNH), kv
