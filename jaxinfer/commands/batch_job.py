"""The batch job of ``jaxinfer run``: a file of requests in, a file of results out, resumable."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jaxinfer.checkpoints.fingerprint import Fingerprint, fingerprint
from jaxinfer.checkpoints.generation import FILE as GENERATION
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.files.contents import contents
from jaxinfer.files.shipped import data_path
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.origin import asked_for
from jaxinfer.report.run_folder import run_folders
from jaxinfer.request import RequestOutput
from jaxinfer.workload.batch_input import BadLine, BatchFile, BatchLine
from jaxinfer.workload.batch_output import error_line, result_line
from jaxinfer.workload.conversation import Conversation
from jaxinfer.workload.order import requests_in_order
from jaxinfer.workload.parquet import check_ending, check_pyarrow, is_table, write_results
from jaxinfer.workload.result_file import ResultFile, read_job

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.serving.request_state import RequestState

# The options of an instance that may change a result.
RESULT_OPTIONS = ("dtype", "max_model_len", "seed")


def lines_of(output: str) -> Path:
    """Return the file with results as lines: the output, or one next to a Parquet output."""
    out = Path(output)
    return out.with_name(f"{out.name}.jsonl") if is_table(out) else out


class BatchJob:
    """An input file, its results so far, and the requests that are left.

    Memory holds only the input lines that are being served, and the ids of all others.

    Attributes:
        num_lines: number of requests in the input.
        num_resumed: number of requests that had a result when the job was opened.
        lost: reason why lines have no result, if an instance was lost; the next run serves them.
        run_folder: folder where ``run`` writes ``run.json`` and ``steps.jsonl``, in numbered
            folders.
    """

    def __init__(
        self, config: RunFile, source: BatchFile, results: ResultFile, output: str, show: int
    ) -> None:
        """Create a job whose files are open; users call ``open``."""
        self.num_lines = len(source.number_of)
        self.num_resumed = len(results.finished)
        self.run_folder = f"{output}.runs"
        self._output = output
        self._config = config
        self._source = source
        self._results = results
        self._show = show
        self._unanswered: dict[str, BatchLine] = {}
        self._answers: dict[int, tuple[str, str]] = {}
        self.lost: str | None = None

    @classmethod
    def open(
        cls,
        config: RunFile,
        input_path: str,
        output_path: str,
        force: bool,
        show: int = 0,
        started: str | None = None,
    ) -> Self:
        """Read through the input, and start or resume the output; no weights are loaded yet.

        Args:
            show: number of lines whose ``answers`` to keep.
            started: time for chat templates if this is the job's first start; by default now.

        Raises:
            JaxinferError: the input cannot be read, the model is unknown, or the output cannot be
                written or belongs to another job.
        """
        model = config.require_model()
        config = config.with_workload(input=input_path, output=output_path)
        check_ending(Path(output_path), "output")
        with ExitStack() as opened:
            source = opened.enter_context(BatchFile(input_path))
            out, lines = Path(output_path), lines_of(output_path)
            for path in (out, lines):
                if path.exists() and os.path.samefile(data_path(input_path), path):
                    raise JaxinferError(f"{path}: the output must not be the input")
            if out != lines:
                check_pyarrow(out)
                if out.exists() and not lines.exists() and not force:
                    raise JaxinferError(f"{out} exists: give another output, or --force")
            job = {"input_sha256": source.sha256, "model": model} | _result_options(config.engine)
            if config.instances:
                instances = config.cluster().instances
                job["instances"] = {name: _result_options(i) for name, i in instances.items()}
            load_format = config.cluster().load_format
            files = fingerprint(model, load_format, _fingerprint_of(read_job(lines)))
            choice = config.engine.generation_config
            named = [] if choice in ("auto", "vllm") else [str(Path(choice, GENERATION))]
            job["model_files"] = files.digests | contents(named)
            started = started or datetime.now().isoformat()
            notes = {"started": started, "model_stamps": files.stamps}
            results = opened.enter_context(ResultFile.open(lines, job, force, notes))
            if out != lines and out.exists():
                if force:
                    out.unlink()
                elif source.number_of.keys() - results.finished:
                    raise JaxinferError(
                        f"{out} exists, and is not of this job, whose results in {lines} are not "
                        "complete: give another output, or --force to start over"
                    )
            opened.pop_all()
        return cls(config, source, results, output_path, show)

    def run(self) -> RunMetrics | None:
        """Serve all lines without a result; return None if there are none.

        A Parquet file is written once all lines have a result, unless it exists.

        Raises:
            JaxinferError: the model cannot be loaded, and nothing has been written; or the results
                cannot be written, or the input has changed.
        """
        metrics = self._serve()
        out, lines = Path(self._output), lines_of(self._output)
        if out != lines and not self.num_missing and not out.exists():
            write_results(out, lines, self._source.number_of)
        return metrics

    def _serve(self) -> RunMetrics | None:
        finished = self._results.finished
        bad = [line for id, line in self._source.bad.items() if id not in finished]
        num_good = sum(id not in finished for id in self._source.number_of) - len(bad)
        if not num_good and not bad:
            return None
        llm = self._load() if num_good else None
        for line in bad:
            self._fail(line, line.reason)
        if not llm:
            return None
        about = asked_for(self._config) | {"job_started": llm.tokenizer.now.isoformat()}
        about["files"] |= {self._config.workload.input: self._source.sha256}
        requests: Iterable[RequestState] = self._requests(llm)
        if (order := self._config.workload.order) != "given":
            requests = requests_in_order(requests, order)
        return llm.run(
            requests,
            self._take,
            run_dir=self.run_folder,
            num_requests=num_good,
            about=about,
        )

    def _load(self) -> "LLM":
        """Load the model; its chat template uses the time of the job's first start."""
        from jaxinfer.llm import LLM

        started = str(self._results.notes.get("started"))
        try:
            now = datetime.fromisoformat(started)
        except ValueError:
            raise JaxinferError(
                f"{lines_of(self._output)}.job.json is damaged: notes.started is {started!r}: "
                "give another output, or --force to start over"
            ) from None
        llm = LLM.from_config(self._config)
        llm.tokenizer.now = now
        return llm

    def answers(self) -> list[tuple[str, str]]:
        """Return prompts and answers of the first lines that this process has served."""
        return [self._answers[number] for number in sorted(self._answers)]

    @property
    def results_file(self) -> Path:
        """The file with the results: the output, or lines next to an unfinished Parquet file."""
        out = Path(self._output)
        return out if out.exists() else lines_of(self._output)

    def newest_run(self) -> Path:
        """Return the folder of this process's run."""
        return run_folders(Path(self.run_folder))[-1]

    @property
    def num_failed(self) -> int:
        """Number of error lines among the results."""
        return self._results.num_failed

    @property
    def num_missing(self) -> int:
        """Number of lines without a result."""
        return self.num_lines - len(self._results.finished)

    def _requests(self, llm: "LLM") -> "Iterator[RequestState]":
        """Yield the requests of lines without a result; each line is read on demand."""
        for line in self._source.lines(self._results.finished):
            try:
                match line.prompt:
                    case Conversation(messages):
                        tokens = llm.tokenizer.encode_chat(messages)
                    case str(text):
                        tokens = llm.tokenizer.encode(text)
                    case tokens:
                        pass
                requests = llm.requests_of_line(line.custom_id, tokens, line.sampling)
            except JaxinferError as error:
                self._fail(line, str(error))
                continue
            self._unanswered[line.custom_id] = line
            yield from requests

    def _take(self, output: RequestOutput) -> None:
        line = self._unanswered.pop(output.request_id)
        if output.lost:
            self.lost = output.error
            return
        if output.error:
            self._fail(line, output.error)
            return
        assert self._config.model
        record = result_line(line, output, self._config.model)
        try:
            self._results.append(record)
        except ValueError:
            self._fail(line, "a log probability is NaN or infinite, which JSON cannot say")
            return
        self._answers[line.number] = _last_words(line), output.outputs[0].text.strip()
        if len(self._answers) > self._show:
            del self._answers[max(self._answers)]

    def _fail(self, line: BatchLine | BadLine, reason: str) -> None:
        self._results.append(error_line(line, reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close input and output."""
        self._source.close()
        self._results.close()


def _result_options(options: EngineOptions) -> dict[str, Any]:
    """Return the options of an instance that can change a result."""
    found = {name: getattr(options, name) for name in RESULT_OPTIONS}
    for name in ("load_format", "weight_dtype", "generation_config"):
        if getattr(options, name) != "auto":
            found[name] = getattr(options, name)
    if options.kv_cache_dtype != "auto":
        # The entries of a page share its scales.
        found |= {name: getattr(options, name) for name in ("kv_cache_dtype", "page_size")}
    return found


def _fingerprint_of(job: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of the model's files recorded at the job's first start."""
    files, notes = job.get("model_files"), job.get("notes")
    if not isinstance(files, dict) or not isinstance(notes, dict):
        return Fingerprint()
    return Fingerprint(files, notes.get("model_stamps") or {})


def _last_words(line: BatchLine) -> str:
    match line.prompt:
        case Conversation(messages):
            return messages[-1]["content"]
        case str(text):
            return text
        case tokens:
            return f"{len(tokens)} tokens"
