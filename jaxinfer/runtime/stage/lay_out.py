"""A model and its steps as a layout makes them, on the mesh of one stage."""

from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.config.engine import EngineOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layout_checks import check_divides, check_names, check_on_mesh
from jaxinfer.models.layout_files import load_layout
from jaxinfer.models.layouts import LAYOUTS, Layout, most_ways
from jaxinfer.models.sharding import padded
from jaxinfer.steps.shapes import StepLimits

# Rows whose logits are in memory at once where all prompt positions are reported on.
BLOCK_ROWS = 64
# What a stage with attention groups has, besides any rules of parameters.
_ANY_RULES = replace(LAYOUTS["megatron"], parameters=())


def lay_out(
    config: ModelConfig,
    options: EngineOptions,
    axes: Mapping[str, int],
    kernels: str,
    is_spread: bool,
) -> tuple[ModelConfig, int]:
    """The model's config with its layout, padded; and of what a step's tokens are a multiple.

    Args:
        axes: sizes of the mesh's axes.
        is_spread: KV heads may lie elsewhere.

    Raises:
        JaxinferError: the layout is none, or fits neither model nor mesh.
    """
    name, layout = options.layout or "megatron", load_layout(options.layout)
    if is_spread and (len(axes) > 1 or replace(layout, parameters=()) != _ANY_RULES):
        raise JaxinferError(
            f"layout {name} on mesh axes {list(axes)}: attention groups need megatron, or other "
            "rules of parameters, on one axis"
        )
    try:
        check_names(layout, axes)
        wide = replace(padded(config, axes, layout), kernels=kernels, layout=layout)
        check_on_mesh(layout, axes, wide)
        return wide, _multiple(options, axes, layout)
    except JaxinferError as error:
        raise JaxinferError(f"layout {name}: {error}") from None


def _multiple(options: EngineOptions, axes: Mapping[str, int], layout: Layout) -> int:
    """Pieces that tokens are cut into; the rows that are sampled from must divide as they are."""
    multiple, pieces = most_ways("T", layout, axes), most_ways("S", layout, axes)
    for tokens in options.token_buckets or ():
        check_divides("T", "token_buckets", tokens, multiple)
    buckets = StepLimits(options.max_num_seqs, options.max_num_batched_tokens, 1, 1).row_buckets
    for rows in (*buckets, BLOCK_ROWS):
        check_divides("S", "logits", rows, pieces)
    return multiple
