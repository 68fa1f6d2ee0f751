"""Processes of groups on nodes that Ray finds for them."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import yaml
from killed_jobs import wait_for_lines
from tiny_model import TINY_OPTIONS
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.groups import GroupConfig, RayDemands
from jaxinfer.runtime.processes.ray_hosts import _check, _demands

COUNT = 40


@pytest.fixture
def nodes() -> Iterator[tuple[str, Any, Any]]:
    """Two of them, by the address of the first; ``x`` is what the second has alone."""
    pytest.importorskip("ray.cluster_utils")
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "resources": {"y": 1}, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    second = made.add_node(num_cpus=1, resources={"x": 1})
    yield made.address, made, second
    ray.shutdown()
    made.shutdown()


def processes(mark: str) -> list[psutil.Process]:
    """Return the processes that have this mark in their environment, except this process."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


CRONUS = {"name": "cronus", "partial": "weak", "chunked": "strong", "cut_share": 0.5}


POOL = {"page_size": TINY_OPTIONS["page_size"], "num_pages": TINY_OPTIONS["num_pages"]}


def write_job(
    folder: Path, model: Path, system: Any = CRONUS, is_pipeline: bool = False, **groups: Any
) -> Path:
    """A run file with an instance on each group, or one with a stage on each."""
    instances = {name: {"group": name} | POOL for name in groups}
    if is_pipeline:
        stages = [{"group": name, "share": 1 / len(groups)} for name in groups]
        instances = {"whole": {"stages": stages} | POOL}
    config = {
        "model": str(model),
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 32},
        "groups": {name: {"platform": "cpu"} | group for name, group in groups.items()},
        "instances": instances,
        "system": system,
        "verify_transfers": True,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_lines(path: Path) -> None:
    lines = [
        {
            "prompt": f"Request number {i}. " + "lorem ipsum " * (i % 9),
            "max_tokens": 40 + i % 60,
            "temperature": (i % 3) / 2,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(COUNT)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def choices(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
    assert len(found) == len(lines), "a line is doubled"
    return found


def command(run_file: Path, source: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "jaxinfer", "run", str(run_file), "--input", str(source),
        "--output", str(out), *more,
    ]  # fmt: skip


NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}},
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:A10G": 1.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


def demands(**given: Any) -> dict[str, float]:
    """Return the demands of a group of two GPUs."""
    config = {"platform": "gpu", "devices": 2, "ray": given}
    return _demands(GroupConfig.model_validate(config))


def test_what_a_group_asks_for() -> None:
    a10 = {"accelerator_type:A10G": 0.001}
    assert demands() == {"CPU": 1, "GPU": 2}
    assert demands(num_cpus=0.0, num_gpus=1.0, resources=a10) == {"CPU": 0, "GPU": 1, **a10}
    assert _demands(GroupConfig(devices=4, ray=RayDemands())) == {"CPU": 1, "GPU": 0}


def test_what_no_node_has_is_refused() -> None:
    for given in ({}, {"num_cpus": 8.0}, {"resources": {"accelerator_type:A10G": 0.001}}):
        _check("weak", demands(**given), NODES)
    known = "those that are there have CPU 4; CPU 8, GPU 2, accelerator_type:A10G 1"
    for given, words in (
        ({"num_cpus": 9.0}, "CPU 9, GPU 2"),
        ({"num_gpus": 3.0}, "CPU 1, GPU 3"),
        ({"num_gpus": 0.0, "resources": {"x": 1.0}}, "CPU 1, x 1"),
    ):
        with pytest.raises(JaxinferError) as raised:
            _check("weak", demands(**given), NODES)
        assert str(raised.value) == f"groups.weak.ray: no node has {words}; {known}"


@pytest.mark.slow
def test_cronus_over_two_nodes_of_which_one_is_lost(
    nodes: tuple[str, Any, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """Killed, then continued when a node goes: the lines are those of one process, each once.

    Of what Ray had placed nothing is left.
    """
    address, cluster, second = nodes
    mark = uuid4().hex
    groups: dict[str, Any] = {
        name: {"ray": {"resources": {resource: 1}}, "environment": {"MARK": mark}}
        for name, resource in (("strong", "y"), ("weak", "x"))
    }
    source, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write_lines(source)
    alone = write_job(tmp_path, tiny_folder, strong={}, weak={})
    subprocess.run(command(alone, source, whole), check=True, capture_output=True)
    placed = command(write_job(tmp_path, tiny_folder, **groups), source, out, "--ray", address)

    with start(placed) as job:
        wait_for_lines(job, out, 1)
        assert len(processes(mark)) == 2
        job.kill()
    wait_until(lambda: not processes(mark))

    with start(placed) as job:
        wait_for_lines(job, out, 1 + len(choices(out)))
        cluster.remove_node(second, allow_graceful=False)
        said, _ = job.communicate(timeout=200)
    assert job.returncode == 0, said
    assert choices(out) == choices(whole)
    run = json.loads((tmp_path / "out.jsonl.runs" / "2" / "run.json").read_text())
    assert list(run["lost"]) == ["weak"]
    wait_until(lambda: not processes(mark))

    # Until Ray has noticed, it says something else of the node.
    cluster.wait_for_nodes(timeout=HANG_S)
    refused = subprocess.run([*placed, "--force"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("jaxinfer: groups.weak.ray: no node has CPU 1, x 1; ")


@pytest.mark.slow
def test_one_that_is_lost_is_placed_again(
    nodes: tuple[str, Any, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """All requests wait for it; its node has room for one alone, so that the lost one is let go."""
    mark = uuid4().hex
    group = {"ray": {"resources": {"x": 1}}, "environment": {"MARK": mark}, "restart": 1}
    job = partial(write_job, tmp_path, tiny_folder, "single")
    assert restarted(job, mark, nodes[0], a=group) == ("a", None)
    wait_until(lambda: not processes(mark))


def restarted(job: Callable[..., Path], mark: str, address: str, **groups: Any) -> tuple[str, Any]:
    """The group and the error of the restart in a run that loses the process with this mark.

    Its lines are those of one instance in one process.
    """
    alone = job(a={})
    folder = alone.parent
    source, whole, out = (folder / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write_lines(source)
    subprocess.run(command(alone, source, whole), check=True, capture_output=True)
    with start(command(job(**groups), source, out, "--ray", address)) as run:
        wait_for_lines(run, out, 1)
        (lost,) = processes(mark)
        lost.kill()
        said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert choices(out) == choices(whole)
    told = json.loads((folder / "out.jsonl.runs" / "1" / "run.json").read_text())
    assert told["lost"] == {}
    (restart,) = told["restarts"]
    assert restart["why"].endswith("was ended by signal 9")
    return restart["group"], restart["error"]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["first", "last"])
def test_a_lost_stage_is_placed_again_with_the_other(
    ends: str, nodes: tuple[str, Any, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """Each node has room for one stage alone, so that both are let go first."""
    marks = {name: uuid4().hex for name in ("first", "last")}
    groups: dict[str, Any] = {
        name: {"ray": {"resources": {resource: 1}}, "environment": {"MARK": mark}, "restart": 1}
        for (name, mark), resource in zip(marks.items(), ("y", "x"), strict=True)
    }
    job = partial(write_job, tmp_path, tiny_folder, "single", is_pipeline=True)
    assert restarted(job, marks[ends], nodes[0], **groups) == ("first and last", None)
    for mark in marks.values():
        wait_until(lambda mark=mark: not processes(mark))
