"""``jaxinfer check points`` of a log of vLLM's requests: files, figures by hand, and mistakes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from jaxinfer.commands.app import cli
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.validate.request_log import Figure, read_requests, request_rows, simulated

RUN: dict[str, Any] = {
    "model": "llama-3-8b",
    "groups": {"g": {"kind": "A100-80G-SXM"}},
    "engine": {"num_pages": 100, "max_num_seqs": 8, "max_in_flight": 1, "launch_ahead": False},
    "instances": {"x": {"group": "g"}},
    "simulate": {"linear": {"step_s": 0.01}},
}
# By the client's clock sent at 100 and 100.5 s, noted 1 ms later at the soonest.
REQUESTS = [
    {"input_toks": 10, "output_toks": 3, "arrival_time": 100.0, "queued_ts": 7.0,
     "first_token_ts": 7.019, "last_token_ts": 7.039},
    {"input_toks": 10, "output_toks": 1, "arrival_time": 100.5, "queued_ts": 7.501,
     "first_token_ts": 7.520, "last_token_ts": 7.520},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    lines = [json.dumps(request) for request in REQUESTS]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(folder: Path, *more: str, log: str = "requests.jsonl") -> Result:
    command = ["check", "points", str(folder / log), "--out", str(folder / "out"), *more]
    return CliRunner().invoke(cli, command)


def test_a_log_beside_its_simulation(folder: Path) -> None:
    """Steps of 10 ms: 10 and 10 ms to the first token, where 19 and 20 ms were measured."""
    done = run(folder, "--run", str(folder / "run.yaml"))
    assert done.exit_code == 0, done.output
    with (folder / "out" / "points.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    measured = [(19.0, 10.0, 39.0), (20.0, None, 20.0)]
    ours = [(10.0, 10.0, 30.0), (10.0, None, 10.0)]
    for row, theirs, found in zip(rows, measured, ours, strict=True):
        for prefix, wanted in (("silicon_", theirs), ("", found)):
            for name, ms in zip(("ttft", "tpot", "e2e"), wanted, strict=True):
                text = row[f"{prefix}{name}_ms"]
                assert text == "" if ms is None else float(text) == pytest.approx(ms, abs=1e-3)
    assert rows[0]["input_toks"] == "10"
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["requests"] == 2
    assert summary["TTFT mean"]["off"] == pytest.approx(10 / 19.5 - 1, rel=1e-6)
    assert summary["makespan"]["measured_s"] == pytest.approx(0.52)
    assert (folder / "out" / "scatter-requests.png").is_file()
    assert (folder / "out" / "1" / "run.json").is_file()


def test_a_preempted_prompt_finds_its_own_pages(folder: Path) -> None:
    """Two requests on 12 pages of 4 tokens: without a prefix cache, more is computed again."""
    engine = {**RUN["engine"], "num_pages": 13, "page_size": 4}
    (folder / "requests.jsonl").write_text(
        "\n".join(json.dumps({**REQUESTS[0], "input_toks": 16, "output_toks": 20}) for _ in "ab")
    )
    real = read_requests(folder / "requests.jsonl")
    ends = []
    for caching in (True, False):
        config = as_run_file({**RUN, "engine": {**engine, "enable_prefix_caching": caching},
                              "simulate": {"linear": {"token_s": 0.01}}})  # fmt: skip
        found = simulated(config, real, folder / str(caching))
        assert sum(request.preemptions for request in found.requests) > 0
        ends.append(max(request.token_times[-1] for request in found.requests))
        assert len(request_rows(real, found.requests)) == 2
    assert ends[0] < ends[1]
    # With room for both, nothing is computed again; no prompt begins like one that has ended.
    real[1] = {**real[1], "arrival": real[1]["arrival"] + 100}
    roomy = {**engine, "num_pages": 100}
    both = [
        simulated(as_run_file({**RUN, "engine": {**roomy, "enable_prefix_caching": caching},
                               "simulate": {"linear": {"token_s": 0.01}}}),
                  real, folder / f"roomy{caching}").requests
        for caching in (True, False)
    ]  # fmt: skip
    assert [each.token_times for each in both[0]] == [each.token_times for each in both[1]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--run is missing, must be a run file of the engine that wrote the log"),
        (["--run", "run.yaml", "--jobs", "2"], "--jobs has no effect on a log of requests"),
        (["--run", "run.yaml", "--without", "a"], "--without has no effect on a log"),
    ],
)
def test_mistakes_are_one_line(folder: Path, more: list[str], message: str) -> None:
    done = run(folder, *more)
    assert done.exit_code != 0
    assert message in str(done.exception or "") + done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_toks": "200"}, "input_toks is '200', must be an integer from 1 to 10000000"),
        ({"input_toks": 0}, "input_toks is 0, must be an integer from 1 to 10000000"),
        ({"output_toks": 20.5}, "output_toks is 20.5, must be an integer from 0 to 10000000"),
        ({"output_toks": True}, "output_toks is True, must be an integer from 0 to 10000000"),
        ({"input_toks": 10**12}, "input_toks is 1000000000000, must be an integer from 1 to"),
        ({"first_token_ts": None}, "first_token_ts is None, must be a number of seconds, at most"),
        ({"arrival_time": float("nan")}, "arrival_time: NaN is not JSON, write a finite number"),
        (
            {"arrival_time": 1e18},
            "arrival_time is 1e+18, must be a number of seconds, at most 1e+11",
        ),
        ({"last_token_ts": 5.0}, "last_token_ts is 5, before first_token_ts, which is 7.019"),
        ({"first_token_ts": 6.0}, "first_token_ts is 6, before queued_ts, which is 7"),
    ],
)
def test_a_line_that_cannot_be_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    """The third line, of which two are blank; a second such line is counted."""
    wrong = json.dumps(REQUESTS[0] | change)
    (folder / "requests.jsonl").write_text("\n".join(["", "", wrong, json.dumps(REQUESTS[1])]))
    done = run(folder, "--run", str(folder / "run.yaml"))
    said = str(done.exception)
    assert done.exit_code != 0
    assert f"requests.jsonl, line 3: {message}" in said
    assert not (folder / "out").exists()
    (folder / "requests.jsonl").write_text(f"{wrong}\n{wrong}")
    done = run(folder, "--run", str(folder / "run.yaml"))
    assert str(done.exception).endswith("(of 2 such lines the first)")


def test_what_cannot_be_simulated_leaves_no_folder(folder: Path) -> None:
    (folder / "requests.jsonl").write_text(json.dumps(REQUESTS[0] | {"input_toks": 100_000}))
    done = run(folder, "--run", str(folder / "run.yaml"))
    assert "request '0' needs" in str(done.exception)
    assert not (folder / "out").exists()


def test_given_fields_stay_beside_ours(folder: Path) -> None:
    lines = [json.dumps(each | {"ttft_ms": 5}) for each in REQUESTS]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    done = run(folder, "--run", str(folder / "run.yaml"))
    assert done.exit_code == 0, done.output
    with (folder / "out" / "points.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["own_ttft_ms"] for row in rows] == ["5", "5"]
    assert float(rows[0]["ttft_ms"]) == pytest.approx(10.0, abs=1e-3)


def test_a_csv_takes_no_run_file(folder: Path) -> None:
    (folder / "points.csv").write_text("id\n")
    done = run(folder, "--run", "run.yaml", log="points.csv")
    assert "--run is only for a log" in str(done.exception or "") + done.output
    done = run(folder, log="points.csv")
    assert "--operators is missing" in str(done.exception or "") + done.output


def test_a_figure_in_words() -> None:
    assert Figure("TTFT mean", 2.0, 2.5).line.split() == [
        "TTFT", "mean", "(s)", "vLLM", "2.0000", "simulated", "2.5000", "+25.0%",
    ]  # fmt: skip
