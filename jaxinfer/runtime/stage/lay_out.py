"""Applies a layout to a model and its steps on one stage's mesh; chooses formats of weights."""

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp

from jaxinfer.config.engine import EngineOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import EightBits, ModelConfig
from jaxinfer.models.eight_bits import is_scale, own_scale
from jaxinfer.models.layout_checks import check_divides, check_names, check_on_mesh, check_pages
from jaxinfer.models.layout_files import load_layout
from jaxinfer.models.layouts import LAYOUTS, Layout, most_ways
from jaxinfer.models.sharding import padded
from jaxinfer.steps.shapes import StepLimits

# Number of rows whose logits are in memory at once if all prompt positions are reported.
BLOCK_ROWS = 64
# Formats of 8 bits, of weights and of KV, by the values of their options.
DTYPES_OF_8_BITS = {"int8": jnp.dtype("int8"), "fp8": jnp.dtype("float8_e4m3fn")}
# Rules of a stage with attention groups, in addition to any rules of parameters.
_ANY_RULES = replace(LAYOUTS["megatron"], parameters=())


def lay_out(
    config: ModelConfig,
    options: EngineOptions,
    axes: Mapping[str, int],
    kernels: str,
    is_spread: bool,
) -> tuple[ModelConfig, int]:
    """Return the padded config with its layout, and the number that must divide a step's tokens.

    Args:
        axes: sizes of the mesh's axes.
        is_spread: whether KV heads may be on other devices.

    Raises:
        JaxinferError: the layout is unknown, or does not fit model or mesh.
    """
    name, layout = options.layout or "megatron", load_layout(options.layout)
    if is_spread and (len(axes) > 1 or replace(layout, parameters=()) != _ANY_RULES):
        raise JaxinferError(
            f"layout {name} on mesh axes {list(axes)}: attention groups need megatron, or other "
            "rules of parameters, on one axis"
        )
    try:
        check_names(layout, axes)
        check_pages(layout)
        wide = replace(padded(config, axes, layout), kernels=kernels, layout=layout)
        check_on_mesh(layout, axes, wide)
        return wide, _multiple(options, axes, layout)
    except JaxinferError as error:
        raise JaxinferError(f"layout {name}: {error}") from None


def _multiple(options: EngineOptions, axes: Mapping[str, int], layout: Layout) -> int:
    """Return into how many pieces tokens are cut.

    The rows to sample from must divide as they are.
    """
    multiple, pieces = most_ways("T", layout, axes), most_ways("S", layout, axes)
    for tokens in options.token_buckets or ():
        check_divides("T", "token_buckets", tokens, multiple)
    buckets = StepLimits(options.max_num_seqs, options.max_num_batched_tokens, 1, 1).row_buckets
    for rows in (*buckets, BLOCK_ROWS):
        check_divides("S", "logits", rows, pieces)
    return multiple


def with_bits(config: ModelConfig, options: EngineOptions, dtype: jnp.dtype) -> ModelConfig:
    """Return the config with the format of its linear weights, if they have 8 bits.

    Raises:
        JaxinferError: the checkpoint has another format of 8 bits, or experts.
    """
    wanted, there = options.weight_dtype, config.stored_bits
    stored = there if wanted == "auto" else DTYPES_OF_8_BITS[wanted].name
    if stored is None:
        return config
    if there not in (None, stored):
        raise JaxinferError(f"weight_dtype is {wanted}, the checkpoint has {there}: leave it auto")
    if config.num_experts:
        whose = f" (the checkpoint has {stored})" if wanted == "auto" else ""
        raise JaxinferError(
            f"weight_dtype is {wanted}{whose}: a mixture's weights must be of 16 or 32 bits, as "
            "experts have no products of 8 bits"
        )
    return replace(config, eight_bits=EightBits(stored, dtype.name))


def dtype_of(path: str, ndim: int, config: ModelConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Return a parameter's dtype; ``dtype`` is that of matrices that are not stored in 8 bits."""
    # Vectors (the scales of norms) stay float32: they are small, and norms work in float32.
    if ndim == 1 or is_scale(path):
        return jnp.dtype("float32")
    if config.eight_bits and own_scale(path, config):
        return jnp.dtype(config.eight_bits.stored)
    return dtype
