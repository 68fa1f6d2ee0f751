"""A ledger as a file: an entry a line, ``[kind, decided, measured]``, and one hash over all.

The hash is over kinds and what was decided or heard, in order, and not over what was measured: two
runs that decide the same have the same.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError

NAME = "ledger.jsonl"
# Entries that are written at once.
_CHUNK = 512
Keep = Callable[[str, list[Any], Any], None]
Entry = tuple[str, list[Any], Any]
_as_text = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class LedgerFile:
    """A ledger that is being written.

    Attributes:
        count: entries so far.
    """

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path, self._hash = path, blake2b(digest_size=16)
        self._entries: list[Entry] = []
        self._file = path.open("w", encoding="utf-8")

    def keep(self, kind: str, decided: list[Any], measured: Any) -> None:
        """Take an entry, whose lists do not change any more."""
        self._entries.append((kind, decided, measured))
        if len(self._entries) == _CHUNK:
            self._write()

    def _write(self) -> None:
        entries, self._entries = self._entries, []
        self.count += len(entries)
        try:
            for kind, decided, measured in entries:
                head = f'["{kind}",{_as_text(decided)}'
                self._hash.update(head.encode())
                self._file.write(f"{head},{_as_text(measured)}]\n")
        except OSError as error:
            raise JaxinferError(f"cannot write {self._path}: {error.strerror}") from None

    def finish(self) -> dict[str, Any]:
        """Write what is left; return the hash, and the number of entries, as JSON values."""
        self._write()
        return {"hash": self._hash.hexdigest(), "entries": self.count}

    def close(self) -> None:
        """Close the file."""
        try:
            self._write()
        finally:
            self._file.close()


def read_ledger(path: Path) -> list[Entry]:
    """Read a ledger.

    Raises:
        JaxinferError: there is none, or it is damaged.
    """
    if not path.is_file():
        raise JaxinferError(f"{path}: no ledger; a run keeps one with --ledger")
    return list(_entries(path))


def _entries(path: Path) -> Iterator[Entry]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                kind, decided, measured = json.loads(line)
            except ValueError:
                raise JaxinferError(f"{path}: line {number} is damaged") from None
            yield kind, decided, measured


def ledger_hash(entries: list[Entry]) -> str:
    """Return the hash of what was decided."""
    found = blake2b(digest_size=16)
    for kind, decided, _ in entries:
        found.update(f'["{kind}",{_as_text(decided)}'.encode())
    return found.hexdigest()
