"""Digests of the files that a run file names."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from jaxinfer.files.own_modules import with_imports
from jaxinfer.files.shipped import OPERATORS_NAME, data_path

# Options that may name a folder by a single word; elsewhere, a word is a system, group or planner.
_FOLDERS = ("model", "tokenizer", "tables", "folder")
# Files of a folder that matter in addition to its tables: a model's shape and tokenizer, and how it
# was measured.
_INSIDE = (
    *("config.json", "generation_config.json", "meta.yaml"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)


def contents(data: object, beside: bool = True) -> dict[str, str]:
    """Return the SHA-256 of each file that run files name, and of the user's own modules.

    They show whether a file has changed when a search is continued or a run is repeated.

    Args:
        data: a run file's contents; all texts in it that may be names of files are looked up.
        beside: for a module or a Python file, include those in its folder and all their imports.
    """
    found = {}
    for text, may_be_folder in _texts(data):
        for path in _files(text, may_be_folder, beside):
            with suppress(OSError):  # It is gone or closed by now; its user will report that.
                found[str(path)] = file_digest(path)
    return found


def _texts(value: object, of_folder: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether it may name a folder, as texts without a key may."""
    if isinstance(value, str):
        if value:
            yield value, of_folder or "/" in value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            named = key == "tables" and isinstance(item, str) and not data_path(item).exists()
            yield from _texts(OPERATORS_NAME if named else item, key in _FOLDERS)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, of_folder)


def _files(text: str, may_be_folder: bool, beside: bool) -> Iterator[Path]:
    """Yield the file of this name, the files of a folder with data or a model, or a
    module's files.
    """
    module, colon, _ = text.partition(":")
    try:
        path = data_path(Path(text).expanduser())
        if path.is_file():
            yield from with_imports(path) if beside and path.suffix == ".py" else [path]
        elif may_be_folder and path.is_dir():
            named = (path / name for name in _INSIDE)
            tables = (path.rglob(name) for name in ("*.csv*", "*.parquet", "*.npz"))
            cards = path.glob("*.yaml")
            found = dict.fromkeys(chain(named, *tables, cards))
            yield from (p for p in found if p.is_file())
        elif colon and all(part.isidentifier() for part in module.split(".")):
            spec = find_spec(module)
            if spec and spec.origin and Path(spec.origin).is_file():
                module_file = Path(spec.origin)
                yield from with_imports(module_file) if beside else [module_file]
    except (OSError, RuntimeError, ValueError, ImportError):
        return  # It is too long or otherwise invalid as a name; its user will report that.


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if it has changed."""
    status = path.stat()
    return _digest(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
