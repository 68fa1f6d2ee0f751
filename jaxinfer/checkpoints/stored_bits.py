"""Folders whose linear weights have 8 bits, with scales beside them, as ``config.json`` says.

Those of compressed-tensors, and of ``fp8``: ``weight`` in int8 or fp8 (e4m3), and ``weight_scale``,
one number for each output channel or one for all.
"""

from collections.abc import Mapping
from typing import Protocol

from jaxinfer.models.config import WeightSpec
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.eight_bits import scale_path

_KINDS = {"int": "int8", "float": "float8_e4m3fn"}
_TYPES = {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}


class Stored(Protocol):
    """A tensor as a checkpoint describes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def dtype(self) -> str: ...  # noqa: D102


def read_stored_bits(keys: Keys) -> str | None:
    """The dtype of linear weights by ``quantization_config``; None where there is none.

    Activations that it would quantise, too, stay as they are.

    Raises:
        JaxinferError: weights are quantised otherwise.
    """
    if keys.get("quantization_config") is None:
        return None
    found = keys.within("quantization_config")
    match found.get("quant_method"):
        case "fp8":
            found.only("weight_block_size", None)
            return _KINDS["float"]
        case "compressed-tensors":
            found.only("kv_cache_scheme", None)
            return _of_groups(found)
    method = found.get("quant_method")
    raise found.wrong("quant_method", method, "one of: compressed-tensors, fp8")


def _of_groups(found: Keys) -> str:
    formats = ("int-quantized", "float-quantized", "naive-quantized")
    if found.get("format") not in formats:
        raise found.wrong("format", found.get("format"), f"one of: {', '.join(formats)}")
    groups = found.within("config_groups")
    if len(groups.values) != 1:
        raise found.wrong("config_groups", list(groups.values), "one group")
    weights = groups.within(next(iter(groups.values))).within("weights")
    for key, known in {"num_bits": 8, "symmetric": True}.items():
        weights.only(key, known)
    for key, allowed in {"type": list(_KINDS), "strategy": ["channel", "tensor"]}.items():
        if weights.get(key) not in allowed:
            raise weights.wrong(key, weights.get(key), f"one of: {', '.join(allowed)}")
    return _KINDS[weights.get("type")]


def scale_name(name: str) -> str:
    """The name of a weight's scales."""
    return f"{name.removesuffix('.weight')}.weight_scale"


def bit_problems(
    tensors: Mapping[str, Stored], specs: Mapping[str, WeightSpec], stored: str | None
) -> list[str]:
    """Describe weights of 8 bits that lack scales, and those that are wider."""
    problems = []
    for path, spec in specs.items():
        wanted = _TYPES[stored] if stored and scale_path(path) else None
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
