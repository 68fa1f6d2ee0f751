"""A cache of a model's operators from published tables, keyed by the tables' contents."""

import io
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.files.contents import file_digest
from jaxinfer.files.kept import key_of, write_whole
from jaxinfer.files.made_from import code_version
from jaxinfer.simulate.costs.attention_grid import GridValues
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from jaxinfer.simulate.costs.tables import AttentionTable, OperatorTables
from jaxinfer.simulate.published.convert import OperatorPoints, Wanted, convert
from jaxinfer.simulate.published.files import FAMILIES

FOLDER = Path("~/.cache/jaxinfer/operators")


@dataclass(frozen=True)
class Published:
    """A model's operators, and the files from which they were read."""

    operators: OperatorTables
    files: list[str] = field(default_factory=list)


@lru_cache(maxsize=64)
def published_operators(wanted: Wanted) -> Published:
    """Read or convert a model's operators.

    Raises:
        JaxinferError: see ``convert``.
    """
    path = FOLDER.expanduser() / f"{_key(wanted)}.npz"
    with suppress(OSError, KeyError, ValueError, zipfile.BadZipFile):
        return _tables(*_load(path))
    points = convert(wanted)
    found = _tables(points, {})
    _save(path, points, found.operators.attention)
    return found


def _tables(found: OperatorPoints, grids: Mapping[str, GridValues]) -> Published:
    points = {(c, key, 0.0, 0.0): micros for (c, key), micros in found.chunks.items()}
    points |= {(0.0, 0.0, n, k): micros for (n, k), micros in found.decodes.items()}
    dense = {name: PiecewiseLinear(curve) for name, curve in found.dense.items()}
    heads = {name: PiecewiseLinear(curve) for name, curve in found.heads.items()}
    attention = AttentionTable(points, keyed=True, grids=grids)
    return Published(OperatorTables(dense, heads, attention, ()), found.files)


def _key(wanted: Wanted) -> str:
    """Return a digest of the request, of all files that may be read for it, and of our code."""
    model = wanted.model.model_dump()
    asked = {name: str(value) for name, value in vars(wanted).items() if name != "model"}
    digests = {
        str(path): file_digest(path)
        for path in sorted(wanted.folder.rglob("*"))
        if path.suffix == ".yaml" or (path.stem in FAMILIES and wanted.backend in path.parts)
    }
    return key_of(code_version(), asked, model, digests)


def _load(path: Path) -> tuple[OperatorPoints, dict[str, GridValues]]:
    found, grids = OperatorPoints(), {}
    with np.load(path) as arrays:
        for name in arrays.files:
            kind, _, of = name.partition(":")
            if kind == "files":
                found.files = arrays[name].tolist()
            elif kind in ("chunks", "decodes"):
                setattr(found, kind, {(a, b): micros for a, b, micros in arrays[name].tolist()})
            elif kind in ("dense", "heads"):
                getattr(found, kind)[of] = dict(arrays[name].tolist())
            elif kind == "values":
                axes = [arrays[f"axis{number}:{of}"].tolist() for number in range(4)]
                weights, filled = arrays[f"weights:{of}"].tolist(), int(arrays[f"filled:{of}"])
                grids[of] = GridValues(axes, arrays[name].tolist(), weights, filled)
    return found, grids


def _save(path: Path, found: OperatorPoints, attention: AttentionTable) -> None:
    """Store the operators; if that fails, they are converted again next time."""
    arrays: dict[str, Any] = {
        f"{kind}:{name}": np.array(list(points.items()))
        for kind in ("dense", "heads")
        for name, points in getattr(found, kind).items()
    }
    for kind in ("chunks", "decodes"):
        each = getattr(found, kind)
        arrays[kind] = np.array([(*at, micros) for at, micros in each.items()])
    for kind, made in attention.grids.items():
        arrays[f"values:{kind}"] = made.grid.values
        arrays[f"weights:{kind}"], arrays[f"filled:{kind}"] = made.grid.weights, made.grid.filled
        arrays |= {f"axis{n}:{kind}": axis for n, axis in enumerate(made.grid.axes)}
    arrays["files"] = np.array(found.files)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(data := io.BytesIO(), **arrays)
        write_whole(path, data.getvalue())
