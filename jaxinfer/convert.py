"""``jaxinfer convert``: converts a checkpoint to a folder that devices read shard by shard."""

import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.converted import MANIFEST, is_converted, write
from jaxinfer.checkpoints.generation import FILE as GENERATION
from jaxinfer.checkpoints.open_tensors import Checkpoint, load_weights
from jaxinfer.errors import JaxinferError
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.text.tokenizer import load_tokenizer

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def convert(model: str, destination: str, dtype: str | None, force: bool) -> Path:
    """Write ``model``'s parameters, configuration and tokenizer to a new folder.

    The folder gets its name when it is complete. All weights are in host memory at once.

    Args:
        model: any model of ``open_checkpoint`` except converted folders.
        destination: a folder that does not exist or is empty.
        dtype: a name in ``DTYPES``, or None for the stored one (float32 for a GGUF file). Vectors
            are always float32.
        force: replace a converted folder, and remove the remains of a killed process.

    Returns:
        The folder, as an absolute path.

    Raises:
        JaxinferError: the model cannot be opened, the destination is taken, or it cannot be
            written.
    """
    folder = Path(destination).expanduser().resolve()
    partial = folder.with_name(folder.name + ".partial")
    _check_destination(folder, partial, force)
    checkpoint = open_checkpoint(model)
    if checkpoint.converted is not None:
        raise JaxinferError(f"{model} is converted already: convert the original instead")
    if checkpoint.config.stored_bits:
        raise JaxinferError(f"{model} has weights of 8 bits: run it as it is, it loads as fast")
    try:
        if force and partial.exists():
            shutil.rmtree(partial)
        # This fails if another process has made it since.
        partial.mkdir()
    except OSError as error:
        raise JaxinferError(f"{partial}: cannot write: {error.strerror}") from None
    try:
        _fill(partial, checkpoint, dtype)
        _replace(folder, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _check_destination(folder: Path, partial: Path, force: bool) -> None:
    if not folder.parent.is_dir():
        raise JaxinferError(f"{folder}: there is no folder {folder.parent}")
    if folder.exists() and not folder.is_dir():
        raise JaxinferError(f"{folder} is a file, must be a new folder")
    if folder.exists() and any(folder.iterdir()):
        if not is_converted(folder):
            raise JaxinferError(f"{folder} exists and is no converted model: name a new folder")
        if not force:
            raise JaxinferError(f"{folder} exists; --force overwrites it")
    if partial.exists() and not force:
        raise JaxinferError(
            f"{partial} exists: another convert is running, or was killed; --force removes it"
        )


def _fill(folder: Path, checkpoint: Checkpoint, dtype: str | None) -> None:
    def stored(path: str, array: np.ndarray) -> np.ndarray:
        wanted = DTYPES["float32"] if array.ndim == 1 else DTYPES.get(dtype or "", array.dtype)
        return array.astype(wanted, copy=False)

    try:
        load_tokenizer(checkpoint).save(folder)
        if (defaults := checkpoint.path / GENERATION).is_file():
            shutil.copyfile(defaults, folder / GENERATION)
    except OSError as error:
        raise JaxinferError(f"{folder}: cannot write: {error.strerror}") from None
    specs = ARCHITECTURES[checkpoint.config.architecture].hf_weights(checkpoint.config)
    write(folder, checkpoint.config, load_weights(checkpoint, specs, stored))


def _replace(folder: Path, complete: Path) -> None:
    """Rename ``complete`` to ``folder``; an existing folder is first made unloadable."""
    try:
        if is_converted(folder):
            (folder / MANIFEST).unlink()
            shutil.rmtree(folder)
        os.rename(complete, folder)
    except OSError as error:
        raise JaxinferError(f"{folder}: cannot write: {error.strerror}") from None
