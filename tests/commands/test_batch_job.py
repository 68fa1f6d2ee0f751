"""Batches whose machine fails, and what makes two jobs the same."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tiny_model import TINY_OPTIONS

from jaxinfer import LLM, JaxinferError, RequestOutput
from jaxinfer.checkpoints.fingerprint import fingerprint
from jaxinfer.commands.app import cli
from jaxinfer.commands.batch_job import BatchJob, lines_of
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.run_file import RunFile, Workload


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


def test_a_batch_in_the_order_of_its_prefixes(
    tiny_folder: Path, tiny_loaded_once: None, tmp_path: Path
) -> None:
    """One at a time; what an interrupted job has left is in that order, too."""
    prompts = ["b1", "a2", "c", "a1", "b2"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": text, "prompt": text, "max_tokens": 2} for text in prompts]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = EngineOptions(**TINY_OPTIONS | {"max_num_seqs": 1})
    config = RunFile(model=str(tiny_folder), engine=options, workload=Workload(order="prefix_tree"))

    def lose(number: int, output: RequestOutput) -> RequestOutput:
        return replace(output, outputs=[], error="gone", lost=True) if number > 1 else output

    with pytest.MonkeyPatch.context() as patch:
        with_outputs(patch, lose)
        with BatchJob.open(config, str(source), str(out), force=False) as job:
            job.run()
    assert [record["custom_id"] for record in records(out)] == ["a1", "a2"]
    with BatchJob.open(config, str(source), str(out), force=False) as job:
        job.run()
    assert [record["custom_id"] for record in records(out)] == ["a1", "a2", "b1", "b2", "c"]


def test_a_blended_batch_is_resumed_and_its_table_has_the_input_s_order(
    tiny_folder: Path, tiny_loaded_once: None, tmp_path: Path
) -> None:
    """A resumed job blends the requests that are left: long outputs first, prompts between them."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    asked = {"a1": 1, "a2": 1, "b1": 9, "b2": 9, "a3": 1, "b3": 9}
    lines = [
        {"custom_id": name, "prompt": name * (30 if name < "b" else 1), "max_tokens": count}
        | {"ignore_eos": True}
        for name, count in asked.items()
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = EngineOptions(**TINY_OPTIONS | {"max_num_seqs": 1})
    config = RunFile(model=str(tiny_folder), engine=options, workload=Workload(order="blend"))

    def lose(number: int, output: RequestOutput) -> RequestOutput:
        return replace(output, outputs=[], error="gone", lost=True) if number > 2 else output

    with pytest.MonkeyPatch.context() as patch:
        with_outputs(patch, lose)
        with BatchJob.open(config, str(source), str(out), force=False) as job:
            job.run()
    lines_file = lines_of(str(out))
    assert [record["custom_id"] for record in records(lines_file)] == ["b3", "a1", "b2"]
    with BatchJob.open(config, str(source), str(out), force=False) as job:
        assert job.num_resumed == 3
        job.run()
    ended = [record["custom_id"] for record in records(lines_file)]
    assert ended == ["b3", "a1", "b2", "b1", "a2", "a3"]
    found = pq.read_table(out).column("custom_id").to_pylist()
    assert found == list(asked)


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
