"""Results of a search: rows, the best few, the front, and who cannot be."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import Carries, problem
from test_search import cluster

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.plan.candidate import Candidate, Costs, Score
from jaxinfer.lab.plan.result import best_few, front_of, refusals, rows
from jaxinfer.lab.plan.search import DrivenSearch

PRICES = {"A10": 1.0, "L4": 0.5}


def searched(rates: list[float], **goal: Any) -> DrivenSearch:
    """Clusters of 1, 2, ... GPUs; those of a rate below 0 were given up at it."""
    search = DrivenSearch(problem({"maximise": "gpu"} | goal))
    for gpus, rate in enumerate(rates, 1):
        each = cluster("A10", gpus, 8)
        given_up: Any = "at this rate" if rate < 0 else None
        score = Score(abs(rate), Costs(gpus, None, None), given_up, {"ttft": 0.5})
        search.tried[each.key] = each, score
    return search


def cells(search: DrivenSearch, count: int) -> list[tuple[str, ...]]:
    table = best_few(search, count)
    return [
        tuple(str(column.header) for column in table.columns),
        *zip(*(map(str, column.cells) for column in table.columns), strict=True),
    ]


def test_the_best_few_and_then_those_that_were_given_up() -> None:
    search = searched([2.0, 5.0, -9.0, 6.0])
    assert cells(search, 8) == [
        ("gpus", "GPUs", "requests/s", "requests/s per GPU", "front"),
        ("2", "2", "5", "2.5", "*"),
        ("1", "1", "2", "2", "*"),
        ("4", "4", "6", "1.5", "*"),
        ("3", "3", "< 9", "< 3", ""),
    ]
    assert len(cells(search, 2)) == 3


def test_each_row_says_how_many_requests_would_be_enough() -> None:
    """Not that of the choice alone; nothing where they were."""
    search = searched([2.0, 5.0])
    candidate, score = list(search.tried.values())[1]
    search.tried[candidate.key] = candidate, replace(score, enough=120)
    assert [row["enough_requests"] for row in rows(search)] == [None, 120]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9))
def test_the_front_is_that_of_all_pairs(rates: list[int]) -> None:
    """The front has each cluster, of one GPU more each, that carries more than all cheaper ones."""
    search = searched([float(rate) for rate in rates])
    wanted = [
        gpus for gpus, rate in enumerate(rates, 1) if rate > max(rates[: gpus - 1], default=0)
    ]
    assert [candidate.axes["gpus"] for candidate in front_of(search)] == wanted
    assert [row["axes.gpus"] for row in rows(search) if row["front"]] == wanted


def test_axes_that_are_called_as_columns_stay(carries: Carries) -> None:
    axes = {"gpus": "mine", "value": 7, "ttft": "long", "other": 1}
    search = DrivenSearch(problem({"maximise": "gpu"}))
    search.best([Candidate(axes, cluster("A10", 2, 8).part)])
    (row,) = rows(search)
    assert [row[f"axes.{name}"] for name in ("gpus", "value", "ttft")] == ["mine", 7, "long"]
    assert (row["gpus"], row["other"], row["value"]) == (2, 1, row["requests_s"] / 2)


def test_equal_axes_are_two_candidates_if_all_else_is_not(carries: Carries) -> None:
    """The two are simulated, and have a row each; what is equal in all is looked at once."""
    carries.rate = lambda config: float(of_gpus(config))
    search = DrivenSearch(problem({"maximise": "cluster"}))
    two, one = (Candidate({"a": 1}, cluster("A10", gpus, 8).part) for gpus in (2, 1))
    assert search.best([two, one, two]) == two
    assert [row["gpus"] for row in rows(search)] == [2, 1]


def of_gpus(config: RunFile) -> int:
    (group,) = config.groups.values()
    return group.devices


def test_who_cannot_be_is_named() -> None:
    search = searched([2.0, 3.0])
    assert refusals(search) is None
    search.tried[()] = Candidate({"a": -5}, {}), Score(0.0, refused="a is -5,\n must be above 0")
    assert refusals(search) == (
        "1 of 3 candidates are not valid; for example a -5: a is -5, must be above 0"
    )


@pytest.mark.parametrize("what", ["guess", "bound"])
@pytest.mark.parametrize("rate", [-1.0, math.nan])
def test_a_planners_guess_that_is_none(carries: Carries, what: str, rate: float) -> None:
    search = DrivenSearch(problem({"maximise": "gpu"}, {"name": "mine:Mine"}))
    says = (
        rf"^planner mine:Mine: the {what} of kind A10, .* is {rate}, must be requests/s, a number"
    )
    with pytest.raises(JaxinferError, match=says):
        search.best([cluster("A10", 1, 8)], **{what: lambda candidate: rate})
    assert not carries.tried
