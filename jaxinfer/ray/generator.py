"""Answers batches of a Ray Data dataset: ``ds.map_batches(jaxinfer.ray.Generator, ...)``."""

from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import shorten
from jaxinfer.request import RequestOutput, SamplingParams
from jaxinfer.text.prompts import text_or_token_ids
from jaxinfer.workload.conversation import read_conversation

if TYPE_CHECKING:
    from jaxinfer.serving.request_state import RequestState

# Columns that a row may ask with; each row has one of them.
PROMPTS = ("prompt", "prompt_token_ids", "messages")
# Columns of a result, by the names of Ray Data's LLM processors.
ANSWER = (
    "generated_text",
    "generated_tokens",
    "num_input_tokens",
    "num_generated_tokens",
    "finish_reason",
    "error",
)

RayBatch = dict[str, Any]


class Generator:
    """An LLM in each of Ray Data's actors.

    A row has ``prompt`` (text), ``prompt_token_ids`` or ``messages``, and may have
    ``sampling_params``, a mapping that takes precedence over the constructor's. It keeps its
    columns and gets ``generated_text``, ``generated_tokens``, ``num_input_tokens``,
    ``num_generated_tokens``, ``finish_reason`` and ``error`` (why it was not answered, or None).
    Rows without a seed use their actor's own sequence.

    Args:
        run_file: a path, which must exist on each of Ray's hosts, or the contents of a run file.
        sampling_params: options of rows, by the names of ``SamplingParams``; options that neither
            they nor a row set have the model's default.
        **options: without a run file, the options of ``LLM``: ``model`` and the engine's.

    Raises:
        JaxinferError: see ``LLM`` and ``LLM.from_config``.
    """

    def __init__(
        self,
        run_file: str | Path | Mapping[str, Any] | None = None,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        # Imported here, so that the driver can plan its datasets without JAX.
        from jaxinfer.config.run_file import as_run_file
        from jaxinfer.llm import LLM

        self._sampling = dict(sampling_params or {})
        SamplingParams.model_validate(self._sampling)
        if run_file is None:
            self._llm = LLM(**{"progress": False} | options)
        elif options:
            raise JaxinferError(f"{', '.join(options)}: beside a run file, which has all options")
        else:
            config = as_run_file(run_file) if isinstance(run_file, Mapping) else run_file
            self._llm = LLM.from_config(config, progress=False)
        self._ids = map(str, count())

    def __call__(self, batch: RayBatch) -> RayBatch:
        """Answer the rows of a batch, a mapping from columns to arrays of equal length.

        Raises:
            JaxinferError: the batch has another format, no column with prompts, or a column that
                the answers would overwrite; or an instance was lost, so that this actor cannot
                continue.
        """
        if not isinstance(batch, dict):
            raise JaxinferError(f"batch is a {type(batch).__name__}: leave batch_format out")
        if taken := [name for name in ANSWER if name in batch]:
            raise JaxinferError(f"column {taken[0]}: is there already, and is to hold answers")
        if not any(name in batch for name in PROMPTS):
            raise JaxinferError(
                f"columns {shorten(list(batch))}: one of {', '.join(PROMPTS)} is needed"
            )
        rows = [_plain_row(batch, index) for index in range(len(next(iter(batch.values()))))]
        answers: list[dict[str, Any]] = [{} for _ in rows]
        asked: dict[str, int] = {}

        def take(output: RequestOutput) -> None:
            if output.lost:
                raise JaxinferError(f"row {asked[output.request_id]}: {output.error}")
            answers[asked[output.request_id]] = _answer(output)

        requests = []
        for index, row in enumerate(rows):
            id = next(self._ids)
            asked[id] = index
            try:
                requests.append(self._request(id, row))
            except JaxinferError as error:
                answers[index] = {"error": str(error)}
        self._llm.run(requests, take, progress=False)
        return batch | {name: _column(answer.get(name) for answer in answers) for name in ANSWER}

    def _request(self, id: str, row: Mapping[str, Any]) -> "RequestState":
        given = [name for name in PROMPTS if row.get(name) is not None]
        if len(given) != 1:
            raise JaxinferError(f"has {', '.join(given) or 'none'} of {', '.join(PROMPTS)}: one")
        if given == ["messages"]:
            tokens = self._llm.tokenizer.encode_chat(read_conversation(row["messages"]).messages)
        else:
            prompt = row["prompt"] if given == ["prompt"] else {given[0]: row[given[0]]}
            found = text_or_token_ids(prompt)
            tokens = self._llm.tokenizer.encode(found) if isinstance(found, str) else found
        own = row.get("sampling_params") or {}
        if not isinstance(own, Mapping):
            raise JaxinferError(f"sampling_params is {shorten(own)}, must be a mapping")
        # Arrow gives each row the fields of all rows, with null for missing ones.
        own = {name: value for name, value in own.items() if value is not None}
        sampling = SamplingParams.model_validate(self._sampling | own)
        requests = self._llm.requests_of_line(id, tokens, sampling)
        if len(requests) > 1:
            raise JaxinferError(f"sampling_params.n is {len(requests)}, must be 1: repeat the row")
        return requests[0]


def _plain_row(batch: RayBatch, index: int) -> dict[str, Any]:
    row = {name: batch[name][index] for name in (*PROMPTS, "sampling_params") if name in batch}
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """Convert arrays and their numbers to Python's own types."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return value


def _answer(output: RequestOutput) -> dict[str, Any]:
    if output.error:
        return {"error": output.error}
    (found,) = output.outputs
    return {
        "generated_text": found.text,
        "generated_tokens": found.token_ids,
        "num_input_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": len(found.token_ids),
        "finish_reason": found.finish_reason,
    }


def _column(values: Iterable[Any]) -> np.ndarray:
    """Return an array of objects that may include None, unlike arrays of numbers or texts."""
    cells = list(values)
    column = np.empty(len(cells), object)
    # All at once, lists of one length would become rows of a matrix.
    for index, cell in enumerate(cells):
        column[index] = cell
    return column
