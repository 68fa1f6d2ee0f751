"""GGUF files split by ``llama-gguf-split``, each with some of the tensors."""

import re
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.checkpoints.gguf_file import GGUFFile, read_gguf
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config_keys import Keys

_NAME = re.compile(r"(?P<base>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def read_whole(paths: Sequence[Path]) -> GGUFFile:
    """Read a GGUF file, or all files of a split; one of them is enough to find the others.

    Args:
        paths: one file, or the parts into which a file is cut (see ``read_gguf``).

    Raises:
        JaxinferError: see ``read_gguf``; or a split lacks a file or a tensor, or has one twice.
    """
    file = read_gguf(*paths)
    count = Keys(file.path, file.metadata).count("split.count", 0)
    if count <= 1:
        return file
    files = [read_gguf(path) for path in _siblings(file.path, count)]
    first, tensors = files[0], dict(files[0].tensors)
    for number, each in enumerate(files):
        keys = Keys(each.path, each.metadata)
        if keys.get("split.count") != count:
            raise keys.wrong("split.count", keys.get("split.count"), f"{count}, as its name says")
        if keys.get("split.no") != number:
            raise keys.wrong("split.no", keys.get("split.no"), f"{number}, as its name says")
        if number and (twice := sorted(tensors.keys() & each.tensors.keys())):
            raise JaxinferError(f"{each.path}: has {twice[0]!r}, which an earlier file has too")
        tensors |= each.tensors
    keys = Keys(first.path, first.metadata)
    if keys.get("split.tensors.count", len(tensors)) != len(tensors):
        total = keys.get("split.tensors.count")
        raise keys.wrong("split.tensors.count", total, f"{len(tensors)}: so many are in the files")
    return GGUFFile(first.path, first.metadata, tensors)


def files_of_split(path: Path) -> list[Path]:
    """Return the files of the split that ``path`` belongs to, or else only this file."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return [path]
    names = (
        f"{match['base']}-{n + 1:05}-of-{match['count']}.gguf" for n in range(int(match["count"]))
    )
    return [each for each in map(path.with_name, names) if each.is_file()] or [path]


def _siblings(path: Path, count: int) -> list[Path]:
    """Return the files of a split, given one of them."""
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise JaxinferError(
            f"{path}: split.count is {count}, so the file must be named as its split named it: "
            f"NAME-00001-of-{count:05}.gguf"
        )
    found = [path.with_name(f"{match['base']}-{n + 1:05}-of-{count:05}.gguf") for n in range(count)]
    for each in found:
        if not each.is_file():
            raise JaxinferError(
                f"{each}: missing, one of the {count} files of a split; put it beside {path.name}"
            )
    return found
