"""Hetis' planner: the candidates for the paper's cluster, without simulating them."""

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.plan.planners.hetis import Hetis, HetisOptions
from jaxinfer.plan.problem import Problem, load_problem
from jaxinfer.simulate.cluster import model_cluster

FILE = Path(__file__).parents[2] / "configs" / "plan" / "hetis.yaml"


def make(problem: Problem, **options: Any) -> Hetis:
    given = {key: value for key, value in problem.planner.items() if key != "name"}
    return Hetis(HetisOptions.model_validate(given | options))


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
    best = resolve(as_run_file(problem.run_file(found[0].part)))
    assert model_cluster(best).instances


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
