"""A file of a batch's results, one JSON record per line, that survives a kill."""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import shorten
from jaxinfer.workload.batch_output import Record


class ResultFile:
    """An append-only JSONL file of results, which can be resumed after a kill at any time.

    A second file ``<output>.job.json`` has the fingerprint of the job that writes the output, with
    notes of its first start. Each record is one write and is on the disk when ``append`` returns,
    so that a kill can only tear the last line, which the next ``open`` removes. A lock keeps other
    processes out.

    Attributes:
        finished: the ``custom_id`` of each record in the file.
        num_failed: number of records that are errors.
        notes: notes of the job's first start.
    """

    def __init__(
        self, path: Path, fd: int, failed: dict[str, bool], notes: Mapping[str, object]
    ) -> None:
        """Take over ``fd``, opened for appending and locked; users call ``open``."""
        self.finished = set(failed)
        self.notes = notes
        self.num_failed = sum(failed.values())
        self._path = path
        self._fd: int | None = fd

    @classmethod
    def open(
        cls,
        path: str | Path,
        job: Mapping[str, object],
        force: bool,
        notes: Mapping[str, object] | None = None,
    ) -> Self:
        """Start the output of ``job``, or resume it if the file already has some of it.

        Args:
            path: the output. An empty file counts as none.
            job: everything that decides the results, as JSON values; compared key by key. The
                input's digest is ``input_sha256``; those of the model's files are ``model_files``.
            force: start over and discard the file's contents.
            notes: further entries to keep, as JSON values, if this is the job's first start.

        Raises:
            JaxinferError: the file belongs to another job or to none, is damaged in the middle, is
                in use by another process, or cannot be written.
        """
        path = Path(path)
        fd = _open_locked(path)
        try:
            return cls(path, fd, *_prepare(path, fd, job, force, notes or {}))
        except BaseException:
            os.close(fd)
            raise

    def append(self, record: Record) -> None:
        """Write one record and wait until the disk has it.

        Raises:
            JaxinferError: it cannot be written. A part that was written is removed, and the file is
                closed; earlier records stay valid for resuming.
            ValueError: a record with this ``custom_id`` exists already, or the file is closed.
        """
        if self._fd is None:
            raise ValueError(f"{self._path} is closed")
        custom_id = record["custom_id"]
        if not isinstance(custom_id, str) or custom_id in self.finished:
            raise ValueError(f"custom_id {custom_id!r} is no string or already in {self._path}")
        size, failed = os.fstat(self._fd).st_size, record.get("error") is not None
        try:
            _write_all(self._fd, _to_line(record))
            self.finished.add(custom_id)
            self.num_failed += failed
        except BaseException as error:  # This includes interrupts: others may be appended.
            self.finished.discard(custom_id)
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            if not isinstance(error, OSError):
                raise
            self.close()
            raise JaxinferError(
                f"cannot write {self._path}: {error.strerror or error}; "
                "results so far are kept, run the same command again to go on"
            ) from error

    def close(self) -> None:
        """Close the file and release its lock; closing twice is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _open_locked(path: Path) -> int:
    if not path.parent.is_dir():
        raise JaxinferError(f"cannot write {path}: {path.parent} is not a folder, create it first")
    with _one_line_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise JaxinferError(f"cannot write {path}: not a regular file")
        _lock(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(path: Path, fd: int) -> None:
    with _one_line_errors(path):
        try:
            # Unlike lockf's, this lock is kept if this process opens and closes the file again.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JaxinferError(
                f"{path} is in use by another process: wait for it, or give another output"
            ) from None


def _prepare(
    path: Path, fd: int, job: Mapping[str, object], force: bool, notes: Mapping[str, object]
) -> tuple[dict[str, bool], Mapping[str, object]]:
    """Make output and sidecar consistent with ``job``.

    Returns:
        The finished ids, and which are errors; and the notes of the first start.
    """
    sidecar = _sidecar(path)
    with _one_line_errors(path):
        if force:
            # Write old results first, then the new fingerprint, so that it never precedes old
            # results.
            os.ftruncate(fd, 0)
            os.fsync(fd)
        empty = os.fstat(fd).st_size == 0
    if empty:
        with _one_line_errors(sidecar):
            _write_sidecar(sidecar, {**job, "notes": notes} if notes else job)
        return {}, notes
    recorded = _check_same_job(path, sidecar, job)
    with _one_line_errors(path):
        return _repair(path, fd), _mapping(recorded.get("notes"))


def read_job(path: str | Path) -> Mapping[str, Any]:
    """Return the fingerprint and notes stored next to an output; empty if there are none."""
    try:
        return _mapping(json.loads(_sidecar(Path(path)).read_bytes()))
    except (OSError, ValueError):
        return {}


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".job.json")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_same_job(path: Path, sidecar: Path, job: Mapping[str, object]) -> Mapping[str, object]:
    """Return the record if it belongs to the same job; otherwise raise JaxinferError."""
    remedy = "give another output, or --force to start over"
    try:
        recorded = json.loads(sidecar.read_bytes())
    except FileNotFoundError:
        raise JaxinferError(
            f"{path} is not empty and has no {sidecar.name} beside it: {remedy}"
        ) from None
    except OSError as error:
        raise JaxinferError(f"cannot read {sidecar}: {error.strerror or error}") from error
    except ValueError:
        recorded = None
    if not isinstance(recorded, dict):
        raise JaxinferError(f"{sidecar} is damaged: {remedy}")
    before, now = _compared(recorded), _compared(job)
    differing = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    if differing:
        key = "input_sha256" if "input_sha256" in differing else differing[0]
        changed = f"{key} was {_short_value(before, key)}, is now {_short_value(now, key)}"
        if key == "input_sha256":
            changed = "the input has changed"
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise JaxinferError(f"{path} holds results of another job: {changed}{more}: {remedy}")
    if job.get("model_files") != recorded.get("model_files"):
        raise JaxinferError(f"{path} {_other_model(job, recorded)}{remedy}")
    return recorded


def _compared(job: Mapping[str, object]) -> dict[str, str]:
    return dict(_flat({k: v for k, v in job.items() if k not in ("notes", "model_files")}))


def _other_model(job: Mapping[str, object], recorded: Mapping[str, object]) -> str:
    """Describe which of the model's files differ, and what to do about it."""
    if "model_files" not in recorded:
        return (
            f"was begun by an older version, which did not note the files of {job.get('model')}, "
            "so that they may have changed since: "
        )
    before, now = _mapping(recorded["model_files"]), _mapping(job.get("model_files"))
    names = sorted({*before, *now})
    differing = [name for name in names if before.get(name) != now.get(name)]
    name = differing[0]
    how = "is gone" if name not in now else "is new" if name not in before else "has changed"
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return (
        f"holds results of another model: {name} of {job.get('model')} {how} since{more}: "
        "bring the old files back, "
    )


def _flat(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield leaves of nested options as (dotted key, JSON text), in which 1 differs from 1.0."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item, sort_keys=True)


def _short_value(flat: dict[str, str], key: str) -> str:
    return shorten(json.loads(flat[key]), 43) if key in flat else "not set"


def _write_sidecar(sidecar: Path, job: Mapping[str, object]) -> None:
    new = sidecar.with_name(sidecar.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(job, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(sidecar)
    folder = os.open(sidecar.parent, os.O_RDONLY)
    try:
        # Some network file systems cannot sync a folder.
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)


def _repair(path: Path, fd: int) -> dict[str, bool]:
    """Collect the finished ids, and which are errors; remove a torn last line."""
    failed: dict[str, bool] = {}
    end = 0
    torn_number: int | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if torn_number is not None:
                raise JaxinferError(
                    f"{path} line {torn_number} is not a result line: "
                    "mend or remove it, or --force to start over"
                )
            record = _whole_record(raw)
            if record is None:
                torn_number = number
            else:
                failed[str(record["custom_id"])] = record.get("error") is not None
                end += len(raw)
    if torn_number is not None:
        os.ftruncate(fd, end)
        os.fsync(fd)
    return failed


def _whole_record(raw: bytes) -> Record | None:
    """Return a result line's record; None for a torn line."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("custom_id"), str)
    return record if whole else None


def _to_line(record: Record) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # Half of a surrogate pair has no UTF-8; its JSON escape replaces it.
    return text.encode("utf-8", "backslashreplace")


def _write_all(fd: int, data: bytes) -> None:
    while data:  # A full disk takes a part first, and fails on the rest.
        data = data[os.write(fd, data) :]
    os.fsync(fd)


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JaxinferError(f"cannot write {path}: {error.strerror or error}") from error
