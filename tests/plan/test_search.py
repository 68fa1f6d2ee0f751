"""The driver of searches, against brute force over what each candidate carries."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import Carries, problem
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, Workload
from jaxinfer.files.kept import KeptResults
from jaxinfer.lab.plan.candidate import Candidate, Score
from jaxinfer.lab.plan.lacking import why_nothing
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.simulate.capacity import Ladder
from jaxinfer.workload.lengths import BenchRequest

PRICES = {"A10": 1.0, "L4": 0.5}


def cluster(kind: str, gpus: int, seqs: int) -> Candidate:
    """So many instances of one GPU each."""
    part = {
        "groups": {"g": {"kind": kind, "devices": gpus, "tensor_parallel_size": 1}},
        "instances": {"i": {"group": "g", "replicas": gpus, "max_num_seqs": seqs}},
        "system": "least_loaded",
    }
    return Candidate({"kind": kind, "gpus": gpus, "seqs": seqs}, part)


def of(config: RunFile) -> tuple[str, int, int]:
    """The axes of a candidate's run file."""
    (group,) = config.groups.values()
    return str(group.kind), group.devices, config.instances["i0"].max_num_seqs


def draw(seed: int, count: int) -> tuple[list[Candidate], dict[tuple[str, int, int], float]]:
    """Clusters, and what each carries."""
    rng = random.Random(seed)
    space = [(kind, gpus, seqs) for kind in PRICES for gpus in range(1, 5) for seqs in (8, 16, 32)]
    chosen = rng.sample(space, count)
    return [cluster(*axes) for axes in chosen], {axes: rng.uniform(0.5, 9) for axes in chosen}


def value(goal: str, axes: tuple[str, int, int], rate: float) -> float:
    kind, gpus, _ = axes
    return rate / {"cluster": 1, "gpu": gpus, "usd": gpus * PRICES[kind]}[goal]


def axes(candidate: Candidate) -> tuple[Any, ...]:
    return tuple(candidate.axes.values())


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 20),
    at_once=st.integers(1, 9),
    goal=st.sampled_from(["cluster", "gpu", "usd"]),
    slack=st.floats(1, 3),
)
@examples(25)
def test_the_best_is_that_of_brute_force_pruned_or_not(
    carries: Carries, seed: int, count: int, at_once: int, goal: str, slack: float
) -> None:
    candidates, rates = draw(seed, count)
    carries.rate = lambda config: rates[of(config)]
    ladder = Ladder(0.02)
    # What can be found: the step of the ladder below what it carries.
    found = {a: ladder.rate(ladder.above(rate) - 1) for a, rate in rates.items()}
    most = max(value(goal, a, rate) for a, rate in found.items())
    asked = problem({"maximise": goal, "at_once": at_once}, prices=PRICES)
    counts = {}
    for prune, bounded in ((True, True), (True, False), (False, False)):
        carries.tried.clear()
        search = DrivenSearch(asked, prune=prune)
        bounds = {"bound": lambda c: slack * rates[axes(c)]} if bounded else {}
        best = search.best(candidates, **bounds)
        assert value(goal, axes(best), found[axes(best)]) == pytest.approx(most, rel=1e-9)
        counts[prune, bounded] = len(carries.tried)
        for candidate, score in search.tried.values():
            carried = found[axes(candidate)]
            if score.given_up == "at this rate":
                assert prune
                assert carried < score.rate
            elif score.given_up:
                assert bounded
                assert value(goal, axes(candidate), carried) <= most * (1 + 1e-9)
            else:
                assert score.rate == carried
    # From a rate that is far below, growing steps may try one or two more than leaps from none.
    assert counts[True, False] <= counts[False, False] + 2 * count


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 20),
    top=st.integers(1, 5),
    at_once=st.integers(1, 9),
    slack=st.floats(0.2, 3),
)
@examples(25)
def test_the_best_few_are_found_in_full_whatever_is_guessed(
    carries: Carries, seed: int, count: int, top: int, at_once: int, slack: float
) -> None:
    candidates, rates = draw(seed, count)
    carries.rate = lambda config: rates[of(config)]
    ladder = Ladder(0.02)
    found = {a: ladder.rate(ladder.above(rate) - 1) for a, rate in rates.items()}
    values = sorted((value("usd", a, rate) for a, rate in found.items()), reverse=True)
    asked = problem({"maximise": "usd", "at_once": at_once, "top": top}, prices=PRICES)
    search = DrivenSearch(asked)
    rng = random.Random(seed)
    best = search.best(candidates, guess=lambda c: rng.uniform(1, slack + 1) * rates[axes(c)])
    assert value("usd", axes(best), found[axes(best)]) == pytest.approx(values[0], rel=1e-9)
    full = sorted(
        (search.value(s) for _, s in search.tried.values() if not s.given_up), reverse=True
    )
    assert full[:top] == pytest.approx(values[:top], rel=1e-9)


def test_the_best_guesses_come_first_and_are_where_a_search_begins(carries: Carries) -> None:
    candidates, rates = draw(3, 6)
    carries.rate = lambda config: rates[of(config)]
    guesses = {axes(c): 2.0**i for i, c in enumerate(candidates)}
    search = DrivenSearch(problem({"maximise": "cluster", "at_once": 2}))
    search.best(candidates, guess=lambda c: guesses[axes(c)])
    assert [c for c, _ in search.tried.values()] == candidates[::-1]
    # Of the first wave, since what comes then has a rate to keep.
    assert [rate for _, rate in carries.tried if rate in (32.0, 16.0)] == [32.0, 16.0]
    # A bound counts beside it: no guess is better than what can be.
    search = DrivenSearch(problem({"maximise": "cluster", "at_once": 1}))
    search.best(candidates, lambda c: 40 - guesses[axes(c)], lambda c: guesses[axes(c)])
    first = next(iter(search.tried.values()))[0]
    assert guesses[axes(first)] == 16.0


def test_who_cannot_be_by_its_guess_is_refused(carries: Carries) -> None:
    def guess(candidate: Candidate) -> float:
        if candidate.axes["gpus"] == 1:
            raise JaxinferError("too small")
        return 1.0

    search = DrivenSearch(problem({"maximise": "cluster"}))
    small = cluster("A10", 1, 8)
    assert search.best([small, cluster("A10", 2, 8)], guess=guess).axes["gpus"] == 2
    assert search.tried[small.key][1].refused == "too small"


@given(seed=st.integers(0, 10**6), count=st.integers(1, 20), rate=st.floats(0.5, 12))
@examples(25)
def test_the_cheapest_that_carries_a_rate(
    carries: Carries, seed: int, count: int, rate: float
) -> None:
    candidates, rates = draw(seed, count)
    carries.rate = lambda config: rates[of(config)]
    carries.tried.clear()
    search = DrivenSearch(problem({"minimise": "usd", "rate": rate, "at_once": 2}, prices=PRICES))
    enough = [a for a in rates if rates[a] >= rate]
    if not enough:
        with pytest.raises(JaxinferError, match=rf"^none of {count} candidates meets the targets"):
            search.best(candidates)
        return
    usd = {a: a[1] * PRICES[a[0]] for a in rates}
    best = axes(search.best(candidates))
    assert best in enough
    assert usd[best] == min(usd[a] for a in enough)
    # Each costs one simulation, and none of those that cost more is looked at but beside it.
    assert all(tried == rate for _, tried in carries.tried)
    assert sum(usd[of(config)] > usd[best] for config, _ in carries.tried) <= 1


def test_what_was_found_is_not_simulated_again(carries: Carries, tmp_path: Path) -> None:
    candidates, rates = draw(0, 12)
    carries.rate = lambda config: rates[of(config)]
    asked = problem({"maximise": "gpu", "at_once": 3})
    file = tmp_path / "evaluations.jsonl"

    def search() -> tuple[Candidate, int]:
        carries.tried.clear()
        kept = KeptResults(file)
        best = DrivenSearch(asked, kept=kept).best(candidates)
        kept.close()
        return best, len(carries.tried)

    first, whole = search()
    text = file.read_text()
    assert search() == (first, 0)
    assert file.read_text() == text
    # Killed in the midst of a line.
    lines = text.splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:20])
    again, rest = search()
    assert again == first
    assert 0 < rest < whole
    assert file.read_text() == text
    # Another goal is another search.
    other = DrivenSearch(problem({"maximise": "usd"}, prices=PRICES), kept=KeptResults(file))
    carries.tried.clear()
    other.best(candidates)
    assert carries.tried


def test_what_is_asked_for_is_part_of_what_is_kept(
    carries: Carries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plan file, whose lengths are drawn otherwise by now, or whose targets are others."""
    slo = tmp_path / "slo.yaml"
    reference = Path("configs/splitwise/dgx_a100.yaml").resolve()
    lengths = [(9, 5)]

    def requests(workload: Workload, *given: Any) -> list[BenchRequest]:
        return [BenchRequest(None, *pair, 0.0) for pair in lengths]

    monkeypatch.setattr(Workload, "requests", requests)

    def simulations(multiple: float) -> int:
        slo.write_text(f"reference: {reference}\nscale: {{ttft: {multiple}}}\n")
        carries.tried.clear()
        kept = KeptResults(tmp_path / "evaluations.jsonl")
        search = DrivenSearch(problem({"maximise": "gpu", "slo": str(slo)}), kept=kept)
        search.best([cluster("A10", 1, 8)])
        kept.close()
        return len(carries.tried)

    first = simulations(2.0)
    assert (first > 0, simulations(2.0)) == (True, 0)
    assert simulations(3.0) == first
    # The limits are multiples of what these take: for other lengths, with the same seconds.
    lengths.append((9, 5))
    assert simulations(3.0) == first
    assert simulations(3.0) == 0


def test_the_choice_is_looked_at_with_seeds_that_the_search_has_not_had(carries: Carries) -> None:
    asked = problem({"maximise": "gpu", "seeds": 2, "fresh_seeds": 3})
    search = DrivenSearch(asked)
    best = search.best([cluster("A10", 1, 8), cluster("L4", 2, 8)])
    assert {seeds for _, seeds in carries.served} == {(0, 1)}
    carries.served.clear()
    assert search.fresh_rates(best) == [1.0] * 3
    assert list(dict.fromkeys(seeds for _, seeds in carries.served)) == [(2,), (3,), (4,)]


@pytest.mark.parametrize("goal", [{"maximise": "gpu"}, {"minimise": "gpus", "rate": 0.5}])
def test_larger_clusters_serve_more_requests(carries: Carries, goal: dict[str, Any]) -> None:
    """So many for each GPU, of the four that there are."""
    asked = problem(goal | {"requests_per_gpu": 2})
    for gpus, served in ((1, 2), (2, 4)):
        carries.served.clear()
        (score,) = DrivenSearch(asked).scores([cluster("A10", gpus, 8)])
        assert score.rate > 0
        assert {count for count, _ in carries.served} == {served}
    with pytest.raises(JaxinferError, match=r"for 3 GPUs is 6 requests: the workload has 4"):
        DrivenSearch(asked).best([cluster("A10", 3, 8)])


def test_equal_keys_are_one_candidate(carries: Carries) -> None:
    search = DrivenSearch(problem({"maximise": "gpu"}))
    one, other = cluster("A10", 2, 8), cluster("A10", 2, 16)
    twin = Candidate(other.axes, other.part, one.key)
    scores = search.scores([one, twin, one])
    assert len(search.tried) == 1
    assert {score.rate for score in scores} == {1.0}


def test_candidates_that_cannot_be_keep_their_reason(carries: Carries) -> None:
    wrong = Candidate({"kind": "B1"}, cluster("B1", 1, 8).part)
    search = DrivenSearch(problem({"maximise": "gpu"}))
    assert search.best([wrong, cluster("A10", 1, 8)]).axes["kind"] == "A10"
    assert "B1" in str(search.tried[wrong.key][1].refused)
    with pytest.raises(JaxinferError, match=r"none of 1 candidates is valid; for example: .*B1"):
        DrivenSearch(problem({"maximise": "gpu"})).best([wrong])


def test_one_with_requests_of_its_own_is_refused_beside_others(carries: Carries) -> None:
    good = cluster("A10", 1, 8)
    own = Candidate({"kind": "own"}, {**good.part, "workload": {"limit": 1}})
    first, second, third = DrivenSearch(problem({"maximise": "gpu"})).scores([good, own, good])
    assert first.rate == third.rate == 1.0
    assert second.rate == 0
    assert "workload.limit: all candidates serve the same" in str(second.refused)


def test_one_of_which_nothing_is_known_is_not_the_nearest() -> None:
    """Stopped early, it has no gap; the other misses by a half. Where none has any, all count."""
    asked = problem({"maximise": "gpu", "slo": "ttft:p99=1,tbt:p99=0.1"})
    tried = [
        (cluster(kind, 1, 8), Score(0.0, figures={"ttft p99": ttft, "tbt p99": tbt}))
        for kind, ttft, tbt in (("L4", 1.2, None), ("A10", 0.5, 0.15), ("T4", 0.5, 0.2))
    ]
    assert "nearest is kind A10" in why_nothing(tried, asked)
    tried = [
        (cluster(kind, 1, 8), Score(0.0, figures={"ttft p99": ttft, "tbt p99": None}))
        for kind, ttft in (("L4", 1.3), ("A10", 1.2), ("T4", 1.4))
    ]
    assert "nearest is kind A10" in why_nothing(tried, asked)


def test_where_nothing_keeps_the_targets_the_nearest_is_named() -> None:
    """Really simulated: an A10 decodes no token in a millisecond, and an L4 still less."""
    candidates = [cluster("L4", 1, 8), cluster("A10", 1, 8)]
    search = DrivenSearch(problem({"maximise": "gpu", "slo": "tbt:p99=0.001"}))
    nearest = r"nearest is kind A10, .*, with tbt p99 0\.0\d+ \(at most 0\.001\) at 0 requests/s$"
    with pytest.raises(JaxinferError, match=nearest):
        search.best(candidates)
    # Of four requests the first one misses, which is enough.
    search = DrivenSearch(problem({"maximise": "gpu", "slo": "tpot=0.001", "attainment": 0.8}))
    with pytest.raises(JaxinferError, match=r"with tpot 0\.75 \(at least 0\.8\) at 0 requests/s"):
        search.best(candidates)


def test_where_no_bound_is_high_enough_that_is_said(carries: Carries) -> None:
    search = DrivenSearch(problem({"minimise": "gpus", "rate": 5.0}))
    with pytest.raises(JaxinferError, match=r"^none of 2 candidates can serve 5\.0 requests/s, by"):
        search.best([cluster("L4", 1, 8), cluster("A10", 1, 8)], lambda candidate: 4.0)
    assert not carries.tried


def test_dollars_need_prices(carries: Carries) -> None:
    for prices, says in (({}, "usd are needed, but not known"), ({"L4": 1.0}, "none of A10")):
        search = DrivenSearch(problem({"maximise": "usd"}, prices=prices))
        with pytest.raises(JaxinferError, match=says):
            search.best([cluster("A10", 1, 8)])
