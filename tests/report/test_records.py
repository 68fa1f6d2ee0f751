"""Run folders: written, and read as what was written."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.report.recorder import Recorder
from jaxinfer.report.records import RequestRecord, StepRecord, TransferRecord, read_run
from jaxinfer.report.run_folder import RunFolder, run_folders
from jaxinfer.serving.batch import ShardWork, Work
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import InstanceLost, StepDone, TransferDone

DESCRIPTION: dict[str, Any] = {
    "system": {"name": "two"},
    "emulated": ["all: slow"],
    "instances": {
        "a": {"stages": [{"group": "low"}, {"group": "high"}]},
        "b": {"stages": [{"group": "high"}]},
    },
}


def step(
    instance: str, spans: list[tuple[float, float]], tokens: int, decodes: int, *shards: ShardWork
) -> StepDone:
    work = Work(tokens, decodes, 3, 2, 0, [], decodes, shards)
    batch: Any = SimpleNamespace(
        instance=instance, rows=[], work=work, num_waiting=4, num_running=5, pages_in_use=6
    )
    return StepDone(batch, (1, 2), spans[0][0], spans[-1][1], stages=spans)


def request(cut: int | None, error: str | None) -> RequestState:
    made = RequestState("r0", 100, 10, 1.0000004)
    made.metrics.token_times = [2.00000049, 3.5]
    made.metrics.received = 2.75
    made.metrics.first_scheduled = None if error else 1.25000049
    made.metrics.cut, made.metrics.num_preemptions, made.metrics.num_cached_tokens = cut, 2, 16
    made.error = error
    return made


def write(
    folder: Path, counts_transfer: bool = False, metrics: dict[str, Any] | None = None
) -> RunFolder:
    with RunFolder(folder, DESCRIPTION) as made:
        moved: Any = SimpleNamespace(source="a", dest="b", start=4, stop=30, requested=0.25,
                                     slice_move=None, request=SimpleNamespace(id="r0"))  # fmt: skip
        made.add_step(step("a", [(0.0, 1.00000049), (1.5, 2.0)], 40, 3), [moved])
        shards = ShardWork(5, 50, [(0, 9, 2), (4, 1, 1)]), ShardWork(7, 70)
        made.add_step(step("b", [(0.75, 1.25)], 7, 7, *shards), [moved])
        idle: Any = {name: SimpleNamespace(in_flight=0) for name in "ab"}
        made.add_transfer(TransferDone(moved, 0.5, 1.0, 2600), idle)
        made.add_request(request(120, None), "p0", counts_transfer)
        made.add_request(request(None, "lost"), "p0", counts_transfer)
        made.finish(metrics or {"wall_s": 4.0}, {"b": [0.25, 0.5]}, {"a": "failed"}, {"cuts": {}})
    return made


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read_run(write(tmp_path).path)
    assert (found.name, found.wall_s, found.emulated) == ("two", 4.0, ("all: slow",))
    assert found.groups == {"a": ("low", "high"), "b": ("high",)}
    assert found.steps == (
        StepRecord("a", ((0.0, 1.0), (1.5, 2.0)), 37, 3),
        StepRecord("b", ((0.75, 1.25),), 0, 7, heads=(8, 7)),
    )
    # The destination computes from 0.75 on.
    assert found.transfers == (TransferRecord("r0", "a", "b", 26, 2600, 0.25, 0.5, 1.0, 0.25),)
    assert found.requests == (
        RequestRecord("r0", 1.0, 100, (2.0, 3.5), 100, 2, None, 1.25, "p0"),
        RequestRecord("r0", 1.0, 100, (2.0, 3.5), 0, 2, "lost", None, "p0"),
    )
    assert found.run["overruns"] == {"b": {"steps": 2, "seconds": 0.75}}
    assert found.run["lost"] == {"a": "failed"}
    assert found.run["system_report"] == {"cuts": {}}
    assert found.run["versions"]["jaxinfer"]
    counted = read_run(write(tmp_path, counts_transfer=True).path)
    assert counted.requests[0].token_times == (2.75, 3.5)


def test_lines_have_what_the_documentation_names(tmp_path: Path) -> None:
    path = write(tmp_path).path
    first, second, moved = map(json.loads, (path / "steps.jsonl").read_text().splitlines())
    assert first == {
        "instance": "a", "start": 0.0, "end": 2.0, "rows": 3, "decode_tokens": 3,
        "prefill_tokens": 37, "sampled": 2, "waiting": 4, "running": 5, "pages_in_use": 6,
        "stages": [[0.0, 1.0], [1.5, 2.0]],
    }  # fmt: skip
    assert "stages" not in second
    assert ("heads" in first, second["heads"]) == (False, [8, 7])
    assert moved["tokens"] == 26
    line, _ = map(json.loads, (path / "requests.jsonl").read_text().splitlines())
    assert line["cached_tokens"] == 16
    assert "tokens_sha256" not in line, "a simulation has none"


def test_an_answer_has_the_digest_of_its_tokens(tmp_path: Path) -> None:
    """Tokens are 8 bytes each, the lowest first."""
    with RunFolder(tmp_path, DESCRIPTION) as made:
        made.add_request(request(None, None), "p0", False, [7, 300])
    line = json.loads((made.path / "requests.jsonl").read_text())
    expected = hashlib.sha256(bytes([7, *[0] * 7, 44, 1, *[0] * 6])).hexdigest()
    assert line["tokens_sha256"] == expected


def test_a_transfer_is_written_when_an_end_of_it_is_lost(tmp_path: Path) -> None:
    moved: Any = SimpleNamespace(source="a", dest="b", start=0, stop=2, requested=0.0,
                                 slice_move=None, request=SimpleNamespace(id="r0"))  # fmt: skip
    in_flight: Any = {name: SimpleNamespace(in_flight=int(name == "a")) for name in "ab"}
    with RunFolder(tmp_path, DESCRIPTION) as made:
        made.add_transfer(TransferDone(moved, 0.0, 1.0, 8), in_flight)
        made.lose_instance("a")
    (line,) = (made.path / "steps.jsonl").read_text().splitlines()
    assert json.loads(line)["hidden_s"] == 0.0


def test_a_recorder_hands_on_what_it_hears(tmp_path: Path) -> None:
    """A step, a transfer from an instance that computes and is lost, a request, the end."""
    moved: Any = SimpleNamespace(source="a", dest="b", start=0, stop=2, requested=0.0,
                                 slice_move=None, request=SimpleNamespace(id="r0"))  # fmt: skip
    loop: Any = SimpleNamespace(
        assignments=SimpleNamespace(
            hand_offs=SimpleNamespace(moving=[moved]),
            instances={
                name: SimpleNamespace(
                    in_flight=int(name == "a"), kv=SimpleNamespace(is_spread=False)
                )
                for name in "ab"
            },
        ),
        world=SimpleNamespace(now=lambda: 4.0),
        system=SimpleNamespace(report=lambda: {"cuts": {}}),
    )
    done, heard = step("b", [(0.25, 0.5)], 7, 7), list[StepDone]()
    with Recorder(tmp_path, lambda: DESCRIPTION, True, heard.append) as made:
        made.add_event(done, loop)
        made.add_event(TransferDone(moved, 0.0, 1.0, 8), loop)
        made.add_event(InstanceLost("a", "failed"), loop)
        made.add_request(ended := request(50, None), "r0")
        assert made.add_prompt([ended]) == [[2.75, 3.5]]
        found = made.finish(
            loop, 1, 0, 2, {"b": [0.25, 0.5]}, {"a": "failed"}, num_pages=9, compiles=0,
            compile_s=0.0, late_compiles=0, loop_s=0.5, launching_s=0.25,
        )  # fmt: skip
    assert heard == [done]
    assert (found.requests, found.failed, found.preemptions, found.wall_s) == (1, 0, 2, 4.0)
    assert (found.steps, found.ttft_mean) == (1, pytest.approx(2.75 - 1.0000004))
    run = read_run(tmp_path / "1")
    assert run.run["overruns"] == {"b": {"steps": 2, "seconds": 0.75}}
    assert (run.run["lost"], run.run["system_report"]) == ({"a": "failed"}, {"cuts": {}})
    # The step of b, while the transfer was under way.
    assert [transfer.hidden_s for transfer in run.transfers] == [0.25]
    assert [each.token_times for each in run.requests] == [(2.75, 3.5)]


def test_a_run_has_the_name_that_its_reader_gives(tmp_path: Path) -> None:
    path = write(tmp_path).path
    assert read_run(path, "mine").name == "mine"
    assert read_run(str(path), None).name == "two"


def test_latencies() -> None:
    record = RequestRecord("r", 1.0, 5, (1.5, 1.75, 3.0), 0, 0, None)
    assert record.ttft == 0.5
    assert record.tbt == [0.25, 1.25]
    none = RequestRecord("r", 1.0, 5, (), 0, 0, None)
    assert (none.ttft, none.tbt) == (None, [])


def test_folders_count_up(tmp_path: Path) -> None:
    (tmp_path / "9").mkdir()
    (tmp_path / "10").mkdir()
    (tmp_path / "notes").mkdir()
    with RunFolder(tmp_path, DESCRIPTION) as made:
        assert made.path == tmp_path / "11"
        assert json.loads((made.path / "run.json").read_text())["status"] == "running"
    assert [path.name for path in run_folders(tmp_path)] == ["9", "10", "11"]
    with RunFolder(tmp_path / "new" / "folder", DESCRIPTION) as made:
        assert made.path.name == "1"
    (tmp_path / "file").touch()
    with pytest.raises(JaxinferError, match=r"^run folder .*/file: "):
        RunFolder(tmp_path / "file", DESCRIPTION)


def test_a_run_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path, DESCRIPTION) as made:
        pass
    with pytest.raises(JaxinferError, match=r"/1: the run is 'running', must be finished"):
        read_run(made.path)
    (made.path / "run.json").write_text("{}")
    with pytest.raises(JaxinferError, match=r"/1: the run is None, must be finished"):
        read_run(made.path)
    path = write(tmp_path).path
    steps = path / "steps.jsonl"
    whole = steps.read_text()
    steps.write_text(whole + "{")
    last = len(whole.splitlines()) + 1
    with pytest.raises(
        JaxinferError, match=rf"steps\.jsonl: not JSON lines: .* at line {last}, column 2$"
    ):
        read_run(path)
    steps.write_text(whole.replace("decode_tokens", "tokens"))
    with pytest.raises(JaxinferError, match="damaged, KeyError: 'decode_tokens'"):
        read_run(path)
    steps.unlink()
    with pytest.raises(JaxinferError, match=r"steps\.jsonl: No such file"):
        read_run(path)


def test_lines_that_are_missing_are_told(tmp_path: Path) -> None:
    """A finished run whose lines are not those that it counted."""
    metrics = {"wall_s": 4.0, "steps": 2, "requests": 1}
    path = write(tmp_path, metrics=metrics).path
    assert len(read_run(path).steps) == 2
    for name, count, what in (("steps", 2, "steps"), ("requests", 1, "requests")):
        file = path / f"{name}.jsonl"
        whole = file.read_text()
        file.write_text("")
        with pytest.raises(JaxinferError) as caught:
            read_run(path)
        assert str(caught.value) == (
            f"{file}: has 0 {what}, the run had {count}: lines are missing or too many"
        )
        file.write_text(whole)


def test_the_folder_of_a_run_is_named(tmp_path: Path) -> None:
    """Given a folder above a run's, such as a comparison's, the error names a run's folder."""
    path = write(tmp_path / "runs" / "two").path
    for folder in (tmp_path, tmp_path / "runs", tmp_path / "runs" / "two"):
        with pytest.raises(JaxinferError) as caught:
            read_run(folder)
        assert str(caught.value) == (
            f"{folder}: no run.json there, give the folder of one run, such as {path}"
        )
