"""GGUF files: metadata, and tensors dequantised to float32.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version,
counts, metadata, tensor table, padding, data. ``gguf.GGUFReader`` makes a numpy array of every
vocabulary entry, which costs seconds; only its dequantisation is used here.
"""

import mmap
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from jaxinfer.errors import JaxinferError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: row-major, i.e. GGUF's dimensions reversed; a matrix is [out, in].
        dtype: stored type by GGUF's name, e.g. ``"Q4_1"``.
        data: stored bytes, uint8 [rows, bytes per row], read-only.
    """

    shape: tuple[int, ...]
    dtype: str
    data: np.ndarray

    def blocks(self) -> np.ndarray:
        """Return the stored bytes of a matrix, [out, blocks of a row, bytes of a block]."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.dtype]]
        return self.data.reshape(-1, self.shape[-1] // block, size)

    def load(self) -> np.ndarray:
        """Return the values as a new float32 array of ``shape``."""
        values: np.ndarray = dequantize(self.data, GGMLQuantizationType[self.dtype])
        values = values.reshape(self.shape)
        # Stored float32 is returned as a view of the file.
        return values.copy() if self.dtype == "F32" else values


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata and tensors, both under the file's own names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path, *more: Path) -> GGUFFile:
    """Read the header of the GGUF file at ``path``; tensor data stays on disk until loaded.

    Args:
        more: the other parts of the file, if it is cut. The parts are joined in memory, which holds
            the whole file as long as one of its tensors is in use.

    Raises:
        JaxinferError: a file is missing, is not a GGUF file of version 2 or 3, is truncated or
            corrupt, or has a tensor whose type cannot be dequantised.
    """
    content = _content([path, *more])
    header = _Header(path, content)
    metadata, entries = header.read()
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise JaxinferError(f"{path}: general.alignment is {alignment!r}, must be positive")
    start = -(-header.offset // alignment) * alignment
    data = np.frombuffer(content, np.uint8)
    data.flags.writeable = False
    tensors = {name: _tensor(path, name, *entry, data, start) for name, entry in entries.items()}
    return GGUFFile(path, metadata, tensors)


def _content(parts: Sequence[Path]) -> mmap.mmap:
    """Return the file's contents: mapped, or a copy of its joined parts."""
    part = parts[0]
    try:
        with part.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise JaxinferError(f"{part}: not a GGUF file (it does not begin with 'GGUF')")
            if len(parts) == 1:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = 0
        for part in parts:
            size += part.stat().st_size
        content = mmap.mmap(-1, size)
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, content)
    except OSError as error:
        raise JaxinferError(f"{part}: cannot read the file: {error.strerror}") from None
    return content


def _tensor(
    path: Path,
    name: str,
    dims: tuple[int, ...],
    type_id: int,
    offset: int,
    data: np.ndarray,
    start: int,
) -> GGUFTensor:
    type_name = _dequantisable_type(path, name, type_id)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    row = dims[0] if dims else 1
    if row % block:
        raise JaxinferError(
            f"{path}: tensor {name!r} has rows of {row}, {type_name} needs multiples of {block}"
        )
    row_bytes = row // block * block_bytes
    rows = 1
    for dim in dims[1:]:
        rows *= dim
    begin, size = start + offset, rows * row_bytes
    if begin + size > len(data):
        raise JaxinferError(
            f"{path}: truncated: tensor {name!r} ends at byte {begin + size}, "
            f"the file at {len(data)}; download it again"
        )
    return GGUFTensor(dims[::-1], type_name, data[begin : begin + size].reshape(rows, row_bytes))


def _dequantisable_type(path: Path, name: str, type_id: int) -> str:
    try:
        kind = GGMLQuantizationType(type_id)
        block_bytes = GGML_QUANT_SIZES[kind][1]
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, NotImplementedError):
        known = {kind.value: kind.name for kind in GGMLQuantizationType}.get(type_id, type_id)
        raise JaxinferError(
            f"{path}: tensor {name!r} has type {known}, which cannot be dequantised; "
            "use F32, F16, BF16, Q8_0, Q4_0, Q4_1 or a K quantisation"
        ) from None
    return str(kind.name)


class _Header:
    """Reads a GGUF header from front to back."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.offset = len(_MAGIC)

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """Return the metadata, and for each tensor GGUF's dimensions, type and offset in
        the data.
        """
        try:
            (version,) = self._unpack("I")
            if version not in _VERSIONS:
                raise JaxinferError(f"{self.path}: GGUF version {version}, must be 2 or 3")
            num_tensors, num_keys = self._unpack("QQ")
            metadata: dict[str, Any] = {}
            for _ in range(num_keys):
                key = self._new(self._string(), metadata)
                metadata[key] = self._value(*self._unpack("I"))
            tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
            for _ in range(num_tensors):
                name, entry = self._tensor_entry()
                tensors[self._new(name, tensors)] = entry
            return metadata, tensors
        except struct.error:
            raise JaxinferError(
                f"{self.path}: truncated or corrupt: the header goes past the file's end "
                f"({len(self.content)} bytes); download it again"
            ) from None
        except UnicodeDecodeError:
            raise JaxinferError(
                f"{self.path}: corrupt: no UTF-8 text at byte {self.offset}; download it again"
            ) from None

    def _new(self, name: str, names: Mapping[str, Any]) -> str:
        if name in names:
            raise JaxinferError(f"{self.path}: has {name!r} twice, must have it once")
        return name

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.content, self.offset)
        self.offset += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.content, self.offset)
        begin = self.offset + 8
        if begin + length > len(self.content):
            raise struct.error
        text = self.content[begin : begin + length].decode()
        self.offset = begin + length
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise JaxinferError(f"{self.path}: corrupt: unknown value type {kind} in the metadata")
        item_kind, length = self._unpack("IQ")
        if length > len(self.content):
            raise struct.error
        if item_kind in _SCALARS:
            return list(self._unpack(f"{length}{_SCALARS[item_kind]}"))
        return [self._value(item_kind) for _ in range(length)]

    def _tensor_entry(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        dims = self._unpack(f"{num_dims}Q")
        type_id, offset = self._unpack("IQ")
        return name, (dims, type_id, offset)
