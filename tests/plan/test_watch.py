"""Progress of a search: how many were looked at, and which is the best so far."""

import pytest
from plan_cases import Carries, problem
from test_search import cluster

from jaxinfer.plan import watch
from jaxinfer.plan.search import DrivenSearch
from jaxinfer.plan.watch import SearchBar


@pytest.mark.parametrize("at_once", [1, 5])
def test_the_best_so_far_is_told_as_each_result_comes(
    carries: Carries, at_once: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Within a wave, too: of 0, 2, 1, 3 and again 3 requests/s."""
    monkeypatch.setattr(watch, "EVERY_S", -1.0)
    carried = {1: 0.0, 2: 2.0, 3: 1.0, 4: 3.0, 5: 3.0}
    carries.rate = lambda config: carried[next(iter(config.groups.values())).devices]
    with SearchBar() as bar:
        search = DrivenSearch(
            problem({"maximise": "cluster", "at_once": at_once}), on_score=bar.update
        )
        search.best([cluster("A10", gpus, 8) for gpus in carried])
    said = capsys.readouterr().err.splitlines()
    best = [None, 2, 2, 4, 4]
    assert said == [
        f"{number} tried; "
        + (f"best: kind A10, gpus {gpus}, seqs 8" if gpus else "none keeps the targets yet")
        for number, gpus in enumerate(best, 1)
    ]
