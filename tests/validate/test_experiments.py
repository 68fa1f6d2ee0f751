"""Experiments with stages of load: rows, requests, figures and ranks."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from published_cases import MODEL, chunks_ms, decodes_ms, gemm_ms, make_card

from jaxinfer.commands.app import cli
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.validate.experiments import (
    Experiments,
    StageRow,
    is_experiments,
    read_experiments,
    set_up,
)
from jaxinfer.lab.validate.scoreboard import ScoredRow, score
from jaxinfer.simulate.costs import kept_operators

ROW = {
    "experiment": "1-made-up-talk-1", "workload": "talk", "stage": "0", "model": "made/up",
    "gpu": "X9", "precision": "FP16", "tensor_parallel": "1", "max_num_batched_tokens": "2048",
    "host_kv_offload": "False", "gpu_memory_utilization": "0.9", "measured_e2e_mean_ms": "10",
    "measured_ttft_mean_ms": "5", "measured_itl_mean_ms": "2", "other:e2e_mean": "12",
    "other:itl_mean": "",
}  # fmt: skip
ABOUT: dict[str, Any] = {
    "models": {"made/up": "made-up"},
    "cards": {"X9": {"kind": "H100-SXM", "version": "1.2.0"}},
    "formats": {"FP16": {"engine.dtype": "bfloat16"}},
    "set": {
        "models": {"made-up": MODEL.model_dump(exclude_none=True)},
        "simulate.tables.backend": "trtllm",
        "simulate.tables.small_operators": False,
        "engine.max_in_flight": 1,
        "engine.enable_prefix_caching": False,
    },
    "stage_s": 200,
    "workloads": [
        {"name": "talk-lite", "why_not": "its rate is not published"},
        {"name": "talk", "prompt": 64, "output": 3, "rates": [0.05, 0.1]},
    ],
}


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_operators, "FOLDER", tmp_path / "kept")
    kept_operators.published_operators.cache_clear()
    make_card(tmp_path / "operators", "h100_sxm")
    (tmp_path / "about.yaml").write_text(yaml.safe_dump(ABOUT))
    return tmp_path


def run(folder: Path, rows: list[dict[str, str]], *more: str) -> Result:
    points = write_rows(folder / "points.csv", rows)
    command = [
        "check", "points", points, "--operators", folder / "operators", "--out", folder / "out",
        "--campaigns", folder / "about.yaml", "--jobs", "1", *more,
    ]  # fmt: skip
    return CliRunner().invoke(cli, [str(word) for word in command], catch_exceptions=False)


def step_ms(tokens: int, attention: float) -> float:
    """Two layers and the head for one row."""
    layer = sum(
        gemm_ms("bfloat16", tokens, n, k)
        for n, k in ((1024, 512), (512, 512), (2048, 512), (512, 1024))
    )
    return 2 * (layer + attention) + gemm_ms("bfloat16", 1, 4096, 512)


def test_requests_that_do_not_meet_take_a_sum_of_operators(folder: Path) -> None:
    ttft = step_ms(64, chunks_ms(1, 64))
    itl = step_ms(1, (decodes_ms(1, 65) + decodes_ms(1, 66)) / 2)
    rows = [
        ROW | {"measured_e2e_mean_ms": str(ttft), "other:e2e_mean": str(1.5 * ttft)},
        ROW | {"stage": "1"},
        ROW | {"stage": "-1", "measured_itl_mean_ms": "3"},
        ROW | {"experiment": "2-made-up-talk-lite-1"},
        ROW | {"experiment": "3", "host_kv_offload": "True"},
    ]
    done = run(folder, rows)
    assert done.exit_code == 0
    assert "left out: 2-made-up-talk-lite-1: workload talk-lite: its rate is not" in done.output
    assert "left out: 3: host_kv_offload: KV in the host's memory is not modelled" in done.output
    with (folder / "out" / "points.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    for each in found[:3]:
        for name in ("e2e_mean", "e2e_p90", "e2e_p99"):
            assert float(each[f"jaxinfer:{name}"]) == pytest.approx(ttft + 2 * itl, abs=1e-3)
        for name in ("ttft_mean", "ttft_p90", "ttft_p99"):
            assert float(each[f"jaxinfer:{name}"]) == pytest.approx(ttft, abs=1e-3)
        assert float(each["jaxinfer:itl_mean"]) == pytest.approx(itl, abs=1e-3)
    assert [each["jaxinfer:e2e_mean"] for each in found[3:]] == ["", ""]
    figures = json.loads((folder / "out" / "summary.json").read_text())["figures"]
    theirs = next(line for line in figures["e2e_mean"] if line["simulator"] == "other")
    assert theirs["n"] == 3
    assert theirs["bias"] == pytest.approx(0.2)
    assert [line["n"] for line in figures["itl_mean"]] == [3]
    # The earlier figures are taken, not computed again.
    kept = (folder / "out" / "found.jsonl").read_bytes()
    again = run(folder, rows)
    assert again.stdout == done.stdout
    assert "experiments: 1 of 1" in done.stderr
    assert "experiments:" not in again.stderr
    assert (folder / "out" / "found.jsonl").read_bytes() == kept


def test_all_stages_are_simulated_where_only_their_sum_is_measured(folder: Path) -> None:
    """Also where the row of a later stage cannot be read."""
    whole = ROW | {"stage": "-1"}
    for rows in ([whole], [whole, ROW, ROW | {"stage": "1", "other:e2e_mean": "fast"}]):
        done = run(folder, rows)
        assert done.exit_code == 0
        (kept,) = map(json.loads, (folder / "out" / "found.jsonl").read_text().splitlines())
        assert sorted(kept["value"]) == ["-1", "0", "1"]
        shutil.rmtree(folder / "out")


def test_rows_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"workload": "code", "stage": "-1"},
        ROW | {"stage": "one"},
        ROW | {"measured_e2e_mean_ms": "-3"},
        ROW | {"other:e2e_mean": "fast"},
        dict.fromkeys(ROW, "") | {"stage": "1"},
    ]
    path = write_rows(tmp_path / "points.csv", rows)
    assert is_experiments(path)
    assert [each.wrong for each in read_experiments(path)] == [
        "",
        "the same as a row before",
        "stage is 'one', must be an integer",
        "measured_e2e_mean_ms is '-3', must be above 0",
        "other:e2e_mean is 'fast', must be above 0",
        "has no measured figure",
    ]
    (tmp_path / "short.csv").write_text("experiment,measured_e2e_mean_ms\n1,2\n")
    with pytest.raises(JaxinferError, match="lacks the column workload"):
        read_experiments(tmp_path / "short.csv")
    assert not is_experiments(tmp_path / "none.csv")


def test_nothing_to_simulate_ends_with_1(folder: Path) -> None:
    found = run(folder, [ROW | {"model": "made/down"}])
    assert found.exit_code == 1
    assert "model is made/down" in found.output
    assert found.output.endswith("none of 1 experiment can be simulated\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "X8"}, "gpu is X8"),
        ({"precision": "FP4"}, "precision is FP4"),
        ({"tensor_parallel": "1.5"}, "tensor_parallel is '1.5', must be an integer from 1"),
        ({"max_num_batched_tokens": ""}, "max_num_batched_tokens is '', must be an integer"),
        ({"gpu_memory_utilization": "90"}, "gpu_memory_utilization is '90', must be above 0, and"),
        ({"experiment": "7", "workload": "walk"}, "workload is walk"),
    ],
)
def test_what_is_not_known_is_one_line(changes: dict[str, str], message: str) -> None:
    about = Experiments.model_validate(ABOUT)
    with pytest.raises(JaxinferError, match=f"^{message}"):
        set_up(about, StageRow(ROW | changes, 2), {0}, "operators", {})


def test_a_stage_without_a_rate() -> None:
    about = Experiments.model_validate(ABOUT)
    with pytest.raises(JaxinferError, match="has a stage 2, workload talk has rates of 2"):
        set_up(about, StageRow(ROW, 2), {0, 1, 2}, "operators", {})


def test_each_stage_has_as_many_requests_as_its_rate_gives() -> None:
    about = Experiments.model_validate(ABOUT)
    work = set_up(about, StageRow(ROW, 2), {0, 1}, "operators", {}).requests()
    times = [each.arrival for each in work]
    assert times == sorted(times)
    assert (sum(at <= 200.000001 for at in times), len(times)) == (10, 30)
    assert times[9] == pytest.approx(200)
    assert times[-1] == pytest.approx(400)
    assert {(each.prompt_len, each.max_tokens) for each in work} == {(64, 3)}


def test_what_ships_makes_run_files_of_all_its_models() -> None:
    about = Experiments.read("experiments.yaml")
    for model in about.models:
        row = ROW | {"model": model, "gpu": "H100", "workload": "general", "experiment": "9"}
        made = set_up(about, StageRow(row, 2), {0, 1}, "configs/operators", {})
        config = as_run_file(made.data)
        assert config.cluster().instances["engine"].policies.batching == {
            "name": "mixed", "admit_after_preemption": False,
        }  # fmt: skip
        assert made.loads == [(4800, 600), (12000, 600)]


def test_prompts_are_sent_over_and_over() -> None:
    about = Experiments.model_validate(ABOUT | {"prompts": {"groups": 2, "each": 3, "shared": 40}})
    work = set_up(about, StageRow(ROW, 2), {0, 1}, "operators", {}).requests()
    tokens = [tuple(each.prompt_token_ids or ()) for each in work]
    assert {len(each) for each in tokens} == {64}
    assert tokens[6:12] == tokens[:6] == tokens[24:30]
    assert len(set(tokens)) == 6
    assert len({each[:40] for each in tokens}) == 2
    assert len({each[:41] for each in tokens}) == 6


def scored(measured: float, ours: float, **others: float) -> ScoredRow:
    theirs = {name: {"e2e_mean": value} for name, value in others.items()}
    return ScoredRow(StageRow(ROW, 2, 0, {"e2e_mean": measured}, theirs), {"e2e_mean": ours})


def test_medians_tenths_and_ranks_are_of_the_rows_that_ours_predicts() -> None:
    rows = [
        scored(100, 110, near=101, far=200),
        scored(100, 80, near=98, far=50),
        scored(100, 105),
        ScoredRow(StageRow(ROW, 2, 0, {"e2e_mean": 1.0}, {"near": {"e2e_mean": 9.0}}), {}, "no"),
    ]
    found = score(rows)["e2e_mean"]
    assert [line["simulator"] for line in found] == ["near", "jaxinfer", "far"]
    assert [line["n"] for line in found] == [2, 3, 2]
    assert [line["median"] for line in found] == pytest.approx([0.015, 0.1, 0.75])
    assert [line["ours"] for line in found] == pytest.approx([0.15, 0.1, 0.15])
    assert found[1]["p90"] == pytest.approx(0.18)
    assert found[1]["bias"] == pytest.approx(0.05)
