"""Hetis' planner: the candidates for the paper's cluster, without simulating them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.problem import Problem, load_problem
from jaxinfer.papers.hetis.planner import HetisPlanner, HetisPlannerOptions
from jaxinfer.simulate.cluster import model_cluster

FILE = Path(__file__).parents[3] / "configs" / "plan" / "hetis.yaml"


def make(problem: Problem, **options: Any) -> HetisPlanner:
    given = {key: value for key, value in problem.planner.items() if key != "name"}
    return HetisPlanner(HetisPlannerOptions.model_validate(given | options))


def test_the_papers_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A100 and 3090 have all 80 layers, P100 none (section 7.2); a stage stands on one host."""
    monkeypatch.chdir(FILE.parents[2])
    problem = load_problem(FILE)
    found = make(problem, simulated=99).candidates(problem)
    seconds = [float(each.axes["step_s"] or 0) for each in found]
    assert seconds == sorted(seconds)
    for each in found:
        run_file = as_run_file(problem.run_file(each.part))
        kinds = {name: group.kind for name, group in run_file.groups.items()}
        devices = sum(group.devices for group in run_file.groups.values())
        assert devices == 12
        for instance in run_file.instances.values():
            assert sum(stage.layers or 0 for stage in instance.stages) == 80
            for stage in instance.stages:
                assert kinds[stage.group] in ("A100-80G-PCIe", "RTX-3090")
                assert {kinds[name] for name in stage.attention_groups} == {"P100-PCIe-12G"}
    # One instance: three splits of the A100s, of the 3090s all but one over both hosts.
    assert sum(each.axes["instances"] == 1 for each in found) == 6
    best = model_site(resolve(as_run_file(problem.run_file(found[0].part))))
    assert model_cluster(best).instances


# Five kinds, and what a prefill takes, for pools that the paper's cluster is not.
SECONDS = {
    "H100-SXM": 1.0,
    "A100-80G-SXM": 2.0,
    "L40S": 4.0,
    "RTX-3090": 8.3,
    "P100-PCIe-12G": 49.0,
}


@pytest.mark.parametrize(
    "nodes",
    [
        {"A100-80G-SXM": 2},
        {"A100-80G-SXM": 2, "P100-PCIe-12G": 1},
        dict.fromkeys(SECONDS, 4),
    ],
)
def test_pools_with_splits_that_cannot_be(
    nodes: Mapping[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TP 16 and 32 do not divide the 8 KV heads on nodes of 8 GPUs each, up to 160 GPUs.

    Such a split has no time at all if its kind alone has layers; beside others it would be the
    best.
    """
    monkeypatch.chdir(FILE.parents[2])
    each = {
        f"{kind.lower()}_{i}": {"gpu": kind, "gpus": 8, "nic_gb_s": 12.5, "link_gb_s": 32}
        for kind, count in nodes.items()
        for i in range(count)
    }
    hardware = tmp_path / "hardware.yaml"
    hardware.write_text(yaml.safe_dump({"source": "x", "latency_s": 5e-5, "nodes": each}))
    problem = load_problem(FILE)
    problem.run["simulate"]["hardware"] = str(hardware)
    problem.planner["seconds"] = {kind: SECONDS[kind] for kind in nodes}
    found = make(problem, simulated=20).candidates(problem)
    total = 8 * len(each)
    for candidate in found:
        run_file = as_run_file(problem.run_file(candidate.part))
        devices = {name: group.devices for name, group in run_file.groups.items()}
        assert sum(devices.values()) == total
        for instance in run_file.instances.values():
            assert sum(stage.layers or 0 for stage in instance.stages) == 80
            assert all(8 % devices[stage.group] == 0 for stage in instance.stages)
    if total == 16:
        # TP 1, 2, 4 and 8 of 16 GPUs; of 8 in two, 4 in four, 2 in eight and 1 in sixteen.
        by_instances = [sum(c.axes["instances"] == n for c in found) for n in (1, 2, 4, 8, 16)]
        assert by_instances == [4, 4, 3, 2, 1]


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILE.parents[2])
    problem = load_problem(FILE)
    with pytest.raises(JaxinferError, match=r"planner\.seconds\.A10: "):
        make(problem, seconds={"A10": 1.0}).candidates(problem)
    with pytest.raises(JaxinferError, match=r"planner\.seconds: has nothing of "):
        make(problem, seconds={"RTX-3090": 1.0}).candidates(problem)
    with pytest.raises(JaxinferError, match=r"seconds\.RTX-3090 is 0, must be above 0"):
        make(problem, seconds={"RTX-3090": 0.0})
    del problem.run["simulate"]
    with pytest.raises(JaxinferError, match=r"run\.simulate\.hardware is missing"):
        make(problem).candidates(problem)
