"""A batch over processes of their own that are killed: the same command goes on."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from killed_jobs import num_lines, start_limited, wait_for_lines
from tiny_model import TINY_OPTIONS
from waiting import HANG_S

COUNT = 60


def records(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a line is doubled"
    return found


def write_job(folder: Path, model: Path, process: str | None) -> Path:
    own = {"process": process} if process else {}
    instance = {"page_size": TINY_OPTIONS["page_size"], "num_pages": TINY_OPTIONS["num_pages"]}
    config = {
        "model": str(model),
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 32},
        "groups": {"one": {"platform": "cpu", **own}, "other": {"platform": "cpu", **own}},
        "instances": {
            "prefill": {"group": "one", **instance},
            "decode": {"group": "other", **instance},
        },
        "system": "disaggregated",
        "verify_transfers": True,
    }
    path = folder / f"{process}.yaml"
    path.write_text(yaml.safe_dump(config))
    lines = [
        {
            "prompt": f"Request number {i}. " + "lorem ipsum " * (i % 9),
            "max_tokens": 40 + i % 60,
            "temperature": (i % 3) / 2,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(COUNT)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(run_file: Path, out: Path) -> list[str | Path]:
    return ["run", run_file, "--input", run_file.parent / "in.jsonl", "--output", out]


def complete(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    whole = [sys.executable, "-m", "jaxinfer", *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_each_line_is_there_once(tiny_folder: Path, tmp_path: Path) -> None:
    """Killed twice at random moments of the work; the lines are those of one process."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    alone = write_job(tmp_path, tiny_folder, None)
    assert complete(*command(alone, whole)).returncode == 0
    run_file = write_job(tmp_path, tiny_folder, "own")
    rng = random.Random(5)
    for _ in range(2):
        goal = num_lines(out) + rng.randint(1, COUNT // 5)
        job = start_limited(COUNT // 5, *command(run_file, out))
        wait_for_lines(job, out, goal)
        workers = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        _, alive = psutil.wait_procs(workers, timeout=HANG_S)
        assert len(workers) == 2
        assert not alive
    done = complete(*command(run_file, out))
    assert done.returncode == 0, done.stderr
    assert "continuing: " in done.stdout
    check_same(records(out), records(whole))


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) == COUNT
    for name, record in found.items():
        assert (
            record["response"]["body"]["choices"] == expected[name]["response"]["body"]["choices"]
        )


@pytest.mark.long
def test_a_lost_ffn_process_ends_the_command_which_continues(
    tiny_folder: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    alone = write_job(tmp_path, tiny_folder, None)
    config = yaml.safe_load(alone.read_text())
    instance = config["instances"]["prefill"]
    del instance["group"], config["verify_transfers"]
    instance["stages"] = [{"group": "one", "ffn": "other"}]
    config |= {"instances": {"x": instance | {"micro_batches": 2}}, "system": "single"}
    alone.write_text(yaml.safe_dump(config))
    assert complete(*command(alone, whole)).returncode == 0
    for group in config["groups"].values():
        group["process"] = "own"
    run_file = tmp_path / "own.yaml"
    run_file.write_text(yaml.safe_dump(config))
    started = [sys.executable, "-m", "jaxinfer", *map(str, command(run_file, out))]
    job = subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_lines(job, out, 3)
    workers = psutil.Process(job.pid).children(recursive=True)
    max(workers, key=lambda worker: worker.create_time()).kill()  # That of the last group.
    _, said = job.communicate()
    assert job.returncode == 2
    count = num_lines(out)
    assert 3 <= count < COUNT
    (line,) = [line for line in said.splitlines() if line.startswith("jaxinfer: ")]
    assert "process of group other (pid " in line
    assert f"was ended by signal 9: {count} of {COUNT} lines are done; the same command" in line
    done = complete(*command(run_file, out))
    assert done.returncode == 0, done.stderr
    assert f"continuing: {count} of {COUNT} lines" in done.stdout
    check_same(records(out), records(whole))
