"""The script that measures on a GPU: its refusals, and what it does about a stage that fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.config.run_file import load_run_file
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "gpu_suite.sh"


def run(*options: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python}
    return subprocess.run([SCRIPT, *options], capture_output=True, text=True, env=environment)


def test_one_stage(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("--rehearse", "--only", "device", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| device | ok |" in (out / "summary.md").read_text()
    found = json.loads((out / "device.json").read_text())
    assert found["rehearsed"]
    assert found["versions"]["jax"]


def test_stages_after_one_that_fails(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("--rehearse", "--only", "device,kernels", "--out", str(out), python="false")
    assert done.returncode == 1
    summary = (out / "summary.md").read_text()
    assert "| device | failed, exit status 1 |" in summary
    assert "| kernels | failed, exit status 1 |" in summary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rehearse"], "no --out"),
        (["--rehearse", "--out", "."], "exists: give a new folder"),
        (["--out"], "--out needs a value"),
        (["--fast", "--out", "new"], "unknown option --fast"),
        (["--out", "new", "--only", "device,engin"], "--only: no stage engin"),
        (["--out", "new", "--wheels", "."], "not made by --collect-wheels"),
    ],
)
def test_refusals(options: list[str], message: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not Path("new").exists()


@pytest.mark.slow
def test_tables_of_operators(tmp_path: Path) -> None:
    """The last stage, on a CPU: a folder of tables for both degrees, which simulations read."""
    out = tmp_path / "out"
    done = run("--rehearse", "--only", "operators", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| operators | ok |" in (out / "summary.md").read_text()
    for degree in (1, 2):
        config = load_run_file(str(out / "operators" / f"tp{degree}.yaml"))
        found = simulate(config, [BenchRequest(None, 40, 5, 0.0) for _ in range(6)])
        assert found.output_tokens == 30
