"""A ledger as a file, and one hash over it.

A line has up to 512 entries, apart by what they are of: ``{"decided": [[kind, ...], ...],
"measured": [...]}``. The hash is over the former, in order: two runs that decide the same have the
same. Encoding many at once is most of what makes a ledger cheap.
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
        self._decided: list[tuple[str, list[Any]]] = []
        self._measured: list[Any] = []
        self._file = path.open("w", encoding="utf-8")

    def keep(self, kind: str, decided: list[Any], measured: Any) -> None:
        """Take an entry, whose lists do not change any more."""
        self._decided.append((kind, decided))
        self._measured.append(measured)
        if len(self._decided) == _CHUNK:
            self._write()

    def _write(self) -> None:
        if not self._decided:
            return
        self.count += len(self._decided)
        decided, measured = _as_text(self._decided), _as_text(self._measured)
        self._decided.clear()
        self._measured.clear()
        self._hash.update(decided.encode())
        try:
            self._file.write(f'{{"decided":{decided},"measured":{measured}}}\n')
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
                both = json.loads(line)
                pairs = zip(both["decided"], both["measured"], strict=True)
                for (kind, decided), measured in pairs:
                    yield kind, decided, measured
            except (ValueError, KeyError, TypeError):
                raise JaxinferError(f"{path}: line {number} is damaged") from None


def ledger_hash(entries: list[Entry]) -> str:
    """Return the hash of what was decided."""
    found = blake2b(digest_size=16)
    for start in range(0, len(entries), _CHUNK):
        chunk = [(kind, decided) for kind, decided, _ in entries[start : start + _CHUNK]]
        found.update(_as_text(chunk).encode())
    return found.hexdigest()
