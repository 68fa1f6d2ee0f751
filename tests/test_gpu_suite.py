"""The script that measures on a GPU: its refusals, and what it does about a stage that fails."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from jaxinfer.config.run_file import load_run_file
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "gpu_suite.sh"


# Seconds of a command on a machine that is lent, and of those what starting and packing take.
COMMAND_S, REST_S = 600, 10
WHERE = "/usr/local/cuda/bin:/usr/bin:/bin"


def run(*options: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python}
    return subprocess.run([SCRIPT, *options], capture_output=True, text=True, env=environment)


def unpacked(out: Path) -> Path:
    """The results of a run."""
    folder = out / "results"
    with tarfile.open(out / "results.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return folder


def test_each_part_ends_before_its_command_is_cut_off() -> None:
    """Stages may do anything, and be killed: the part ends."""
    text = SCRIPT.read_text(encoding="utf-8")
    parts = dict(re.findall(r"^    \[(\w+)\]=([\w,]+)$", text, re.M))
    limits = dict(re.findall(r"^(?:stage|watched) (\w+) (\d+) ", text, re.M))
    (environment,) = re.findall(r"^environment_limit=(\d+)$", text, re.M)
    (kill,) = re.findall(r"timeout --kill-after=(\d+) ", text)
    assert list(parts) == ["systems", "1", "2", "3", "extra", "launching"]
    for stages in parts.values():
        names = stages.split(",")
        longest = sum(int(limits[name]) + int(kill) for name in names)
        assert int(environment) + longest + REST_S <= COMMAND_S, names
    # Each is of one part, but for the first.
    found = [name for stages in parts.values() for name in stages.split(",")[1:]]
    assert sorted([*found, "device"]) == sorted(limits)
    assert {stages.split(",")[0] for stages in parts.values()} == {"device"}


def test_one_stage(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("--rehearse", "--only", "device", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| device | ok |" in (out / "summary.md").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["results.tar.gz", "summary.md"]
    found = json.loads((unpacked(out) / "device.json").read_text())
    assert found["rehearsed"]
    assert found["versions"]["jax"]


def test_stages_after_one_that_fails(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("--rehearse", "--only", "device,kernels", "--out", str(out), python="false")
    assert done.returncode == 1
    summary = (out / "summary.md").read_text()
    assert "| device | failed, exit status 1 |" in summary
    assert "| kernels | failed, exit status 1 |" in summary
    assert (unpacked(out) / "summary.md").read_text() == summary


@pytest.mark.skipif(
    any(shutil.which(tool, path=WHERE) for tool in ("ncu", "compute-sanitizer")),
    reason="CUDA's tools are here",
)
def test_tools_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are left out, and said to be; a rehearsal does without them anyway."""
    out = tmp_path / "out"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # The suite puts CUDA's before it.
    done = run("--only", "memory,counters", "--out", str(out), python="false")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (out / "summary.md").read_text()
    assert "| memory | skipped: no compute-sanitizer | 0 |" in summary
    assert "| counters | skipped: no ncu | 0 |" in summary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rehearse"], "no --out"),
        (["--rehearse", "--out", "."], "exists: give a new folder"),
        (["--out"], "--out needs a value"),
        (["--fast", "--out", "new"], "unknown option --fast"),
        (["--out", "new", "--only", "device,engin"], "--only: no stage engin"),
        (["--out", "new", "--only", "1"], "--only: no stage 1"),
        (["--out", "new", "--part", "4"], "--part: must be systems, 1, 2, 3, extra or launching"),
        (["--out", "new", "--wheels", "."], "not made by --collect-wheels"),
    ],
)
def test_refusals(options: list[str], message: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not Path("new").exists()


@pytest.mark.slow
def test_rehearsal_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage has its figures on a CPU, and its tables are ones that simulations read."""
    out = tmp_path / "out"
    done = run("--rehearse", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = unpacked(out)
    stages = re.findall(
        r"^\| (\w+) \| (ok|skipped: no test has)", (out / "summary.md").read_text(), re.M
    )
    names = "device systems card_processes tests pools memory kernels engine counters flex"
    assert [name for name, _ in stages] == [*names.split(), "operators"]
    for name in ("kernels", "memory", "counters", "flex"):
        for case in json.loads((found / f"{name}.json").read_text()).values():
            assert case["runs"]["generic"]["error"] < 0.02
            assert ("seconds" in case["runs"]["generic"]) == (name in ("kernels", "flex"))
    engine = json.loads((found / "engine.json").read_text())
    assert engine["run"]["metrics"]["requests"] == 12
    for sampler in ("greedy", "top_p"):
        alone = engine["untraced"][sampler]["alone"]
        assert set(alone) == {"greedy", "drawn", "top_p", "top_k, top_p"}
        assert all(0 < each["device_s"] < 10 for each in alone.values())
    monkeypatch.chdir(found)
    for degree in (1, 2):
        config = load_run_file(f"operators/tp{degree}.yaml")
        tables = simulate(config, [BenchRequest(None, 40, 5, 0.0) for _ in range(6)])
        assert tables.output_tokens == 30


@pytest.mark.slow
def test_rehearsal_of_launching(tmp_path: Path) -> None:
    """By the flags that a CPU's XLA knows: none."""
    out = tmp_path / "out"
    done = run("--rehearse", "--only", "launching", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((unpacked(out) / "launching.json").read_text())
    assert figures["times"].keys() == {"default"}
    assert all(0 < each["host_s"] < 10 for each in figures["times"]["default"].values())
