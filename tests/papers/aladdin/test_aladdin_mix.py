"""Aladdin's planner with workers of several kinds, and with eq. 7 over several rates."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import Carries, problem
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.aladdin.planner import AladdinPlanner, AladdinPlannerOptions
from jaxinfer.papers.aladdin.sizing import Counts, WorkerCount, cheapest_mix

quick = examples(60)
PRICES = {"A100-80G-SXM": 1.69, "L40": 1.03, "RTX-A6000": 0.76}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A worker of each of three kinds, with costs of one of them."""
    path = tmp_path_factory.mktemp("workers") / "kinds.yaml"
    data = {
        "model": "none",
        "groups": {f"g{kind}": {"kind": kind} for kind in PRICES},
        "instances": {kind: {"group": f"g{kind}"} for kind in PRICES},
        "simulate": {"groups": {"gL40": {"step_s": 0.001}}},
        "system": {"name": "aladdin", "ttft_s": 1.0, "atgt_s": 0.05},
    }
    path.write_text(yaml.safe_dump(data))
    return str(path)


def planner(file: str, **options: Any) -> AladdinPlanner:
    return AladdinPlanner(AladdinPlannerOptions.model_validate({"file": file, "most": 3} | options))


def search(
    rate: float = 1.0, minimise: str = "usd", slo_tpot: float = 0.05, **more: Any
) -> DrivenSearch:
    goal = {"minimise": minimise, "rate": rate, "slo": f"ttft=1,tpot={slo_tpot}"}
    return DrivenSearch(problem(goal, **({"prices": PRICES} | more)))


def planned(planner: AladdinPlanner, search: DrivenSearch) -> Candidate:
    return planner.plan(search.problem, search)


def of(config: RunFile) -> Counts:
    """Workers of each kind."""
    kinds = [group.kind for group in config.groups.values()]
    return tuple(kinds.count(kind) for kind in PRICES)


# The search.


@given(seed=st.integers(0, 10**6), kinds=st.integers(1, 3), most=st.integers(1, 4))
@quick
def test_the_cheapest_mix_is_that_of_all(seed: int, kinds: int, most: int) -> None:
    """The mix found is the cheapest of all that keep the targets, whatever the guesses are."""
    rng = random.Random(seed)
    costs = [round(rng.uniform(0.5, 4), 1) for _ in range(kinds)]
    true = [rng.choice([0.0, rng.uniform(0.3, 4)]) for _ in range(kinds)]
    guessed = [rate * rng.choice([0.0, 0.5, 1.0, 2.0]) for rate in true]
    rate = rng.uniform(0.3, 3.0 * most)
    asked: list[Counts] = []

    def carried(counts: Counts) -> bool:
        return sum(n * r for n, r in zip(counts, true, strict=True)) ** 1.1 >= rate

    def keeps(counts: Counts) -> bool:
        asked.append(counts)
        return carried(counts)

    def cost(counts: Counts) -> float:
        return sum(n * c for n, c in zip(counts, costs, strict=True))

    found = cheapest_mix(keeps, costs, guessed, rate, most)
    enough = [c for c in product(range(most + 1), repeat=kinds) if carried(c)]
    assert len(set(asked)) == len(asked)
    if not enough:
        assert found is None
        return
    assert found in enough
    assert cost(found) == pytest.approx(min(map(cost, enough)))


def test_good_guesses_take_few_simulations() -> None:
    """169 mixes; those that are looked at are the edge of what is enough, near the cheapest."""
    asked: list[Counts] = []

    def keeps(counts: Counts) -> bool:
        asked.append(counts)
        return counts[0] * 3 + counts[1] * 2 >= 19

    assert cheapest_mix(keeps, [3.1, 2.0], [3.0, 2.0], 19.0, 12) == (1, 8)
    assert len(asked) <= 10


# On the driver.


@given(
    seed=st.integers(0, 10**6), rate=st.floats(0.5, 12), minimise=st.sampled_from(["usd", "gpus"])
)
@examples(15)
def test_the_planner_finds_the_cheapest_of_all_mixes(
    carries: Carries, file: str, seed: int, rate: float, minimise: str
) -> None:
    rng = random.Random(seed)
    each = [rng.uniform(0.5, 2.5) for _ in PRICES]
    carries.rate = lambda config: sum(n * r for n, r in zip(of(config), each, strict=True))
    here = search(rate, minimise)
    costs = list(PRICES.values()) if minimise == "usd" else [1.0] * 3
    enough = [
        c
        for c in product(range(4), repeat=3)
        if sum(n * r for n, r in zip(c, each, strict=True)) >= rate
    ]
    if not enough:
        with pytest.raises(JaxinferError, match="none of"):
            planned(planner(file), here)
        return
    best = planned(planner(file), here)
    counts = tuple(best.axes[kind] for kind in PRICES)
    assert counts in enough
    least = min(sum(n * c for n, c in zip(each, costs, strict=True)) for each in enough)
    assert here.costs(best).amount(minimise) == pytest.approx(least)  # type: ignore[arg-type]


def test_a_mix_as_a_run_file(carries: Carries, file: str) -> None:
    """Kinds of which there are none are gone, and the system knows dollars, if those count."""
    carries.rate = lambda config: {(1, 0, 2): 9.0, (2, 0, 1): 9.0, (3, 3, 3): 9.0}.get(
        of(config), 0
    )
    carries.rate = lambda config: 9.0 if of(config)[0] >= 1 and of(config)[2] >= 2 else 0.0
    here = search(5.0)
    best = planned(planner(file), here)
    config = RunFile.model_validate(here.problem.run_file(best.part))
    assert of(config) == (1, 0, 2)
    assert config.system["usd_per_hour"] == {
        "A100-80G-SXM0": 1.69,
        "RTX-A60000": 0.76,
        "RTX-A60001": 0.76,
    }
    assert not config.simulate.groups
    assert best.axes == {"A100-80G-SXM": 1, "L40": 0, "RTX-A6000": 2}
    here = search(5.0, "gpus")
    config = RunFile.model_validate(here.problem.run_file(planned(planner(file), here).part))
    assert "usd_per_hour" not in config.system


@pytest.mark.parametrize("costs", [True, False])
def test_what_is_left_out_of_one_mix_is_there_in_the_next(
    carries: Carries, file: str, tmp_path: Path, costs: bool
) -> None:
    """L40s, whose costs the file has, or has not: mixes without any are looked at before."""
    data = yaml.safe_load(Path(file).read_text())
    if not costs:
        del data["simulate"]
    path = tmp_path / "kinds.yaml"
    path.write_text(yaml.safe_dump(data))
    seen: list[Counts] = []

    def rate(config: RunFile) -> float:
        seen.append(of(config))
        return 9.0 if of(config)[1] == 2 else 0.0

    carries.rate = rate
    here = search(5.0)
    config = RunFile.model_validate(here.problem.run_file(planned(planner(str(path)), here).part))
    assert of(config) == (0, 2, 0)
    assert any(not counts[1] for counts in seen[: seen.index((0, 2, 0))])
    found = {name: group.step_s for name, group in config.simulate.groups.items()}
    assert found == ({"gL400": 0.001, "gL401": 0.001} if costs else {})


def test_other_systems_know_no_dollars(carries: Carries, file: str, tmp_path: Path) -> None:
    data = yaml.safe_load(Path(file).read_text()) | {"system": {"name": "least_loaded"}}
    path = tmp_path / "kinds.yaml"
    path.write_text(yaml.safe_dump(data))
    best = planned(planner(str(path)), search())
    assert best.part["system"] == {"name": "least_loaded"}


def test_kinds_that_are_too_slow_are_left_out(carries: Carries, file: str) -> None:
    """Weights of 16 GB take 11 ms on an A100, and more than 20 on the other two."""
    carries.rate = lambda config: float(len(config.instances))
    for tpot, expected in ((0.02, (2, 0, 0)), (0.05, (0, 0, 2))):
        here = search(2.0, slo_tpot=tpot)
        best = planned(planner(file), here)
        assert tuple(best.axes[kind] for kind in PRICES) == expected
    with pytest.raises(JaxinferError, match=r"no worker's iterations keep goal\.slo's tpot"):
        planned(planner(file), search(2.0, slo_tpot=0.01))


@pytest.mark.parametrize(
    ("options", "more", "says"),
    [
        ({"sizes": {"1": {}}}, {}, r"planner\.sizes: is for one kind of workers, the file has sev"),
        ({"rates": [1.0, 2.0]}, {}, r"planner\.rates: is for one kind of workers"),
        ({}, {"prices": {"A100-80G-SXM": 1.0}}, r"prices: none of L40"),
        ({}, {"prices": {}}, r"usd are needed, but not known"),
    ],
)
def test_what_cannot_be_asked_of_kinds(
    file: str, options: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(JaxinferError, match=says) as raised:
        planned(planner(file, **options), search(**more))
    assert "\n" not in str(raised.value)


def test_two_kinds_on_one_group(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    data = {"groups": {"g": {"kind": "A10"}}, "instances": {n: {"group": "g"} for n in "ab"}}
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(JaxinferError, match=r"one\.yaml has 2 instances and 1 groups, must have"):
        planned(planner(str(path)), search())
    path.write_text(yaml.safe_dump(data | {"instances": {"a": "group"}}))
    with pytest.raises(JaxinferError, match=r"one\.yaml has 1 instances and 1 groups, must have"):
        planned(planner(str(path)), search())


# Eq. 7.


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("worker") / "worker.yaml"
    data = {"groups": {"g": {"kind": "A10"}}, "instances": {"w": {"group": "g"}}}
    path.write_text(yaml.safe_dump(data | {"system": "least_loaded"}))
    return str(path)


@given(
    per_rate=st.floats(0.2, 2),
    constant=st.floats(-0.5, 5),
    rate=st.floats(12, 40),
    extra=st.integers(-2, 3),
)
@examples(15)
def test_the_goal_s_rate_has_as_many_as_eq_7_tells_or_the_next_that_are_enough(
    carries: Carries, worker: str, per_rate: float, constant: float, rate: float, extra: int
) -> None:
    """The system needs a line's workers at low rates, and more or fewer at the goal's rate."""
    line = WorkerCount(per_rate, constant)
    low = [2.0, 4.0, 6.0, 8.0, 10.0]
    need = {at: line.workers(at) for at in low} | {rate: max(line.workers(rate) + extra, 1)}
    carries.tried.clear()
    # The rate that these workers serve, up to the rate asked for.
    carries.rate = lambda config: max((r for r in need if need[r] <= of_one(config)), default=0.0)
    rates = sorted(need)
    if sorted(need.values()) != [need[r] for r in rates]:  # More workers must not carry less.
        return
    here = search(rate, "gpus")
    best = planned(planner(worker, rates=low, most=200), here)
    fitted = WorkerCount(best.axes["eq7_per_rate"], best.axes["eq7_constant"])  # type: ignore[arg-type]
    told = fitted.workers(rate)
    # By least squares each low rate has a share in the line at the goal's; what it was rounded by
    # counts as often. Rounding the two lines up adds one at most.
    assert abs(told - line.workers(rate)) <= 1 + sum(
        abs(1 / 5 + (at - 6) * (rate - 6) / 40)
        * max(abs(need[at] - 0.5 - per_rate * at - constant), 0.5)
        for at in low
    )
    # At most one more or less by the four digits that are shown.
    assert abs(best.axes["workers"] - max(told, need[rate])) <= 1  # type: ignore[operator]
    assert best.axes["workers"] >= need[rate]  # type: ignore[operator]
    at_goal = [of_one(config) for config, r in carries.tried if r == rate]
    assert at_goal == list(range(at_goal[0], at_goal[-1] + 1))


def of_one(config: RunFile) -> int:
    return len(config.instances)


@pytest.mark.parametrize(("needed", "expected"), [({}, 28), ({40: 20}, 24), ({40: 26}, 26)])
def test_eq_7_of_the_dossier_s_counts(
    carries: Carries, worker: str, needed: dict[int, int], expected: int
) -> None:
    """The line by hand tells of 13 + 21 * 703 / 1472 at 40, 23.03, so of 24."""
    found = {3: 5, 6: 8, 12: 10, 18: 13, 25: 17, 50: 28}
    need = found | needed
    carries.rate = lambda config: max((r for r in need if need[r] <= of_one(config)), default=0)
    best = planned(planner(worker, rates=list(found), most=60), search(40.0, "gpus"))
    assert best.axes["eq7_per_rate"] == round(703 / 1472, 4)
    assert best.axes["eq7_constant"] == round(13 - 19 * 703 / 1472, 3)
    assert best.axes["workers"] == expected


def test_one_rate_is_no_line(carries: Carries, worker: str) -> None:
    carries.rate = lambda config: 1.0
    with pytest.raises(JaxinferError, match=r"eq\. 7: needs the workers of two rates"):
        planned(planner(worker, rates=[1.0]), search(1.0, "gpus"))


def test_a_file_that_has_prices_itself(carries: Carries, file: str, tmp_path: Path) -> None:
    """Prices of kinds that are left out go too, since the system would refuse them."""
    data = yaml.safe_load(Path(file).read_text())
    data["system"]["usd_per_hour"] = PRICES
    priced = tmp_path / "priced.yaml"
    priced.write_text(yaml.safe_dump(data))
    carries.rate = lambda config: 2.0 * len(config.instances)
    found, plain = (planned(planner(path), search()) for path in (str(priced), file))
    assert found.axes == plain.axes


def test_eq_7_beyond_the_most(carries: Carries, tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    data = {
        "model": "none",
        "groups": {"g": {"kind": "A100-80G-SXM"}},
        "instances": {"w": {"group": "g"}},
        "system": {"name": "aladdin", "ttft_s": 1.0, "atgt_s": 0.05},
    }
    path.write_text(yaml.safe_dump(data))
    carries.rate = lambda config: float(sum(of(config)))
    with pytest.raises(JaxinferError, match=r"planner\.most is 3, eq\. 7 tells \d+ workers"):
        planned(planner(str(path), rates=[1.0, 2.0, 3.0]), search(rate=9.0, minimise="gpus"))
