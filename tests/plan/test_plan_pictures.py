"""Pictures of a search."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import problem
from test_search import cluster

from jaxinfer.lab.plan.candidate import Candidate, Costs, Score
from jaxinfer.lab.plan.pictures import draw_latencies, draw_rates
from jaxinfer.lab.plan.result import frontier
from jaxinfer.lab.plan.search import DrivenSearch

NUMBERS = st.integers(0, 9)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30))
def test_a_frontier_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    """The frontier against all pairs."""
    best = {
        (x, y)
        for x, y in points
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    }
    found = frontier(points)
    assert set(found) == best
    assert found == sorted(best)


def searched(slo: str, goal: dict[str, Any]) -> tuple[DrivenSearch, Candidate]:
    """Three in full, of which two are on the frontier, and one given up."""
    search = DrivenSearch(problem({"slo": slo} | goal))
    names = [name for name in ("tbt p99", "ttft p90") if slo.partition(":")[1]]
    for gpus, rate, tbt, ttft, given_up in (
        (1, 2.0, 0.05, 1.5, None),
        (2, 5.0, 0.1, 0.5, None),
        (3, 6.0, 0.12, 0.6, None),
        (4, 9.0, 0.01, 0.1, "at this rate"),
    ):
        each = cluster("A10", gpus, 8)
        figures = dict(zip(names, (tbt, ttft), strict=False))
        search.tried[each.key] = each, Score(rate, Costs(gpus, 1.0, None), given_up, figures)
    return search, cluster("A10", 2, 8)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that are saved."""
    found: list[Any] = []
    monkeypatch.setattr("jaxinfer.lab.plan.pictures.save_picture", lambda f, path: found.append(f))
    return found


@pytest.mark.parametrize(
    ("goal", "values", "unit"),
    [
        ({"maximise": "gpu"}, [2.0, 2.5, 2.0], "requests/s per GPU"),
        ({"minimise": "gpus", "rate": 2.0}, [1, 2, 3], "GPUs"),
    ],
)
def test_ttft_against_tbt(
    goal: dict[str, Any], values: list[float], unit: str, drawn: list[Any]
) -> None:
    search, chosen = searched("ttft:p90=2,tbt:p99=0.2", goal)
    draw_latencies(Path("l.png"), search, chosen)
    (figure,) = drawn
    axes, bar = figure.axes
    dots, ring = axes.collections
    assert dots.get_offsets().tolist() == [[0.05, 1.5], [0.1, 0.5], [0.12, 0.6]]
    assert dots.get_array().tolist() == values
    assert ring.get_offsets().tolist() == [[0.1, 0.5]]
    front, *limits = axes.lines
    assert front.get_xydata().tolist() == [[0.05, 1.5], [0.1, 0.5]]
    assert [line.get_xydata().tolist() for line in limits] == [
        [[0.2, 0], [0.2, 1]],
        [[0, 2], [1, 2]],
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("TBT p99 (s)", "TTFT p90 (s)")
    # 0.25, 0.5 and 0.6 of the limit of TBT beside 0.75, 0.25 and 0.3 of that of TTFT.
    assert axes.get_title() == "TBT limits 2 of 3 candidates at their largest rate"
    assert bar.get_ylabel() == unit
    # What is at a limit is not at the spine.
    assert axes.get_xlim()[1] > 0.2 * 1.1
    assert axes.get_ylim()[1] > 2 * 1.1
    assert legend_of(figure)[:3] == [
        "Pareto front: none is below in both",
        "chosen",
        "limits of the targets",
    ]


@pytest.mark.parametrize("slo", ["ttft=1", "ttft:p90=2", "tbt:p99=0.2"])
def test_targets_of_one_of_both_have_no_such_picture(slo: str, drawn: list[Any]) -> None:
    draw_latencies(Path("l.png"), *searched(slo, {"maximise": "gpu"}))
    assert not drawn


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_cost_against_rate(drawn: list[Any]) -> None:
    """Points have a number and a name, the front a line; GPUs are whole."""
    draw_rates(Path("r.png"), *searched("ttft=1", {"maximise": "gpu"}))
    (axes,) = drawn[0].axes
    full, given_up, ring = axes.collections
    assert full.get_offsets().tolist() == [[1, 2.0], [2, 5.0], [3, 6.0]]
    assert given_up.get_offsets().tolist() == [[4, 9.0]]
    assert ring.get_offsets().tolist() == [[2, 5.0]]
    assert axes.lines[0].get_xydata().tolist() == [[1, 2.0], [2, 5.0], [3, 6.0]]
    assert axes.get_xlabel() == "GPUs"
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert [(each.get_text(), each.xy) for each in axes.texts] == [
        ("1", (1, 2.0)),
        ("2", (2, 5.0)),
        ("3", (3, 6.0)),
    ]
    assert legend_of(drawn[0]) == [
        "largest rate",
        "misses the targets at this rate",
        "Pareto front of rate and cost",
        "chosen",
        "1: gpus 1",
        "2: gpus 2",
        "3: gpus 3",
    ]


def test_candidates_of_one_cost_are_told_by_name(drawn: list[Any]) -> None:
    """The best first, and then who was given up; by the axes in which they differ."""
    search = DrivenSearch(problem({"maximise": "cluster"}))
    for seqs, rate, given_up in ((8, 2.0, None), (16, 3.0, None), (32, 9.0, "at this rate")):
        each = cluster("A10", 2, seqs)
        search.tried[each.key] = each, Score(rate, Costs(2, None, None), given_up, {"ttft": 0.9})
    draw_rates(Path("r.png"), search, cluster("A10", 2, 16))
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "seqs 16",
        "seqs 8",
        "seqs 32",
    ]
    assert [each.get_text() for each in axes.texts] == ["3", "2", "< 9"]
    assert axes.get_xlabel() == "requests/s that keep the targets (2 GPUs each)"
    full, given_up, ring = axes.collections
    assert full.get_offsets().tolist() == [[3.0, 0], [2.0, 1]]
    assert given_up.get_offsets().tolist() == [[9.0, 2]]
    assert ring.get_offsets().tolist() == [[3.0, 0]]
