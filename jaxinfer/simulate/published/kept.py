"""Converted operators, kept as arrays under a key of all that they were made from."""

import hashlib
import json
import os
import tempfile
import zipfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.simulate.published.convert import OperatorPoints, Wanted, convert
from jaxinfer.simulate.published.files import FAMILIES

FOLDER = Path("~/.cache/jaxinfer/operators")
# Raised with each change of what a conversion makes.
_VERSION = 1


@lru_cache(maxsize=64)
def operator_points(wanted: Wanted) -> OperatorPoints:
    """Read or convert a model's operators.

    Raises:
        JaxinferError: see ``convert``.
    """
    path = FOLDER.expanduser() / f"{_key(wanted)}.npz"
    with suppress(OSError, KeyError, ValueError, zipfile.BadZipFile):
        return _load(path)
    found = convert(wanted)
    _save(path, found)
    return found


def _key(wanted: Wanted) -> str:
    """A digest of what is wanted, and of all files that it may be read from."""
    model = wanted.model.model_dump()
    asked = {name: str(value) for name, value in vars(wanted).items() if name != "model"}
    digests = {
        str(path): _digest(path, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(wanted.folder.rglob("*"))
        if path.suffix == ".yaml" or (path.stem in FAMILIES and wanted.backend in path.parts)
    }
    text = json.dumps([_VERSION, asked, model, digests], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=1024)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(path: Path) -> OperatorPoints:
    found = OperatorPoints()
    with np.load(path) as arrays:
        for name in arrays.files:
            kind, _, operator = name.partition(":")
            if kind == "files":
                found.files = arrays[name].tolist()
            elif kind in ("chunks", "decodes"):
                each = {(a, b): micros for a, b, micros in arrays[name].tolist()}
                setattr(found, kind, each)
            else:
                getattr(found, kind)[operator] = dict(arrays[name].tolist())
    return found


def _save(path: Path, found: OperatorPoints) -> None:
    """Keep them; where that cannot be, they are converted again next time."""
    arrays: dict[str, Any] = {
        f"{kind}:{name}": np.array(list(points.items()))
        for kind in ("dense", "heads")
        for name, points in getattr(found, kind).items()
    }
    for kind in ("chunks", "decodes"):
        each = getattr(found, kind)
        arrays[kind] = np.array([(*at, micros) for at, micros in each.items()])
    arrays["files"] = np.array(found.files)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(suffix=".npz", dir=path.parent)
        with os.fdopen(number, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, path)
