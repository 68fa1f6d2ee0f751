"""Grids over run files."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from plan_cases import RUN

import jaxinfer
from jaxinfer import LLM, JaxinferError
from jaxinfer.commands.sweep import sweep
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.plan.problem import merge
from jaxinfer.plan.sweep import Sweep, draw
from jaxinfer.simulate.run import simulate

CLUSTER = {
    "groups": {"g": {"kind": "A10", "devices": 2, "tensor_parallel_size": 1}},
    "instances": {"a": {"group": "g"}, "b": {"group": "g"}},
}
SYSTEMS: dict[str, Any] = {
    "balanced": "least_loaded",
    "split": {"name": "disaggregated", "prefill": "a", "decode": "b"},
}
WORK = {"synthetic": {"lengths": "azure_code", "count": 20, "seed": 0}, "arrivals": "poisson"}


@pytest.fixture
def file(tmp_path: Path) -> dict[str, Any]:
    """Two systems at two rates, and one with two sizes of chunks, of which one cannot be."""
    for name, system in SYSTEMS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(CLUSTER | {"system": system}))
    return {
        "files": {
            str(tmp_path / "balanced.yaml"): {},
            str(tmp_path / "split.yaml"): {"engine.max_num_batched_tokens": [64, 512]},
        },
        "axes": {"workload.arrivals.rate": [1, 8.0]},
        "run": RUN
        | {
            "engine": {"max_model_len": 16384, "max_num_seqs": 128},
            "workload": WORK | {"arrivals": {"kind": "poisson", "seed": 1}},
        },
    }


def run(folder: Path, file: dict[str, Any], *more: str) -> str:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(file))
    asked = [str(path), "--out", str(folder / "out"), *more]
    return CliRunner().invoke(sweep, asked, catch_exceptions=False).stdout


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "sweep.csv").open() as opened:
        return list(csv.DictReader(opened))


def test_a_table_of_what_each_point_comes_to(tmp_path: Path, file: dict[str, Any]) -> None:
    said = run(tmp_path, file, "--jobs", "1")
    rows = table(tmp_path)
    assert [(r["file"], r["workload.arrivals.rate"]) for r in rows] == [
        ("balanced", "1"), ("balanced", "8.0"),
        *[("split", "1"), ("split", "1"), ("split", "8.0"), ("split", "8.0")],
    ]  # fmt: skip
    refused = [row for row in rows if row["refused"]]
    assert {(r["file"], r["engine.max_num_batched_tokens"]) for r in refused} == {("split", "64")}
    assert "2 of 6 points cannot be, such as: " in said
    for row in rows:
        if row["refused"]:
            continue
        chunk = row["engine.max_num_batched_tokens"]
        data = merge(file["run"], CLUSTER | {"system": SYSTEMS[row["file"]]})
        data["workload"]["arrivals"]["rate"] = float(row["workload.arrivals.rate"])
        if chunk:
            data["engine"] = data["engine"] | {"max_num_batched_tokens": int(chunk)}
        config = as_run_file(data)
        metrics = simulate(config, config.workload.requests())
        assert float(row["ttft_p99"]) == metrics.ttft_p99
        assert float(row["requests_s"]) == 20 / metrics.wall_s
    names = {path.name for path in (tmp_path / "out").iterdir()}
    files = {"sweep.json", "origin.json", "points.jsonl", "sweep.csv"}
    assert names == files | {"ttft_p99.png", "tbt_p99.png"}
    made_from = json.loads((tmp_path / "out" / "origin.json").read_text())
    assert made_from["versions"]["jaxinfer"] == jaxinfer.__version__


def test_what_there_is_is_not_run_again(tmp_path: Path, file: dict[str, Any]) -> None:
    run(tmp_path, file, "--jobs", "2")
    points = tmp_path / "out" / "points.jsonl"
    text, before = points.read_text(), table(tmp_path)
    points.write_text(text[: len(text) // 2])
    run(tmp_path, file, "--jobs", "1")
    assert points.read_text() == text
    # What cannot be is not kept: that may be mended elsewhere.
    assert len(text.splitlines()) == sum(not row["refused"] for row in before) < len(before)
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        line["value"]["requests_s"] = -1
    points.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tmp_path, file, "--jobs", "1")
    assert table(tmp_path) == [
        row if row["refused"] else row | {"requests_s": "-1"} for row in before
    ]
    with pytest.raises(JaxinferError, match=r"out: sweep\.json there is of something else"):
        run(tmp_path, file, "--real")


def test_points_are_run_for_real(
    tmp_path: Path, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "from_config", lambda config, progress: tiny)
    (tmp_path / "one.yaml").write_text("{}")
    (tmp_path / "work.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "9,5\n" * 6)
    run_file = {"model": tiny.model, "workload": {"trace": str(tmp_path / "work.csv")}}
    file = {"files": {str(tmp_path / "one.yaml"): {}}, "axes": {"workload.limit": [2, 6]}}
    run(tmp_path, file | {"run": run_file}, "--real")
    assert [int(row["output_tokens"]) for row in table(tmp_path)] == [10, 30]


def test_a_real_point_that_cannot_be_has_a_row(
    tmp_path: Path, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without a group is found only when the cluster is made."""
    made = LLM.from_config

    def from_config(config: RunFile, progress: bool) -> LLM:
        return tiny if not config.simulate.groups else made(config, progress=progress)

    monkeypatch.setattr(LLM, "from_config", from_config)
    (tmp_path / "one.yaml").write_text("{}")
    (tmp_path / "work.csv").write_text("num_prefill_tokens,num_decode_tokens\n9,5\n")
    run_file = {"model": tiny.model, "workload": {"trace": str(tmp_path / "work.csv")}}
    axes = {"simulate.groups": [{}, {"gone": {"linear": {"step_s": 1.0}}}]}
    file = {"files": {str(tmp_path / "one.yaml"): {}}, "axes": axes, "run": run_file}
    run(tmp_path, file, "--real")
    fine, refused = table(tmp_path)
    assert (fine["output_tokens"], fine["refused"]) == ("5", "")
    assert "gone" in refused["refused"]


@pytest.mark.parametrize(
    ("y", "label"),
    [("ttft_p99", "ttft_p99, s"), ("output_tok_s", "output_tok_s"), ("wall_s", "wall_s, s"),
     ("steady_requests_s", "steady_requests_s")],
)  # fmt: skip
def test_seconds_are_seconds(
    y: str, label: str, tmp_path: Path, file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = []

    def save(figure: Any, path: Path) -> None:
        labels.append(figure.axes[0].get_ylabel())

    monkeypatch.setattr("jaxinfer.plan.sweep.save_picture", save)
    sweep = Sweep.model_validate(file | {"y": [y]})
    point, *_ = sweep.candidates()
    draw(tmp_path, "png", sweep, [{**point.axes, y: 1.0}])
    assert labels == [label]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": ["ttft_p98"]}, "y: no figure 'ttft_p98': did you mean 'ttft_p99'"),
        ({"x": "workload.rate"}, "x is workload.rate, must be one of axes"),
        ({"files": {"none.yaml": {}}}, "none.yaml: No such file"),
        ({"axis": {}}, "axis: unknown option"),
    ],
)
def test_a_sweep_file_that_is_none(
    change: dict[str, Any], says: str, tmp_path: Path, file: dict[str, Any]
) -> None:
    with pytest.raises(JaxinferError, match=says) as raised:
        run(tmp_path, file | change, "--jobs", "1")
    assert "\n" not in str(raised.value)
