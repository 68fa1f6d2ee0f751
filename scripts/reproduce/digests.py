"""Digests of code and data, to tell whether results are current."""

import hashlib
from functools import cache
from pathlib import Path

from jaxinfer.files.contents import contents
from jaxinfer.files.kept import key_of
from jaxinfer.files.made_from import code_version, digest_of
from scripts.tables import CONFIGS


@cache
def digest_of_code() -> str:
    """Return a digest of the package, the scripts, and the run files and tables that they use."""
    scripts = digest_of(Path(__file__).parents[1])
    return key_of(code_version(), scripts, digest_of(CONFIGS), contents([str(CONFIGS)]))


def digests_of(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of each file in a folder, by its path in it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file()
    }
