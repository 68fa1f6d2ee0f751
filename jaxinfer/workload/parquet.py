"""Batches as Parquet: rows are read as JSON lines, and results written from such lines."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.options.validation import did_you_mean

SUFFIX = ".parquet"
# Suffixes of other table formats and of compressed files.
_OTHERS = {
    *(".csv", ".tsv", ".xlsx", ".xls", ".pq", ".parq", ".feather", ".arrow", ".orc", ".avro"),
    *(".gz", ".zst", ".bz2", ".xz", ".zip", ".yaml", ".yml"),
}
# Columns of a table of results.
RESULT_COLUMNS = {
    "custom_id": "text",
    "generated_text": "text",
    "generated_tokens": "numbers",
    "num_input_tokens": "number",
    "num_generated_tokens": "number",
    "finish_reason": "text",
    "error": "text",
    "response": "text",
}
# Rows in memory at a time, and bytes of a column to read ahead.
_ROWS, _BUFFER = 64, 1 << 20


def is_table(path: Path) -> bool:
    """Tell whether the ending of a file's name is that of Parquet."""
    return path.suffix.lower() == SUFFIX


def check_ending(path: Path, what: str) -> None:
    """Raise JaxinferError if a file's name is neither that of JSON lines nor of Parquet."""
    if path.suffix.lower() in _OTHERS:
        raise JaxinferError(
            f"{path}: {what} is JSON lines or Parquet, not {path.suffix}: give a name that ends in "
            f".jsonl or {SUFFIX}"
        )


def check_pyarrow(path: Path) -> None:
    """Raise JaxinferError if pyarrow, which the Parquet file ``path`` needs, is not installed."""
    _pyarrow(path)


def _pyarrow(path: Path) -> Any:
    """Return the module ``pyarrow``, with ``pyarrow.parquet``."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise JaxinferError(
            f"{path}: Parquet takes pyarrow, which is not installed: pip install 'pyarrow>=17'"
        ) from None
    return pyarrow


class ParquetRows:
    """The rows of an open Parquet file.

    Args:
        path: path for messages.
        known: columns that it may have; those of pandas' index are ignored.

    Raises:
        JaxinferError: pyarrow is not installed, the file is not Parquet, or it has another column,
            or one of a type that JSON does not have.
    """

    def __init__(self, file: IO[bytes], path: Path, known: Iterable[str]) -> None:
        self._path, self._pyarrow = path, _pyarrow(path)
        with self._reading():
            # Not a whole row group at once, which may be the whole file.
            self._file = self._pyarrow.parquet.ParquetFile(
                file, pre_buffer=False, buffer_size=_BUFFER
            )
        self._names: list[str] = []
        known = set(known)
        for field in self._file.schema_arrow:
            if field.name.startswith("__index_level_"):
                continue
            if field.name not in known:
                near = did_you_mean(field.name, known)
                raise JaxinferError(f"{path}: unknown column {field.name!r}: {near}")
            if field.name in self._names:
                raise JaxinferError(f"{path}: column {field.name!r} is given twice, give it once")
            if not _has_json(self._pyarrow.types, field.type):
                raise JaxinferError(
                    f"{path}: column {field.name!r} is of type {field.type}, must be of text, "
                    "numbers, booleans, or lists and structs of them, of fields that differ"
                )
            self._names.append(field.name)

    def lines(self) -> Iterator[bytes]:
        """Yield each row as a JSON object without nulls, from the first row on."""
        with self._reading():
            for batch in self._file.iter_batches(_ROWS, columns=self._names):
                for row in batch.to_pylist(maps_as_pydicts="lossy"):
                    fields = _as_json(row)
                    if type(fields.get("custom_id")) is int:  # Many tables have this type.
                        fields["custom_id"] = str(fields["custom_id"])
                    text = json.dumps(fields, ensure_ascii=False)
                    yield text.encode("utf-8", "surrogatepass")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except self._pyarrow.ArrowException as error:
            raise JaxinferError(f"{self._path}: not Parquet: {one_line(error)}") from None


def _has_json(types: Any, kind: Any) -> bool:
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        differ = len({field.name for field in fields}) == len(fields)
        return differ and all(_has_json(types, field.type) for field in fields)
    if types.is_map(kind):
        return _has_json(types, kind.key_type) and _has_json(types, kind.item_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _has_json(types, kind.value_type)
    if types.is_dictionary(kind):
        return _has_json(types, kind.value_type)
    tests: tuple[Callable[[Any], bool], ...] = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
    )
    return any(test(kind) for test in tests)


def _as_json(value: Any) -> Any:
    """Convert values of a row to the values of the same request in JSON.

    Unset fields of structs are null in a table, and numbers are floats if some are missing.
    """
    if isinstance(value, dict):
        fields = ((str(name), _as_json(each)) for name, each in value.items())
        return {name: each for name, each in fields if each is not None}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write_results(path: Path, lines: Path, ids: Iterable[str]) -> None:
    """Write a batch's results completely or not at all; an earlier file is replaced.

    A row has ``custom_id``, ``generated_text`` (of the first choice), ``generated_tokens`` (if the
    prompt was in tokens), ``num_input_tokens``, ``num_generated_tokens``, ``finish_reason``,
    ``error`` (null if there is an answer) and ``response``: the whole answer, as JSON.

    Args:
        lines: a finished JSONL file of results.
        ids: ids of all its records, in the order in which to write the rows.

    Raises:
        JaxinferError: the file cannot be written.
    """
    pa = _pyarrow(path)
    types = {"text": pa.string(), "number": pa.int64(), "numbers": pa.list_(pa.int32())}
    schema = pa.schema({name: types[kind] for name, kind in RESULT_COLUMNS.items()})
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file, lines.open("rb") as source:
            with pa.parquet.ParquetWriter(file, schema) as writer:
                for rows in _chunks(_rows(source, ids)):
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise JaxinferError(
            f"cannot write {path}: {error.strerror or error}; the results are kept in {lines}, run "
            "the same command again"
        ) from error
    finally:
        with suppress(OSError):  # It has become the file, or cannot become one.
            new.unlink()


def _rows(source: IO[bytes], ids: Iterable[str]) -> Iterator[dict[str, Any]]:
    where, offset = {}, 0
    for raw in source:
        where[json.loads(raw)["custom_id"]] = offset
        offset += len(raw)
    for custom_id in ids:
        source.seek(where[custom_id])
        yield _row(json.loads(source.readline()))


def _row(record: dict[str, Any]) -> dict[str, Any]:
    row = {"custom_id": record["custom_id"]}
    if record["error"]:
        return row | {"error": record["error"]["message"]}
    body = record["response"]["body"]
    first = body["choices"][0]
    return row | {
        "generated_text": first["message"]["content"] if "message" in first else first["text"],
        "generated_tokens": first.get("token_ids"),
        "num_input_tokens": body["usage"]["prompt_tokens"],
        "num_generated_tokens": body["usage"]["completion_tokens"],
        "finish_reason": first["finish_reason"],
        "response": json.dumps(body, ensure_ascii=False),
    }


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row)
        if len(found) == _ROWS:
            yield found
            found = []
    if found:
        yield found
