"""Batches through the command line, odd and wrong, on one model that is loaded once."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny_model import TINY_OPTIONS
from waiting import HANG_S

from jaxinfer import JaxinferError
from jaxinfer.commands.app import cli
from jaxinfer.commands.batch_job import BatchJob
from jaxinfer.commands.signals import Interrupted
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import RunFile
from jaxinfer.files.lines import Lines
from jaxinfer.report import run_folder


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(line + "\n" for line in text))
    return path


def run(model: str, source: Path, out: Path, *more: str) -> Result:
    command = ["run", "--model", model, "--input", str(source), "--output", str(out), *more]
    return CliRunner().invoke(cli, command)


def error_of(result: Result) -> str:
    assert isinstance(result.exception, JaxinferError), result
    assert "\n" not in str(result.exception)
    return str(result.exception)


def records(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["custom_id"] for record in found}) == len(found)
    return {record["custom_id"]: record for record in found}


def text_of(record: dict[str, Any]) -> str:
    return record["response"]["body"]["choices"][0]["text"]


GOOD = {"prompt": "Hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def test_extreme_options_do_not_cost_a_batch_its_other_lines(model: str, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        GOOD,
        GOOD | {"temperature": 1, "top_k": 3_000_000_000},
        GOOD | {"temperature": 1e308},
        GOOD | {"max_tokens": 10**30, "seed": 2**63 - 1, "stop": "\u0000"},
        GOOD | {"stop": ""},
        GOOD,
    )
    out = tmp_path / "out.jsonl"
    assert run(model, source, out).exit_code == 1
    found = records(out)
    errors = {name: r["error"]["message"] for name, r in found.items() if r["error"]}
    assert errors == {
        "line-3": "line 3: temperature is 1e+308, must be less than or equal to 100",
        "line-5": "line 5: stop: '' is empty, must have at least one character",
    }
    assert len(found) == 6
    assert text_of(found["line-1"]) == text_of(found["line-6"])


def open_pipe(pipe: Path, *lines: object, model: str, out: Path) -> BatchJob | JaxinferError:
    """A job whose input is a pipe that somebody writes to once."""
    if not pipe.exists():
        os.mkfifo(pipe)
    threading.Thread(target=write, args=(pipe, *lines), daemon=True).start()
    config = RunFile(model=model, engine=EngineOptions(**TINY_OPTIONS))
    opened: list[BatchJob | JaxinferError] = []

    def open_job() -> None:
        try:
            opened.append(BatchJob.open(config, str(pipe), str(out), force=False))
        except JaxinferError as error:
            opened.append(error)

    thread = threading.Thread(target=open_job, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert opened, "waits for a second writer"
    return opened[0]


def test_a_pipe_is_an_input_like_a_file(model: str, tmp_path: Path) -> None:
    """Read once, and known again by what it held."""
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    with open_pipe(pipe, GOOD, model=model, out=out) as job:  # type: ignore[union-attr]
        job.run()
        assert (job.num_lines, job.num_missing, job.num_failed) == (1, 0, 0)
    answer = out.read_bytes()
    refused = open_pipe(pipe, GOOD | {"prompt": "Another"}, model=model, out=out)
    assert str(refused) == (
        f"{out} holds results of another job: the input has changed: "
        "give another output, or --force to start over"
    )
    assert out.read_bytes() == answer
    # As it is in a file.
    with open_pipe(pipe, GOOD, model=model, out=out) as job:  # type: ignore[union-attr]
        assert job.num_resumed == 1
    result = run(model, write(tmp_path / "in.jsonl", GOOD), out)
    assert result.exit_code == 0
    assert "continuing: 1 of 1 lines are done" in result.output


@pytest.mark.parametrize("good", [(), (GOOD,)], ids=["all bad", "one good"])
def test_a_model_that_is_not_there_claims_no_output(
    model: str, tmp_path: Path, good: tuple[object, ...]
) -> None:
    source, out = write(tmp_path / "in.jsonl", *good, "no JSON"), tmp_path / "out.jsonl"
    assert "mistyped" in error_of(run(f"{model}-mistyped", source, out))
    assert not out.exists()
    assert run(model, source, out).exit_code == 1
    found = records(out)
    assert len(found) == len(good) + 1
    assert [bool(record["error"]) for record in found.values()].count(True) == 1


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_an_empty_input_is_said_to_be_empty(model: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    result = run(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert result.exit_code == 0
    assert f"0 requests in {tmp_path / 'in.jsonl'}" in result.output


def no_space(parent: Path, name: str) -> Path:
    """A run's folder in which this file is on a full disk."""
    folder = parent / "1"
    folder.mkdir(exist_ok=True)
    (folder / name).symlink_to("/dev/full")
    return folder


@pytest.mark.parametrize("name", ["steps.jsonl", "requests.jsonl", "run.part"])
def test_a_full_disk_is_one_line_and_the_job_goes_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, out = write(tmp_path / "in.jsonl", *[GOOD] * 9), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_next_folder", lambda parent: no_space(parent, name))
        named = name.replace(".part", ".json")
        assert error_of(run(model, source, out)) == (
            f"cannot write {out}.runs/1/{named}: No space left on device"
        )
    assert run(model, source, out).exit_code == 0
    assert len(records(out)) == 9


def test_lines_on_a_full_disk_are_named_as_they_are_written(tmp_path: Path) -> None:
    """Not only when the file is closed: a run may be long."""
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    lines = Lines(tmp_path / "steps.jsonl")
    with pytest.raises(JaxinferError, match=r"^cannot write .*steps\.jsonl: No space left"):
        lines.write("x" * 100_000)


def test_an_interrupted_job_says_how_it_goes_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: BatchJob) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(BatchJob, "run", interrupt)
    with pytest.raises(Interrupted) as caught:
        run(model, write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl")
    assert str(caught.value) == "terminated"
    assert caught.value.__notes__ == ["0 of 1 lines are done; the same command continues"]
    assert caught.value.code == 143


def test_the_first_answers_are_shown_with_what_was_asked_last(model: str, tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And you?"}]
    options = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    source = write(
        tmp_path / "in.jsonl",
        "no JSON",
        {"messages": talk, **options},
        {"prompt_token_ids": [72, 73, 74], **options},
        {"prompt": "the last one", **options},
    )
    result = run(model, source, tmp_path / "out.jsonl", "--show", "2")
    assert result.exit_code == 1
    assert "And you?" in result.output
    assert "Be brief." not in result.output
    assert "3 tokens" in result.output
    assert "the last one" not in result.output


def test_each_process_has_a_run_folder_of_its_own(model: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    config = RunFile(model=model, engine=EngineOptions(**TINY_OPTIONS))
    for number in (1, 2):
        with BatchJob.open(config, str(source), str(out), force=True) as job:
            job.run()
            assert job.newest_run() == Path(f"{out}.runs") / str(number)
