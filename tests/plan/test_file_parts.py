"""What plans and sweeps take of their files' model and workload."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from plan_cases import problem

from jaxinfer import JaxinferError
from jaxinfer.commands.sweep import sweep
from jaxinfer.config.run_file import load_run_file
from jaxinfer.lab.plan.file_parts import joined
from jaxinfer.lab.plan.planners.any_system import AnySystem, AnySystemOptions
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.sweep.sweep import PointRun, simulate_point
from jaxinfer.lab.plan.sweep.sweep_file import Sweep
from jaxinfer.simulate.run import simulate

ONE = {"groups": {"g": {"kind": "A10"}}, "instances": {"i": {"group": "g"}}, "model": "llama-3-8b"}
POISSON = {"kind": "poisson", "rate": 2}
WORK = {"synthetic": {"input_len": 200, "output_len": 20, "count": 20}, "arrivals": POISSON}


def write(folder: Path, **files: Any) -> dict[str, dict[str, Any]]:
    for name, data in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
    return {str(folder / f"{name}.yaml"): {} for name in files}


def rows(files: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    asked = Sweep.model_validate({"files": files, **more})
    return [dict(simulate_point(PointRun(asked.data(point)))) for point in asked.candidates()]


def test_a_sweep_runs_each_file_as_simulate_does(tmp_path: Path) -> None:
    """Each with its own model, requests and arrivals."""
    other = ONE | {
        "model": "qwen2-7b",
        "workload": WORK | {"arrivals": {"kind": "interval", "seconds": 3}},
    }
    files = write(tmp_path, a=ONE | {"workload": WORK}, b=other)
    found = rows(files, axes={"engine.max_num_seqs": [16]})
    for file, row in zip(files, found, strict=True):
        config = load_run_file(file, ["engine.max_num_seqs=16"])
        alone = simulate(config, config.requests())
        assert row["ttft_p50"] == alone.ttft_p50
        assert row["wall_s"] == alone.wall_s
    assert found[0]["wall_s"] < found[1]["wall_s"]


def test_what_run_says_wins(tmp_path: Path) -> None:
    """Of a sweep: its requests, with the files' arrivals."""
    files = write(tmp_path, a=ONE | {"workload": WORK})
    (row,) = rows(
        files, run={"workload": {"synthetic": {"input_len": 9, "output_len": 5, "count": 7}}}
    )
    assert (row["requests"], row["prompt_tokens"]) == (7, 63)
    assert row["wall_s"] > 1  # By Poisson arrivals, not all at once.
    (fewer,) = rows(files, run={"workload": {"limit": 3}})
    assert (fewer["requests"], fewer["prompt_tokens"]) == (3, 600)
    (quick,) = rows(files, run={"workload": {"arrivals": "at_once"}})
    assert quick["wall_s"] < row["wall_s"]
    (axis,) = rows(files, axes={"workload.arrivals.rate": [0.5]})
    assert axis["wall_s"] > 2 * row["wall_s"]


@pytest.mark.parametrize(
    ("own", "common", "both"),
    [
        ({}, {"limit": 3}, {"limit": 3}),
        ({"synthetic": "x"}, {"trace": "t.csv"}, {"trace": "t.csv"}),
        ({"trace": "t.csv", "limit": 2}, {"synthetic": "x"}, {"limit": 2, "synthetic": "x"}),
        (
            {"synthetic": "x"},
            {"synthetic": {"count": 3}},
            {"synthetic": {"lengths": "x", "count": 3}},
        ),
        (
            {"synthetic": {"lengths": "x", "seed": 4}},
            {"synthetic": {"input_len": 2, "output_len": 3}},
            {"synthetic": {"input_len": 2, "output_len": 3}},
        ),
        (
            {"arrivals": {"kind": "interval", "seconds": 2}},
            {"arrivals": {"kind": "poisson", "rate": 1}},
            {"arrivals": {"kind": "poisson", "rate": 1}},
        ),
        (
            {"arrivals": {"kind": "poisson", "rate": 1, "seed": 4}},
            {"arrivals": {"rate": 3}},
            {"arrivals": {"kind": "poisson", "rate": 3, "seed": 4}},
        ),
        ({"arrivals": POISSON}, {"arrivals": "poisson"}, {"arrivals": POISSON}),
        (
            {"predictor": "a:B", "max_tokens": 3},
            {"max_tokens": 4},
            {"predictor": "a:B", "max_tokens": 4},
        ),
    ],
)
def test_two_workloads_in_one(own: Any, common: Any, both: Any) -> None:
    assert joined(own, common) == both


def asked(files: dict[str, Any], **run: Any) -> Problem:
    planner = {"name": "any_system", "files": files}
    return problem({"maximise": "gpu"}, planner, run={"engine": {"max_model_len": 2048}} | run)


def test_a_plan_takes_what_all_files_say(tmp_path: Path) -> None:
    """Arrivals do not count: rates are searched for."""
    other = WORK | {"arrivals": "at_once", "max_tokens": 99}
    files = write(tmp_path, a=ONE | {"workload": WORK}, b=ONE | {"workload": other})
    found = asked(files)
    assert len(found.work) == 20
    assert found.run["model"] == "llama-3-8b"
    candidates = list(AnySystem(AnySystemOptions(files=files)).candidates(found.run))
    datas = [found.run_file(candidate.part) for candidate in candidates]
    assert [data["workload"].get("max_tokens") for data in datas] == [None, 99]
    assert len(asked(files, workload={"limit": 5}).work) == 5
    # A workload of its own wins.
    mine = {"synthetic": {"input_len": 3, "output_len": 4, "count": 8}}
    assert [w.prompt_len for w in asked(files, workload=mine).work] == [3] * 8


def test_candidates_of_other_requests_are_refused_by_name(tmp_path: Path) -> None:
    other = WORK | {"synthetic": {"input_len": 201, "output_len": 20, "count": 20}}
    files = write(tmp_path, a=ONE | {"workload": WORK}, b=ONE | {"workload": other})
    with pytest.raises(
        JaxinferError,
        match=r"run\.workload: .*a\.yaml and .*b\.yaml differ in workload\.synthetic, .*: give run",
    ):
        asked(files)
    assert len(asked(files, workload=WORK).work) == 20


def test_models_of_their_own(tmp_path: Path) -> None:
    files = write(
        tmp_path, a=ONE | {"workload": WORK}, b=ONE | {"workload": WORK, "model": "qwen2-7b"}
    )
    for run, models in (({}, ["llama-3-8b", "qwen2-7b"]), ({"model": "x"}, ["x", "x"])):
        found = asked(files, **run)
        candidates = AnySystem(AnySystemOptions(files=files)).candidates(found.run)
        assert [found.run_file(c.part)["model"] for c in candidates] == models


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"axes": {"workload.arrivals.seed": [1, 2]}, "seeds": 2},
            "axes: sets seeds of the workload",
        ),
        (
            {"axes": {"workload.synthetic.seed": [1]}, "seeds": [5]},
            "axes: sets seeds of the workload",
        ),
        (
            {"axes": {"workload.predictor": [{"seed": 1}]}, "seeds": 2},
            "axes: sets seeds of the work",
        ),
        (
            {"points": [{"workload.arrivals.seed": 1}], "seeds": 2},
            "points: sets seeds of the workload",
        ),
        ({"axes": {"engine.max_num_seqs": [1, 1]}}, "axes: engine.max_num_seqs has 1 twice"),
        ({"axes": {"engine.max_num_seqs": [1, 1.0]}}, "axes: engine.max_num_seqs has 1.0 twice"),
        ({"axes": {"workload": [{"limit": 1}, {"limit": 1}]}}, "axes: workload has .* twice"),
        ({"points": [{"engine.seed": 1}, {"engine.seed": 1}]}, "points: .* is there twice"),
        ({"seeds": 1_000_000}, "seeds is 1000000, must"),
    ],
)
def test_the_same_point_twice_is_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    files = write(tmp_path, a=ONE | {"workload": WORK})
    with pytest.raises(JaxinferError, match=says):
        Sweep.model_validate({"files": files, **more})


def test_true_and_one_are_two_values(tmp_path: Path) -> None:
    files = write(tmp_path, a=ONE | {"workload": WORK})
    Sweep.model_validate({"files": files, "axes": {"engine.seed": [True, 1, "1"]}})
    with pytest.raises(JaxinferError, match=r"files\..*a\.yaml: engine\.seed has 3 twice"):
        AnySystemOptions(files={next(iter(files)): {"engine.seed": [3, 4, 3]}})


def test_many_runs_are_counted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.commands.sweep.MANY", 4)
    files = write(tmp_path, a=ONE | {"workload": WORK})
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump({"files": files, "axes": {"engine.max_num_seqs": [1, 2]}, "seeds": 2})
    )
    out = ["--out", str(tmp_path / "out"), "--jobs", "1"]
    done = CliRunner().invoke(sweep, [str(tmp_path / "s.yaml"), *out], catch_exceptions=False)
    assert "4 runs: 2 points, 2 seeds each\n" in done.stderr


def test_a_model_that_is_missing_is_asked_for_where_there_is_one(tmp_path: Path) -> None:
    files = write(tmp_path, a={k: v for k, v in ONE.items() if k != "model"} | {"workload": WORK})
    (row,) = rows(files)
    assert str(row["refused"]).startswith("model is missing: name one in the run file")
