"""Reads JSONL strictly: reports what a lenient reader would accept, or crash on, as an error."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn, cast

from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import why_not


def shorten(value: object, limit: int = 60) -> str:
    """Return the ``repr`` of ``value``, without its middle if it exceeds ``limit`` characters."""
    text = repr(value).replace("\n", " ")  # Arrays span several lines.
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise JaxinferError if the code inside cannot read ``path``."""
    try:
        yield
    except OSError as error:
        raise JaxinferError(f"cannot read {path}: {why_not(path, error)}") from error
    except (EOFError, zlib.error) as error:
        raise JaxinferError(f"cannot read {path}: not gzip, or damaged: {error}") from error


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file, decompressed if its name ends in ``.gz``."""
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def numbered(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each non-blank line with its number, counting all lines from 1."""
    for number, raw in enumerate(file, 1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if line.strip():
            yield number, line


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each non-blank line of a file with its number.

    Raises:
        JaxinferError: the file is missing, is a folder, or cannot be read.
    """
    with readable(path), open_bytes(path) as file:
        yield from numbered(file)


def parse_object(raw: bytes) -> dict[str, object]:
    """Parse one line that must be a JSON object.

    Raises:
        JaxinferError: the line is not UTF-8, not JSON or not an object; a key is given twice; or it
            has NaN or infinity (which Python's own reader accepts) or half of a surrogate pair
            (which no tokenizer accepts).
    """
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
        if rb"\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise JaxinferError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except UnicodeEncodeError as error:
        half = shorten(error.object[error.start])
        raise JaxinferError(f"not Unicode text: {half} is half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        message = error.msg.removesuffix(" at")
        raise JaxinferError(f"not JSON: {message} at column {error.colno}") from None
    except ValueError as error:
        raise JaxinferError(f"not JSON: {str(error).partition(';')[0]}") from None
    except RecursionError:
        raise JaxinferError("not usable JSON: nested too deeply") from None
    except _ConstantFound:
        json.loads(raw, object_pairs_hook=_refuse_constants, parse_constant=_Constant)
        raise JaxinferError("NaN and infinity are not JSON, write finite numbers") from None
    if not isinstance(value, dict):
        raise JaxinferError(f"{shorten(value)} is not a JSON object, write {{...}}")
    return value


def as_token_ids(value: object, name: str) -> list[int]:
    """Return ``value`` as a non-empty list of token ids.

    Raises:
        JaxinferError: it is something else; the message shows ``name`` and the wrong element.
    """
    if not isinstance(value, list):
        raise JaxinferError(f"{name} is {shorten(value)}, must be a list of token ids")
    if not value:
        raise JaxinferError(f"{name} is empty, needs at least one token id")
    for index, token in enumerate(value):
        if type(token) is not int or token < 0:  # isinstance accepts True as an int.
            raise JaxinferError(f"{name}[{index}] is {shorten(token)}, must be an integer >= 0")
    return value


class _ConstantFound(Exception):
    pass


class _Constant(str):
    """NaN or an infinity, until its key is known."""


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantFound(name)


def _refuse_constants(pairs: list[tuple[str, object]]) -> None:
    """Raise the error that names a constant and its key."""
    for key, value in pairs:
        values = value if isinstance(value, list) else [value]
        if wrong := next((each for each in values if isinstance(each, _Constant)), None):
            raise JaxinferError(f"{key}: {wrong} is not JSON, write a finite number")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JaxinferError(f"{shorten(key)} is given twice, give it once")
            seen.add(key)
    return fields
