"""Digests of a model's files, which distinguish models with the same name."""

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from jaxinfer.checkpoints.checkpoint import locate
from jaxinfer.checkpoints.converted import MANIFEST, PARAMETERS, is_converted
from jaxinfer.checkpoints.gguf_split import files_of_split
from jaxinfer.checkpoints.hub import FILES
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import read_json

_PIECE = 1 << 20
# Files of up to this size are always read again, even if their size and time are unchanged, because
# that takes little time.
_SMALL = 64 * _PIECE
_AT_ONCE = 8


@dataclass(frozen=True)
class Fingerprint:
    """A model's files, by their path in the model's folder.

    Attributes:
        digests: digests of their contents.
        stamps: size and modification time in nanoseconds, when they were read.
    """

    digests: dict[str, str] = field(default_factory=dict)
    stamps: dict[str, list[int]] = field(default_factory=dict)


def fingerprint(
    model: str, load_format: str = "auto", known: Fingerprint | None = None
) -> Fingerprint:
    """Digest everything that decides a model's answers: weights, configs, tokenizer and template.

    Args:
        load_format: with ``dummy``, weights are left out.
        known: an earlier fingerprint. A large file with the same stamp is not read again.

    Raises:
        JaxinferError: there is no such model, or one of its files cannot be read.
    """
    weights = load_format != "dummy"
    _, paths = locate(model, weights)
    before = known or Fingerprint()

    def read(name: str, path: Path) -> tuple[str, list[int]]:
        try:
            status = path.stat()
            stamp = [status.st_size, status.st_mtime_ns]
            same = stamp == before.stamps.get(name) and status.st_size > _SMALL
            digest = before.digests.get(name) if same else None
            return digest or _digest(path, status.st_size), stamp
        except OSError as error:
            raise JaxinferError(f"{path}: cannot read the file: {error.strerror}") from None

    files = dict(_files(paths, weights))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(files, pool.map(read, files, files.values()), strict=True))
    return Fingerprint(
        {name: digest for name, (digest, _) in found.items()},
        {name: stamp for name, (_, stamp) in found.items()},
    )


def _files(paths: Sequence[Path], weights: bool) -> Iterator[tuple[str, Path]]:
    folder = paths[0]
    if not folder.is_dir():
        found = list(paths) if len(paths) > 1 else files_of_split(folder)
        yield from ((path.name, path) for path in found)
        return
    patterns = [name for name in FILES if weights or "safetensors" not in name]
    names = {path for pattern in patterns for path in folder.glob(pattern)}
    index = folder / "model.safetensors.index.json"
    if weights and index.is_file():
        named = read_json(index).get("weight_map")
        names |= (
            {folder / str(file) for file in named.values()} if isinstance(named, dict) else set()
        )
    if is_converted(folder):
        names |= {folder / MANIFEST, *(p for p in (folder / PARAMETERS).rglob("*") if p.is_file())}
    yield from ((os.path.relpath(path, folder), path) for path in sorted(names))


def _digest(path: Path, size: int) -> str:
    """Return the SHA-256 of the checksums of all pieces.

    This takes a third of the time for all bytes.

    Files in the hub's cache are named by their digests.
    """
    blob = path.resolve()
    if size > _SMALL and blob.parent.name == "blobs":
        return blob.name
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(zlib.crc32(piece).to_bytes(4, "big"))
    return digest.hexdigest()
