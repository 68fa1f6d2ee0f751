"""The planner in docs/adding-a-planner.md, as it stands there."""

from pathlib import Path

import pytest
import yaml
from plan_cases import Carries

from jaxinfer.lab.plan.choose import find
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.registry import make_planner
from jaxinfer.lab.plan.search import DrivenSearch

DOC = Path(__file__).parents[2] / "docs" / "adding-a-planner.md"


def block(language: str) -> str:
    return DOC.read_text().split(f"```{language}\n")[1].split("```")[0]


@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_planner_in_the_docs_finds_the_best(
    best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carries: Carries
) -> None:
    """Rates are a rule: by GPU, those of one degree are highest."""
    (tmp_path / "my_planner.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    problem = Problem.model_validate(yaml.safe_load(block("yaml")))
    carries.rate = lambda config: sum(
        group.devices * (2.0 if group.devices == best else 1.0) for group in config.groups.values()
    )
    search = DrivenSearch(problem)
    candidate, score = find(make_planner(problem.planner), search)
    assert candidate.axes == {"devices": best}
    assert score.costs
    assert score.costs.gpus == best
    assert score.rate == pytest.approx(2.0 * best, rel=0.03)
