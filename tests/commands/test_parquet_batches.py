"""Batches from Parquet to Parquet, on the tiny model: as JSONL has them, and resumed."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import Table
from tiny_model import TINY_OPTIONS

from jaxinfer import JaxinferError
from jaxinfer.commands.batch_job import BatchJob
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import one_line

ROWS: list[dict[str, Any]] = [
    {"custom_id": "a", "prompt": "one", "max_tokens": 9},
    {"prompt": "two", "max_tokens": 2, "temperature": 0.0},
    {"prompt": None},
    {"prompt": "three", "max_tokens": 4, "logprobs": 1, "seed": 7},
    {"prompt": "four", "max_tokens": 1},
]
IDS = ["a", "line-2", "line-3", "line-4", "line-5"]


@pytest.fixture
def config(tiny_folder: Path, tiny_loaded_once: None) -> RunFile:
    return RunFile(model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    names = list(dict.fromkeys(name for row in ROWS for name in row))
    rows = [{name: row.get(name) for name in names} for row in ROWS]
    pq.write_table(Table.from_pylist(rows), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def run(config: RunFile, source: Path, out: Path, force: bool = False) -> BatchJob:
    with BatchJob.open(config, str(source), str(out), force) as job:
        job.run()
        return job


def test_what_comes_out(config: RunFile, source: Path, tmp_path: Path) -> None:
    """The same answers as from JSONL to JSONL, a row for each, in the order of the input."""
    out = tmp_path / "out.parquet"
    job = run(config, source, out)
    assert (job.num_lines, job.num_failed, job.results_file) == (5, 1, out)
    rows = pq.read_table(out).to_pylist()
    assert [row["custom_id"] for row in rows] == IDS
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run(config, lines, tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_id = {record["custom_id"]: record for record in records}
    for row in rows:
        record = by_id[row["custom_id"]]
        if record["error"]:
            assert row["error"] == record["error"]["message"]
            assert row["response"] is None
        else:
            body = record["response"]["body"]
            assert json.loads(row["response"]) == body
            assert row["generated_text"] == body["choices"][0]["text"]
            assert row["num_generated_tokens"] == body["usage"]["completion_tokens"]
    before = out.read_bytes()
    assert run(config, source, out).num_resumed == 5
    assert out.read_bytes() == before


def test_killed_at_any_instant(config: RunFile, source: Path, tmp_path: Path) -> None:
    """The same command has all rows once, whatever a kill leaves of lines or of the table."""
    out, lines = tmp_path / "out.parquet", tmp_path / "out.parquet.jsonl"
    run(config, source, out)
    whole, results = lines.read_bytes(), pq.read_table(out).to_pylist()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [*range(0, len(whole), 301), *ends]:
        out.unlink(missing_ok=True)
        lines.write_bytes(whole[:cut])
        (tmp_path / "out.parquet.new").write_bytes(b"PAR1 torn")
        job = run(config, source, out)
        assert job.num_resumed == whole[:cut].count(b"\n")
        assert pq.read_table(out).to_pylist() == results
        assert not (tmp_path / "out.parquet.new").exists()


def test_no_table_before_all_is_there(
    config: RunFile, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(BatchJob, "_serve", lambda job: None)
        job = run(config, source, out)
    assert not out.exists()
    assert job.results_file == tmp_path / "out.parquet.jsonl"
    assert run(config, source, out).results_file == out


def test_an_output_is_not_overwritten_unasked(
    config: RunFile, source: Path, tmp_path: Path
) -> None:
    out, lines = tmp_path / "out.parquet", tmp_path / "out.parquet.jsonl"
    out.write_bytes(b"mine")
    with pytest.raises(JaxinferError, match=r"out\.parquet exists: give another output, or --f"):
        run(config, source, out)
    assert not lines.exists()
    lines.write_bytes(b"")
    with pytest.raises(JaxinferError, match="exists, and is not of this job"):
        run(config, source, out)
    assert out.read_bytes() == b"mine"
    run(config, source, out, force=True)
    assert [row["custom_id"] for row in pq.read_table(out).to_pylist()] == IDS
    other = config.model_copy(update={"engine": config.engine.model_copy(update={"seed": 5})})
    with pytest.raises(JaxinferError, match="holds results of another job"):
        run(other, source, out)
    for wrong in (source, lines):
        with pytest.raises(JaxinferError, match="the output must not be the input"):
            run(config, wrong, source if wrong == source else out)


def test_a_table_that_cannot_be_written(config: RunFile, source: Path, tmp_path: Path) -> None:
    """The results are kept, and the same command goes on with them."""
    out = tmp_path / "out.parquet"
    (tmp_path / "out.parquet.new").mkdir()
    with pytest.raises(JaxinferError, match=r"cannot write .*out\.parquet: .*kept in") as error:
        run(config, source, out)
    assert one_line(error.value) == str(error.value)
    (tmp_path / "out.parquet.new").rmdir()
    assert run(config, source, out).num_resumed == 5
    assert pq.read_table(out).num_rows == 5
