"""Opened checkpoints of every kind, and the way of their tensors to parameters."""

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
# Buffers that old versions of transformers saved beside the parameters.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that stays on disk until loaded.

    Attributes:
        shape: Hugging Face's; a matrix is [out, in].
        dtype: the stored type by the file's own name, e.g. ``"BF16"`` or ``"Q4_1"``.
        load: reads the values: float32 from a GGUF file; from safetensors the stored type, as a
            view of the file, whose bytes are read where they are used.
        blocks: reads the stored bytes of a Q8_0 matrix, uint8 [out, in / 32, 34], which a device
            can dequantise; none of other tensors.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], np.ndarray]
    blocks: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        name: the demo name, or the file's or folder's name.
        path: the GGUF file, the first of its parts, or the folder.
        tensors: by Hugging Face's names, e.g. ``"model.layers.0.self_attn.q_proj.weight"``;
            none where the checkpoint is converted.
        tokenizer_source: the GGUF file's metadata, or the folder with the tokenizer's files.
        converted: of a converted checkpoint, the shapes of its arrays by parameter path.
        source: what ``open_checkpoint`` was asked for, which opens it elsewhere too.
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
        specs: by parameter path.
        place: takes a parameter's path and its converted array; e.g. gives it another dtype.

    Returns:
        What ``place`` returned, by parameter path.

    Raises:
        JaxinferError: see ``check_tensors``.
    """
    check_tensors(checkpoint, specs)
    return {
        path: place(path, spec.made_of(read_tensors(checkpoint, spec), np.stack))
        for path, spec in specs.items()
    }


def check_tensors(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]) -> None:
    """Check that the checkpoint has what the model's parameters are made of, and no more.

    Raises:
        JaxinferError: names what it lacks, has too many, or has in another shape.
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
    """Scales of a weight of 8 bits, one for each row, or for all: no view, which may be kept."""
    from jaxinfer.checkpoints.stored_bits import scale_name  # brings JAX

    (name,) = spec.tensors
    return checkpoint.tensors[scale_name(name)].load().copy()


def read_tensors(
    checkpoint: Checkpoint, spec: WeightSpec, blocks_from: float = math.inf
) -> list[np.ndarray]:
    """Tensors that a parameter is made of, as they lie in the checkpoint.

    Args:
        blocks_from: numbers in a tensor from which its blocks are read, where it has some.
    """
    found = []
    for name in spec.tensors:
        tensor = checkpoint.tensors[name]
        is_large = math.prod(tensor.shape) >= blocks_from
        found.append((tensor.blocks if is_large and tensor.blocks else tensor.load)())
    return found


def _key_problems(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]) -> list[str]:
    from jaxinfer.checkpoints.stored_bits import bit_problems, scale_name  # brings JAX

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
    # Of activations, which are not quantised here.
    of_inputs = config.stored_bits is not None and name.endswith(".input_scale")
    return tied_copy or of_inputs or _ROTARY_BUFFER.fullmatch(name) is not None


def _check_tied_copy(checkpoint: Checkpoint, embedding: WeightSpec) -> None:
    """Refuse an output matrix of its own where the configuration says that there is none."""
    head = checkpoint.tensors.get("lm_head.weight")
    if head and not np.array_equal(head.load(), read_tensors(checkpoint, embedding)[0]):
        raise JaxinferError(
            f"{checkpoint.path}: tie_word_embeddings is true, but lm_head.weight differs from "
            f"{embedding.names}; set tie_word_embeddings to false in config.json"
        )
