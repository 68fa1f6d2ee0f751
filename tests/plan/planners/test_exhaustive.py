"""Planners against all points of small grids, each really simulated."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_cases import RUN, problem

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.planners.colocated import Colocated, ColocatedOptions
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.splitwise.planner import SplitwisePools, SplitwisePoolsOptions
from jaxinfer.simulate.capacity import capacity, load

pytestmark = pytest.mark.slow
SLO = "ttft:p90=2,tbt:p99=0.2"
PRICES = {"A10": 1.0, "L4": 0.7}


def asked(goal: dict[str, Any], count: int = 30, **more: Any) -> Problem:
    work = {"synthetic": {"lengths": "azure_conversation", "count": count, "seed": 0}}
    engine = {"max_model_len": 16384, "launch_ahead": False}
    return problem({"slo": SLO, **goal}, run=RUN | {"workload": work, "engine": engine}, **more)


def largest(given: Problem, candidate: Candidate) -> float:
    """Return the largest rate of a candidate, found without a search; 0 if it cannot run."""
    try:
        config = as_run_file(given.run_file(candidate.part))
        return capacity(config, given.work, given.targets, (0,), given.goal.precision).rate
    except JaxinferError:
        return 0.0


@pytest.fixture(scope="module")
def colocated() -> Colocated:
    """Two kinds, one GPU, two in a stage or two stages, two sizes of chunks and of batches."""
    options = {
        "gpus": {"A10": 2, "L4": 2},
        "tensor_parallel": [1, 2],
        "pipeline_parallel": [1, 2],
        "engines": {
            "small": {"max_num_batched_tokens": 128},
            "large": {"max_num_batched_tokens": 2048},
        },
        "seqs_per_stage": [2, 64],
        "replicas": "one",
    }
    return Colocated(ColocatedOptions.model_validate(options))


@pytest.fixture(scope="module")
def rates(colocated: Colocated) -> dict[Any, float]:
    """Return the rates of all candidates."""
    given = asked({"maximise": "cluster", "precision": 0.05})
    return {candidate.key: largest(given, candidate) for candidate in colocated.candidates()}


@pytest.mark.parametrize("per", ["gpu", pytest.param("usd", marks=pytest.mark.long)])
def test_the_best_colocated(per: str, colocated: Colocated, rates: dict[Any, float]) -> None:
    given = asked({"maximise": per, "at_once": 3, "precision": 0.05}, prices=PRICES)
    candidates = list(colocated.candidates())
    assert len(candidates) == 2 * 3 * 2 * 2
    values = {}
    for candidate in candidates:
        gpus = int(candidate.axes["tp"] or 0) * int(candidate.axes["pp"] or 0)
        price = PRICES[str(candidate.axes["gpu"])] if per == "usd" else 1.0
        values[candidate.key] = rates[candidate.key] / (gpus * price)
    assert len(set(rates.values())) > 6
    counts = []
    for prune in (True, False):
        search = DrivenSearch(given, prune=prune)
        best = colocated.plan(search.problem, search)
        assert values[best.key] == max(values.values())
        assert search.value(search.tried[best.key][1]) == pytest.approx(values[best.key])
        counts.append(sum(score.given_up is None for _, score in search.tried.values()))
    assert counts[0] < counts[1] == len(candidates)


MOST = 3


@pytest.fixture
def design(tmp_path: Path) -> str:
    """A10s for prompts, L4s for tokens, each a machine of one GPU."""
    nodes = {
        f"{pool}_": {
            "gpu": gpu,
            "gpus": 1,
            "nic_gb_s": 10,
            "usd_per_hour": PRICES[gpu],
            "watts": 100.0,
            "replicas": MOST,
        }
        for pool, gpu in (("prompt", "A10"), ("token", "L4"))
    }
    hardware = tmp_path / "hardware.yaml"
    hardware.write_text(yaml.safe_dump({"source": "none", "latency_s": 0.0, "nodes": nodes}))
    pools = ("prompt", "token")
    file = {
        "model": "none",
        "groups": {pool: {"replicas": MOST} for pool in pools},
        "instances": {pool: {"group": pool, "replicas": MOST} for pool in pools},
        "system": {"name": "splitwise", "prompt": ["prompt"], "token": ["token"]},
        "simulate": {
            "hardware": str(hardware),
            "groups": {pool: {"node": f"{pool}_*"} for pool in pools},
        },
    }
    path = tmp_path / "design.yaml"
    path.write_text(yaml.safe_dump(file))
    return str(path)


def cells(given: Problem, design: str) -> dict[tuple[int, int], Candidate]:
    """The whole grid, written by hand."""
    base = yaml.safe_load(Path(design).read_text())
    found = {}
    for prompts in range(1, MOST + 1):
        for tokens in range(1, MOST + 1):
            counts = {"prompt": prompts, "token": tokens}
            part = {
                **{key: base[key] for key in ("system", "simulate")},
                "groups": {pool: {"replicas": n} for pool, n in counts.items()},
                "instances": {p: {"group": p, "replicas": n} for p, n in counts.items()},
            }
            found[prompts, tokens] = Candidate(counts, part)
    return found


def usd(prompts: int, tokens: int) -> float:
    return prompts * PRICES["A10"] + tokens * PRICES["L4"]


@pytest.mark.parametrize("rate", [8.0, 12.0])
def test_the_cheapest_pools(design: str, rate: float) -> None:
    given = asked({"minimise": "usd", "rate": rate, "at_once": 1}, count=150)
    kept = []
    for (prompts, tokens), candidate in cells(given, design).items():
        config = as_run_file(given.run_file(candidate.part))
        if load(config, given.work, given.targets, (0,), rate).verdict.met:
            kept.append(usd(prompts, tokens))
    assert 0 < len(kept) < MOST**2  # The smallest cluster does not.
    planner = SplitwisePools(
        SplitwisePoolsOptions.model_validate({"files": {design: {"prompt": MOST, "token": MOST}}})
    )
    for prune in (True, False):
        best = planner.plan(given, DrivenSearch(given, prune=prune)).axes
        assert usd(int(best["prompt"] or 0), int(best["token"] or 0)) == pytest.approx(min(kept))


def test_the_largest_rate_of_a_budget(design: str) -> None:
    budget = 2.8
    given = asked({"maximise": "cluster", "precision": 0.05, "at_once": 1})
    rates = {
        cell: largest(given, candidate)
        for cell, candidate in cells(given, design).items()
        if usd(*cell) <= budget
    }
    planner = SplitwisePools(
        SplitwisePoolsOptions.model_validate(
            {"files": {design: {"prompt": MOST, "token": MOST}}, "at_most": {"usd": budget}}
        )
    )
    for prune in (True, False):
        search = DrivenSearch(given, prune=prune)
        best = planner.plan(search.problem, search)
        found = rates[int(best.axes["prompt"] or 0), int(best.axes["token"] or 0)]
        assert found == search.tried[best.key][1].rate == max(rates.values())
