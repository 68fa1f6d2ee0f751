"""`planner: hexgen2` through the driver: the run file it writes, and what it refuses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from placement_cases import A100, H100, L40, site_of
from plan_cases import Carries

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.plan.choose import choose
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.registry import make_planner
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.hexgen2.flow import KVNetwork, PlacedGroup, shared_flow
from jaxinfer.papers.hexgen2.planner import HexGen2Planner
from jaxinfer.papers.hexgen2.run_file import as_part
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

ENGINE = {
    "page_size": 16,
    "enable_prefix_caching": False,
    "launch_ahead": False,
    "memory_fraction": 0.95,
}
PLANNER = {
    "name": "hexgen2",
    "prefill": {"max_num_batched_tokens": 4096},
    "decode": {"max_num_seqs": 32},
    "restarts": 2,
    "flows": 200,
}


def asked(folder: Path, planner: dict[str, Any] | None = None, **run: Any) -> Problem:
    """Three nodes, and chats."""
    site = site_of({"x": (H100, 4), "y": (A100, 4), "z": (A100, 4)}, 12.5)
    path = folder / "hardware.yaml"
    path.write_text(yaml.safe_dump(site.hardware.model_dump(mode="json", exclude_none=True)))
    common: dict[str, Any] = {
        "model": "llama-2-70b",
        "engine": ENGINE,
        "simulate": {"hardware": str(path), "reserve_gb": 1.0, "step_s": 0.02},
        "workload": {
            "synthetic": {"lengths": "azure_conversation", "count": 50, "seed": 0},
            "only": "HPHD",
        },
    }
    return Problem.model_validate(
        {
            "planner": planner or PLANNER,
            "goal": {"maximise": "cluster", "slo": "ttft=1", "fresh_seeds": 1},
            "run": common | run,
        }
    )


def plan(problem: Problem) -> Any:
    planner = make_planner(problem.planner)
    assert isinstance(planner, HexGen2Planner)
    return planner.plan(problem, DrivenSearch(problem))


def test_the_driver_simulates_what_it_finds(tmp_path: Path, carries: Carries) -> None:
    carries.rate = lambda config: 2.0
    problem = asked(tmp_path)
    search = DrivenSearch(problem)
    choice = choose(make_planner(problem.planner), search)
    assert len(search.tried) == 1
    axes = choice.candidate.axes
    config = as_run_file(problem.run_file(choice.candidate.part))
    names = list(config.instances)
    roles = [sum(name.startswith(role) for name in names) for role in ("prefill", "decode")]
    assert [axes["prefills"], axes["decodes"]] == roles
    flow, bound = float(axes["flow"] or 0), float(axes["bound"] or 0)
    assert 0 < flow <= bound
    assert axes["gap"] == pytest.approx(1 - flow / bound, abs=1e-3)
    # A dollar an hour for each GPU.
    assert choice.score.costs
    gpus = choice.score.costs.gpus
    assert axes["usd_per_1000_requests"] == pytest.approx(gpus / 3.6 / flow, rel=1e-3)
    assert {f"per_{gpu}" for gpu in (H100, A100)} <= set(axes)
    # What holds the flow back: instances of this plan, or links.
    full = [each.split()[0] for each in str(axes["full_instances"]).split(", ") if each]
    assert set(full) <= set(names)
    assert full or axes["full_links"]
    flows = config.system["flows"]
    assert sum(rate for row in flows.values() for rate in row.values()) == pytest.approx(
        flow, rel=1e-4
    )


def test_what_is_planned_is_what_flows(tmp_path: Path) -> None:
    """Requests at once: those that end in the midst of the run do so at the planned rate."""
    problem, rng = asked(tmp_path), random.Random(0)
    work = [
        BenchRequest(None, rng.randint(605, 1815), rng.randint(130, 644), 0.0) for _ in range(1000)
    ]
    problem.__dict__["work"] = work
    candidate = plan(problem)
    ends: list[float] = []
    config = as_run_file(problem.run_file(candidate.part))
    simulate(config, work, on_request=lambda request, times: ends.append(times[-1]))
    ends.sort()
    rate = 500 / (ends[750] - ends[250])
    assert rate == pytest.approx(float(candidate.axes["flow"]), rel=0.1)


def test_what_is_planned_flows_through_deep_pipelines(tmp_path: Path) -> None:
    """Four stages that prefill, short prompts: steps are alike, where one could take most of them.

    A full step of 4,096 tokens would have 41 of the 64 prompts that an instance has at once.
    """
    site = site_of({"a": (L40, 4), "b": (H100, 8)}, 12.5)
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(site.hardware.model_dump(mode="json", exclude_none=True)))
    problem, rng = asked(tmp_path), random.Random(0)
    problem.run["simulate"]["hardware"] = str(path)
    work = [BenchRequest(None, rng.randint(60, 140), 2, 0.0) for _ in range(1500)]
    problem.__dict__["work"] = work
    planner = make_planner(problem.planner)
    assert isinstance(planner, HexGen2Planner)
    capacity = planner.capacity(problem)
    groups = [
        PlacedGroup(((0, 4),), "prefill", capacity.carried_by(((0, 4),), ((0, 1),) * 4, "prefill")),
        PlacedGroup(((1, 8),), "decode", capacity.carried(((1, 8),), "decode")),
    ]
    flow = shared_flow(groups, KVNetwork(capacity.site, capacity.layer_bytes))
    assert flow.total == pytest.approx(groups[0].carried.rate)
    bare: Any = {"prefill": PLANNER["prefill"], "decode": PLANNER["decode"]}
    part = as_part(capacity.site, groups, flow, bare, 100, capacity.prefill_tokens)
    tokens = part["instances"]["prefill0"]["max_num_batched_tokens"]
    assert tokens < 64 * 140 / 4
    # Prompts of 100: four steps of them under way, and one that waits.
    assert part["system"]["max_in_prefill"] == {"prefill0": -(-5 * tokens // 100)}
    ends: list[float] = []
    config = as_run_file(problem.run_file(part))
    simulate(config, work, on_request=lambda request, times: ends.append(times[-1]))
    ends.sort()
    assert 900 / (ends[1200] - ends[300]) == pytest.approx(flow.total, rel=0.1)


def test_what_is_planned_flows_in_steps_shorter_than_prompts(tmp_path: Path) -> None:
    """A mean prompt fills two steps, a short one a tenth of one."""
    site = site_of({"a": (L40, 1), "b": (H100, 1)}, 12.5)
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(site.hardware.model_dump(mode="json", exclude_none=True)))
    prefill = {"max_num_batched_tokens": 512}
    problem, rng = asked(tmp_path, PLANNER | {"prefill": prefill}), random.Random(0)
    problem.run["simulate"]["hardware"] = str(path)
    problem.run["model"] = "llama-2-7b"
    work = [BenchRequest(None, rng.choice([50, 2000]), 2, 0.0) for _ in range(600)]
    problem.__dict__["work"] = work
    planner = make_planner(problem.planner)
    assert isinstance(planner, HexGen2Planner)
    capacity = planner.capacity(problem)
    groups = [
        PlacedGroup(((node, 1),), role, capacity.carried(((node, 1),), role))
        for node, role in enumerate(("prefill", "decode"))
    ]
    flow = shared_flow(groups, KVNetwork(capacity.site, capacity.layer_bytes))
    assert flow.total == pytest.approx(groups[0].carried.rate)
    bare: Any = {"prefill": {}, "decode": PLANNER["decode"]}
    mean = capacity.lengths.prompt
    part = as_part(capacity.site, groups, flow, bare, mean, capacity.prefill_tokens)
    assert part["instances"]["prefill0"]["max_num_batched_tokens"] == 512 < mean / 1.9
    # Three for the step under way, and as many for the next one.
    assert part["system"]["max_in_prefill"] == {"prefill0": 6}
    ends: list[float] = []
    config = as_run_file(problem.run_file(part))
    simulate(config, work, on_request=lambda request, times: ends.append(times[-1]))
    ends.sort()
    assert 400 / (ends[500] - ends[100]) == pytest.approx(flow.total, rel=0.05)


def test_decodes_of_a_pipeline_are_even(tmp_path: Path) -> None:
    """Two steps of 16 each flow through two stages, as planned; a policy that is given stays."""
    site = site_of({"a": (H100, 2), "b": (H100, 2)}, 12.5)
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(site.hardware.model_dump(mode="json", exclude_none=True)))
    problem, rng = asked(tmp_path), random.Random(0)
    problem.run["simulate"]["hardware"] = str(path)
    work = [BenchRequest(None, 100, rng.randint(50, 250), 0.0) for _ in range(800)]
    problem.__dict__["work"] = work
    planner = make_planner(problem.planner)
    assert isinstance(planner, HexGen2Planner)
    capacity = planner.capacity(problem)
    two = ((0, 2),), ((0, 1), (0, 1))
    groups = [
        PlacedGroup(((0, 2),), "prefill", capacity.carried_by(*two, "prefill")),
        PlacedGroup(((1, 2),), "decode", capacity.carried_by(*two, "decode")),
    ]
    flow = shared_flow(groups, KVNetwork(capacity.site, capacity.layer_bytes))
    assert flow.total == pytest.approx(groups[1].carried.rate)
    own: Any = {"prefill": PLANNER["prefill"], "decode": PLANNER["decode"]}
    part = as_part(capacity.site, groups, flow, own, 100, capacity.prefill_tokens)
    assert part["instances"]["decode0"]["policies"] == {"batching": "even_decodes"}
    assert "policies" not in part["instances"]["prefill0"]
    ends: list[float] = []
    config = as_run_file(problem.run_file(part))
    simulate(config, work, on_request=lambda request, times: ends.append(times[-1]))
    ends.sort()
    assert 400 / (ends[600] - ends[200]) == pytest.approx(flow.total, rel=0.05)
    for key in ("batching", "form_batch"):  # As it is called, and was.
        own["decode"] = {**own["decode"], "policies": {key: "mixed"}}
        part = as_part(capacity.site, groups, flow, own, 100, capacity.prefill_tokens)
        assert part["instances"]["decode0"]["policies"] == {key: "mixed"}


def test_the_same_run_file_each_time(tmp_path: Path) -> None:
    first, again = plan(asked(tmp_path)), plan(asked(tmp_path))
    assert yaml.safe_dump(first.part) == yaml.safe_dump(again.part)
    assert first.axes == again.axes


@pytest.mark.parametrize(("caching", "own"), [(True, False), (False, False), (True, True)])
def test_there_is_no_bound_where_a_cache_may_spare_what_it_counts(
    tmp_path: Path, caching: bool, own: bool
) -> None:
    """The same prompt twice, or prompts that have nothing in common."""
    trace = tmp_path / "t.jsonl"
    lines = [{"prompt_token_ids": [i * own] * 900, "max_tokens": 9} for i in range(2)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = ENGINE | {"enable_prefix_caching": caching}
    small = PLANNER | {"restarts": 0, "flows": 5}
    axes = plan(asked(tmp_path, small, engine=engine, workload={"trace": str(trace)})).axes
    if caching and not own:
        assert axes["bound"] == "none: prompts share prefixes"
        assert axes["gap"] is axes["within_nodes"] is None
        assert not any(name.startswith("per_") for name in axes)
    else:
        assert axes["bound"] >= axes["flow"]


def test_what_a_budget_rents(tmp_path: Path) -> None:
    """A dollar an hour each: no more GPUs than dollars, and all of them for more than there are."""
    bounds, flows = [], []
    for budget in (4.0, 6.0, 8.5, 99.0):
        axes = plan(asked(tmp_path, PLANNER | {"budget": budget})).axes
        assert axes["usd_per_hour_used"] <= budget
        assert 0 < axes["flow"] <= axes["bound"]
        bounds.append(axes["bound"])
        flows.append(axes["flow"])
    assert bounds == sorted(bounds)
    assert flows == sorted(flows)
    everything = plan(asked(tmp_path)).axes
    assert flows[-1] == everything["flow"]
    assert bounds[-1] == pytest.approx(everything["bound"], rel=1e-3)


def test_plans_from_what_was_measured(tmp_path: Path) -> None:
    """Profiles decide the roles: kinds that are quick at prompts prefill, and the others decode."""
    measured = {
        gpu: {
            "phases": {
                "prefill": {"token_s": prompt},
                "decode": [{"step_s": step}],
                "share_step": True,
            }
        }
        for gpu, prompt, step in ((H100, 1e-5, 1.0), (A100, 1e-3, 0.01))
    }
    planner = PLANNER | {"measured": measured, "tensor_parallel": [1]}
    # With more, some instances have a GPU of each kind.
    problem = asked(tmp_path, planner, engine=ENGINE | {"memory_fraction": 0.88})
    part = plan(problem).part
    config = as_run_file(problem.run_file(part))
    kinds = {
        name: {config.groups[stage.group].kind for stage in instance.places}
        for name, instance in config.instances.items()
    }
    assert all(kind == {H100} for name, kind in kinds.items() if "prefill" in name)
    assert any(kind == {A100} for name, kind in kinds.items() if "decode" in name)
    # The run file has the costs that were planned with.
    for name, group in config.groups.items():
        costs = config.simulate.of(name).phases
        assert costs
        assert costs.prefill.token_s == measured[str(group.kind)]["phases"]["prefill"]["token_s"]


def test_prices_of_the_plan_file_count(tmp_path: Path) -> None:
    """A dollar for each GPU by the hardware file, two by the plan file."""
    problem = asked(tmp_path)
    once = plan(problem).axes
    twice = plan(problem.model_copy(update={"prices": {H100: 2.0, A100: 2.0}})).axes
    assert twice["flow"] == once["flow"]
    assert twice["usd_per_hour_used"] == 2 * once["usd_per_hour_used"]
    assert (
        plan(problem.model_copy(update={"prices": {H100: 2.0}})).axes.get("usd_per_hour_used")
        is None
    )


@pytest.mark.parametrize("method", ["hexgen2", "random_swaps", "genetic"])
def test_methods_that_it_is_compared_with(tmp_path: Path, method: str) -> None:
    best = plan(asked(tmp_path)).axes["flow"]
    own = {name: value for name, value in PLANNER.items() if name != "restarts"}
    for more in ({}, {"costs": "table1", "network": "pairs"}):
        options = own | {"method": method, "flows": 60} | more
        axes = plan(asked(tmp_path, options)).axes
        assert 0 < axes["flow"] <= best * (1 + 1e-6)
        assert axes["flow"] <= axes["bound"]


@pytest.mark.parametrize(
    ("planner", "run", "message"),
    [
        ({}, {"simulate": {}}, "run.simulate.hardware is missing: the nodes that are planned for"),
        (
            {},
            {"model": "opt-175b", "engine": ENGINE | {"memory_fraction": 0.3}},
            "no group of these GPUs holds the model and the longest request",
        ),
        ({"costs": "table1"}, {}, "planner.method is programs, whose plans are by modelled costs"),
        ({"network": "pairs"}, {}, "planner.method is programs, whose plans are by modelled costs"),
        ({"tensor_parallel": [0, 2]}, {}, "planner.tensor_parallel is (0, 2), must be from 1 on"),
        ({"budget": 2.0}, {}, "2 dollars per hour pay for no plan"),
        ({"budget": 9.0, "method": "genetic"}, {}, "planner.method is genetic, which rents"),
        ({"method": "genetic"}, {}, "planner.restarts: has no use with method genetic, only with"),
        ({"method": "hexgen2", "seed": 1}, {}, "planner.restarts: has no use with method hexgen2"),
        ({}, {"engine": ENGINE | {"num_pages": 9}}, "run.engine: num_pages has no place in this"),
        (
            {"measured": {H100: {"step_s": 1.0}}},
            {},
            "planner.tensor_parallel is (1, 2, 4, 8), must be [1] beside measured, which is of one",
        ),
        ({"measured": {"x": {"step_s": 1.0}}, "tensor_parallel": [1]}, {}, "planner.measured.x"),
        ({"decode": {"num_pages": 9}}, {}, "planner.decode: num_pages has no place in this plan"),
        ({"decode": {"max_num_sqs": 9}}, {}, "planner.decode.max_num_sqs: unknown option"),
        ({}, {"workload": {"trace": "ones.csv"}}, "run.workload: all outputs have one token"),
    ],
)
def test_what_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: Any, run: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ones.csv").write_text("num_prefill_tokens,num_decode_tokens\n9,1\n")
    with pytest.raises(JaxinferError) as error:
        plan(asked(tmp_path, PLANNER | planner, **run))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_requests_by_gpus_are_refused(tmp_path: Path) -> None:
    """Its flows and bounds are of the whole workload."""
    whole = asked(tmp_path)
    goal = whole.goal.model_copy(update={"requests_per_gpu": 2})
    with pytest.raises(
        JaxinferError, match=r"goal\.requests_per_gpu: .* give run\.workload\.limit"
    ):
        plan(whole.model_copy(update={"goal": goal}))
