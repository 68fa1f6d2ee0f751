"""A run as DataFrames: against lines by hand, and against the figures of a simulated run."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer import JaxinferError, load_run
from jaxinfer.config.run_file import load_run_file
from jaxinfer.report.frames import REQUESTS, STEPS, TRANSFERS
from jaxinfer.simulate.run import simulate

ROOT = Path(__file__).parents[2]
STEP = {
    "instance": "a", "start": 0.5, "end": 1.5, "rows": 3, "decode_tokens": 2, "prefill_tokens": 37,
    "sampled": 2, "waiting": 4, "running": 5, "pages_in_use": 6,
}  # fmt: skip
STAGED = STEP | {"instance": "b", "end": 2.0, "stages": [[0.5, 1.0], [1.25, 2.0]]}
MOVE = {
    "request": "r0", "source": "a", "dest": "b", "tokens": 26, "bytes": 2600, "requested": 0.25,
    "start": 0.5, "end": 1.0, "hidden_s": 0.125,
}  # fmt: skip
DONE = {
    "id": "r0", "parent": "p", "arrival": 1.0, "first_scheduled": 1.25, "prompt_len": 100,
    "cut": 26, "preemptions": 1, "cached_tokens": 16, "token_times": [2.0, 2.5, 4.0], "error": None,
}  # fmt: skip
SHORT = DONE | {"id": "r1", "token_times": [3.0]}
TWO = DONE | {"id": "r3", "token_times": [3.0, 3.75]}
FAILED = DONE | {"id": "r2", "first_scheduled": None, "token_times": [], "error": "lost"}


def write(folder: Path, steps: list[Any], requests: list[Any], status: str = "finished") -> Path:
    (folder / "run.json").write_text(json.dumps({"status": status, "metrics": {"wall_s": 4.0}}))
    for name, lines in {"steps": steps, "requests": requests}.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def test_what_the_files_have(tmp_path: Path) -> None:
    found = load_run(write(tmp_path, [STEP, MOVE, STAGED], [DONE, SHORT, FAILED, TWO]))
    assert found.run == {"status": "finished", "metrics": {"wall_s": 4.0}}
    assert found.steps.to_dict("records") == [
        STEP | {"stages": ((0.5, 1.5),)},
        STAGED | {"stages": ((0.5, 1.0), (1.25, 2.0))},
    ]
    assert found.transfers.to_dict("records") == [MOVE]
    done, short, failed, two = found.requests.to_dict("records")
    assert done == DONE | {
        "token_times": (2.0, 2.5, 4.0),
        "output_tokens": 3,
        "delay": 0.25,
        "ttft": 1.0,
        "tpot": 1.0,
        "e2e": 3.0,
    }
    assert (short["ttft"], short["e2e"], short["output_tokens"]) == (2.0, 2.0, 1)
    assert np.isnan(short["tpot"])
    assert (two["tpot"], two["e2e"]) == (0.75, 2.75)
    assert all(np.isnan(failed[c]) for c in ("first_scheduled", "delay", "ttft", "tpot", "e2e"))
    assert (failed["error"], failed["token_times"], failed["output_tokens"]) == ("lost", (), 0)


def test_a_run_of_before_there_were_parents(tmp_path: Path) -> None:
    old = {name: value for name, value in DONE.items() if name != "parent"}
    assert list(load_run(write(tmp_path, [STEP], [old, DONE])).requests.parent) == ["r0", "p"]


def test_what_is_counted_is_whole(tmp_path: Path) -> None:
    """Numbers that the files have as integers, and the number of output tokens."""
    found = load_run(write(tmp_path, [STEP, MOVE], [DONE]))
    done = DONE | {"output_tokens": 3}
    for frame, line in ((found.requests, done), (found.steps, STEP), (found.transfers, MOVE)):
        whole = {name for name, kind in frame.dtypes.items() if kind == "int64"}
        assert whole == {name for name, value in line.items() if type(value) is int}


@pytest.mark.parametrize("empty", [True, False])
def test_columns_do_not_depend_on_the_rows(tmp_path: Path, empty: bool) -> None:
    found = load_run(write(tmp_path, [] if empty else [STEP, MOVE], [] if empty else [FAILED]))
    for frame, columns in [
        (found.requests, REQUESTS),
        (found.steps, STEPS),
        (found.transfers, TRANSFERS),
    ]:
        assert {name: str(kind) for name, kind in frame.dtypes.items()} == columns
        assert len(frame) == (not empty)


def test_all_columns_are_explained() -> None:
    text = jaxinfer.report.frames.RunFrames.__doc__  # type: ignore[attr-defined]
    assert all(f"``{name}``" in text for name in [*REQUESTS, *STEPS, *TRANSFERS])


def test_a_simulated_run_has_its_own_figures(tmp_path: Path) -> None:
    settings = ["workload.synthetic=azure_conversation", "workload.limit=30"]
    config = load_run_file(ROOT / "configs" / "cronus" / "cronus.yaml", settings)
    metrics = simulate(config, config.requests(), tmp_path)
    found = load_run(str(tmp_path / "1"))
    requests, steps = found.requests, found.steps
    assert len(requests) == 30
    assert requests.output_tokens.sum() == metrics.output_tokens
    for name in ("ttft", "tpot", "e2e", "delay"):
        # Files have microseconds.
        assert requests[name].mean() == pytest.approx(getattr(metrics, f"{name}_mean"), abs=2e-6)
    assert requests.e2e.quantile(0.9) == pytest.approx(metrics.e2e_p90, abs=2e-6)
    assert len(steps) == metrics.steps
    assert set(found.transfers.source) == {"ppi"}
    assert found.transfers.tokens.sum() == requests.cut.sum() > 0
    assert found.run["metrics"]["output_tokens"] == metrics.output_tokens


MISTAKES: list[tuple[list[Any], list[Any], str, str]] = [
    ([], [], "running", "the run is 'running', must be finished"),
    ([{"instance": "a"}], [], "finished", "damaged, KeyError: 'start'"),
    ([STEP | {"rows": None}], [], "finished", "damaged, "),
    ([], [DONE | {"arrival": "x"}], "finished", "damaged, "),
    ([MOVE | {"bytes": "x"}], [], "finished", "damaged, ValueError"),
    ([STEP | {"stages": [[0.5]]}], [], "finished", "damaged, ValueError"),
]


@pytest.mark.parametrize(("steps", "requests", "status", "message"), MISTAKES)
def test_mistakes_are_told(
    tmp_path: Path, steps: list[Any], requests: list[Any], status: str, message: str
) -> None:
    with pytest.raises(JaxinferError) as caught:
        load_run(write(tmp_path, steps, requests, status))
    assert str(caught.value).startswith(f"{tmp_path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"run\.json: cannot read the file"):
        load_run(tmp_path)


def test_without_pandas_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(JaxinferError, match=r"^load_run needs pandas, .*\[analysis\]") as caught:
        load_run(write(tmp_path, [STEP], [DONE]))
    assert "\n" not in str(caught.value)


def test_pandas_is_loaded_by_the_call_alone() -> None:
    code = "import sys; from jaxinfer import load_run; print('pandas' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


def test_the_extra_and_the_tests_have_the_same_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["analysis"]
    assert wanted in project["optional-dependencies"]["dev"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(JaxinferError) as caught:
        load_run(tmp_path)
    assert wanted in str(caught.value)
