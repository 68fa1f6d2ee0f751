"""The command line on the tiny model: in this process, and in its own where that may be killed."""

import contextlib
import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from killed_jobs import num_lines, start_limited, wait_for_lines
from rich.console import Console
from tiny_model import TINY_OPTIONS

from jaxinfer.commands import app
from jaxinfer.commands.app import main
from jaxinfer.commands.run import _print_restarts
from jaxinfer.workload import result_file


class Run(NamedTuple):
    """The end of a command: its return code and its output."""

    returncode: int | str | None
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def _wide_and_loaded_once(monkeypatch: pytest.MonkeyPatch, tiny_loaded_once: None) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run_file(tiny_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": str(tiny_folder), "engine": TINY_OPTIONS}))
    return path


def jaxinfer(*arguments: str | Path) -> Run:
    """A command, run in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["jaxinfer", *map(str, arguments)])
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr("os._exit", sys.exit)  # By which mistakes end a process at once.
        with pytest.raises(SystemExit) as ended:
            main()
    return Run(ended.value.code, out.getvalue(), errors.getvalue())


def process(*arguments: str | Path) -> list[str]:
    """The same command for a process of its own."""
    return [sys.executable, "-m", "jaxinfer", *map(str, arguments)]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


def records(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["custom_id"] for r in lines}) == len(lines), "a line is doubled"
    return {r["custom_id"]: r for r in lines}


def assert_one_line_error(done: Run, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith("jaxinfer: ")]
    assert len(message) == 1, done.stderr
    for word in words:
        assert word in message[0]


def test_good_and_bad_lines(run_file: Path, tmp_path: Path) -> None:
    chat = {
        "custom_id": "a chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    }
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            chat,
            {"prompt": "Hello", "max_tokens": 7, "temperature": 0, "ignore_eos": True},
            "this is not JSON\n",
            {"prompt": "Hello", "max_tokens": 0},
            {"prompt": "x" * 300},
            {"prompt": "Hello", "temperature": float("nan")},
            {"prompt": ""},
            {"prompt": "Hello", "max_tokens": "7"},
            {"prompt_token_ids": [1, 2, 3], "max_tokens": 2, "ignore_eos": True},
            {"prompt_token_ids": [1, 2, 333], "max_tokens": 2},
            {"prompt": "Hello", "max_tokens": -3},
        ],
    )
    out = tmp_path / "out.jsonl"
    done = jaxinfer("run", run_file, "--input", source, "--output", out)
    assert done.returncode == 1, done.stderr
    assert "8 of 11 lines failed" in done.stdout
    assert "requests" in done.stdout
    got = records(out)
    assert len(got) == 11
    assert got["a chat"]["response"]["body"]["object"] == "chat.completion"
    assert got["line-2"]["response"]["body"]["usage"]["completion_tokens"] == 7
    assert len(got["line-9"]["response"]["body"]["choices"][0]["token_ids"]) == 2
    reasons = {
        3: "not JSON",
        4: "max_tokens is 0",
        5: "max_model_len is 256",
        6: "NaN",
        7: "empty",
        8: "max_tokens is '7'",
        10: "token id 333",
        11: "max_tokens is -3",
    }
    for number, reason in reasons.items():
        error = got[f"line-{number}"]["error"]["message"]
        assert error.startswith(f"line {number}: ")
        assert reason in error

    again = jaxinfer("run", run_file, "--input", source, "--output", out)
    assert again.returncode == 1
    assert "continuing: 11 of 11 lines are done" in again.stdout
    assert records(out) == got


def test_nothing_is_overwritten_unasked(run_file: Path, tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.jsonl", [{"prompt": "Hello", "max_tokens": 2}])
    second = write_lines(tmp_path / "second.jsonl", [{"prompt": "Hallo", "max_tokens": 2}])
    out = tmp_path / "out.jsonl"
    assert jaxinfer("run", run_file, "--input", first, "--output", out).returncode == 0
    before = out.read_bytes()
    refused = jaxinfer("run", run_file, "--input", second, "--output", out)
    assert_one_line_error(refused, "another job", "the input has changed", "--force")
    seed = ("--set", "engine.seed=5")
    refused = jaxinfer("run", run_file, "--input", first, "--output", out, *seed)
    assert_one_line_error(refused, "seed was 0, is now 5")
    refused = jaxinfer("run", run_file, "--input", first, "--output", first, "--force")
    assert_one_line_error(refused, "the output must not be the input")
    assert out.read_bytes() == before
    forced = jaxinfer("run", run_file, "--input", second, "--output", out, "--force", "--json")
    assert forced.returncode == 0
    found = json.loads(forced.stdout)
    run = json.loads((Path(found["run_folder"]) / "run.json").read_text())
    assert found["metrics"] == run["metrics"]
    assert (found["lines"], found["failed"], found["results"]) == (1, 0, str(out))
    assert f"results: {out}" in forced.stderr
    assert out.read_bytes() != before


def test_bench(run_file: Path, tmp_path: Path) -> None:
    work = write_lines(
        tmp_path / "work.jsonl",
        [{"prompt_token_ids": [i, 2, 3], "max_tokens": 5 + i} for i in range(6)],
    )
    out = tmp_path / "bench.json"
    done = jaxinfer("bench", run_file, "--workload", work, "--output", out)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(out.read_text())
    assert figures["prompt_tokens"] == 18
    assert figures["output_tokens"] == sum(range(5, 11))
    assert figures["late_compiles"] == 0
    assert figures["output_tok_s"] == pytest.approx(45 / figures["wall_s"])
    assert figures["peak_rss_mib"] > 50
    assert (tmp_path / "bench.json.runs" / "1" / "steps.jsonl").exists()
    refused = jaxinfer("bench", run_file, "--workload", work, "--output", out)
    assert_one_line_error(refused, "bench.json exists", "--force")

    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n40,3\n7,9\n5,5\n")
    more = ("--output", tmp_path / "csv.json", "--limit", "2", "--repeat", "2")
    own = f"workload={{trace: {lengths}, arrivals: {{kind: closed, concurrency: 1}}}}"
    done = jaxinfer("bench", run_file, "--set", own, *more, "--json")
    assert done.returncode == 0, done.stderr
    twice = json.loads((tmp_path / "csv.json").read_text())
    assert json.loads(done.stdout) == {"runs": twice}
    assert [(f["prompt_tokens"], f["output_tokens"]) for f in twice] == [(47, 12)] * 2
    for number in (1, 2):
        path = tmp_path / "csv.json.runs" / str(number) / "requests.jsonl"
        first, second = map(json.loads, path.read_text().splitlines())
        assert second["arrival"] >= first["token_times"][-1]


def corrupt_weights(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    else:
        config = json.loads((folder / "config.json").read_text())
        config["intermediate_size"] = 63
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "missing.jsonl"], ["missing.jsonl"]),
        (["--input", "."], ["."]),
        (["--output", "no/such/folder/out.jsonl"], ["no/such/folder"]),
        (["--output", "."], ["cannot write"]),
        (["--output", "/proc/version"], ["cannot write /proc/version"]),
        (["--model", "smollm2-135m"], ["no model 'smollm2-135m'", "smollm2-135m-instruct"]),
        (["--model", "llama-3-8b"], ["no weights of 'llama-3-8b'", "simulations", "org/name"]),
        (["--model", "in.jsonl"], ["in.jsonl", ".gguf"]),
        (["--model", "unknown.gguf"], ["unknown.gguf", "not a GGUF"]),
        (["--model", "truncated"], ["model.safetensors", "truncated"]),
        (
            ["--model", "misshapen"],
            ["has shape (64, 32), must be (63, 32)", "layers.1.mlp.down_proj"],
        ),
        (["--set", "engine.max_seqs=3"], ["engine.max_seqs: unknown option", "max_num_seqs"]),
        (["--set", "engine.page_size=big"], ["engine.page_size is 'big', must be an integer"]),
        (["--set", "nonsense"], ["nonsense", "engine.max_num_seqs=16"]),
        (["--set", "engine=3"], ["engine is 3, must be a mapping"]),
        (["--set", "modell=x"], ["modell", "did you mean 'model'"]),
        (["--modle", "x"], ["--modle", "--model"]),
        (["broken.yaml"], ["broken.yaml"]),
        (["list.yaml"], ["list.yaml", "mapping"]),
        (["missing.yaml"], ["missing.yaml", "No such file"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("-") else None,
)
def test_mistakes_are_one_line(
    arguments: list[str],
    words: list[str],
    tiny_folder: Path,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_lines(tmp_path / "in.jsonl", [{"prompt": "Hello", "max_tokens": 2}])
    (tmp_path / "unknown.gguf").write_bytes(b"GGML" + bytes(100))
    (tmp_path / "broken.yaml").write_text("model: [")
    (tmp_path / "list.yaml").write_text("- model")
    for how in ("truncated", "misshapen"):
        (tmp_path / how).mkdir()
        for file in tiny_folder.iterdir():
            (tmp_path / how / file.name).write_bytes(file.read_bytes())
        corrupt_weights(tmp_path / how, how)
    given = [] if arguments[0].endswith(".yaml") else [str(run_file)]
    standard = {"--input": "in.jsonl", "--output": "out.jsonl"}
    for option, value in standard.items():
        if option not in arguments:
            given += [option, value]
    monkeypatch.chdir(tmp_path)
    done = jaxinfer("run", *given, *arguments)
    assert_one_line_error(done, *words)


def test_a_mistake_in_a_process_of_its_own(run_file: Path, tmp_path: Path) -> None:
    command = process("run", run_file, "--input", "missing.jsonl", "--output", tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_one_line_error(Run(done.returncode, done.stdout, done.stderr), "missing.jsonl")


def test_a_full_disk_is_one_line_and_keeps_what_is_written(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eighth line fits in part."""
    lines = [{"prompt": f"Hello {i}", "max_tokens": 8} for i in range(20)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    out = tmp_path / "out.jsonl"
    write, calls = os.write, []

    def write_until_full(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:9] if len(calls) == 8 else data)

    with monkeypatch.context() as patch:
        patch.setattr(result_file.os, "write", write_until_full)
        done = jaxinfer("run", run_file, "--input", source, "--output", out)
    assert_one_line_error(done, "cannot write", "out.jsonl", "run the same command again")
    check_resumed(run_file, source, out)


def check_resumed(run_file: Path, source: Path, out: Path) -> None:
    """Seven lines of twenty are there; the same command adds the others."""
    kept = records(out)
    assert len(kept) == 7
    assert jaxinfer("run", run_file, "--input", source, "--output", out).returncode == 0
    got = records(out)
    assert len(got) == 20
    assert all(got[key] == kept[key] for key in kept)


@pytest.mark.slow
def test_a_full_disk_of_a_process_of_its_own(run_file: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: the write fails half way."""
    lines = [{"prompt": f"Hello {i}", "max_tokens": 8} for i in range(20)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    out = tmp_path / "out.jsonl"
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from jaxinfer.commands.app import main; import jaxinfer.workload.result_file as o;"
        "old = o.os.write;"
        "calls = [];"
        "\ndef write(fd, data):"
        "\n    calls.append(fd)"
        "\n    if len(calls) == 8: resource.setrlimit(resource.RLIMIT_FSIZE, (o.os.fstat(fd).st_size + 9,) * 2)"  # noqa: E501
        "\n    return old(fd, data)"
        "\no.os.write = write; main()"
    )
    command = [sys.executable, "-c", limited, "run", run_file, "--input", source, "--output", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    ended = Run(done.returncode, done.stdout, done.stderr)
    assert_one_line_error(ended, "cannot write", "out.jsonl", "run the same command again")
    check_resumed(run_file, source, out)


@pytest.mark.parametrize(
    ("kills", "count"),
    [
        ([1], 50),
        pytest.param([0, 1, 2], 60, marks=pytest.mark.slow),
        pytest.param(range(10), 150, marks=pytest.mark.long),
    ],
)
def test_kills(run_file: Path, tmp_path: Path, kills: Sequence[int], count: int) -> None:
    """kill -9 at random moments of the work, resumed each time: equal to no kill at all."""
    lines = [
        {
            "prompt": f"Request number {i}. " + "lorem ipsum " * (i % 9),
            "max_tokens": 40 + i % 60,
            "temperature": (i % 3) / 2,
            "ignore_eos": i % 2 == 0,
        }
        for i in range(count)
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    whole = tmp_path / "whole.jsonl"
    done = jaxinfer("run", run_file, "--input", source, "--output", whole)
    assert done.returncode == 0, done.stderr

    out = tmp_path / "out.jsonl"
    rng, most = random.Random(7), count // 12
    for kill in kills:
        goal = num_lines(out) + rng.randint(1, most)
        running = start_limited(most, "run", run_file, "--input", source, "--output", out)
        # Some kills hit the start, most the work: the moment after some more lines.
        if kill % 5:
            wait_for_lines(running, out, goal)
        time.sleep(rng.random() * (0.02 if kill % 5 else 1.5))
        running.kill()
        assert running.wait() == -signal.SIGKILL
    assert num_lines(out) < count
    done = jaxinfer("run", run_file, "--input", source, "--output", out)
    assert done.returncode == 0, done.stderr
    assert records(out) == records(whole)


def test_processes_that_were_started_again_are_told(tmp_path: Path) -> None:
    given = {"group": "b", "instances": ["b"], "why": "killed", "seconds": 12.345, "error": None}
    given |= {"without": []}
    restarts = [given, given | {"error": "no [room]"}, given | {"without": [1]}]
    (tmp_path / "run.json").write_text(json.dumps({"restarts": restarts}))
    out = io.StringIO()
    _print_restarts(Console(file=out, width=20), tmp_path)
    assert out.getvalue() == (
        "group b: killed; it was restarted in 12.3 s\n"
        "group b: killed; it could not be restarted: no [room]\n"
        "group b: killed; it is no longer used by instance b\n"
    )


def test_what_lies_where_a_command_runs_shadows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the user's own is found there, behind all others."""
    for name in ("colorsys", "my_system"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    found: list[bool] = []

    def command(standalone_mode: bool) -> None:
        found.extend(hasattr(import_module(name), "MINE") for name in ("colorsys", "my_system"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(app, "cli", command)
    with pytest.raises(SystemExit):
        main()
    assert found == [False, True]
