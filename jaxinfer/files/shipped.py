"""Finds files that come with the package by their names: run files, clusters, prompts, traces."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path(__file__).parents[1] / "configs"
# Folder of the shipped tables of operators, by card, in aiconfigurator's order; and their name in
# run files.
OPERATORS = SHIPPED / "operators"
OPERATORS_NAME = "configs/operators"


def data_path(name: str | Path) -> Path:
    """Return the path of a file or folder that a user names.

    An existing path as given comes first; then a shipped file of this name, with or without
    ``configs/`` in front; otherwise the name unchanged.
    """
    path = Path(name)
    if os.path.lexists(path) or path.is_absolute() or ".." in path.parts:
        return path
    inner = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    found = SHIPPED / inner
    return found if os.path.exists(found) else path


def read_shipped(name: str) -> Any:
    """Return the contents of a shipped YAML file, read with libyaml if it is available."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((SHIPPED / name).read_text(encoding="utf-8"), Loader=loader)


def why_not(path: str | Path, error: OSError) -> str:
    """Return why a user's path cannot be read, and the nearest name that ships."""
    reason = error.strerror or str(error)
    path = Path(path)
    if not isinstance(error, FileNotFoundError) or path.is_absolute():
        return reason
    near = get_close_matches(_inner(path), list(shipped_files()), n=1, cutoff=0.7)
    meant = f", did you mean {near[0]!r}?" if near else ""
    return f"{reason}, nor among what ships (`jaxinfer configs` lists it){meant}"


def shipped_files() -> Iterator[str]:
    """Yield the names of all files that ship."""
    for path in sorted(SHIPPED.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(SHIPPED).as_posix()


def _inner(path: Path) -> str:
    return path.as_posix().removeprefix("configs/")
