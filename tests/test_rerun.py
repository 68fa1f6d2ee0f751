"""Runs made again from what their folders record: byte for byte, or refused with a reason."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from tiny_model import TINY_OPTIONS

from jaxinfer import LLM, JaxinferError
from jaxinfer.commands.app import cli
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.lab.measure import measure
from jaxinfer.lab.rerun import OF_THE_MOMENT, differing
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

SAME = "all files are the same, apart from times of day and the machine in run.json\n"
TRACE = "num_prefill_tokens,num_decode_tokens,arrived_at\n70,9,0.0\n400,20,0.25\n33,5,0.5\n"
SYSTEM = """
from jaxinfer.systems.single import Single

class Mine(Single):
    def report(self):
        return {"n": 1}
"""


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def refused(*words: str) -> str:
    with pytest.raises(JaxinferError) as caught:
        call(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


DRAWN = ["workload.synthetic=azure_conversation", "workload.limit=8"]
CASES: list[tuple[str, Sequence[str]]] = [
    ("cronus/cronus.yaml", [*DRAWN, "workload.arrivals={kind: gamma, rate: 3.0, cv: 2.0}"]),
    ("modelled/flips.yaml", ["workload.limit=40"]),
    ("modelled/aladdin.yaml", ["workload.limit=20", "workload.synthetic.seed=3"]),
    ("tetriinfer/tetriinfer.yaml", [*DRAWN, "engine.seed=4"]),
    ("multivendor/unlike.yaml", DRAWN),
    ("vidur/codellama_34b.yaml", [*DRAWN, "workload.only=HPHD"]),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: str(value)[:20])
def test_a_run_comes_to_the_same(name: str, settings: Sequence[str], here: Path) -> None:
    config = load_run_file(name, settings)
    simulate(config, config.requests(), "runs")
    assert call("check", "rerun", "runs/1").output == SAME
    assert call("check", "rerun", "runs/1", "--out", "again").output == SAME
    before, after = files(here / "runs" / "1"), files(here / "again")
    for file in ("steps.jsonl", "requests.jsonl"):
        assert len(before[file]) > 100
        assert before[file] == after[file]
    runs = [json.loads(each["run.json"]) for each in (before, after)]
    changed = {key for key in runs[0] if runs[0][key] != runs[1][key]}
    assert before.keys() == after.keys()
    assert changed <= {*OF_THE_MOMENT, "metrics"}


def test_a_comparison_comes_to_the_same(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, pictures and traces, too; each system with the first one's requests."""
    Path("t.csv").write_text(TRACE)
    for name, system in (("b", "least_loaded"), ("a", "data_parallel")):
        shares = (
            {"shares": {n: {"weight": w, "max_waiting": w} for n, w in (("i", 3), ("j", 1))}}
            if system == "data_parallel"
            else {}
        )
        run_file = {
            "model": "llama-3-8b",
            "groups": {"g": {"kind": "A10"}, "h": {"kind": "A10"}},
            "instances": {"i": {"group": "g"}, "j": {"group": "h"}},
            "system": {"name": system, **shares},
            "workload": {"trace": "t.csv", "arrivals": "trace"} if name == "b" else {},
        }
        Path(f"{name}.yaml").write_text(yaml.safe_dump(run_file))
    call("compare", "--simulate", "b.yaml", "a.yaml", "--out", "out", "--pictures", "svg")
    run = json.loads(Path("out/runs/a/1/run.json").read_text())
    assert run["run_file"]["workload"] == {"trace": "t.csv", "arrivals": {"kind": "trace"}}
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # t.csv is found where the command was given.
    assert call("check", "rerun", "../out", "--out", "again").output == SAME
    assert files(here / "out").keys() == files(elsewhere / "again").keys()
    assert differing(here / "out", elsewhere / "again") == []


def test_what_has_changed_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.csv").write_text(TRACE)
    Path("rerun_mine.py").write_text(SYSTEM)
    monkeypatch.syspath_prepend(str(here))
    settings = ["system=rerun_mine:Mine", "workload.trace=t.csv"]
    config = load_run_file("vllm/rtx4090_llama31_8b.yaml", settings)
    simulate(config, config.requests(), "runs")
    assert call("check", "rerun", "runs/1").output == SAME
    for name in ("steps.jsonl", "run.json"):
        path = here / "runs" / "1" / name
        whole = path.read_text()
        path.write_text(whole.replace("prefill_tokens", "tokens").replace('"n": 1', '"n": 2'))
        done = call("check", "rerun", "runs/1")
        assert (done.output, done.exit_code) == (f"these files differ: {name}\n", 1)
        path.write_text(whole)
    run = f"{here}/runs/1"
    Path("t.csv").write_text(TRACE + "5,5,1.0\n")
    assert (
        refused("check", "rerun", "runs/1")
        == f"{run}: t.csv has changed since the run was made from it"
    )
    Path("t.csv").unlink()
    assert (
        refused("check", "rerun", "runs/1") == f"{run}: t.csv is gone, which the run was made from"
    )
    Path("t.csv").write_text(TRACE)
    Path("rerun_mine.py").write_text(SYSTEM.replace("1", "2"))
    assert "rerun_mine.py has changed since the run" in refused("check", "rerun", "runs/1")


def changed(**values: Any) -> None:
    path = Path("runs/1/run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_cannot_be_run_again_is_told(here: Path) -> None:
    config = load_run_file("vllm/rtx4090_llama31_8b.yaml", DRAWN)
    simulate(config, [BenchRequest(None, 10, 2, 0.0)], "runs")
    message = refused("check", "rerun", "runs/1")
    assert message.startswith(f"{here}/runs/1: its 1 requests are not those of its run file: ")
    assert refused("check", "rerun", "runs").endswith(f"such as {here}/runs/1")
    missing = f"{here}/none/run.json: cannot read the file: No such file or directory"
    assert refused("check", "rerun", "none") == missing
    whole = json.loads(Path("runs/1/run.json").read_text())
    changed(run_file=whole["run_file"] | {"gone": 1})
    assert "runs/1/run.json: run_file: gone: unknown option" in refused("check", "rerun", "runs/1")
    changed(status="running")
    assert refused("check", "rerun", "runs/1").endswith("the run is 'running', must be finished")
    older = {name: value for name, value in whole.items() if name != "files"}
    Path("runs/1/run.json").write_text(json.dumps(older))
    assert "run.json does not record the run's inputs" in refused("check", "rerun", "runs/1")
    shutil.rmtree("runs")
    config = load_run_file("vllm/rtx4090_llama31_8b.yaml", DRAWN)
    simulate(config, config.requests(), "runs")
    Path("full").mkdir()
    Path("full/x").touch()
    assert refused("check", "rerun", "runs/1", "--out", "full").startswith(
        f"{here}/full: has files in it"
    )
    changed(run_file=whole["run_file"] | {"workload": {}})
    assert refused("check", "rerun", "runs/1").startswith(
        f"{here}/runs/1: its requests: no trace: "
    )
    real = {name: value for name, value in whole.items() if name != "simulate"}
    Path("runs/1/run.json").write_text(json.dumps(real))
    assert refused("check", "rerun", "runs/1") == "a real run needs --out FOLDER"


def test_a_measured_run_is_made_again(
    tiny: LLM, tiny_loaded_once: None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is made again on its trace's requests, and its lengths and tokens are compared."""
    Path("t.csv").write_text("num_prefill_tokens,num_decode_tokens\n7,3\n20,2\n")
    given = {"model": tiny.model, "engine": TINY_OPTIONS, "workload": {"trace": "t.csv"}}
    monkeypatch.setattr(tiny, "config", RunFile.model_validate(given))
    measure(tiny, tiny.config.requests(), "t.csv", "runs")
    done = call("check", "rerun", "runs/1", "--out", "again")
    assert done.exit_code == 0
    assert f"2 of 2 answers have the same tokens as in {here}/runs/1\n" in done.output
    lines = [
        [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
        for folder in (here / "runs" / "1", here / "again" / "1")
    ]
    kept = [{(x["id"], x["prompt_len"], len(x["token_times"])) for x in each} for each in lines]
    assert kept[0] == kept[1] == {("0", 7, 3), ("1", 20, 2)}
    path = here / "runs" / "1" / "requests.jsonl"
    whole = path.read_text()
    other = {x["id"]: x["tokens_sha256"] for x in lines[0]}
    path.write_text(whole.replace(other["1"], other["0"]))
    done = call("check", "rerun", "runs/1", "--out", "other")
    assert (done.exit_code, "1 of 2 answers have the same" in done.output) == (1, True)
    path.write_text(whole.replace("tokens_sha256", "no_digest"))
    done = call("check", "rerun", "runs/1", "--out", "older")
    assert (done.exit_code, "nothing was compared: " in done.output) == (0, True)
    path.write_text(whole)
    Path("t.csv").write_text("num_prefill_tokens,num_decode_tokens\n7,3\n")
    assert "t.csv has changed" in refused("check", "rerun", "runs/1", "--out", "third")


def test_what_else_lies_in_the_folder_does_not_count(here: Path) -> None:
    """A user's notes, and the run made again in it; but a file of its own that is gone does."""
    config = load_run_file("cronus/cronus.yaml", DRAWN)
    simulate(config, config.requests(), "runs")
    Path("runs/1/notes.txt").write_text("mine")
    for name in ("again", "once_more"):
        done = call("check", "rerun", "runs/1", "--out", f"runs/1/{name}")
        assert (done.output, done.exit_code) == (SAME, 0)
    Path("runs/1/steps.jsonl").unlink()
    done = call("check", "rerun", "runs/1")
    assert (done.output, done.exit_code) == ("these files differ: steps.jsonl\n", 1)
