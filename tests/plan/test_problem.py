"""Plan files: what they say of requests and targets, and how a candidate's part goes in."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_cases import RUN, problem

from jaxinfer import JaxinferError
from jaxinfer.lab.plan.problem import Goal, load_problem, merge
from jaxinfer.simulate.targets import RequestTargets

GOAL = {"maximise": "gpu", "slo": "ttft=1"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"minimise": "usd", "rate": 1.0}, "give either maximise or minimise"),
        ({"maximise": None}, "give either maximise or minimise"),
        ({"maximise": None, "minimise": "usd"}, "rate is missing"),
        ({"rate": 1.0}, "rate is 1, and is for minimise"),
        ({"seeds": 0}, "seeds is 0"),
        ({"fresh_seeds": 0}, "fresh_seeds is 0"),
        ({"requests_per_gpu": 0}, "requests_per_gpu is 0"),
        ({"at_once": 0}, "at_once is 0"),
        ({"top": 0}, "top is 0"),
        ({"precision": 1e-7}, "precision is 1e-07"),
        ({"precision": 1.0}, r"precision is 1\.0"),
        ({"maximise": None, "minimise": "usd", "rate": 0.0}, r"rate is 0\.0"),
    ],
)
def test_a_goal_that_is_none(change: dict[str, Any], says: str) -> None:
    with pytest.raises(JaxinferError, match=says):
        Goal.model_validate(GOAL | change)


def test_a_workload_needs_requests() -> None:
    for workload in ({}, {"limit": 3}):
        with pytest.raises(JaxinferError, match=r"^run\.workload: needs a trace, or synthetic"):
            _ = problem(GOAL).model_copy(update={"run": RUN | {"workload": workload}}).work


@pytest.mark.parametrize("usd", [0.0, -1.0])
def test_a_price_that_is_none(usd: float) -> None:
    with pytest.raises(JaxinferError, match=r"prices\.A10 is -?\d, must be above 0"):
        problem(GOAL, prices={"A10": usd})


def test_targets_are_as_the_goal_has_them() -> None:
    goal = GOAL | {"attainment": 0.5, "criterion": "each"}
    targets = problem(goal).targets
    assert isinstance(targets, RequestTargets)
    assert (targets.attainment, targets.criterion, targets.limits) == (0.5, "each", {"ttft": 1.0})


def test_what_candidates_complete_may_not_do_by_itself() -> None:
    """The requests are read without it."""
    run = RUN | {
        "engine": {"max_num_seqs": 4096},
        "links": [{"between": ["a", "b"], "gb_s": 1}],
        "groups": {"g": {"devices": -1}},
        "system": {"name": 3},
    }
    assert len(problem(GOAL).model_copy(update={"run": run}).work) == 4
    with pytest.raises(JaxinferError, match=r"^run\.modl: unknown option"):
        _ = problem(GOAL).model_copy(update={"run": RUN | {"modl": "x"}}).work


@pytest.mark.parametrize("name", ["trace", "synthetic", "only", "limit", "arrivals"])
def test_all_candidates_serve_the_same_requests(name: str) -> None:
    with pytest.raises(JaxinferError, match=rf"^workload\.{name}: all candidates serve the same"):
        problem(GOAL).run_file({"workload": {name: None}})


def test_a_candidate_may_have_what_tells_of_its_requests() -> None:
    found = problem(GOAL).run_file({"workload": {"max_tokens": 9}, "system": "least_loaded"})
    assert found["workload"] == RUN["workload"] | {"max_tokens": 9}  # type: ignore[operator]
    assert problem(GOAL).run_file({"workload": None})["workload"] is None


@pytest.mark.parametrize(
    ("base", "more", "both"),
    [
        ({"a": 1, "b": {"c": 1, "d": {"e": 2}}}, {"b": {"d": {"f": 3}}, "g": 4},
         {"a": 1, "b": {"c": 1, "d": {"e": 2, "f": 3}}, "g": 4}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        # A name for options goes with others, where it is one; elsewhere it is a value.
        ({"system": "cronus"}, {"system": {"x": 1}}, {"system": {"name": "cronus", "x": 1}}),
        ({"system": "cronus"}, {"system": "single"}, {"system": "single"}),
        ({"workload": {"arrivals": "poisson"}}, {"workload": {"arrivals": {"rate": 2}}},
         {"workload": {"arrivals": {"kind": "poisson", "rate": 2}}}),
        ({"engine": {"system": "a"}}, {"engine": {"system": {"x": 1}}},
         {"engine": {"system": {"x": 1}}}),
    ],
)  # fmt: skip
def test_two_parts_of_a_run_file_in_one(
    base: dict[str, Any], more: dict[str, Any], both: dict[str, Any]
) -> None:
    before = repr(base)
    assert merge(base, more) == both
    assert repr(base) == before


def test_a_file_and_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    file = {"planner": {"name": "colocated"}, "goal": GOAL, "run": RUN}
    path.write_text(yaml.safe_dump(file))
    found = load_problem(path, ["goal.seeds=3", "planner.gpus={A10: 2}"])
    assert found.goal.seeds == 3
    assert found.planner == {"name": "colocated", "gpus": {"A10": 2}}
    for text, says in (("[1]", "must be a mapping of planner, goal"), ("a: [", "expected")):
        path.write_text(text)
        with pytest.raises(JaxinferError, match=says) as raised:
            load_problem(path)
        assert str(raised.value).count(str(path)) == 1
    with pytest.raises(JaxinferError, match=r"none\.yaml: No such file") as raised:
        load_problem(tmp_path / "none.yaml")
    assert str(raised.value).count("none.yaml") == 1
