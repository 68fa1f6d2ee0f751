"""Finds the files of a user's own modules from the imports in their source."""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

# Installed packages, and this one, count by their versions.
_INSTALLED = ("site-packages", "dist-packages")
_OURS = "jaxinfer"


def with_imports(path: Path) -> list[Path]:
    """Return a Python file, the others in its folder, and all files that they import.

    Imports from the module search path count, except the standard library, installed packages and
    jaxinfer. All files in the folder count, since names of imports may be computed.
    """
    found = dict.fromkeys([path, *sorted(path.parent.glob("*.py"))])
    waiting = list(found)
    while waiting:
        here = waiting.pop()
        for file in _imported(here):
            if file not in found:
                found[file] = None
                waiting.append(file)
    return sorted(found)


def _imported(path: Path) -> Iterator[Path]:
    """Yield the files of modules that a file imports itself, and of packages that it is in."""
    for folder in path.parents:
        if not (package := folder / "__init__.py").is_file():
            break
        yield package
    status = path.stat()
    for level, name in _imports(path, status.st_mtime_ns, status.st_size):
        roots = [path.parents[level - 1]] if level else _roots()
        for root in roots:
            at, files = root, []
            for part in name.split(".") if name else ():
                at = at / part
                files += [at.with_suffix(".py"), at / "__init__.py"]
            if there := [file for file in files if file.is_file()]:
                yield from there
                break


def _roots() -> list[Path]:
    """Return the folders of the module search path that have a user's own modules."""
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    paths = [Path.cwd(), *(Path(entry or ".").absolute() for entry in sys.path)]
    return [
        path
        for path in dict.fromkeys(paths)
        if str(path) not in standard
        and path.is_dir()
        and not set(_INSTALLED) & set(path.parts)
        and path.name != "lib-dynload"
    ]


@lru_cache(maxsize=4096)
def _imports(path: Path, mtime_ns: int, size: int) -> list[tuple[int, str]]:
    """Return levels and names of all modules that a file may import; empty if it is not Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    found: dict[tuple[int, str], None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name): None for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            found |= {(node.level, f"{module}{alias.name}"): None for alias in node.names}
    return [each for each in found if each[0] or each[1].partition(".")[0] != _OURS]
