"""``jaxinfer check points`` on made-up points and operators."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from published_cases import MODEL, chunks_ms, decodes_ms, gemm_ms, make_card
from validate_cases import row, write_points

from jaxinfer import JaxinferError
from jaxinfer.commands.app import cli
from jaxinfer.simulate.costs import kept_operators


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Operators of a card and a file of rules; conversions are kept here alone."""
    monkeypatch.setattr(kept_operators, "FOLDER", tmp_path / "kept")
    kept_operators.published_operators.cache_clear()
    make_card(tmp_path / "operators", "h100_sxm")
    shape = MODEL.model_dump(exclude_none=True)
    rules = [
        {
            "name": "all",
            "when": {},
            "set": {
                "models": {"made-up": shape},
                "simulate.tables.version": "1.2.0",
                "simulate.tables.small_operators": False,
                "engine.max_in_flight": 1,
                "rounds": 2,
            },
        },
        {"name": "step", "when": {}, "set": {"simulate.step_s": 0.001}},
    ]
    data = {"models": {"made/up": "made-up"}, "cards": {"x9_sxm": "H100-SXM"}, "rules": rules}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(data))
    return tmp_path


def run(folder: Path, rows: list[dict[str, str]], out: str, *more: str) -> Result:
    points = write_points(folder / "points.csv", rows)
    command = [
        "check", "points", points, "--operators", folder / "operators", "--out", folder / out,
        "--campaigns", folder / "rules.yaml", "--jobs", "1", *more,
    ]  # fmt: skip
    return CliRunner().invoke(cli, [str(word) for word in command], catch_exceptions=False)


def predicted(folder: Path, out: str) -> list[dict[str, str]]:
    with (folder / out / "points.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def step_ms(tokens: int, attention: float) -> float:
    """Two layers and the head for one row."""
    layer = sum(
        gemm_ms("bfloat16", tokens, n, k)
        for n, k in ((1024, 512), (512, 512), (2048, 512), (512, 1024))
    )
    return 2 * (layer + attention) + gemm_ms("bfloat16", 1, 4096, 512)


def test_one_request_at_a_time_is_a_sum_of_operators(folder: Path) -> None:
    """A prompt of 64 tokens alone; its second token sees 65 entries, the third 66."""
    one = row(batch_size="1", osl="3")
    assert run(folder, [one], "a", "--without", "step").exit_code == 0
    (found,) = predicted(folder, "a")
    ttft = step_ms(64, chunks_ms(1, 64))
    tpot = step_ms(1, (decodes_ms(1, 65) + decodes_ms(1, 66)) / 2)
    assert float(found["ttft_ms"]) == pytest.approx(ttft, rel=1e-6)
    assert float(found["tpot_ms"]) == pytest.approx(tpot, rel=1e-6)
    assert float(found["e2e_ms"]) == pytest.approx(ttft + 2 * tpot, rel=1e-6)
    assert (found["usable"], found["why"], found["id"]) == ("both", "", "a")
    # A step's host time is in each of them.
    assert run(folder, [one], "b").exit_code == 0
    (late,) = predicted(folder, "b")
    assert float(late["tpot_ms"]) == pytest.approx(tpot + 1, rel=1e-6)


def test_what_is_written_and_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row(id="p", batch_size="2"),
        row(id="q", batch_size="4", silicon_ttft_ms="12", silicon_tpot_ms="6"),
        row(id="r", model_path="made/down"),
        row(id="s", mode="disagg"),
    ]
    done = run(folder, rows, "a")
    assert done.exit_code == 0
    assert "1 point left out, line 4: model_path is made/down" in done.output
    version = "made/up x9_sxm trtllm 1.2.0: simulated with scheduler of its own options, tables 1.2"
    assert version in done.output
    found = predicted(folder, "a")
    assert [each["usable"] for each in found] == ["both", "both", "", ""]
    summary = json.loads((folder / "a" / "summary.json").read_text())
    errors = [abs(float(e["tpot_ms"]) / float(e["silicon_tpot_ms"]) - 1) for e in found[:2]]
    assert summary["all"]["tpot"]["median"] == pytest.approx(sum(errors) / 2)
    assert summary["all"]["tpot"]["tau"] == pytest.approx(1)
    assert (folder / "a" / "scatter-trtllm.png").is_file()
    # What was found is not simulated again.
    monkeypatch.setattr("jaxinfer.lab.validate.predict.predict", None)
    again = run(folder, rows, "a", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout) == summary
    assert predicted(folder, "a") == found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--without", "stop"], "--without stop: no such rule, did you mean 'step'?"),
        (
            ["--operators", "h100"],
            "--operators h100: no such folder; configs/operators ships, with all its cards",
        ),
        (
            ["--operators", "configs/operators/h100_sxm"],
            "--operators configs/operators/h100_sxm: is of one card; rows name theirs, so give the "
            "folder with all: configs/operators",
        ),
    ],
)
def test_mistakes_are_one_line(folder: Path, more: list[str], message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        run(folder, [row()], "a", *more)
    assert str(error.value) == message


def test_nothing_to_simulate_is_an_error_that_leaves_no_folder(folder: Path) -> None:
    rows = [row(), row(isl="1.5"), row(osl="9", gemm_quant_mode="int4")]
    found = run(folder, rows, "a", "--set", "engine.max_num_sqs=1")
    assert found.exit_code == 1
    *_, option, isl, form, last = found.output.splitlines()
    assert option.startswith(
        "1 point left out, line 2: engine.max_num_sqs: unknown option, did you"
    )
    assert isl.startswith("1 point left out, line 3: isl is '1.5', must be an integer")
    assert form == (
        "1 point left out, line 4: gemm_quant_mode is 'int4', which no rule is for: known: none"
    )
    assert last.endswith("points.csv: none of 3 points can be simulated")
    assert not (folder / "a").exists()


def test_given_columns_stay_beside_ours(folder: Path) -> None:
    assert run(folder, [row()], "a").exit_code == 0
    mine = {"why": "mine", "ttft_ms": "123", "own_why": "too"}
    with (folder / "points.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*row(), *mine])
        writer.writeheader()
        writer.writerow(row() | mine)
    points, rules = folder / "points.csv", folder / "rules.yaml"
    done = CliRunner().invoke(
        cli,
        ["check", "points", str(points), "--operators", str(folder / "operators"), "--jobs", "1",
         "--campaigns", str(rules), "--out", str(folder / "b")],
    )  # fmt: skip
    assert "own_NAME in points.csv: why, ttft_ms" in done.output
    (ours,), (found,) = predicted(folder, "a"), predicted(folder, "b")
    assert (found["own_own_why"], found["own_why"], found["own_ttft_ms"]) == ("mine", "too", "123")
    assert (found["why"], found["ttft_ms"]) == ("", ours["ttft_ms"])


def test_tables_of_several_engines_need_one(folder: Path, tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "model": "made-up",
        "models": {"made-up": MODEL.model_dump(exclude_none=True)},
        "groups": {"g": {"kind": "H100-SXM"}},
        "instances": {"a": {"group": "g"}},
        "simulate": {"tables": str(folder / "operators")},
        "workload": {"synthetic": {"input_len": 8, "output_len": 2, "count": 1}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(JaxinferError, match=r"give tables as \{folder: \.\.\., backend: "):
        CliRunner().invoke(cli, ["simulate", str(path)], catch_exceptions=False)
    tables = {"folder": str(folder / "operators"), "backend": "trtllm", "version": "1.2.0"}
    path.write_text(yaml.safe_dump(data | {"simulate": {"tables": tables}}))
    out = str(tmp_path / "out")
    done = CliRunner().invoke(cli, ["simulate", str(path), "--out", out], catch_exceptions=False)
    assert done.exit_code == 0
    (record,) = Path(out).rglob("run.json")
    stage = json.loads(record.read_text())["instances"]["a"]["stages"][0]
    assert any(file.endswith("gemm_perf.parquet") for file in stage["tables"]["files"])
