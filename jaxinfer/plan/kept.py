"""What has been found, in a file, so that a search that was killed goes on."""

import fcntl
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from jaxinfer.config.contents import contents as contents
from jaxinfer.errors import JaxinferError


def key_of(*what: object) -> str:
    """By which a result is found again: equal for equal JSON values."""
    text = json.dumps(_text_keys(what), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _text_keys(value: object) -> object:
    """Keys that JSON can sort: YAML's may be numbers beside names."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


class Kept:
    """JSON values by key.

    Args:
        path: of JSON lines, one for each; None keeps them in memory alone.

    Raises:
        JaxinferError: the file has something else, or another process writes to it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._values: dict[str, Any] = {}
        self._file: TextIO | None = None
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
        if whole != data:  # Killed in the midst of a line.
            path.write_bytes(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found = json.loads(line)
                key, value = found["key"], found["value"]
                if not isinstance(value, dict):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                raise JaxinferError(
                    f"{path}, line {number}: is none that was kept here: remove it, or give a new "
                    "folder"
                ) from None
            self._values[key] = value

    def get(self, key: str) -> Any:
        """The value of this key, or None."""
        return self._values.get(key)

    def add(self, key: str, value: Any) -> None:
        """Keep one."""
        self._values[key] = value
        if self._file:
            self._file.write(json.dumps({"key": key, "value": value}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
