"""Targets: limits of requests, of percentiles, and beside a reference machine."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.report.percentiles import StreamPercentiles
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.isolated import reference_latencies, serve_alone
from jaxinfer.simulate.read_targets import read_targets
from jaxinfer.simulate.run import serve
from jaxinfer.simulate.targets import (
    LATENCIES,
    PercentileTargets,
    Reference,
    RequestTargets,
    Targets,
    Verdict,
)
from jaxinfer.workload.lengths import BenchRequest

ROOT = Path(__file__).parents[2]
Ended = tuple[RequestState, Sequence[float]]


def ended(arrival: float, *times: float, prompt: int = 10, delay: float = 0.0) -> Ended:
    request = RequestState("r", prompt, len(times), arrival)
    request.metrics.first_scheduled = arrival + delay
    return request, times


def verdict(targets: Targets, *requests: Ended, runs: int = 1) -> Verdict:
    work = [BenchRequest(None, r.prompt_len, r.max_tokens, 0.0) for r, _ in requests]
    watch = targets.watch(work[: len(work) // runs], runs)
    for request, times in requests:
        watch.add(request, times)
    return watch.verdict()


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ("ttft=2", True),
        ("ttft=1.9", False),
        ("e2e=6", True),
        ("e2e=5.9", False),
        ("tpot=2", True),
        ("tpot=1.9", False),
        ("tbt=3", True),
        ("tbt=2.9", False),
        ("delay=0.5", True),
        ("delay=0.4", False),
        ("normalised=2", True),
        ("normalised=1.9", False),
        ("ttft=2, tbt=3", True),
        ("ttft=2,tbt=2.9", False),
        ("ttft:p50=2,tbt:p0.1=1.01", True),
        ("ttft:p50=1.9,tbt:p0.1=1.01", False),
        ("tbt:p100=3", True),
        ("tbt:p100=2.9", False),
        ("tbt:p50=2", True),
        ("tbt:p50=1.9", False),
        ("tpot:p99=2,e2e:p99=6,delay:p99=0.5,normalised:p99=2", True),
        ("tpot:p99=2,e2e:p99=6,delay:p99=0.4,normalised:p99=2", False),
    ],
)
def test_one_request(slo: str, met: bool) -> None:
    """Arrived at 10, started at 10.5; tokens at 12, 15, 16."""
    assert verdict(read_targets(slo, []), ended(10, 12, 15, 16, delay=0.5)).met == met


def test_one_token_has_no_time_between() -> None:
    alone = ended(0.0, 5.0)
    assert verdict(RequestTargets({"tpot": 0.1, "tbt": 0.1}), alone).met
    found = verdict(PercentileTargets([("tpot", 50, 0.1), ("tbt", 50, 0.1)]), alone)
    assert found == Verdict(True, 1, None, {"tpot p50": None, "tbt p50": None})
    # Nor do they count in the percentiles of others: 2 of (1, 3), not 1.5 of (0, 1, 3).
    many = [alone, ended(0, 1, 2), ended(0, 1, 4)]
    assert verdict(PercentileTargets([("tpot", 50, 2)]), *many).figures == {"tpot p50": 2.0}


# TTFT 1, 1, 3, 3, 1; time between tokens 1, 9, 1, 9, 1.
FIVE = [ended(0, t, t + d) for t, d in ((1, 1), (1, 9), (3, 1), (3, 9), (1, 1))]


@pytest.mark.parametrize(
    ("criterion", "share", "met"),
    [("both", 0.4, True), ("both", 0.41, False), ("each", 0.6, True), ("each", 0.61, False)],
)
def test_all_limits_by_one_share_or_each_by_its_own(
    criterion: Any, share: float, met: bool
) -> None:
    found = verdict(RequestTargets({"ttft": 2, "tbt": 5}, share, criterion), *FIVE)
    attained = 0.4 if criterion == "both" else 0.6
    assert found == Verdict(met, 2, attained, {"ttft": 0.6, "tbt": 0.6})
    lopsided = verdict(RequestTargets({"ttft": 2, "tbt": 10}, share, criterion), *FIVE)
    assert (lopsided.attainment, lopsided.figures) == (0.6, {"ttft": 0.6, "tbt": 1.0})


def test_runs_count_as_one() -> None:
    found = verdict(RequestTargets({"ttft": 2}, 0.5), *FIVE, FIVE[3], runs=2)
    assert found == Verdict(True, 3, 0.5, {"ttft": 0.5})
    found = verdict(PercentileTargets([("ttft", 50, 2)]), *FIVE, FIVE[3], runs=2)
    assert found == Verdict(True, 6, None, {"ttft p50": 2.0})


REQUESTS = st.lists(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
        lambda gaps: ended(0.0, *(float(t) for t in np.cumsum(gaps)))
    ),
    min_size=1,
    max_size=25,
)


@given(
    REQUESTS,
    st.sampled_from(["ttft", "tbt", "e2e", "tpot"]),
    st.floats(1, 100),
    st.sampled_from([0.9, 1.0, 1.7, 2.0, 3.0]),
)
def test_percentiles_are_those_of_all_values_and_a_stop_is_never_wrong(
    requests: list[Ended], metric: str, percent: float, limit: float
) -> None:
    values = [latency for r, t in requests for latency in _values(metric, t)]
    targets = PercentileTargets([(metric, percent, limit)])
    found = verdict(targets, *requests)
    truth = float(np.percentile(values, percent)) if values else None
    assert found.figures[f"{metric} p{percent:g}"] == truth
    assert found.met == (truth is None or truth <= limit)
    assert found.good == (len(requests) if found.met else 0)
    work = [BenchRequest(None, 10, r.max_tokens, 0.0) for r, _ in requests]
    watch = targets.watch(work)
    for number, (request, times) in enumerate(requests, 1):
        watch.add(request, times)
        beyond = sum(v > limit for _, t in requests[:number] for v in _values(metric, t))
        # Best that the rest can do: values below all others.
        best = sorted([0.0] * (len(values) - beyond) + [limit + 1] * beyond)
        rank = percent / 100 * (len(values) - 1)
        assert watch.hopeless == (bool(values) and best[int(rank)] > limit)
        if watch.hopeless:
            assert not found.met
            assert not watch.verdict().met


def _values(metric: str, times: Sequence[float]) -> list[float]:
    gaps = [b - a for a, b in pairwise(times)]
    if metric == "tbt":
        return gaps
    if metric == "tpot":
        return [sum(gaps) / len(gaps)] if gaps else []
    return [times[0] if metric == "ttft" else times[-1]]


@given(REQUESTS, st.sampled_from(["both", "each"]), st.integers(1, 20).map(lambda n: n / 20))
def test_a_run_is_stopped_as_soon_as_its_share_is_out_of_reach(
    requests: list[Ended], criterion: Any, share: float
) -> None:
    targets = RequestTargets({"ttft": 2, "e2e": 5}, share, criterion)
    missed = [(t[0] > 2, t[-1] > 5) for _, t in requests]
    count = len(requests)
    watch = targets.watch([BenchRequest(None, 10, 1, 0.0)] * count)
    for number, (request, times) in enumerate(requests, 1):
        watch.add(request, times)
        if criterion == "both":
            misses = sum(a or b for a, b in missed[:number])
        else:
            misses = max(sum(column) for column in zip(*missed[:number], strict=True))
        assert watch.hopeless == ((count - misses) / count < share)
        found = watch.verdict()
        assert found.met != watch.hopeless
        assert found.good == sum(not (a or b) for a, b in missed[:number])


def test_multiples_of_what_a_request_takes_alone() -> None:
    """Alone: TTFT 1 and end-to-end 2 for the first lengths, 4 and 10 for the others."""
    alone = Reference({(10, 2): {"ttft": 1, "e2e": 2}, (20, 3): {"ttft": 4, "e2e": 10}})
    requests = [ended(5, 7, 8), ended(1, 7, 8, 9, prompt=20)]
    by_request = RequestTargets({"ttft": 1.6, "e2e": 1.6}, 0.5, "both", alone)
    # 2 and 1.5 times; 1.5 and 0.8.
    assert verdict(by_request, *requests) == Verdict(True, 1, 0.5, {"ttft": 0.5, "e2e": 1.0})
    limits = [("ttft", 50, 1.75), ("ttft", 100, 2), ("e2e", 50, 1.2)]
    found = verdict(PercentileTargets(limits, alone), *requests)
    assert found.met
    assert found.figures == pytest.approx({"ttft p50": 1.75, "ttft p100": 2.0, "e2e p50": 1.15})
    limits[0] = ("ttft", 50, 1.74)
    assert not verdict(PercentileTargets(limits, alone), *requests).met


def test_beside_a_reference_tbt_is_each_request_s_longest() -> None:
    alone = Reference({(10, 3): {"tbt": 2.0}, (10, 1): {}})
    requests = [ended(0, 1, 2, 6), ended(0, 9), ended(0, 1, 3, 5)]
    targets = PercentileTargets([("tbt", 100, 2.0), ("tbt", 50, 1.5)], alone)
    assert verdict(targets, *requests) == Verdict(True, 3, None, {"tbt p100": 2.0, "tbt p50": 1.5})


def test_a_run_that_was_stopped_has_missed_however_values_were_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values in bins are known to 0.05 %, those beyond the limit are counted as they come."""
    monkeypatch.setattr(
        "jaxinfer.simulate.targets.StreamPercentiles", lambda: StreamPercentiles(exact=0)
    )
    for value in np.linspace(1, 1.002, 9):
        targets = PercentileTargets([("ttft", 50, value - 1e-6)])
        assert not verdict(targets, *[ended(0, float(value))] * 3).met


ONE_GPU = {
    "model": "llama-3-8b",
    "engine": {"enable_prefix_caching": False, "launch_ahead": False},
    "groups": {"g": {"kind": "A10"}},
    "instances": {"i": {"group": "g"}},
    "simulate": {"linear": {"step_s": 0.001, "token_s": 0.0001}},
}


@pytest.fixture
def slowdowns(tmp_path: Path) -> Any:
    """A file of slowdowns beside one GPU: 1 ms a step, and 0.1 ms a token."""
    (tmp_path / "reference.yaml").write_text(yaml.safe_dump(ONE_GPU))

    def write(**sections: Any) -> str:
        path = tmp_path / "slo.yaml"
        given = {"reference": str(tmp_path / "reference.yaml")} | sections
        path.write_text(yaml.safe_dump(given, sort_keys=False))
        return str(path)

    return write


def test_the_reference_serves_each_request_alone(slowdowns: Any) -> None:
    work = [BenchRequest(None, 90, 11, 3.0), BenchRequest(None, 190, 1, 3.0)] * 2
    path = slowdowns(percentiles={"ttft": {50: 2, 99.5: 6}, "e2e": {90: 1.5}})
    targets = read_targets(path, work)
    assert isinstance(targets, PercentileTargets)
    assert targets.limits == [("ttft", 50, 2), ("ttft", 99.5, 6), ("e2e", 90, 1.5)]
    assert targets.reference
    found = targets.reference.seconds
    assert set(found) == {(90, 11), (190, 1)}
    # 90 tokens take 10 ms, each token after 1.1 ms.
    assert found[90, 11] == pytest.approx(
        {
            "ttft": 0.01,
            "tpot": 0.0011,
            "tbt": 0.0011,
            "e2e": 0.021,
            "delay": 0,
            "normalised": 0.021 / 11,
        }
    )
    assert found[190, 1] == pytest.approx(
        {"ttft": 0.02, "e2e": 0.02, "delay": 0, "normalised": 0.02}
    )


def test_each_pair_of_lengths_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[int, int]] = []

    def count(cluster: Any, work: Any, *rest: Any) -> Any:
        served.extend((item.prompt_len, item.max_tokens) for item in work)
        return serve(cluster, work, *rest)

    monkeypatch.setattr("jaxinfer.simulate.isolated.serve", count)
    lengths = [(90, 2), (90, 1), (90, 2), (9, 2), (90, 2)]
    reference_latencies(as_run_file(ONE_GPU), [BenchRequest(None, p, n, 0.0) for p, n in lengths])
    assert served == [(90, 2), (90, 1), (9, 2)]


def test_the_time_at_which_a_request_would_arrive_does_not_count() -> None:
    config = as_run_file(ONE_GPU)
    found: list[Sequence[float]] = []
    work = [BenchRequest(None, 90, 3, arrival) for arrival in (0.0, 1e9)]
    serve_alone(config, work, lambda request, times: found.append(times))
    assert found[0] == pytest.approx([0.01, 0.0111, 0.0122])
    assert found[1] == found[0]


def test_a_scale_of_each_request(slowdowns: Any) -> None:
    work = [BenchRequest(None, 90, 11, 0.0)]
    path = Path(slowdowns(scale={"e2e": 5}))
    targets = read_targets(str(path), work, 0.99, "each")
    assert isinstance(targets, RequestTargets)
    assert (targets.limits, targets.attainment, targets.criterion) == ({"e2e": 5}, 0.99, "each")
    # 5 times 21 ms.
    assert verdict(targets, ended(0, *[0.05] * 10, 0.105, prompt=90)).met
    assert not verdict(targets, ended(0, *[0.05] * 10, 0.1051, prompt=90)).met
    # The other ending of a YAML file.
    assert read_targets(str(path.rename(path.with_suffix(".yml"))), work, 0.99, "each") == targets


def test_splitwise_s_targets_are_those_of_its_table_vi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    work = [BenchRequest(None, 1020, 129, 0.0)]
    targets = read_targets("configs/targets/splitwise.yaml", work)
    assert isinstance(targets, PercentileTargets)
    others = {50: 1.25, 90: 1.5, 99: 5}
    table = {"ttft": {50: 2, 90: 3, 99: 6}, "tpot": others, "e2e": others}
    assert {(m, p): limit for m, p, limit in targets.limits} == {
        (metric, percent): limit for metric, row in table.items() for percent, limit in row.items()
    }
    assert targets.reference
    assert set(targets.reference.seconds) == {(1020, 129)}


def test_what_is_asked_for_by_default() -> None:
    assert read_targets("ttft=1,tbt=0.1", []) == RequestTargets(
        {"ttft": 1, "tbt": 0.1}, 0.9, "both"
    )
    found = read_targets("ttft=1", [], 0.5, "each")
    assert found == RequestTargets({"ttft": 1}, 0.5, "each")
    found = read_targets("ttft:p90=2, tbt:p99.9=0.2,ttft:p50=1", [])
    assert found == PercentileTargets([("ttft", 90, 2), ("tbt", 99.9, 0.2), ("ttft", 50, 1)])


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("ttft", "'ttft' must look like ttft=1.5 or ttft:p90=1.5"),
        ("ttft=fast", "'ttft=fast' must look like"),
        ("ttft:90=1", "'ttft:90=1' must look like"),
        ("ttft:p=1", "'ttft:p=1' must look like"),
        ("tfft=1", "tfft: no such metric, did you mean 'ttft'?"),
        ("tfft:p9=1", "tfft: no such metric, did you mean 'ttft'?"),
        ("ttft=0", "ttft is 0, must be a number above 0"),
        ("ttft=inf", "ttft is inf"),
        ("ttft:p5=nan", "ttft:p5 is nan"),
        ("ttft:p0=1", "ttft: percentile 0, must be above 0 and at most 100"),
        ("ttft:p101=1", "ttft: percentile 101, must be"),
        ("ttft=1,ttft=2", "ttft is given twice, give it once"),
        ("ttft:p9=1,ttft:p9=2", "ttft:p9 is given twice"),
        (
            "ttft=1,tbt:p99=2",
            "has limits of percentiles and limits of requests: give only one kind",
        ),
    ],
)
def test_what_is_no_target(slo: str, message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        read_targets(slo, [])
    assert str(error.value).startswith(f"slo {slo!r}: {message}")


@pytest.mark.parametrize("share", [float("nan"), float("inf"), 0.0, -0.5, 1.1, 90])
def test_what_is_no_share(share: float) -> None:
    with pytest.raises(JaxinferError, match=r"attainment is .*, must be above 0 and at most 1$"):
        read_targets("ttft=1", [], share)


@pytest.mark.parametrize("given", [{"attainment": 0.9}, {"criterion": "both"}])
def test_percentiles_have_no_share(given: Any, slowdowns: Any) -> None:
    ((name, value),) = given.items()
    for slo in ("ttft:p50=1", slowdowns(percentiles={"ttft": {50: 2}})):
        with pytest.raises(JaxinferError, match=rf"{name} is {value}, but a percentile's limit"):
            read_targets(slo, [], **given)


def test_no_target_at_all() -> None:
    with pytest.raises(JaxinferError, match=r"^no target: give one or more of ttft, tpot, tbt"):
        RequestTargets({})
    with pytest.raises(JaxinferError, match=r"^no target"):
        PercentileTargets([])
    assert set(LATENCIES) == {"ttft", "tpot", "tbt", "e2e", "delay", "normalised"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "give either percentiles or scale"),
        ({"scale": {"e2e": 5}, "percentiles": {"e2e": {50: 5}}}, "give either percentiles or"),
        (
            {"scale": {"delay": 5}},
            "scale.delay: no such metric, known: e2e, normalised, tbt, tpot, ttft",
        ),
        # The reference, which takes its time, comes last.
        ({"scale": {"delay": 5}, "reference": "nowhere.yaml"}, "scale.delay: no such metric"),
        (
            {"percentiles": {"delay": {50: 5}}, "reference": "nowhere.yaml"},
            "percentiles.delay: no such metric, known",
        ),
        ({"percentiles": {"ttft": {"p50": 2}}}, "percentiles.ttft.p50: must be a percentile: 90"),
        ({"percentiles": {"ttft": {99.5: 0}}}, "percentiles.ttft.99.5 is 0, must be a number abo"),
        ({"percentiles": {"ttft": {101: 2}}}, "percentiles.ttft: percentile 101, must be above"),
        ({"scale": {"e2e": 0}}, "scale.e2e is 0, must be a number above 0"),
        ({"scale": {"e2e": "5"}}, "scale.e2e is '5', must be a number"),
        ({"scale": {"e2e": 5}, "refrence": "x"}, "refrence: unknown option, did you mean"),
        ({"scale": {"e2e": 5}, "reference": "nowhere.yaml"}, "run file nowhere.yaml: "),
    ],
)
def test_what_is_no_file_of_slowdowns(sections: Any, message: str, slowdowns: Any) -> None:
    path = slowdowns(**sections)
    with pytest.raises(JaxinferError) as error:
        read_targets(path, [BenchRequest(None, 9, 9, 0.0)])
    assert str(error.value).startswith(f"slo {path}: {message}")
