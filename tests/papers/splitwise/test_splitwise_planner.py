"""Pools of machines: the staircase and the budget's edge against the whole grid."""

import math
import random
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from plan_cases import Carries, problem
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.splitwise.planner import SplitwisePools, SplitwisePoolsOptions
from jaxinfer.simulate.capacity import Ladder

# Of a machine: GPUs, dollars per hour, watts.
MACHINES = {"big": (2, 3.3, 700.0), "small": (1, 1.1, 300.0)}
MOST = 5
Grid = dict[tuple[str, int, int], float]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run files of designs: both kinds, one kind, and one pool."""
    folder = tmp_path_factory.mktemp("designs")
    nodes = {
        f"{pool}_{kind}": {
            "gpu": "A10",
            "gpus": gpus,
            "nic_gb_s": 10,
            "usd_per_hour": usd,
            "watts": watts,
            "replicas": MOST,
        }
        for pool in ("prompt", "token")
        for kind, (gpus, usd, watts) in MACHINES.items()
    }
    hardware = folder / "hardware.yaml"
    hardware.write_text(yaml.safe_dump({"source": "none", "latency_s": 0.0, "nodes": nodes}))
    found = {}
    for name, kinds in {
        "mixed": ("big", "small"),
        "alike": ("small",) * 2,
        "one": ("big",),
    }.items():
        pools = dict(zip(("prompt", "token"), kinds, strict=False))
        groups = {p: {"replicas": 2, "devices": MACHINES[k][0]} for p, k in pools.items()}
        data = {
            "model": "none",
            "groups": groups,
            "instances": {pool: {"group": pool, "replicas": 2} for pool in pools},
            "system": {
                "name": "splitwise",
                "prompt": ["prompt"],
                "token": ["token"] if len(pools) > 1 else [],
            },
            "simulate": {
                "hardware": str(hardware),
                "groups": {p: {"node": f"{p}_{k}*"} for p, k in pools.items()},
            },
        }
        found[name] = str(folder / f"{name}.yaml")
        Path(found[name]).write_text(yaml.safe_dump(data))
    return found


def planner(files: dict[str, str], names: Any = ("mixed", "alike", "one"), **more: Any) -> Any:
    most = {"prompt": MOST, "token": MOST}
    asked = {files[n]: most if n != "one" else {"prompt": MOST} for n in names}
    return SplitwisePools(SplitwisePoolsOptions.model_validate({"files": asked} | more))


def cost(of: str, cell: tuple[str, int, int]) -> float:
    """Return the cost of a cell, computed by hand."""
    name, prompts, tokens = cell
    number = ("gpus", "usd", "watts").index(of)
    here = MACHINES["small" if name == "alike" else "big"][number]
    return prompts * here + tokens * MACHINES["small"][number]


def of(config: RunFile) -> tuple[str, int, int]:
    names = list(config.instances)
    prompts = sum(name.startswith("prompt") for name in names)
    tokens = len(names) - prompts
    node = config.simulate.groups["prompt0"].node
    name = ("mixed" if tokens else "one") if node == "prompt_big0" else "alike"
    return name, prompts, tokens


def grid(seed: int, over_tokens: bool = True) -> Grid:
    """Rates that grow with prompt machines, and with token machines, too, if asked for."""
    rng, found = random.Random(seed), {}
    for name in ("mixed", "alike", "one"):
        rows = [[rng.uniform(0.1, 3) for _ in range(MOST)] for _ in range(MOST)]
        rows = [list(accumulate(row)) for row in rows]
        if over_tokens:
            columns = [list(accumulate(column)) for column in zip(*rows, strict=True)]
            rows = [list(row) for row in zip(*columns, strict=True)]
        for (t, row), p in product(enumerate(rows), range(MOST)):
            if name != "one" or t == 0:
                found[name, p + 1, t + (name != "one")] = row[p]
    return found


def cell(candidate: Any) -> tuple[str, int, int]:
    axes = candidate.axes
    return axes["design"], axes["prompt"], axes["token"]


quick = examples(20)


@given(
    seed=st.integers(0, 10**6),
    rate=st.floats(0.1, 12),
    of_what=st.sampled_from(["gpus", "usd", "watts"]),
    at_once=st.integers(1, 9),
    limit=st.none() | st.floats(300, 5000),
)
@quick
def test_the_cheapest_is_that_of_the_whole_grid(
    carries: Carries,
    files: dict[str, str],
    seed: int,
    rate: float,
    of_what: str,
    at_once: int,
    limit: float | None,
) -> None:
    """The grid's cheapest is found whatever more machines for tokens do."""
    rates = grid(seed, over_tokens=False)
    carries.rate = lambda config: rates[of(config)]
    carries.tried.clear()
    within = [c for c in rates if cost("watts", c) <= (limit or math.inf)]
    enough = [c for c in within if rates[c] >= rate]
    at_most = {} if limit is None else {"watts": limit}
    search = DrivenSearch(problem({"minimise": of_what, "rate": rate, "at_once": at_once}))
    asked = planner(files, at_most=at_most)
    if not enough:
        with pytest.raises(JaxinferError, match=r"none of|no cluster of any design costs"):
            asked.plan(search.problem, search)
        return
    best = asked.plan(search.problem, search)
    assert cell(best) in enough
    least = min(cost(of_what, c) for c in enough)
    assert cost(of_what, cell(best)) == pytest.approx(least)
    # Nothing beyond the limit is looked at, and nothing twice.
    looked_at = [of(config) for config, _ in carries.tried]
    assert len(set(looked_at)) == len(looked_at)
    assert set(looked_at) <= set(within)
    assert len(looked_at) < len(rates)


@given(
    seed=st.integers(0, 10**6),
    of_what=st.sampled_from(["gpus", "usd", "watts"]),
    share=st.floats(0.02, 1.1),
    step=st.integers(1, 3),
    at_once=st.integers(1, 9),
)
@example(seed=0, of_what="usd", share=0.3, step=1, at_once=1)
@quick
def test_the_largest_rate_of_a_budget_is_that_of_the_whole_grid(
    carries: Carries,
    files: dict[str, str],
    seed: int,
    of_what: str,
    share: float,
    step: int,
    at_once: int,
) -> None:
    rates = {c: rate + 0.01 for c, rate in grid(seed).items()}
    carries.rate = lambda config: rates[of(config)]
    budget = share * cost(of_what, ("mixed", MOST, MOST))
    budget = math.ceil(budget) if of_what == "gpus" else budget
    # A cluster that costs the budget to the last bit but a few is within it.
    near = budget * (1 + 1e-9)
    within = [c for c in rates if cost(of_what, c) <= near and c[2] % step == 0]
    found = []
    for prune in (True, False):
        search = DrivenSearch(problem({"maximise": "cluster", "at_once": at_once}), prune=prune)
        asked = planner(files, at_most={of_what: budget}, step=step)
        if not within:
            with pytest.raises(JaxinferError, match="no cluster of any design costs so little"):
                asked.plan(search.problem, search)
            return
        found.append(cell(asked.plan(search.problem, search)))
        assert all(cell(candidate) in within for candidate, _ in search.tried.values())
    ladder = Ladder(0.02)
    steps = [ladder.above(rates[c]) for c in found]
    assert steps == [ladder.above(max(rates[c] for c in within))] * 2


@pytest.mark.parametrize("machines", range(2, 2 * MOST + 1))
def test_a_budget_is_spent_to_its_last_cent(
    carries: Carries, files: dict[str, str], machines: int
) -> None:
    """So many at 1.1 dollars, but for the last digits of floats."""
    carries.rate = lambda config: float(len(config.instances))
    search = DrivenSearch(problem({"maximise": "cluster"}))
    asked = planner(files, ["alike"], at_most={"usd": round(1.1 * machines, 1)})
    best = asked.plan(search.problem, search)
    assert best.axes["prompt"] + best.axes["token"] == machines


def test_a_pool_may_have_but_one_machine(carries: Carries, files: dict[str, str]) -> None:
    options = {"files": {files["mixed"]: {"prompt": 2, "token": 1}}, "at_most": {"usd": 4.4}}
    chosen = SplitwisePools(SplitwisePoolsOptions.model_validate(options))
    search = DrivenSearch(problem({"maximise": "cluster"}))
    assert cell(chosen.plan(search.problem, search)) == ("mixed", 1, 1)


def test_machines_that_share_nodes_have_no_cost_each(carries: Carries, tmp_path: Path) -> None:
    """Two pools on nodes of 8 GPUs: half of what the largest cluster says by machine."""
    hardware, file = tmp_path / "hardware.yaml", tmp_path / "shared.yaml"
    node = {"gpu": "A10", "gpus": 8, "nic_gb_s": 10, "usd_per_hour": 40, "replicas": 8}
    hardware.write_text(yaml.safe_dump({"source": "none", "latency_s": 0.0, "nodes": {"a": node}}))
    pools = ("prompt", "token")
    part = {
        "groups": {pool: {"devices": 4} for pool in pools},
        "instances": {pool: {"group": pool} for pool in pools},
        "system": {"name": "splitwise", "prompt": ["prompt"], "token": ["token"]},
        "simulate": {"hardware": str(hardware), "groups": {p: {"node": "a*"} for p in pools}},
    }
    file.write_text(yaml.safe_dump(part))
    options = {"files": {str(file): {"prompt": 4, "token": 4}}}
    search = DrivenSearch(problem({"minimise": "usd", "rate": 1.0}))
    with pytest.raises(JaxinferError, match=r"shared\.yaml: usd are 40 of the smallest cluster"):
        SplitwisePools(SplitwisePoolsOptions.model_validate(options)).plan(search.problem, search)


def test_what_the_staircase_cannot_tell_is_refused(carries: Carries, files: dict[str, str]) -> None:
    search = DrivenSearch(problem({"minimise": "usd", "rate": 1.0, "requests_per_gpu": 9}))
    with pytest.raises(JaxinferError, match=r"goal\.requests_per_gpu: this planner needs"):
        planner(files).plan(search.problem, search)
    search = DrivenSearch(problem({"minimise": "usd", "rate": 1.0}))
    with pytest.raises(JaxinferError, match=r"planner\.step is 6, above the 5 machines for tokens"):
        planner(files, ["mixed"], step=MOST + 1).plan(search.problem, search)


def test_files_of_one_name_are_two_designs(
    carries: Carries, files: dict[str, str], tmp_path: Path
) -> None:
    twin = tmp_path / "one.yaml"
    twin.write_text(Path(files["one"]).read_text())
    asked = {str(twin): {"prompt": 1}, files["one"]: {"prompt": 2}}
    carries.rate = lambda config: float(len(config.instances))
    search = DrivenSearch(problem({"minimise": "usd", "rate": 2.0}))
    options = SplitwisePoolsOptions.model_validate({"files": asked})
    assert cell(SplitwisePools(options).plan(search.problem, search)) == (files["one"], 2, 0)


def test_clusters_that_cost_as_much_are_not_looked_at(
    carries: Carries, files: dict[str, str]
) -> None:
    """Six machines will do, in any split: of other rows, five are tried, and all at a time."""
    carries.rate = lambda config: float(len(config.instances))
    search = DrivenSearch(problem({"minimise": "usd", "rate": 6.0, "at_once": 4}))
    assert cell(planner(files, ["alike"]).plan(search.problem, search)) == ("alike", 5, 1)
    tried = {of(config)[1:] for config, _ in carries.tried}
    assert tried == {(5, 1), (2, 1), (3, 1), (4, 1), (3, 2), (2, 3), (1, 4)}


def test_the_largest_may_be_what_it_takes(carries: Carries, files: dict[str, str]) -> None:
    carries.rate = lambda config: float(of(config)[1:] == (MOST, MOST))
    search = DrivenSearch(problem({"minimise": "usd", "rate": 1.0}))
    assert cell(planner(files, ["mixed"]).plan(search.problem, search)) == ("mixed", MOST, MOST)


def test_few_of_many_are_simulated(carries: Carries, files: dict[str, str]) -> None:
    """A design takes one simulation per number of token machines, and bisections."""
    carries.rate = lambda config: 1.0 * of(config)[1] + 2.0 * of(config)[2]
    search = DrivenSearch(problem({"minimise": "usd", "rate": 8.3, "at_once": 1}))
    best = planner(files, ["alike"]).plan(search.problem, search)
    assert cell(best) == ("alike", 1, 4)
    assert len(carries.tried) <= MOST + 2 * math.ceil(math.log2(MOST))
    # What it leaves is what it has found.
    scores = {cell(candidate): score for candidate, score in search.tried.values()}
    assert all(
        (score.given_up is None) == (p + 2 * t >= 8.3) for (_, p, t), score in scores.items()
    )


def test_the_chosen_run_file_has_the_machines(carries: Carries, files: dict[str, str]) -> None:
    carries.rate = lambda config: min(1.0 * of(config)[1], 2.0 * of(config)[2])
    search = DrivenSearch(problem({"minimise": "watts", "rate": 4.0}))
    best = planner(files, ["mixed"]).plan(search.problem, search)
    config = RunFile.model_validate(search.problem.run_file(best.part))
    assert (of(config), config.model) == (("mixed", 4, 2), "llama-3-8b")
    assert config.system["prompt"] == [f"prompt{n}" for n in range(4)]
    assert search.costs(best).watts == 4 * 700 + 2 * 300
    (score,) = search.scores([best])
    assert score.costs == search.costs(best)


@pytest.mark.parametrize(
    ("goal", "most", "more", "says"),
    [
        ({"maximise": "usd"}, {}, {}, "goal.maximise is usd: .* with cluster and planner.at_most"),
        ({"maximise": "cluster"}, {}, {}, "planner.at_most: give gpus, usd or watts"),
        ({"maximise": "cluster"}, {}, {"at_most": {"usd": 1}}, "no cluster of any design costs"),
        ({}, {"prompt": 6}, {}, r"planner.files: .*mixed.yaml: .*prompt_big5"),
        ({}, {"token": 0}, {}, r"mixed.yaml: token is 0, and the file has instances.token"),
    ],
)
def test_what_cannot_be_asked(
    files: dict[str, str], goal: dict[str, Any], most: dict[str, int], more: Any, says: str
) -> None:
    goal = goal or {"minimise": "usd", "rate": 1.0}
    asked = {files["mixed"]: {"prompt": MOST, "token": MOST} | most}
    options = SplitwisePoolsOptions.model_validate({"files": asked} | more)
    search = DrivenSearch(problem(goal))
    with pytest.raises(JaxinferError, match=says) as raised:
        SplitwisePools(options).plan(search.problem, search)
    assert "\n" not in str(raised.value)


def test_one_pool_has_no_tokens(files: dict[str, str]) -> None:
    asked = {files["one"]: {"prompt": MOST, "token": 1}}
    options = SplitwisePoolsOptions.model_validate({"files": asked})
    search = DrivenSearch(problem({"minimise": "usd", "rate": 1.0}))
    with pytest.raises(JaxinferError, match=r"token is 1, and the file needs instances.token"):
        SplitwisePools(options).plan(search.problem, search)
