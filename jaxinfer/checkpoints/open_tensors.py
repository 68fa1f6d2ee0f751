"""Opened checkpoints of every kind, and the conversion of their tensors to parameters."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxinfer.checkpoints.converted import Shapes
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig, WeightSpec

T = TypeVar("T")

_MAX_PROBLEMS = 10
# Buffers that old versions of transformers saved together with the parameters.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that stays on disk until it is loaded.

    Attributes:
        shape: Hugging Face's shape; a matrix is [out, in].
        dtype: stored type by the file's own name, e.g. ``"BF16"`` or ``"Q4_1"``.
        load: reads the values: float32 from a GGUF file; from safetensors a view of the file in the
            stored type, whose bytes are read when they are used.
        blocks: reads the stored bytes of a Q8_0 matrix, uint8 [out, in / 32, 34], which a device
            can dequantise; None for other tensors.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], np.ndarray]
    blocks: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        name: demo name, or name of the file or folder.
        path: path of the GGUF file, of the first of its parts, or of the folder.
        tensors: tensors by Hugging Face's names, e.g. ``"model.layers.0.self_attn.q_proj.weight"``;
            empty for a converted checkpoint.
        tokenizer_source: metadata of the GGUF file, or the folder with the tokenizer's files.
        converted: shapes of a converted checkpoint's arrays, by parameter path; otherwise None.
        source: argument of ``open_checkpoint``, with which other processes open it, too.
    """

    name: str
    path: Path
    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer_source: Mapping[str, Any] | Path
    converted: Shapes | None = None
    source: str = ""


def load_weights(
    checkpoint: Checkpoint,
    specs: Mapping[str, WeightSpec],
    place: Callable[[str, np.ndarray], T],
) -> dict[str, T]:
    """Load every tensor of the model on the host, one at a time.

    Args:
        specs: specs by parameter path.
        place: called with a parameter's path and its converted array, for example to change its
            dtype.

    Returns:
        The results of ``place``, by parameter path.

    Raises:
        JaxinferError: see ``check_tensors``.
    """
    check_tensors(checkpoint, specs)
    return {
        path: place(path, spec.made_of(read_tensors(checkpoint, spec), np.stack))
        for path, spec in specs.items()
    }


def check_tensors(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]) -> None:
    """Check that the checkpoint has exactly the tensors of the model's parameters.

    Raises:
        JaxinferError: tensors are missing, superfluous or of another shape; the message names them.
    """
    problems = _key_problems(checkpoint, specs)
    if problems:
        shown = "; ".join(problems[:_MAX_PROBLEMS])
        more = len(problems) - _MAX_PROBLEMS
        raise JaxinferError(
            f"{checkpoint.path}: tensors do not fit {checkpoint.config.architecture}: {shown}"
            + (f"; and {more} more" if more > 0 else "")
        )
    if "head_VD" not in specs:
        _check_tied_copy(checkpoint, specs["embed_VD"])


def read_scales(checkpoint: Checkpoint, spec: WeightSpec) -> np.ndarray:
    """Return a copy of a weight's scales: one for each row, or one for all."""
    from jaxinfer.checkpoints.stored_bits import scale_name  # This imports JAX.

    (name,) = spec.tensors
    return checkpoint.tensors[scale_name(name)].load().copy()


def read_tensors(
    checkpoint: Checkpoint, spec: WeightSpec, blocks_from: float = math.inf
) -> list[np.ndarray]:
    """Return the tensors of a parameter, as stored in the checkpoint.

    Args:
        blocks_from: number of elements from which on a tensor's blocks are read instead of its
            values, if it has any.
    """
    found = []
    for name in spec.tensors:
        tensor = checkpoint.tensors[name]
        is_large = math.prod(tensor.shape) >= blocks_from
        found.append((tensor.blocks if is_large and tensor.blocks else tensor.load)())
    return found


def _key_problems(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]) -> list[str]:
    from jaxinfer.checkpoints.stored_bits import bit_problems, scale_name  # This imports JAX.

    tensors, stored = checkpoint.tensors, checkpoint.config.stored_bits
    shapes = {name: spec.shape for spec in specs.values() for name in spec.tensors}
    missing = [f"missing {name}" for name in shapes if name not in tensors]
    if "missing lm_head.weight" in missing:
        missing.append("tie_word_embeddings: true would take the embedding for it")
    scales = {scale_name(name) for name in shapes} if stored else set()
    unexpected = [
        f"unexpected {name}"
        for name in tensors
        if name not in shapes
        and name not in scales
        and not _is_superfluous(name, checkpoint.config)
    ]
    misshapen = [
        f"{name} has shape {tensors[name].shape}, must be {shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    return missing + unexpected + misshapen + bit_problems(tensors, specs, checkpoint.config)


def _is_superfluous(name: str, config: ModelConfig) -> bool:
    tied_copy = name == "lm_head.weight" and config.tie_word_embeddings
    # Scales of activations, which are not quantised here.
    of_inputs = config.stored_bits is not None and name.endswith(".input_scale")
    return tied_copy or of_inputs or _ROTARY_BUFFER.fullmatch(name) is not None


def _check_tied_copy(checkpoint: Checkpoint, embedding: WeightSpec) -> None:
    """Refuse a separate output matrix if the configuration says that it is the embedding."""
    head = checkpoint.tensors.get("lm_head.weight")
    if head and not np.array_equal(head.load(), read_tensors(checkpoint, embedding)[0]):
        raise JaxinferError(
            f"{checkpoint.path}: tie_word_embeddings is true, but lm_head.weight differs from "
            f"{embedding.names}; set tie_word_embeddings to false in config.json"
        )
