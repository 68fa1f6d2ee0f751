"""Hugging Face folders: ``config.json`` and safetensors."""

import json
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.checkpoints.config_readers import read_architecture
from jaxinfer.checkpoints.open_tensors import Checkpoint, LazyTensor
from jaxinfer.checkpoints.quantization import with_stored_bits
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys
from jaxinfer.options.validation import read_json

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
}


def open_folder(path: Path, name: str, weights: bool = True) -> Checkpoint:
    """Open the folder ``path``, whose tensors stay on disk.

    Args:
        weights: open the safetensors; otherwise there may be none.

    Raises:
        JaxinferError: a file is missing or damaged, or a feature is not implemented.
    """
    config = read_folder_config(path)
    tensors = _open_tensors(path) if weights else {}
    # The checkpoint was saved without a head, like the published OPTs.
    if not any(name.startswith("model.") for name in tensors):
        tensors = {
            name if name.startswith("lm_head.") else f"model.{name}": tensor
            for name, tensor in tensors.items()
        }
    return Checkpoint(name, path, config, tensors, tokenizer_source=path)


def read_folder_config(folder: Path) -> ModelConfig:
    """Read the config in ``config.json``, and add the EOS tokens of ``generation_config.json``.

    Both transformers 4's and 5's spellings are read; see ``config_readers``.

    Raises:
        JaxinferError: a file is missing or not JSON; see also ``read_architecture``.
    """
    path = folder / "config.json"
    if not path.exists():
        raise JaxinferError(f"{folder}: has no config.json; must be a Hugging Face model folder")
    more_path = folder / "generation_config.json"
    # A class's own EOS applies only if the folder states no end tokens.
    absent = {"eos_token_id": None} if more_path.exists() else {}
    keys = Keys(path, absent | read_json(path))
    config = with_stored_bits(read_architecture(keys), keys)
    more = Keys(more_path, read_json(more_path) if more_path.exists() else {})
    ends = dict.fromkeys([*config.eos_token_ids, *more.tokens("eos_token_id")])
    return replace(config, eos_token_ids=tuple(ends))


def _open_tensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of ``model.safetensors``, or each from the file that the index names."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return _open_safetensors(single)
    if not index.exists():
        raise JaxinferError(
            f"{path}: has neither {single.name} nor {index.name}; weights in another format "
            "become safetensors with transformers' save_pretrained"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise JaxinferError(f"{index}: lacks 'weight_map', from tensor names to file names")
    tensors: dict[str, LazyTensor] = {}
    unnamed: dict[str, str] = {}
    for file in sorted(set(map(str, weight_map.values()))):
        if not (path / file).is_file():
            raise JaxinferError(f"{index}: names {file!r}, which is not in the folder")
        for name, tensor in _open_safetensors(path / file).items():
            # A file may also hold another file's tensor, perhaps an old one.
            if weight_map.get(name, file) != file:
                continue
            if name not in weight_map and unnamed.setdefault(name, file) != file:
                raise JaxinferError(
                    f"{index}: does not say whether {name!r} is that of {unnamed[name]} or that "
                    f"of {file}, which both have it"
                )
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise JaxinferError(f"{index}: has {name!r} in {file}, which lacks it")
    return tensors


def _open_safetensors(path: Path) -> dict[str, LazyTensor]:
    try:
        file: Any = safe_open(path, framework="np")
    except SafetensorError as error:
        raise JaxinferError(f"{path}: damaged or truncated: {one_line(error)}") from None
    except OSError as error:
        raise JaxinferError(f"{path}: cannot read the file: {one_line(error)}") from None
    content = _Content(path)
    tensors = {}
    for name in file.keys():  # noqa: SIM118  (not a mapping)
        view = file.get_slice(name)
        if view.get_dtype() not in _DTYPES:
            raise JaxinferError(
                f"{path}: tensor {name!r} has type {view.get_dtype()}, "
                f"must be one of: {', '.join(_DTYPES)}"
            )
        shape = tuple(view.get_shape())
        tensors[name] = LazyTensor(shape, view.get_dtype(), partial(content.view, name))
    return tensors


class _Content:
    """A safetensors file in memory, as stored on disk; safetensors' own tensors would be copies."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        (length,) = struct.unpack("<Q", self._bytes[:8].tobytes())
        self._start = 8 + length
        self._header = json.loads(self._bytes[8 : self._start].tobytes())

    def view(self, name: str) -> np.ndarray:
        """Return a read-only view of a tensor."""
        begin, end = (self._start + at for at in self._header[name]["data_offsets"])
        dtype, shape = _DTYPES[self._header[name]["dtype"]], self._header[name]["shape"]
        return np.asarray(self._bytes)[begin:end].view(dtype).reshape(shape)
