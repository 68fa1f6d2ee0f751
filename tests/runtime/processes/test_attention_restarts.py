"""Attention groups whose processes are lost and started again: tokens, and who uses them again."""

import gc
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attention_restarts import (
    Return,
    home_of,
    pid_of,
    restartable,
    serve_with,
    worker_of,
)
from cluster_cases import load
from cluster_checks import Done, serve
from host_cases import KEY, jobs, listening
from process_cases import (
    SILENT,
    call_silent_who_is_stopped,
    check_nothing_left,
    children,
    wait_until,
)
from scatter import of_two_devices

from jaxinfer import JaxinferError
from jaxinfer.lab.validate.same_decisions import check_decisions


def told(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Groups, instances, errors and shards of a run's restarts."""
    keys = "group", "instances", "error", "without"
    return [tuple(each[key] for key in keys) for each in run["restarts"]]


WITHOUT, BACK = ("a0", ["x"], None, [1]), ("a0", [], None, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "by", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_heads_lie_there_again(
    by: signal.Signals,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice in two runs, and once between them; the fourth loss is for good.

    The simulator decides alike on what each run has heard.
    """
    call_silent_who_is_stopped(monkeypatch)
    before = children()
    llm = load(models["two"], tmp_path, **restartable(3))
    runs, pids, back = tmp_path / "runs", [pid_of(llm, "a0")], Return(home_of(llm))
    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids[0], by), 30: back})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT, BACK])
    why = f"was ended by signal {by}" if by == signal.SIGKILL else SILENT
    assert run["restarts"][1]["why"] == f"process of group a0 (pid {pids[0]}) {why}"
    lies_there = [each[1] > 0 for each in slices]
    assert any(lies_there[:9])
    assert not any(lies_there[12:30])
    assert any(lies_there[30:])
    assert run["metrics"]["late_compiles"] == 0
    pids.append(pid_of(llm, "a0"))

    os.kill(pids[1], by)
    back()
    found, run, slices = serve_with(llm, runs, {})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT, BACK])
    assert any(each[1] for each in slices[9:])
    pids.append(pid_of(llm, "a0"))

    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids[2], by), 30: back})
    assert (found, told(run)) == (expected["two"], [WITHOUT, BACK])
    assert any(each[1] for each in slices[30:])
    pids.append(pid_of(llm, "a0"))
    assert len({*pids}) == 4

    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids[3], by)})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT])
    assert not any(each[1] for each in slices[12:])
    for number in range(1, 5):
        assert check_decisions(runs / str(number)).difference is None
    check_nothing_left(llm)
    assert [shard.num_pages > 0 for shard in llm._runs.kv["x"].shards] == [True, False, True]
    del llm
    gc.collect()
    wait_until(lambda: children() <= before)


@pytest.mark.slow
def test_all_devices_of_a_group_are_lost_and_back_together(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    before = children()
    llm = load(models["two"], tmp_path, **of_two_devices(restartable(1)))
    runs, kill = tmp_path / "runs", partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL)
    acts = {9: kill, 30: Return(home_of(llm))}
    found, run, slices = serve_with(llm, runs, acts)
    assert (found, run["lost"]) == (expected["two"], {})
    assert told(run) == [("a0", ["x"], None, [1, 2]), BACK]
    for device in (1, 2):
        assert any(each[device] for each in slices[:9])
        assert not any(each[device] for each in slices[12:30])
        assert any(each[device] for each in slices[30:])
    assert check_decisions(runs / "1").difference is None
    check_nothing_left(llm)
    del llm
    gc.collect()
    wait_until(lambda: children() <= before)


ALL = ("p and a0 and a1", ["x"], None, [])


@pytest.mark.slow
def test_the_stage_is_back_with_all_its_attention_groups(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Once it is lost alone, and once while the instance goes on without a group for good."""
    before = children()
    llm = load(models["two"], tmp_path, **of_two_devices(restartable(2, "p")))
    runs, pids = (
        tmp_path / "runs",
        {each.name: pid_of(llm, each.name) for each in worker_of(llm).processes},
    )
    found, run, slices = serve_with(llm, runs, {9: partial(os.kill, pids["p"], signal.SIGKILL)})
    assert (found, run["lost"], told(run)) == (expected["two"], {}, [ALL])
    assert (
        run["restarts"][0]["why"] == f"process of group p (pid {pids['p']}) was ended by signal 9"
    )
    assert all(any(each[shard] for each in slices[20:]) for shard in range(4))
    assert not {*pids.values()} & {pid_of(llm, name) for name in pids}
    check_nothing_left(llm)

    acts = {
        9: partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL),
        24: partial(os.kill, pid_of(llm, "p"), signal.SIGKILL),
    }
    found, run, slices = serve_with(llm, runs, acts)
    assert (found, run["lost"]) == (expected["two"], {})
    assert told(run) == [("a0", ["x"], None, [1, 2]), ALL]
    assert not any(each[1] + each[2] for each in slices[12:24])
    assert any(each[1] + each[2] for each in slices[30:])
    for number in (1, 2):
        assert check_decisions(runs / str(number)).difference is None
    check_nothing_left(llm)
    with pytest.raises(
        JaxinferError, match=r"^process of group p \(pid \d+\) was ended by signal 9"
    ):
        serve_with(llm, runs, {9: partial(os.kill, pid_of(llm, "p"), signal.SIGKILL)})
    wait_until(lambda: children() <= before)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("group", ["a0", "q"])
def test_stages_in_two_processes_are_back_with_the_group_that_they_share(
    group: str, models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    before = children()
    sections = of_two_devices(restartable(1, "p", "a0"))
    del sections["groups"]["a1"]
    sections["groups"]["q"] = {"process": "own", "restart": 1}
    sections["instances"]["x"]["stages"] = [
        {"group": "p", "layers": 3, "attention": ["a0"]},
        {"group": "q", "layers": 1, "attention": [{"group": "a0", "num_pages": 12}]},
    ]
    llm = load(models["three"], tmp_path, **sections)
    acts = {9: partial(os.kill, pid_of(llm, group), signal.SIGKILL)}
    found, run, slices = serve_with(llm, tmp_path / "runs", acts)
    assert (found, run["lost"]) == (expected["three"], {})
    assert told(run) == [("p and q and a0", ["x"], None, [])]
    assert all(any(each[shard] for each in slices[20:]) for shard in range(6))
    assert check_decisions(tmp_path / "runs" / "1").difference is None
    check_nothing_left(llm)
    del llm, acts
    gc.collect()
    wait_until(lambda: children() <= before)


@pytest.mark.slow
def test_one_that_cannot_be_started(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The instance goes on without it for good, and no process is left of the attempts."""
    before = children()
    llm = load(models["two"], tmp_path, **restartable(2))
    llm.cluster.config.groups["a0"].environment["JAX_PLATFORMS"] = "nonsense"
    acts = {
        9: partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL),
        20: Return(home_of(llm)),
    }
    found, run, _ = serve_with(llm, tmp_path / "runs", acts)
    assert (found, run["lost"]) == (expected["two"], {})
    went_on, failed = told(run)
    assert went_on == WITHOUT
    assert failed[:2] == ("a0", [])
    assert "nonsense" in failed[2]
    assert home_of(llm).left == 0
    assert check_decisions(tmp_path / "runs" / "1").difference is None
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    wait_until(lambda: len(children() - before) == 2)


@pytest.mark.slow
def test_one_of_another_host(
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker there starts another."""
    monkeypatch.setenv("JAXINFER_KEY", KEY)
    with listening() as (address, server):
        sections = restartable(1)
        sections["groups"]["a0"] |= {"process": None, "host": address}
        llm = load(models["two"], tmp_path, **sections)
        (job,) = jobs(server)
        acts = {9: job.kill, 30: Return(home_of(llm))}
        found, run, slices = serve_with(llm, tmp_path / "runs", acts)
        assert (found, run["lost"], told(run)) == (expected["two"], {}, [WITHOUT, BACK])
        why = f"process of group a0 (at {address}) was ended by signal 9"
        assert run["restarts"][1]["why"] == why
        assert any(each[1] for each in slices[30:])
        (after,) = jobs(server)
        assert after.pid != job.pid
        check_nothing_left(llm)
        del llm
        gc.collect()
        wait_until(lambda: not jobs(server))


@pytest.mark.slow
@pytest.mark.long
def test_the_stage_is_lost_while_one_is_started(models: dict[str, Path], tmp_path: Path) -> None:
    """Nobody needs the attention group any more, and none of its processes is left."""
    before = children()
    llm = load(models["two"], tmp_path, **restartable(9))
    pid = pid_of(llm, "p")
    acts = {
        9: partial(os.kill, pid_of(llm, "a0"), signal.SIGKILL),
        14: partial(os.kill, pid, signal.SIGKILL),
    }
    with pytest.raises(JaxinferError, match=rf"^process of group p \(pid {pid}\) was ended by sig"):
        serve_with(llm, tmp_path / "runs", acts)
    wait_until(lambda: children() <= before)
    assert home_of(llm).left == 8
