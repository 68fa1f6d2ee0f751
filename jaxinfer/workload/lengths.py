"""Workloads for measurements: prompts in token ids, or only lengths and arrival times."""

from pathlib import Path

from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.workload.bench_request import BenchRequest, synthetic_tokens
from jaxinfer.workload.sharegpt import read_sharegpt
from jaxinfer.workload.trace import Encode, Trace
from jaxinfer.workload.trace_csv import read_csv
from jaxinfer.workload.trace_jsonl import read_jsonl

__all__ = ["BenchRequest", "read_trace", "read_workload", "synthetic_tokens"]


def _no_tokenizer(text: str) -> list[int]:
    raise JaxinferError("has texts, which take a tokenizer")


def read_workload(path: str | Path, limit: int | None = None) -> list[BenchRequest]:
    """Return the requests of a trace without texts; see ``read_trace``."""
    return read_trace(path, limit).requests


def read_trace(path: str | Path, limit: int | None = None, encode: Encode = _no_tokenizer) -> Trace:
    """Read a trace, in the file's order; with ``limit``, only the first requests.

    The columns or fields show the kind of file:

    - CSV: Vidur's (``arrived_at`` in seconds, 0 if the column is missing), Azure's, whose earliest
      request arrives at 0, or BurstGPT's, whose failures are left out.
    - JSONL: ``prompt_token_ids`` and ``max_tokens`` (and maybe ``id``, ``prompt_len``, ``text``),
      all at 0; Mooncake's, which names blocks of prompts; or ShareGPT's conversations, all at 0.
    - JSON: ShareGPT's list of conversations.

    Each may be compressed by gzip, with ``.gz`` at the end of its name.

    Args:
        encode: converts a text to its token ids.

    Raises:
        JaxinferError: the file cannot be read, is of another kind, has no request, or has a wrong
            value, which the message names with its line number.
    """
    path = data_path(path)
    match path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix:
        case ".jsonl":
            trace = read_jsonl(path, limit, encode)
        case ".csv":
            trace = read_csv(path, limit)
        case ".json":
            trace = read_sharegpt(path, limit, encode)
        case _:
            raise JaxinferError(
                f"workload {path} must be a .jsonl, .csv or .json file, or such a .gz"
            )
    if not trace.requests:
        raise JaxinferError(
            f"workload {path} holds no request{': ' * bool(trace.note)}{trace.note}"
        )
    return trace
