"""Files that are written line by line during a run or search."""

from pathlib import Path

from jaxinfer.errors import JaxinferError


class Lines:
    """A file of lines that is being written.

    Raises:
        JaxinferError: the file cannot be opened, written, or closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from None

    def write(self, text: str) -> None:
        """Write one or several lines, which end with a line break."""
        try:
            self._file.write(text)
        except OSError as error:
            raise cannot_write(self._path, error) from None

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self._path, error) from None


def cannot_write(path: Path, error: OSError) -> JaxinferError:
    """Return an error that says which file cannot be written, and why."""
    return JaxinferError(f"cannot write {path}: {error.strerror}")
