"""Tensors of folders whose linear weights have 8 bits, with separate scales.

``weight`` is in int8 or fp8 (e4m3); ``weight_scale`` has one number for each output channel or one
for all. ``quantization.py`` reads which weights they are.
"""

from collections.abc import Mapping
from typing import Protocol

from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.models.eight_bits import scale_path

_TYPES = {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}


class Stored(Protocol):
    """A tensor as a checkpoint describes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def dtype(self) -> str: ...  # noqa: D102


def scale_name(name: str) -> str:
    """Return the name of a weight's scales."""
    return f"{name.removesuffix('.weight')}.weight_scale"


def bit_problems(
    tensors: Mapping[str, Stored], specs: Mapping[str, WeightSpec], config: ModelConfig
) -> list[str]:
    """Return a message for each weight whose stored type or scales are not those of the config."""
    problems, stored = [], config.stored_bits
    for path, spec in specs.items():
        is_narrow = stored and scale_path(path) and path not in config.wide_weights
        wanted = _TYPES[stored] if stored and is_narrow else None
        for name in spec.tensors:
            tensor = tensors.get(name)
            if tensor is None or (tensor.dtype not in _TYPES.values() and wanted is None):
                continue
            if tensor.dtype != wanted:
                must = wanted or "of 16 or 32 bits"
                problems.append(f"{name} has type {tensor.dtype}, must be {must}")
                continue
            scales = tensors.get(scale_name(name))
            shapes = [(), (1,), (spec.shape[0],), (spec.shape[0], 1)]
            if scales is None:
                problems.append(f"missing {scale_name(name)}")
            elif scales.shape not in shapes:
                problems.append(
                    f"{scale_name(name)} has shape {scales.shape}, must be one of: {shapes}"
                )
    return problems
