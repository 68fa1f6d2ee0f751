"""``--json``: one object on stdout, with the numbers of the table and of the files."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from jaxinfer.commands.app import COMMANDS, cli
from jaxinfer.commands.figures import print_json

RUN = ["configs/cronus/cronus.yaml", "--set", "workload.synthetic=azure_conversation"]
# Those that print no figures.
WITHOUT = {"configs", "convert", "worker", "check"}


def said(*words: object) -> str:
    return CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False).stdout


def figures(*words: object) -> Any:
    return json.loads(said(*words, "--json"))


def metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "1" / "run.json").read_text())["metrics"]
    return found


def test_every_command_with_figures_has_it() -> None:
    check = cli.get_command(click.Context(cli), "check")
    assert isinstance(check, click.Group)
    for group, names in (
        (cli, set(COMMANDS) - WITHOUT),
        (check, check.list_commands(click.Context(check))),
    ):
        for name in names:
            command = group.get_command(click.Context(group), name)
            assert command
            assert any("--json" in option.opts for option in command.params), name


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("inf"), "b": [float("nan"), 1.5], "c": Path("d"), 3: True})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [None, 1.5],
        "c": "d",
        "3": True,
    }


def test_a_simulation(tmp_path: Path) -> None:
    """Figures of the run folder, those of the table, and the bound of ``--bound``."""
    call = ["simulate", *RUN, "--limit", "20"]
    found = figures(*call, "--out", tmp_path / "out")
    assert found == metrics(tmp_path / "out" / "runs" / "cronus")
    table = said(*call, "--bound")
    assert float(re.findall(r"^prefill +([\d.,]+)", table, re.M)[0].replace(",", "")) == round(
        found["prompt_tok_s"], 1
    )
    printed = re.findall(r"of ([\d.]+), the upper bound", table)
    (bound,) = {figures(*call, "--bound")["bound_requests_s"]}
    assert printed == [f"{bound:.3g}"]


def test_systems_side_by_side(tmp_path: Path) -> None:
    call = ["compare", "--simulate", *RUN, "--systems", "data_parallel", "--limit", "10"]
    found = figures(*call, "--out", tmp_path / "a")
    written = json.loads((tmp_path / "a" / "compare.json").read_text())
    assert found["systems"] == written["systems"]
    table = said(*call, "--out", tmp_path / "b")
    for name, system in found["systems"].items():
        (cell,) = re.findall(rf"^{name} +([\d.,]+)", table, re.M)
        assert float(cell) == pytest.approx(system["median"]["requests_s"], rel=5e-3)


def test_a_capacity() -> None:
    call = ["capacity", *RUN, "--limit", "20", "--slo", "ttft=2,tbt=0.2", "--precision", "0.5"]
    found, lines = figures(*call), said(*call).splitlines()
    assert f"capacity: {found['requests_s']:.3g} requests/s" in "\n".join(lines)
    tried = [float(line.split()[0]) for line in lines if line.startswith(" ")]
    assert tried == [round(each["requests_s"], 3) for each in found["tried"] if each["requests_s"]]
    assert [each["met"] for each in found["tried"] if each["requests_s"] == found["requests_s"]]


def test_a_plan(tmp_path: Path) -> None:
    file, out = tmp_path / "plan.yaml", tmp_path / "out"
    planner = {"name": "colocated", "gpus": {"A10": 2}, "tensor_parallel": [1, 2]}
    goal = {"maximise": "gpu", "slo": "ttft:p90=2,tbt:p99=0.2", "at_once": 2, "fresh_seeds": 2}
    work = {"synthetic": {"lengths": "azure_code", "count": 20, "seed": 0}}
    run = {"model": "llama-3-8b", "engine": {"max_model_len": 16384}, "workload": work}
    file.write_text(yaml.safe_dump({"planner": planner, "goal": goal, "run": run}))
    found = figures("plan", file, "--out", out, "--jobs", "1")
    with (out / "plan.csv").open() as table:
        rows = list(csv.DictReader(table))
    given = [row["requests_s"] and float(row["requests_s"]) for row in rows]
    assert given == [each["requests_s"] or "" for each in found["candidates"]]
    exact = [float(row["value"]) for row in rows if row["value"]]
    assert found["best"]["value"] == max(exact)
    assert found["run_file"] == str(out / "run.yaml")


def test_a_sweep(tmp_path: Path) -> None:
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    asked = {"files": {RUN[0]: {}}, "axes": {"workload.limit": [5, 10]}}
    work = {"synthetic": {"lengths": "azure_code", "count": 20, "seed": 0}}
    file.write_text(yaml.safe_dump(asked | {"run": {"workload": work}}))
    found = figures("sweep", file, "--out", out, "--jobs", "1")["points"]
    with (out / "sweep.csv").open() as table:
        rates = [float(row["requests_s"]) for row in csv.DictReader(table)]
    assert [each["requests_s"] for each in found] == rates
    assert len(rates) == 2


def test_a_calibration() -> None:
    call = ["calibrate", RUN[0], "--group", "high", "--points", "configs/cronus/example_steps.csv"]
    found, printed = figures(*call), said(*call)
    section = yaml.safe_load(printed[printed.index("simulate:") :])["simulate"]
    fitted = section["groups"]["high"]
    assert {name: float(f"{found['efficiency'][name]:.4g}") for name in fitted} == fitted
    assert f"mean error of {found['points']} points: {found['mape']:.1%}" in printed


def test_a_simulation_again(tmp_path: Path) -> None:
    said("simulate", *RUN, "--limit", "5", "--out", tmp_path / "first")
    assert figures("check", "rerun", tmp_path / "first") == {"same": True, "differing_files": []}
