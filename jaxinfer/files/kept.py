"""Stores results for later runs: by key in a file that grows, or as whole files."""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, TextIO

from jaxinfer.errors import JaxinferError
from jaxinfer.files.made_from import code_version


def key_of(*what: object) -> str:
    """Return the key of a result; equal JSON values give equal keys."""
    text = json.dumps(_text_keys(what), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _text_keys(value: object) -> object:
    """Make keys sortable for JSON: YAML's may be numbers next to names."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def write_whole(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, because other processes may use it meanwhile."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


class KeptResults:
    """JSON values by key, stored in a file so that a killed search can be continued.

    Args:
        path: file of JSON lines, one per value; None keeps them only in memory.
        version: identifies everything that values depend on except their keys; by default
            ``code_version``.

    Attributes:
        of_others: number of lines that belong to other versions and are ignored.

    Raises:
        JaxinferError: a line of the file is damaged, or another process writes to it.
    """

    def __init__(self, path: Path | None = None, version: str | None = None) -> None:
        self._values: dict[str, Any] = {}
        self._file: TextIO | None = None
        self._version = version or code_version()
        self._lock = Lock()
        self.of_others = 0
        if path:
            try:
                self._file = path.open("a", encoding="utf-8")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._read(path)
            except BlockingIOError:
                raise JaxinferError(
                    f"{path} is in use by another process: wait for it, or give another folder"
                ) from None
            except OSError as error:
                raise JaxinferError(f"{path}: {error.strerror}") from None

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:  # The process was killed while it wrote this line.
            path.write_bytes(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found = json.loads(line)
                key, value = found["key"], found["value"]
                if not isinstance(key, str) or not isinstance(value, dict):
                    raise TypeError
                if found.get("version") != self._version:
                    self.of_others += 1
                    continue
                if found["sum"] != self._sum(key, value):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise JaxinferError(
                    f"{path}, line {number}: is not a valid entry: delete this line, or choose "
                    "another folder"
                ) from None
            self._values[key] = value

    def _sum(self, key: str, value: Any) -> str:
        """Return a checksum that reveals a damaged line."""
        return key_of(self._version, key, value)[:16]

    def get(self, key: str) -> Any:
        """Return the value of this key, or None."""
        return self._values.get(key)

    def add(self, key: str, value: Any) -> None:
        """Store a value; several threads may do so."""
        line = {"key": key, "value": value, "version": self._version, "sum": self._sum(key, value)}
        with self._lock:
            self._values[key] = value
            if self._file:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file; results that threads add later are kept only in memory."""
        with self._lock:
            if self._file:
                self._file.close()
                self._file = None
