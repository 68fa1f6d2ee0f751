"""Instances in processes of their own: tokens, what is told, what is lost, what is left behind."""

import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_cases import (
    PAIRS,
    Case,
    Loader,
    Pair,
    Side,
    Way,
    covering_cases,
    load,
)
from cluster_checks import Done, Ran, check_case, check_transfers, serve, token_bytes
from process_cases import (
    SILENT,
    SMALL,
    apart,
    call_silent_who_is_stopped,
    children,
    pid_of,
    serve_once,
    serve_until,
)
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError

# Another number of devices, of stages and of segments on either side.
ONE_APART = Pair("two", Side(1, 8, segments=3), Side(4, 16), apart="b")
BOTH_APART = Pair("three", Side(2, 16, (1, 3)), Side(2, 8, (2, 2), segments=2), apart="ab")


def ways() -> list[Way]:
    """Rules of handing KV off in both directions, a shortage on either side, a warm cache."""
    chosen = [
        ("cronus_a_b", 31, "at_end", "", "twice"),
        ("cronus_b_a", 32, "per_chunk", "b", "off"),
        ("cronus_a_b", 0.98, "per_segment", "", "off"),
        ("disaggregated_a_b", None, "on_demand", "b", "off"),
        ("disaggregated_b_a", None, "per_segment", "a", "on"),
        ("data_parallel", None, "", "a", "on"),
    ]
    return [Way(*way) for way in chosen]


@pytest.mark.parametrize("way", ways(), ids=str)
@pytest.mark.parametrize(
    "pair", [ONE_APART, pytest.param(BOTH_APART, marks=pytest.mark.slow)], ids=str
)
def test_tokens_are_those_of_one_instance(
    pair: Pair, way: Way, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    check_case(Case(pair, way), loader.pair(pair), expected[pair.heads], tmp_path)


@pytest.mark.slow
def test_by_the_transfer_server(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Four devices send to two, which pad three heads: one shard goes over."""
    pair = Pair("three", Side(4, 16), Side(2, 8, (1, 3)), apart="b")
    options = {"transport": "transfer_server", "verify_transfers": True}
    llm = load(models["three"], tmp_path, **apart(pair, "cronus"), **options)
    assert serve(llm, run_dir=tmp_path / "runs") == expected["three"]
    ran = Ran.last(tmp_path / "runs")
    assert ran.record.run["transports"] == {"a -> b": "transfer_server"}
    assert [i["process"] for i in ran.record.run["instances"].values()] == [None, "b"]
    assert ran.record.run["measured_gb_s"]["a -> b"] > 0
    assert ran.record.transfers
    check_transfers(ran, token_bytes("three"))


# Which groups have processes in the pairs that are not long; those above have the other kinds of
# instances, and the other group alone.
APART = {PAIRS[3]: "a", PAIRS[8]: "ab"}


def apart_cases() -> list[Any]:
    """Return the cases of ``test_cluster``, with processes.

    Starting those of a pair takes long.
    """
    cases = []
    for case in covering_cases():
        pair, number = case.pair, PAIRS.index(case.pair)
        mark = pytest.mark.slow if pair in APART else pytest.mark.long
        apart = APART.get(pair, ("a", "b", "ab")[(number + number // 3) % 3])
        cases.append(pytest.param(replace(case, pair=replace(pair, apart=apart)), marks=mark))
    return cases


@pytest.mark.parametrize("case", apart_cases(), ids=str)
def test_tokens_are_those_of_one_instance_in_every_way(
    case: Case, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    check_case(case, loader.pair(case.pair), expected[case.pair.heads], tmp_path)


DEATHS = [
    ("cronus", "a", signal.SIGKILL, 9),
    ("disaggregated", "b", signal.SIGKILL, 17),
    ("least_loaded", "a", signal.SIGSTOP, 5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("system", "victim", "by", "step"), DEATHS)
def test_what_a_process_had_goes_on_elsewhere(
    system: str,
    victim: str,
    by: signal.Signals,
    step: int,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call_silent_who_is_stopped(monkeypatch)
    before = children()
    llm = load(models["two"], tmp_path, **apart(SMALL, system))
    pid = pid_of(llm, victim)
    found, run = serve_until(llm, step, lambda: os.kill(pid, by), tmp_path / "runs")
    assert found == expected["two"]
    why = f"was ended by signal {by}" if by == signal.SIGKILL else SILENT
    assert run["lost"] == {victim: f"ProcessLost: process of group {victim} (pid {pid}) {why}"}
    assert not psutil.pid_exists(pid)
    with pytest.raises(JaxinferError, match=f"instance {victim} was lost, load the model again"):
        serve(llm)
    assert len(children() - before) == 1
    del llm
    gc.collect()
    wait_until(lambda: not children() - before)


@pytest.mark.slow
def test_a_process_that_dies_between_two_runs_and_another_cluster_beside_it(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The next run begins with its loss; the other cluster hears nothing of it."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    pair = Pair("two", Side(1, 8), Side(2, 16), apart="b")
    before = children()
    llms = [load(models["two"], folder, **apart(pair, "disaggregated")) for folder in folders]
    assert len(children() - before) == 2
    for llm in llms:
        assert serve(llm) == expected["two"]
    pid = pid_of(llms[0], "b")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))
    found, run = serve_once(llms[0], tmp_path / "runs")
    assert found == expected["two"]
    assert list(run["lost"]) == ["b"]
    assert "was ended by signal 9" in run["lost"]["b"]
    assert serve(llms[1]) == expected["two"]
    del llm, llms
    gc.collect()
    wait_until(lambda: not children() - before)


SCRIPT = """
import sys
from jaxinfer import LLM, SamplingParams
llm = LLM.from_config(sys.argv[1], progress=False)
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, *[200] * 63)]
outputs = llm.generate_iter(["x"] * 64, params, progress=False)
next(outputs)
print(*(llm.cluster.engines[name].worker.process.peer.pid for name in "ab"), flush=True)
list(outputs)
"""


NO_BACKEND = """
import sys
from jax._src import xla_bridge
from jaxinfer import LLM
llm = LLM.from_config(sys.argv[1], progress=False)
llm.generate(["x"] * 3, progress=False, run_dir=sys.argv[2])
print(xla_bridge.backends_are_initialized())
"""


@pytest.mark.slow
def test_a_loop_whose_groups_are_elsewhere_starts_no_backend(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """On GPUs it would take their memory from the processes that need it."""
    load(models["two"], tmp_path, **SMALL.sections, system="least_loaded")
    arguments = [str(tmp_path / "run.yaml"), str(tmp_path / "runs")]
    ran = subprocess.run(
        [sys.executable, "-c", NO_BACKEND, *arguments], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split()[-1] == "False"


@pytest.mark.parametrize(
    "by",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_of_a_job_that_is_killed(
    by: signal.Signals, models: dict[str, Path], tmp_path: Path
) -> None:
    load(models["two"], tmp_path, **SMALL.sections, system="least_loaded")
    job = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert job.stdout
    pids = [int(pid) for pid in job.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(psutil.pid_exists, pids))
    job.send_signal(by)
    job.wait(HANG_S)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.slow
def test_what_a_process_cannot_load_is_one_line(models: dict[str, Path], tmp_path: Path) -> None:
    sections = SMALL.sections
    sections["instances"]["b"]["num_pages"] = 10**9
    before = children()
    with pytest.raises(JaxinferError, match=r"groups\.b: num_pages 1000000000 of 16 tokens"):
        load(models["two"], tmp_path, **sections)
    wait_until(lambda: not children() - before)


@pytest.mark.slow
def test_a_process_that_ends_while_it_loads(models: dict[str, Path], tmp_path: Path) -> None:
    sections = SMALL.sections
    sections["groups"]["b"]["environment"] = {"JAX_PLATFORMS": "nonsense"}
    before = children()
    with pytest.raises(JaxinferError, match=r"groups\.b: .*nonsense"):
        load(models["two"], tmp_path, **sections)
    wait_until(lambda: not children() - before)
