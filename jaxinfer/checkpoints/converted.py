"""Converted checkpoints: parameters under our own paths, which devices read shard by shard.

A folder has ``jaxinfer.json`` (see ``Manifest``), the tokenizer's files, and ``parameters/``, an
Orbax checkpoint: uncompressed Zarr arrays in an OCDBT store. A chunk is the smallest unit that can
be read, so arrays are cut along every axis that devices may share.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.models.config import ModelConfig
from jaxinfer.options.validation import read_json

if TYPE_CHECKING:
    import jax

Shapes = Mapping[str, tuple[int, ...]]

MANIFEST = "jaxinfer.json"
PARAMETERS = "parameters"
_VERSION = 1

# Heads are stored one by one, because shards may have any number of them. On longer axes, the end
# of a shard may lie within a piece. More pieces have shorter rows, which take longer to read.
_HEADS = "NK"
_MAX_PIECES = 32
# The model's width and the size of a head, which few tables of rules cut.
_WHOLE = "DH"
_ARRAYS_WRITTEN_AT_ONCE = 8
_MIN_BYTES_IN_FLIGHT = 2**27


class Manifest(BaseModel):
    """The contents of ``jaxinfer.json``.

    Attributes:
        version: version of the folder's format.
        shapes: shapes of the stored arrays, by parameter path, without padding.
        files: size in bytes of each file in ``parameters/``, by its path there.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    version: int
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    files: dict[str, int]


def is_converted(folder: Path) -> bool:
    """Tell whether ``folder`` has a converted checkpoint, even a damaged one or another version."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read ``jaxinfer.json``; the arrays stay on disk.

    Raises:
        JaxinferError: the file cannot be read, has another version, or has a field that is unknown,
            missing or wrong.
    """
    from jaxinfer.models.registry import ARCHITECTURES  # This imports JAX.

    path = folder / MANIFEST
    values = read_json(path)
    version = values.get("version")
    if version != _VERSION:
        raise JaxinferError(
            f"{path}: version is {version!r}, must be {_VERSION}: convert the model again"
        )
    try:
        # Read from JSON again, because strict validation accepts a list for a tuple only there.
        manifest = Manifest.model_validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise JaxinferError(f"{path}: {name}: {first['msg']}; convert the model again") from None
    if manifest.config.architecture not in ARCHITECTURES:
        raise JaxinferError(
            f"{path}: config.architecture is {manifest.config.architecture!r}, "
            f"must be one of: {', '.join(ARCHITECTURES)}"
        )
    return manifest


def write(folder: Path, config: ModelConfig, parameters: Mapping[str, np.ndarray]) -> None:
    """Write arrays and manifest into the existing ``folder``; the manifest comes last.

    Args:
        parameters: arrays by path, without padding, in the dtypes to store.

    Raises:
        JaxinferError: the disk has too little space, or something cannot be written.
    """
    needed, free = sum(array.nbytes for array in parameters.values()), disk_usage(folder).free
    if needed > free:
        raise JaxinferError(
            f"{folder}: the parameters take {needed / 2**20:.0f} MiB, "
            f"{free / 2**20:.0f} MiB are free on the disk"
        )
    shapes = {path: array.shape for path, array in parameters.items()}
    try:
        arrays = folder.absolute() / PARAMETERS
        _write_arrays(arrays, parameters)
        found = (path for path in sorted(arrays.rglob("*")) if path.is_file())
        files = {path.relative_to(arrays).as_posix(): path.stat().st_size for path in found}
        manifest = Manifest(version=_VERSION, config=config, shapes=shapes, files=files)
        # The loader decides where parameters are placed.
        text = manifest.model_dump_json(indent=2, exclude={"config": {"layout"}}) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    # Orbax passes on all errors of TensorStore, and itself raises plain Exception.
    except Exception as error:
        raise JaxinferError(f"{folder}: cannot write: {_reason(error)}") from error


def chunk_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the chunks in which a parameter is stored and read."""

    def piece(letter: str, size: int) -> int:
        if letter in _WHOLE:
            return size
        return 1 if letter in _HEADS else math.ceil(size / _MAX_PIECES)

    letters = path.rpartition("_")[2]
    return tuple(piece(letter, size) for letter, size in zip(letters, shape, strict=True))


def _write_arrays(folder: Path, parameters: Mapping[str, np.ndarray]) -> None:
    import jax
    import orbax.checkpoint as ocp

    at_once = asyncio.Semaphore(_ARRAYS_WRITTEN_AT_ONCE)

    class Chunked(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
        """Sets the chunks, for which Orbax's own options are too coarse, and limits memory."""

        async def _open_and_write(self, value: np.ndarray, spec: Any, context: Any) -> None:
            path = spec["kvstore"]["path"].rstrip("/")
            spec["metadata"]["chunks"] = chunk_shape(path, value.shape)
            async with at_once:
                await super()._open_and_write(value, spec, context)

    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, Chunked(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # Orbax warns if there is none.
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(parameters)))


def restore(folder: Path, wanted: Mapping[str, "jax.ShapeDtypeStruct"]) -> dict[str, "jax.Array"]:
    """Read parameters; each device gets only its shards, straight from the disk.

    Args:
        wanted: shapes, dtypes and shardings by path; if a shape is larger than the stored one, the
            rest is zero.

    Raises:
        JaxinferError: a file is missing, truncated or damaged.
    """
    import jax
    import orbax.checkpoint as ocp

    arrays = folder.absolute() / PARAMETERS
    _check_files(arrays, read_manifest(folder).files)
    arguments = {
        path: ocp.ArrayRestoreArgs(
            sharding=array.sharding, global_shape=array.shape, dtype=array.dtype, strict=False
        )
        for path, array in wanted.items()
    }
    # More than the largest array, because Orbax refuses arrays above its limit.
    largest = max(math.prod(array.shape) * 4 for array in wanted.values())
    in_flight = max(_MIN_BYTES_IN_FLIGHT, largest * 5 // 4)
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=in_flight / 10**9)
    try:
        _check_index(arrays)
        with ocp.Checkpointer(handler) as checkpointer:
            restored: dict[str, jax.Array] = checkpointer.restore(
                arrays,
                args=ocp.args.PyTreeRestore(
                    item=dict(wanted), restore_args=arguments, partial_restore=True
                ),
            )
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    # The same limit as for writing.
    except Exception as error:
        raise JaxinferError(
            f"{arrays}: damaged, convert the model again: {_reason(error)}"
        ) from error
    return restored


def _check_index(folder: Path) -> None:
    """Read the store's index, which has checksums; raise one TensorStore error if it is damaged.

    If reads fail that Orbax runs concurrently, all but one print their own tracebacks.
    """
    import tensorstore

    base = {"driver": "file", "path": f"{folder}/"}
    tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()


def _check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise JaxinferError(f"{path}: missing; copy the folder or convert the model again")
        if path.stat().st_size != size:
            raise JaxinferError(
                f"{path}: {path.stat().st_size} bytes long, must be {size}; "
                "copy the folder or convert the model again"
            )


def _reason(error: BaseException) -> str:
    """Return the innermost cause in one line, without TensorStore's dump of its settings."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error).partition(" [tensorstore_spec=")[0].partition(" [source")[0]
    return f"{type(error).__name__}: {text[:300]}"
