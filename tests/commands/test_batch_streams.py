"""A batch reads lines as they are served: memory, order and what a resumed job reads."""

import json
import os
import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_batch_job import records

from jaxinfer import LLM, JaxinferError, RequestOutput
from jaxinfer.checkpoints.fingerprint import Fingerprint
from jaxinfer.commands import batch_job
from jaxinfer.commands.batch_job import BatchJob
from jaxinfer.config.run_file import RunFile
from jaxinfer.request import CompletionOutput, RequestMetrics, Sampling
from jaxinfer.serving.request_state import RequestState


class Echo:
    """Stands for an LLM: keeps some requests for a while, and answers each with its prompt's end.

    Attributes:
        failing: ids of requests that are too long.
        order: ids in the order of their answers.
    """

    def __init__(self, failing: Iterable[str] = (), most: int = 10) -> None:
        self.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
        self.failing = set(failing)
        self.order: list[str] = []
        self._most = most

    def requests_of_line(self, id: str, tokens: list[int], params: Any) -> list[RequestState]:
        if id in self.failing:
            raise JaxinferError("too long")
        payload = Sampling(params, 0, (), id)
        return [RequestState(id, len(tokens), 1, prompt_token_ids=tokens, payload=payload)]

    def run(self, requests: Iterable[RequestState], on_output: Any, **options: Any) -> None:
        self.options = options
        kept: list[RequestState] = []
        draw = random.Random(0)
        for request in requests:
            kept.append(request)
            if len(kept) == self._most:
                self._answer(kept.pop(draw.randrange(self._most)), on_output)
        for request in kept:
            self._answer(request, on_output)

    def _answer(self, request: RequestState, on_output: Any) -> None:
        self.order.append(request.id)
        ending = bytes(request.prompt_token_ids[-9:]).decode()
        choice = CompletionOutput(0, ending, [1], None, finish_reason="length")
        metrics = RequestMetrics(0.0)
        on_output(RequestOutput(request.id, None, [1], [choice], True, metrics))


def job_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, llm: Echo, show: int = 0, force: bool = False
) -> BatchJob:
    monkeypatch.setattr(LLM, "from_config", lambda config: llm)
    monkeypatch.setattr(batch_job, "fingerprint", lambda *of: Fingerprint())
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    config = RunFile(model="a model")
    return BatchJob.open(config, str(folder / "in"), str(folder / "out"), force, show)


def write_long(folder: Path, count: int) -> None:
    """20 kB a line; each tenth one is bad."""
    with (folder / "in").open("w") as file:
        for i in range(count):
            sampling = {"temperature": -1} if i % 10 == 9 else {}
            file.write(json.dumps({"prompt": "x" * 20_000 + f"{i:09}", **sampling}) + "\n")


def test_memory_does_not_grow_with_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160 kB for each of the 10 lines that are being served, as lists of tokens; and ids."""

    def peak(count: int) -> int:
        write_long(tmp_path, count)
        tracemalloc.start()
        llm = Echo()
        with job_of(tmp_path, monkeypatch, llm, show=3, force=True) as job:
            job.run()
            assert (job.num_missing, job.num_failed) == (0, count // 10)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(llm.order) == count - count // 10
        return found

    few, many = peak(100), peak(600)
    assert few < 20 * 160_000
    assert (many - few) / 500 < 600


def test_the_first_answers_are_kept_in_the_files_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers kept are the first that came, in the file's order; failed lines have none."""
    write_long(tmp_path, 40)
    llm = Echo(failing=["line-2"])
    with job_of(tmp_path, monkeypatch, llm, show=4) as job:
        job.run()
        assert [answer for _, answer in job.answers()] == [f"{i:09}" for i in (0, 2, 3, 4)]
        assert all(prompt.endswith(answer) for prompt, answer in job.answers())
    numbers = [int(name.removeprefix("line-")) for name in llm.order]
    assert numbers != sorted(numbers)
    assert llm.options["num_requests"] == 36
    found = {record["custom_id"]: record["error"] for record in records(tmp_path / "out")}
    assert found["line-2"] == {"code": "invalid_request", "message": "line 2: too long"}
    assert [name for name, error in found.items() if error] == [
        *(f"line-{i}" for i in (10, 20, 30, 40)),
        "line-2",
    ]
    with job_of(tmp_path, monkeypatch, llm, force=True) as job:
        job.run()
        assert job.answers() == []


def test_a_resumed_job_reads_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are the same whether a job runs in one part or in several."""
    write_long(tmp_path, 60)
    with job_of(tmp_path, monkeypatch, Echo()) as job:
        job.run()
    whole = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    assert len(whole) == 60
    # A kill in the middle of a line.
    kept = random.Random(1).sample(whole, 25)
    (tmp_path / "out").write_bytes(b"".join(kept)[:-20])
    llm = Echo()
    with job_of(tmp_path, monkeypatch, llm) as job:
        assert job.num_resumed == 24
        job.run()
        assert (job.num_missing, job.num_failed) == (0, 6)
    assert sorted((tmp_path / "out").read_bytes().splitlines(keepends=True)) == sorted(whole)
    done = {json.loads(line)["custom_id"] for line in kept[:24]}
    assert not done & set(llm.order)
    with job_of(tmp_path, monkeypatch, llm) as job:
        assert job.run() is None
