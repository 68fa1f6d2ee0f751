"""The commands on modelled clusters."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from jaxinfer import JaxinferError
from jaxinfer.cli import cli

CRONUS = Path(__file__).parents[2] / "configs" / "cronus"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{200 + 90 * i},{10 + i}" for i in range(12)]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return path


def test_one_cluster(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(
        cli, ["simulate", str(CRONUS / "cronus.yaml"), "--workload", str(trace), "--out", str(out)]
    )
    assert ran.exit_code == 0, ran.output
    assert "simulated on high (A100-80G-SXM), low (A10)" in ran.output
    names = {path.name for path in out.iterdir()}
    assert {"compare.md", "compare.csv", "timeline-cronus.png", "trace-cronus.json"} <= names


def test_several_systems(trace: Path, tmp_path: Path) -> None:
    files = [str(CRONUS / "cronus.yaml"), "--systems", "cronus,data_parallel", "--simulate"]
    given = [*files, "--workload", str(trace), "--limit", "5", "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(cli, ["compare", *given])
    assert ran.exit_code == 0, ran.output
    assert len((tmp_path / "out" / "compare.csv").read_text().splitlines()) == 3
    refused = CliRunner().invoke(cli, ["compare", *given, "--rounds", "2"])
    assert isinstance(refused.exception, JaxinferError)
    assert str(refused.exception).startswith("--rounds is for real runs")


def test_capacity(trace: Path) -> None:
    given = [str(CRONUS / "data_parallel.yaml"), "--workload", str(trace), "--slo", "ttft=0.2"]
    ran = CliRunner().invoke(cli, ["capacity", *given])
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines()[-1].startswith("capacity: ")


def test_nothing_to_simulate(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli, ["simulate", "--out", str(tmp_path / "out")])
    assert str(refused.exception) == "give a run file, or --replay RUN_DIR"
