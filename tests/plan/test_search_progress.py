"""Progress of a search: how many were looked at, and which is the best so far."""

import pytest
from plan_cases import Carries, problem
from test_search import cluster

from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.plan import search_progress
from jaxinfer.lab.plan.candidate import Score
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.lab.plan.search_progress import SearchProgress
from jaxinfer.report import progress
from jaxinfer.simulate.capacity import AT_ONCE, TriedRate
from jaxinfer.simulate.targets import Verdict

CARRIED = {1: 0.0, 2: 2.0, 3: 1.0, 4: 3.0, 5: 3.0}


def _gpus(config: RunFile) -> int:
    (group,) = config.groups.values()
    return group.devices


@pytest.mark.parametrize("at_once", [1, 5])
def test_the_best_so_far_is_told_as_each_result_comes(
    carries: Carries, at_once: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The best is told within a wave, too: of 0, 2, 1, 3 and again 3 requests/s."""
    monkeypatch.setattr(progress, "LINES_EVERY_S", -1.0)
    alone: list[int] = []  # Clusters whose sample was simulated, which the rule does not count.

    def met_alone(config: RunFile, *given: object) -> Verdict:
        alone.append(_gpus(config))
        return Verdict(True, 1, None, {})

    monkeypatch.setattr("jaxinfer.lab.plan.evaluate.alone", met_alone)
    carries.rate = lambda config: CARRIED[_gpus(config)]
    with SearchProgress() as bar:
        search = DrivenSearch(problem({"maximise": "cluster", "at_once": at_once}), watcher=bar)
        search.best([cluster("A10", gpus, 8) for gpus in CARRIED])
    said = capsys.readouterr().err.splitlines()
    # The first one comes before any simulation, and each simulation has one.
    assert said[0] == "candidates: 0 of 5, 0 s, 0 simulations; none keeps the targets yet"
    assert len(said) == 1 + len(carries.tried) + len(alone) + len(CARRIED)
    # Without a rate to beat, the least that one keeps is looked for: until the second is the best.
    assert alone == ([1, 2] if at_once == 1 else [*CARRIED])
    assert f" s, {len(carries.tried) + len(alone)} simulations; " in said[-1]
    seen = {}
    for line in said:  # The last one of each count.
        done, _, best = line.removeprefix("candidates: ").partition(" of 5, ")
        seen[int(done)] = best.split("; ")[1]
    best = [None, None, 2, 2, 4, 4]
    assert seen == {
        number: f"best: kind A10, gpus {gpus}, seqs 8" if gpus else "none keeps the targets yet"
        for number, gpus in enumerate(best)
    }
    assert all("left" in line for line in said[1:-1])
    assert said[-1].endswith("simulations; best: kind A10, gpus 4, seqs 8")


def test_how_long_it_takes_is_by_the_simulations_of_those_that_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pace after 60 s: 1 of 4 is done with 6 simulations, another has 3 of 6: 1.5 of 4."""
    clock = [0.0]
    monkeypatch.setattr(search_progress.time, "monotonic", lambda: clock[0])
    bar = SearchProgress()
    one, two = cluster("A10", 1, 8), cluster("A10", 2, 8)
    tried = TriedRate(1.0, 1, Verdict(True, 1, None, {}), 1.0)
    bar.expect(4)
    assert bar.left_s() is None
    clock[0] = 60.0
    for candidate, count in ((one, 6), (two, 3)):
        for _ in range(count):
            bar.simulated(candidate, tried)
        if candidate is one:
            bar.scored(one, Score(1.0), one)
    assert bar.left_s() == pytest.approx(60 / (1.5 / 4) - 60)


def test_no_time_is_left_where_a_candidate_is_looked_at_again() -> None:
    bar, one = SearchProgress(), cluster("A10", 1, 8)
    tried = TriedRate(1.0, 1, Verdict(True, 1, None, {}), 1.0)
    bar.expect(1)
    bar.simulated(one, tried)
    bar.scored(one, Score(1.0), one)
    bar.simulated(one, tried)
    assert bar.left_s() == 0


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (0.0, "kept one request at a time"),
        (12.0, "kept at 12 requests/s"),
        (AT_ONCE, "kept all requests at once"),
    ],
)
def test_a_rate_is_told_in_words(
    rate: float, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LINES_EVERY_S", -1.0)
    bar = SearchProgress()
    bar.expect(2)
    bar.simulated(cluster("A10", 1, 8), TriedRate(rate, 1, Verdict(True, 1, None, {}), 1.0))
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": {words}")
