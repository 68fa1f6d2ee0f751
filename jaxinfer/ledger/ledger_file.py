"""A ledger as a file, with one hash over its decisions.

A line has up to 512 entries, divided into decisions and measurements:
``{"decided": [[kind, ...], ...], "measured": [...]}``. The hash covers the decisions, in order: two
runs with the same decisions have the same hash.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.files.lines import Lines

NAME = "ledger.jsonl"
# Number of entries in a line.
LINE = 512
Entry = tuple[str, list[Any], Any]
as_text = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Entries:
    """Entries of a ledger, in memory.

    Attributes:
        decided: ``[kind, [...]]`` of each entry, as compact JSON. The observer appends texts,
            because objects would keep the garbage collector busy in a simulation.
        count: number of entries that are no longer in ``decided``.
    """

    def __init__(self) -> None:
        self.decided: list[str] = []
        self.count = 0
        self._measured: dict[int, str] = {}

    def measure(self, value: Any) -> None:
        """Store the measurement of the latest entry, a JSON value."""
        self._measured[self.count + len(self.decided) - 1] = as_text(value)

    def write(self) -> None:
        """Write full lines, if there is a file."""

    def take(self, count: int) -> tuple[str, str]:
        """Remove the first ``count`` entries; return their decisions and measurements as JSON."""
        texts = ",".join(self.decided[:count])
        del self.decided[:count]
        measured = ["null"] * count
        for number in [n for n in self._measured if n < self.count + count]:
            measured[number - self.count] = self._measured.pop(number)
        self.count += count
        return f"[{texts}]", f"[{','.join(measured)}]"

    def parsed(self) -> list[Entry]:
        """Remove and return all remaining entries."""
        return list(_paired(*map(json.loads, self.take(len(self.decided)))))


class LedgerFile(Entries):
    """A ledger that is being written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._hash = blake2b(digest_size=16)
        self._lines = Lines(path)

    def write(self) -> None:
        """Write full lines."""
        while len(self.decided) >= LINE:
            self._write(LINE)

    def _write(self, count: int) -> None:
        decided, measured = self.take(count)
        self._hash.update(decided.encode())
        self._lines.write(f'{{"decided":{decided},"measured":{measured}}}\n')

    def finish(self) -> dict[str, Any]:
        """Write the remaining entries; return the hash and the number of entries, as
        JSON values.
        """
        self.write()
        if self.decided:
            self._write(len(self.decided))
        return {"hash": self._hash.hexdigest(), "entries": self.count}

    def close(self) -> None:
        """Write the remaining entries, and close the file."""
        try:
            self.finish()
        finally:
            self._lines.close()


def read_ledger(path: Path) -> list[Entry]:
    """Read a ledger.

    Raises:
        JaxinferError: the ledger does not exist, or is damaged.
    """
    if not path.is_file():
        raise JaxinferError(f"{path}: no ledger; a run keeps one with --ledger")
    return list(_entries(path))


def _entries(path: Path) -> Iterator[Entry]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                both = json.loads(line)
                yield from _paired(both["decided"], both["measured"])
            except (ValueError, KeyError, TypeError):
                raise JaxinferError(f"{path}: line {number} is damaged") from None


def _paired(decided: Iterable[Any], measured: Iterable[Any]) -> Iterator[Entry]:
    for (kind, values), given in zip(decided, measured, strict=True):
        yield kind, values, given


def ledger_hash(entries: list[Entry]) -> str:
    """Return the hash of the decisions."""
    found = blake2b(digest_size=16)
    for start in range(0, len(entries), LINE):
        chunk = [(kind, decided) for kind, decided, _ in entries[start : start + LINE]]
        found.update(as_text(chunk).encode())
    return found.hexdigest()
