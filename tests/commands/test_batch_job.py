"""Batches whose machine fails, and what makes two jobs the same."""

import hashlib
import json
import math
import os
import random
import re
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tiny_model import TINY_OPTIONS, write_tiny_model

from jaxinfer import LLM, JaxinferError, RequestOutput, SamplingParams
from jaxinfer.checkpoints.fingerprint import Fingerprint, fingerprint
from jaxinfer.commands import batch_job
from jaxinfer.commands.app import cli
from jaxinfer.commands.batch_job import BatchJob
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.run_file import RunFile
from jaxinfer.request import CompletionOutput, RequestMetrics, Sampling
from jaxinfer.serving.request_state import RequestState
from jaxinfer.text.tokenizer import Tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": text, "max_tokens": 3, "logprobs": 0} for text in ("one", "two", "three")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def with_outputs(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int, RequestOutput], RequestOutput]
) -> None:
    """Change each output, by its place among those that come."""
    run = LLM.run

    def changed(self: LLM, requests: Any, on_output: Any, **options: Any) -> Any:
        came: list[RequestOutput] = []

        def take(output: RequestOutput) -> None:
            came.append(output)
            on_output(change(len(came) - 1, output))

        return run(self, requests, take, **options)

    monkeypatch.setattr(LLM, "run", changed)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_a_lost_instance_had_is_left_to_the_next_run(
    tiny_folder: Path, tiny_loaded_once: None, tmp_path: Path, source: Path
) -> None:
    config = RunFile(model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS))
    out = tmp_path / "out.jsonl"

    def lose(number: int, output: RequestOutput) -> RequestOutput:
        return replace(output, outputs=[], error="gone", lost=True) if number else output

    with pytest.MonkeyPatch.context() as patch:
        with_outputs(patch, lose)
        with BatchJob.open(config, str(source), str(out), force=False) as job:
            job.run()
            assert (job.lost, job.num_missing, job.num_failed) == ("gone", 2, 0)
    assert len(records(out)) == 1
    with BatchJob.open(config, str(source), str(out), force=False) as job:
        assert job.num_resumed == 1
        job.run()
        assert (job.lost, job.num_missing, job.num_failed) == (None, 0, 0)
    assert all(record["error"] is None for record in records(out))


def test_a_log_probability_that_json_cannot_say(
    tiny_folder: Path,
    tiny_loaded_once: None,
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RunFile(model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS))

    def spoil(number: int, output: RequestOutput) -> RequestOutput:
        if number == 1:
            (choice,) = output.outputs
            first = (choice.logprobs or [])[0]
            first[choice.token_ids[0]] = replace(first[choice.token_ids[0]], logprob=math.nan)
        return output

    with_outputs(monkeypatch, spoil)
    with BatchJob.open(config, str(source), str(tmp_path / "out"), force=False) as job:
        job.run()
        assert (job.num_failed, job.num_missing) == (1, 0)
    errors = [record["error"]["message"] for record in records(tmp_path / "out") if record["error"]]
    assert len(errors) == 1
    assert "NaN" in errors[0]


def cluster(model: Path, options: Sequence[dict[str, Any]]) -> RunFile:
    names = ["a", "b"]
    return RunFile(
        model=str(model),
        groups={name: GroupConfig() for name in names},
        instances={
            name: InstanceConfig(group=name, **given)
            for name, given in zip(names, options, strict=True)
        },
    )


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"max_model_len": 99}]
)
def test_another_instance_is_another_job(
    tiny_folder: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    source, out = tmp_path / "bad.jsonl", str(tmp_path / "out")
    source.write_text('{"prompt": 7}\n')

    def opened(*options: dict[str, Any]) -> BatchJob:
        return BatchJob.open(cluster(tiny_folder, options), str(source), out, force=False)

    with opened({}, {"max_num_seqs": 3}) as job:
        job.run()  # Has nothing to serve.
    # What changes no result may change.
    with opened({}, {"max_num_seqs": 5}) as job:
        assert job.num_resumed == 1
    with pytest.raises(JaxinferError, match="instances"):
        opened({}, other)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {}),
        ({"max_num_seqs": 3, "page_size": 8, "num_pages": 99}, {}),
        ({"seed": 5, "dtype": "bfloat16", "max_model_len": 77}, {}),
        ({"load_format": "dummy"}, {"load_format": "dummy"}),
        ({"kv_cache_dtype": "int8", "page_size": 8}, {"kv_cache_dtype": "int8", "page_size": 8}),
        ({"weight_dtype": "fp8"}, {"weight_dtype": "fp8"}),
        ({"generation_config": "vllm"}, {"generation_config": "vllm"}),
    ],
)
def test_what_a_job_is_known_by(
    tiny_folder: Path, tmp_path: Path, source: Path, options: dict[str, Any], more: dict[str, Any]
) -> None:
    """A job is known by what may change a result and nothing else; defaults are left out."""
    config = RunFile(model=str(tiny_folder), engine=EngineOptions(**options))
    BatchJob.open(config, str(source), str(tmp_path / "out"), force=False).__exit__(
        None, None, None
    )
    always = {"dtype": "auto", "max_model_len": None, "seed": 0}
    files = fingerprint(str(tiny_folder), options.get("load_format", "auto"))
    recorded = json.loads((tmp_path / "out.job.json").read_text())
    notes = recorded.pop("notes")
    assert notes["model_stamps"] == files.stamps
    assert datetime.fromisoformat(notes["started"]) <= datetime.now()
    assert recorded == {
        "model": str(tiny_folder),
        "model_files": files.digests,
        "input_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        **{name: options.get(name, value) for name, value in always.items()},
        **more,
    }


def test_the_output_is_not_the_input(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    before = source.read_bytes()
    config = RunFile(model="a model")
    for output in (source, tmp_path / "link"):
        with pytest.raises(JaxinferError, match="the output must not be the input"):
            BatchJob.open(config, str(source), str(output), force=True)
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl.gz", "out.XLSX"])
def test_an_output_in_another_format(tmp_path: Path, source: Path, name: str) -> None:
    with pytest.raises(JaxinferError, match=r"output is JSON lines or Parquet, not \."):
        BatchJob.open(RunFile(model="a model"), str(source), str(tmp_path / name), force=True)
    assert not list(tmp_path.glob("out*"))


@pytest.fixture
def chats(tmp_path: Path) -> tuple[Path, Path]:
    """A model of one's own, whose template writes a date; and a file of four chats."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_model(folder)
    template = "{{ strftime_now('%d %b %Y') }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    source = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": str(i)}], "max_tokens": 2} for i in range(4)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, source


def answer_first(folder: Path, source: Path, out: Path, **options: Any) -> None:
    """Start a job on a day long ago, of which two lines are answered."""
    config = RunFile(model=str(folder), engine=EngineOptions(**TINY_OPTIONS, **options))
    day = "2021-03-04T05:06:07"
    with BatchJob.open(config, str(source), str(out), force=False, started=day) as job:
        for line in list(job._source.lines(()))[:2]:
            job._results.append({"custom_id": line.custom_id, "error": None})


def weights(folder: Path) -> None:
    tensors = {n: -a for n, a in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")


def chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def sampling(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": 1}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (weights, "model.safetensors of .*/model has changed since: bring the old files back"),
        (chat_template, "chat_template.jinja of .* has changed since"),
        (sampling, "generation_config.json of .* is new since"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "chat_template.* is gone since"),
    ],
)
def test_another_model_under_the_same_name_is_refused(
    chats: tuple[Path, Path], tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    folder, source = chats
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out)
    before = out.read_bytes()
    change(folder)
    asked = ["run", "--model", str(folder), "--input", str(source), "--output", str(out)]
    options = [f"--set=engine.{name}={value}" for name, value in TINY_OPTIONS.items()]
    result = CliRunner().invoke(cli, [*asked, *options])
    assert isinstance(result.exception, JaxinferError)
    assert re.search(f"holds results of another model: {said}", str(result.exception))
    assert out.read_bytes() == before


def test_the_folder_of_generation_config_counts(chats: tuple[Path, Path], tmp_path: Path) -> None:
    folder, source = chats
    other = tmp_path / "other"
    other.mkdir()
    sampling(other)
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out, generation_config=str(other))
    answer_first(folder, source, tmp_path / "again.jsonl", generation_config=str(other))
    (other / "generation_config.json").write_text('{"top_k": 2}')
    with pytest.raises(JaxinferError, match=r"other/generation_config\.json of .* has changed"):
        answer_first(folder, source, out, generation_config=str(other))


def test_a_job_of_an_older_version_is_refused(chats: tuple[Path, Path], tmp_path: Path) -> None:
    """Its first start did not note what the model was."""
    folder, source = chats
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out)
    sidecar = tmp_path / "out.jsonl.job.json"
    recorded = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({k: recorded[k] for k in recorded.keys() - {"model_files"}}))
    with pytest.raises(JaxinferError, match="begun by an older version, which did not note"):
        answer_first(folder, source, out)


def test_all_of_a_job_has_the_date_of_its_first_start(
    chats: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rerun has it, too: ``run.json`` has it."""
    folder, source = chats
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out)
    prompts: list[str] = []
    encode = Tokenizer._ids

    def note(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        prompts.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_ids", note)
    config = RunFile(model=str(folder), engine=EngineOptions(**TINY_OPTIONS))
    with BatchJob.open(config, str(source), str(out), force=False) as job:
        assert job.num_resumed == 2
        job.run()
        recorded = json.loads((job.newest_run() / "run.json").read_text())
        assert prompts == ["04 Mar 2021: 2", "04 Mar 2021: 3"]
        prompts.clear()
        again = ["check", "rerun", str(job.newest_run()), "--out", str(tmp_path / "again")]
        assert "results: " in CliRunner().invoke(cli, again).output
    assert prompts == [f"04 Mar 2021: {i}" for i in range(4)]
    assert recorded["job_started"] == "2021-03-04T05:06:07"
    assert recorded["default_sampling"] == {}


def test_what_is_said_at_the_end(chats: tuple[Path, Path], tmp_path: Path) -> None:
    """The folder of this run, its files, and whose sampling held."""
    folder, source = chats
    sampling(folder)
    asked = ["run", "--model", str(folder), "--input", str(source), "--output", str(tmp_path / "o")]
    options = [f"--set=engine.{name}={value}" for name, value in TINY_OPTIONS.items()]
    result = CliRunner().invoke(cli, [*asked, *options, "--ledger"], catch_exceptions=False)
    said = f"run.json, steps.jsonl, requests.jsonl and ledger.jsonl: {tmp_path / 'o.runs' / '1'}"
    assert said in result.output
    assert "default sampling options of generation_config.json: top_k 1 (engine." in result.output
    closing = [line for line in result.output.splitlines() if line.startswith("requests: 4 of 4")]
    assert not any("tok/s" in line for line in closing)


def test_lines_get_the_model_s_sampling(chats: tuple[Path, Path], tmp_path: Path) -> None:
    """Where they give none themselves; ``generation_config: vllm`` leaves it out."""
    folder, _ = chats
    (folder / "generation_config.json").write_text('{"top_k": 1, "max_new_tokens": 5}')
    given = [
        {"prompt": "abc", "ignore_eos": True},
        {"prompt": "abc", "ignore_eos": True, "top_k": 0, "max_tokens": 7},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in given))
    texts = {}
    for choice in ("auto", "vllm"):
        engine = EngineOptions(**TINY_OPTIONS, generation_config=choice)
        out = tmp_path / choice
        config = RunFile(model=str(folder), engine=engine)
        with BatchJob.open(config, str(source), str(out), force=False) as job:
            job.run()
        bodies = {r["custom_id"]: r["response"]["body"] for r in records(out)}
        texts[choice] = [bodies[f"line-{i}"]["choices"][0]["text"] for i in (1, 2)]
        counts = [bodies[f"line-{i}"]["usage"]["completion_tokens"] for i in (1, 2)]
        assert counts == ([5, 7] if choice == "auto" else [253, 7])
    llm = LLM(str(folder), progress=False, **TINY_OPTIONS)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    assert texts["auto"][0] == llm.generate("abc", greedy, progress=False)[0].outputs[0].text
    alike = SamplingParams(temperature=0, max_tokens=5)
    messages = [{"role": "user", "content": "abc"}]
    for ask, asked in ((llm.generate, "abc"), (llm.chat, messages)):
        found, wanted = ask(asked, progress=False), ask(asked, alike, progress=False)
        assert found[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids
    assert texts["auto"][1] == texts["vllm"][1]
    assert texts["auto"][0] != texts["vllm"][0]


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


def test_lines_are_read_while_others_are_served(
    tiny: LLM, tiny_folder: Path, tiny_loaded_once: None, tmp_path: Path
) -> None:
    """The real engine has at most 24 of the requests under way at a time."""
    source = tmp_path / "in"
    with source.open("w") as file:
        for i in range(150):
            asked = {"prompt": f"prompt {i}", "max_tokens": 1 + i % 3, "ignore_eos": True}
            file.write(json.dumps(asked | ({"n": 2} if i % 7 == 0 else {})) + "\n")
    config = RunFile(model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS))
    unanswered: list[int] = []
    job = BatchJob.open(config, str(source), str(tmp_path / "out"), force=False)

    def count(number: int, output: RequestOutput) -> RequestOutput:
        unanswered.append(len(job._unanswered))
        return output

    with pytest.MonkeyPatch.context() as patch, job:
        with_outputs(patch, count)
        metrics = job.run()
    assert metrics
    assert (metrics.requests, metrics.failed) == (150, 0)
    assert max(unanswered) <= 24
    found = {
        record["custom_id"]: record["response"]["body"] for record in records(tmp_path / "out")
    }
    for i in range(150):
        choices = found[f"line-{i + 1}"]["choices"]
        assert len(choices) == (2 if i % 7 == 0 else 1)


def test_a_batch_is_run_again_from_its_record(
    tiny_folder: Path,
    tiny_loaded_once: None,
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch comes to the same answers; it is refused where its lines have changed."""
    monkeypatch.chdir(tmp_path)
    config = RunFile(model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS))
    with BatchJob.open(config, source.name, "out.jsonl", force=False) as job:
        job.run()
    run = json.loads(Path("out.jsonl.runs/1/run.json").read_text())
    assert run["run_file"]["workload"] == {"input": source.name, "output": "out.jsonl"}
    assert run["files"][source.name] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert run["command"]

    def rerun(out: str) -> Any:
        words = ["check", "rerun", "out.jsonl.runs/1", "--out", out]
        return CliRunner().invoke(cli, words, catch_exceptions=False)

    done = rerun("again")
    assert done.output.endswith("3 of 3 answers are the same as in out.jsonl\n")
    assert done.exit_code == 0
    assert sorted(records(Path("out.jsonl")), key=repr) == sorted(
        records(Path("again/answers.jsonl")), key=repr
    )
    lines = Path("out.jsonl").read_text()
    Path("out.jsonl").write_text(lines.replace('"index": 0', '"index": 1', 1))
    done = rerun("third")
    assert done.output.splitlines()[-1] == "2 of 3 answers are the same as in out.jsonl"
    assert done.exit_code == 1
    # Without the answers, by digests of their tokens.
    Path("out.jsonl").unlink()
    done = rerun("fourth")
    assert re.search(r": out.jsonl no longer exists\n(\d) of \1 answers have the same", done.output)
    assert done.exit_code == 0
    path = Path("out.jsonl.runs/1/requests.jsonl")
    path.write_text(re.sub(r'_sha256": "\w+', '_sha256": "none', path.read_text(), count=1))
    done = rerun("fifth")
    assert not re.search(r"(\d) of \1 answers have the same", done.output)
    assert done.exit_code == 1
    source.write_text("")
    with pytest.raises(JaxinferError, match=r"in\.jsonl has changed since the run was made from"):
        rerun("sixth")
