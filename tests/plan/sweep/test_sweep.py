"""Grids over run files."""

import csv
import json
import math
import shutil
import statistics
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
from jaxinfer.files.kept import KeptResults
from jaxinfer.lab.plan.problem import merge
from jaxinfer.report.records import read_run
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
        ("balanced", "1"),
        ("balanced", "8.0"),
        *[("split", "1"), ("split", "1"), ("split", "8.0"), ("split", "8.0")],
    ]
    refused = [row for row in rows if row["refused"]]
    assert {(r["file"], r["engine.max_num_batched_tokens"]) for r in refused} == {("split", "64")}
    assert "2 of 6 points are not valid; for example: " in said
    for row in rows:
        if row["refused"]:
            continue
        chunk = row["engine.max_num_batched_tokens"]
        data = merge(file["run"], CLUSTER | {"system": SYSTEMS[row["file"]]})
        data["workload"]["arrivals"]["rate"] = float(row["workload.arrivals.rate"])
        if chunk:
            data["engine"] = data["engine"] | {"max_num_batched_tokens": int(chunk)}
        config = as_run_file(data)
        metrics = simulate(config, config.requests())
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
    points.unlink()
    kept = KeptResults(points)
    for line in lines:
        kept.add(line["key"], line["value"] | {"requests_s": -1})
    kept.close()
    run(tmp_path, file, "--jobs", "1")
    assert table(tmp_path) == [
        row if row["refused"] else row | {"requests_s": "-1"} for row in before
    ]
    with pytest.raises(JaxinferError, match=r"out: sweep\.json holds another task"):
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


def test_seeds_have_means_with_their_intervals(tmp_path: Path, file: dict[str, Any]) -> None:
    """Intervals are those of single runs by Student's t of two degrees of freedom, 4.3027."""
    file |= {"files": {str(tmp_path / "balanced.yaml"): {}}, "seeds": 3}
    run(tmp_path, file, "--jobs", "1")
    for row in table(tmp_path):
        data = merge(file["run"], CLUSTER | {"system": SYSTEMS["balanced"]})
        data["workload"]["arrivals"]["rate"] = float(row["workload.arrivals.rate"])
        found = []
        for seed in range(3):
            data["workload"]["arrivals"]["seed"] = data["workload"]["synthetic"]["seed"] = seed
            config = as_run_file(data)
            found.append(simulate(config, config.requests()).ttft_p99 or 0.0)
        assert float(row["ttft_p99"]) == pytest.approx(statistics.fmean(found))
        half = 4.3027 * statistics.stdev(found) / 3**0.5
        assert float(row["ttft_p99_ci95"]) == pytest.approx(half, rel=1e-4)
        assert float(row["requests"]) == 20
        assert float(row["requests_ci95"]) == 0
    lines = (tmp_path / "out" / "points.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 3


def test_a_run_folder_of_each_point(tmp_path: Path, file: dict[str, Any]) -> None:
    """Folders that are there stay; one that is gone is made again."""
    file |= {"files": {str(tmp_path / "balanced.yaml"): {}}, "axes": {"workload.limit": [2, 3]}}
    file |= {"seeds": [7, 8], "y": ["ttft_p99"]}
    file["run"]["workload"]["arrivals"]["rate"] = 1.0
    run(tmp_path, file, "--jobs", "1")
    assert not (tmp_path / "out" / "runs").exists()
    said = run(tmp_path, file, "--jobs", "1", "--folders")
    assert "2 points, a table and 1 picture: " in said
    folders = sorted(path.parent for path in (tmp_path / "out" / "runs").rglob("run.json"))
    names = [str(path.relative_to(tmp_path / "out")) for path in folders]
    assert names == [f"runs/{n}/seed{seed}/1" for n in ("0001", "0002") for seed in (7, 8)]
    assert [row["folder"] for row in table(tmp_path)] == ["runs/0001", "runs/0002"]
    assert [len(read_run(path).requests) for path in folders] == [2, 2, 3, 3]
    (folders[1] / "run.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in folders[0].iterdir()}
    run(tmp_path, file, "--jobs", "1", "--folders")
    assert {path: path.stat().st_mtime_ns for path in folders[0].iterdir()} == kept
    assert (folders[1] / "run.json").exists()


def test_equal_points_share_a_folder(tmp_path: Path, file: dict[str, Any]) -> None:
    """A single one is simulated, and found by the rows of both, then and on going on."""
    copy = tmp_path / "copy.yaml"
    shutil.copyfile(tmp_path / "balanced.yaml", copy)
    files = {str(path): {} for path in (tmp_path / "balanced.yaml", copy)}
    file |= {"files": files, "axes": {"workload.limit": [2, 3]}, "y": ["ttft_p99"]}
    file["run"]["workload"]["arrivals"]["rate"] = 1.0
    for more in ({}, {"seeds": [7, 8]}):
        folder = tmp_path / f"with{len(more)}"
        folder.mkdir()
        for _ in range(2):
            run(folder, file | more, "--jobs", "1", "--folders")
            rows = table(folder)
            assert [row["folder"] for row in rows] == ["runs/0001", "runs/0002"] * 2
            runs = folder / "out" / "runs"
            assert sorted(path.name for path in runs.iterdir()) == ["0001", "0002"]
            assert len(list(runs.rglob("run.json"))) == 2 * (1 + len(more))


def test_too_few_requests_are_told(tmp_path: Path, file: dict[str, Any]) -> None:
    """The cluster has all 20 requests together at 8 requests/s."""
    said = run(tmp_path, file, "--jobs", "1")
    row = next(r for r in table(tmp_path) if r["workload.arrivals.rate"] == "8.0")
    there = float(row["requests_s"]) * float(row["e2e_mean"])
    assert int(row["enough_requests"]) == max(100, math.ceil(20 * there))
    assert "warning: 4 of 6 points have too few requests" in said
    at_once = file["run"] | {"workload": WORK | {"arrivals": "at_once"}}
    only = {"files": {str(tmp_path / "balanced.yaml"): {}}, "axes": {"engine.max_num_seqs": [4, 8]}}
    (tmp_path / "again").mkdir()
    assert "warning" not in run(tmp_path / "again", {**only, "run": at_once}, "--jobs", "1")
    assert "enough_requests" not in table(tmp_path / "again")[0]


@pytest.mark.parametrize(
    ("rate", "left_out"), [(1e308, "2 values are too large or small to be drawn"), (1e3, "")]
)
def test_rates_beyond_all_pictures(
    rate: float, left_out: str, tmp_path: Path, file: dict[str, Any]
) -> None:
    file["files"] = {str(tmp_path / "balanced.yaml"): {}}
    file["axes"]["workload.arrivals.rate"] = [1, rate]
    said = run(tmp_path, file, "--jobs", "1")
    assert left_out in said
    assert ("too large" in said) == bool(left_out)
    assert (tmp_path / "out" / "ttft_p99.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"axes": {"model": ["llama-9-8b"]}},
            "none of 3 points is valid; for example: .*llama-9-8b",
        ),
        (
            {"axes": {"workload.synthetic.count": [0, -1]}},
            "none of 6 points .*synthetic.count is 0",
        ),
        (
            {"axes": {"engine.no_such": [1]}},
            "none of 3 points is valid; for example: .*engine.no_such",
        ),
        ({"run": {}}, "none of 6 points is valid; for example: "),
    ],
)
def test_what_keeps_all_points_from_being_run_is_refused_first(
    change: dict[str, Any], says: str, tmp_path: Path, file: dict[str, Any]
) -> None:
    file["run"]["workload"]["arrivals"]["rate"] = 1.0
    with pytest.raises(JaxinferError, match=says) as error:
        run(tmp_path, file | change, "--jobs", "1")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_sweep_none_of_whose_points_can_be_fails(tmp_path: Path, file: dict[str, Any]) -> None:
    """A request that never fits is found only when it comes."""
    file["run"]["engine"]["max_model_len"] = 256
    with pytest.raises(
        JaxinferError, match=r"sweep\.yaml: none of 6 points is valid; for example: "
    ):
        run(tmp_path, file, "--jobs", "1")
    assert not (tmp_path / "out").exists()


def test_a_real_sweep_without_a_model_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("{}")
    (tmp_path / "work.csv").write_text("num_prefill_tokens,num_decode_tokens\n9,5\n")
    file = {
        "files": {str(tmp_path / "one.yaml"): {}},
        "axes": {"workload.limit": [1]},
        "run": {"workload": {"trace": str(tmp_path / "work.csv")}},
    }
    with pytest.raises(JaxinferError, match=r"none of 1 points is valid; for example: .*model"):
        run(tmp_path, file, "--real")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": ["ttft_p98"]}, "y: no figure 'ttft_p98': did you mean 'ttft_p99'"),
        ({"x": "workload.rate"}, "x is workload.rate, must be one of axes"),
        ({"files": {"none.yaml": {}}}, "none.yaml: No such file"),
        ({"axis": {}}, "axis: unknown option"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": []}, r"seeds is \[\], must have one or more, none twice"),
        ({"seeds": [1, 1]}, r"seeds is \[1, 1\], must have one or more, none twice"),
    ],
)
def test_a_sweep_file_that_is_none(
    change: dict[str, Any], says: str, tmp_path: Path, file: dict[str, Any]
) -> None:
    with pytest.raises(JaxinferError, match=says) as raised:
        run(tmp_path, file | change, "--jobs", "1")
    assert "\n" not in str(raised.value)
