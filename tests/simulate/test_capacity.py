"""The rate that meets targets."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples
from scipy.optimize import brentq

from jaxinfer import JaxinferError
from jaxinfer.commands.capacity import capacity as command
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.simulate.capacity import (
    Ladder,
    TriedRate,
    capacity,
    enough_requests,
    load,
    met_above,
    num_gpus,
    requests_for,
)
from jaxinfer.simulate.isolated import reference_latencies
from jaxinfer.simulate.run import simulate
from jaxinfer.simulate.targets import PercentileTargets, RequestTargets, Targets, Verdict
from jaxinfer.workload.lengths import BenchRequest


def prefills(folder: Path, devices: int = 1) -> RunFile:
    """A prefill at a time."""
    path = folder / "run.yaml"
    engine = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1024,
        "launch_ahead": False,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
    }
    run = {
        "model": "llama-3-8b",
        "engine": engine,
        "groups": {"g": {"kind": "A10", "devices": devices}},
    }
    path.write_text(yaml.safe_dump(run | {"instances": {"i": {"group": "g"}}}))
    return load_run_file(path)


def alone(config: RunFile) -> float:
    """Seconds of one prefill."""
    found: list[float] = []
    simulate(config, WORK[:1], on_request=lambda request, times: found.extend(times))
    return found[0]


WORK = [BenchRequest(None, 512, 1, 0.0)] * 6_000


def lindley(count: int, seconds: float, rate: float, seed: int) -> tuple[list[float], float]:
    """Return how long each request waits in an M/D/1 queue, and when the last one is done."""
    rng, now, free, waits = random.Random(seed), 0.0, 0.0, []
    for _ in range(count):
        waits.append(max(free - now, 0.0))
        free = now + waits[-1] + seconds
        now += rng.expovariate(rate)
    return waits, free


def test_who_finds_an_m_d_1_server_idle(tmp_path: Path) -> None:
    """A share 1 - R D of Poisson arrivals does not wait: so R = 0.1 / D lets 90 % through."""
    config = prefills(tmp_path)
    d = alone(config)
    found = load(config, WORK, RequestTargets({"ttft": d + 1e-6}, 0.5), [0], 0.1 / d)
    assert found.verdict.attainment == pytest.approx(0.9, abs=0.01)
    waits, end = lindley(len(WORK), d, 0.1 / d, seed=0)
    met = sum(wait < 1e-6 for wait in waits)
    share = met / len(WORK)
    assert found == TriedRate(
        0.1 / d, 1, Verdict(True, met, share, {"ttft": share}), pytest.approx(met / end)
    )
    assert found.goodput_per_gpu == found.goodput


def waits_at_most(services: int, load: float) -> float:
    """Share of an M/D/1 queue's requests that wait ``services`` services at most (Crommelin)."""
    left = [load * (services - j) for j in range(services + 1)]
    terms = [(-x) ** j / math.factorial(j) * math.exp(x) for j, x in enumerate(left)]
    return (1 - load) * sum(terms)


def test_too_few_requests_are_told_from_enough(tmp_path: Path) -> None:
    """A prefill in six times its time, for 90 %: the rate of an M/D/1 queue in closed form."""
    config = prefills(tmp_path)
    d = alone(config)
    true = brentq(lambda load: waits_at_most(5, load) - 0.9, 0.1, 0.99) / d
    targets = RequestTargets({"ttft": 6 * d + 1e-9}, 0.9)
    few, many = (capacity(config, WORK[:count], targets) for count in (20, 1000))
    assert few.enough == 100
    assert few.rate > 1.2 * true
    assert many.enough is None
    assert many.rate == pytest.approx(true, rel=0.05)
    # A backlog of 50 grows unseen in 60 requests, and two seeds see no more of it than one.
    targets = RequestTargets({"ttft": 50 * d}, 1.0)
    for seeds in ([0], [0, 1]):
        behind = capacity(config, WORK[:60], targets, seeds)
        assert behind.rate > 2 / d
        assert behind.enough is not None
        assert 250 < behind.enough < 1000
    settled = capacity(config, WORK[:1000], targets)
    assert settled.enough is None
    assert settled.rate == pytest.approx(1 / d, rel=0.1)


def test_how_many_requests_are_enough(tmp_path: Path) -> None:
    """Little's law, from arrivals and waits that are known."""
    config, rate = prefills(tmp_path), 50.0
    d = alone(config)
    waits, end = lindley(100, d, rate, seed=0)
    found = load(config, WORK[:100], RequestTargets({"ttft": 1e6}), [0], rate)
    assert found.enough == math.ceil(20 * sum(wait + d for wait in waits) / end)
    assert [enough_requests(2.0, runs) for runs in (1, 2, 3, 9)] == [100, 50, 40, 40]
    assert enough_requests(7.01) == 141
    assert [enough_requests(0.01, runs) for runs in (1, 3, 7)] == [100, 34, 15]
    # A rate at which nobody waits: the hundredth request is the last that is needed.
    for count, enough in ((99, 100), (100, None)):
        found = load(config, WORK[:count], RequestTargets({"ttft": 1e6}), [0], 0.01 / d)
        assert found.enough == enough


def test_requests_of_several_seeds_count_as_one_run_s(tmp_path: Path) -> None:
    config, work = prefills(tmp_path, devices=2), WORK[:400]
    d = alone(config)
    rate, seeds = 0.6 / d, [3, 1, 8]
    runs = [lindley(len(work), d, rate, seed) for seed in seeds]
    waits = [wait for found, _ in runs for wait in found]
    seconds = sum(end for _, end in runs)
    met = sum(wait <= d + 1e-9 for wait in waits)
    found = load(config, work, RequestTargets({"ttft": 2 * d}, 0.1), seeds, rate)
    assert found.verdict.attainment == met / 1200
    assert found.goodput == pytest.approx(met / seconds)
    assert found.goodput_per_gpu == pytest.approx(met / seconds / 2)
    by_percentile = PercentileTargets([("ttft", 90, 10.0), ("ttft", 35, 10.0)])
    found = load(config, work, by_percentile, seeds, rate)
    assert found.verdict.figures == pytest.approx(
        {f"ttft p{p}": d + np.percentile(waits, p) for p in (90, 35)}
    )
    # All requests are good where the percentiles are.
    assert found.goodput == pytest.approx(1200 / seconds)


@pytest.mark.parametrize("targets", [RequestTargets, "percentiles"])
def test_a_hopeless_run_ends_early(targets: Any, tmp_path: Path) -> None:
    """The third prefill in a row is the first to miss its target, at ten times the capacity."""
    config = prefills(tmp_path)
    d, seen = alone(config), list[float]()

    class Spy:
        def watch(self, work: Any, runs: int = 1) -> Any:
            limit = 2.9 * d
            inner: Targets = RequestTargets({"ttft": limit}, 0.99)
            if targets == "percentiles":
                inner = PercentileTargets([("ttft", 99, limit)])
            watch = inner.watch(work, runs)
            add = watch.add

            def counted(request: Any, times: Any) -> None:
                seen.append(times[0] - request.arrival)
                add(request, times)

            watch.add = counted  # type: ignore[method-assign]
            return watch

    found = load(config, WORK[:1000], Spy(), [0, 1], 10 / d)
    # 1 % of 2,000 may; the 21st ends it, among the first of the first run.
    assert sum(ttft > 2.9 * d for ttft in seen) == 21
    assert len(seen) < 50
    assert (found.verdict.met, found.goodput, found.goodput_per_gpu) == (False, None, None)


@pytest.mark.parametrize(
    ("at_once", "seed", "target"), [(1, 0, 0.9), (2, 7, 0.97), (4, 1, 0.5), (1, 5, 0.99)]
)
def test_the_rate_is_the_largest_that_meets_the_targets(
    at_once: int, seed: int, target: float, tmp_path: Path
) -> None:
    """Rates tried are as Lindley's recursion has them on the very arrivals."""
    config, work = prefills(tmp_path), WORK[:300]
    d, loads = alone(config), list[TriedRate]()
    targets = RequestTargets({"ttft": 2 * d}, target)
    best = capacity(config, work, targets, [seed], on_load=loads.append, at_once=at_once)
    for each in loads:
        waits, end = lindley(len(work), d, each.rate, seed)
        met = sum(wait <= d + 1e-9 for wait in waits)
        assert each.verdict.met == (met / 300 >= target)
        if each.verdict.met:
            found = each.verdict.attainment, each.verdict.good, each.goodput
            assert found == pytest.approx((met / 300, met, met / end))
        else:
            assert each.verdict.attainment == (math.ceil(300 * target) - 1) / 300
            assert each.goodput is None
    met_at = [each.rate for each in loads if each.verdict.met]
    missed_at = [each.rate for each in loads if not each.verdict.met]
    assert best == max(loads, key=lambda each: (each.verdict.met, each.rate))
    assert max(met_at) == best.rate < min(missed_at) <= 1.02 * best.rate
    assert len(set(met_at + missed_at)) == len(loads)
    # Twice the rate each time, as many at once as asked for, up to the first that misses.
    first = [each.rate / 0.125 for each in loads[: max(at_once, 2)]]
    assert first == [2**i for i in range(max(at_once, 2))]


def scripted(
    monkeypatch: pytest.MonkeyPatch, met: Callable[[float], bool], met_alone: bool = True
) -> list[float]:
    """Put a rule in the simulator's place; the list gets the rates that are tried."""
    tried: list[float] = []

    def rule(config: Any, work: Any, targets: Any, seeds: Any, rate: float) -> TriedRate:
        tried.append(rate)
        return TriedRate(rate, 1, Verdict(met(rate), 1, None, {}), rate)

    monkeypatch.setattr("jaxinfer.simulate.capacity.load", rule)
    monkeypatch.setattr("jaxinfer.simulate.capacity._met_alone", lambda *given: met_alone)
    return tried


TARGETS = RequestTargets({"ttft": 1.0})


def test_with_one_process_the_search_is_by_bisection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = scripted(monkeypatch, lambda rate: rate <= 3)
    best = capacity(prefills(tmp_path), WORK[:3], TARGETS, precision=0.1)
    # 32 is not tried, nor is 8: the first that misses ends the rise.
    # Eight steps to twice the rate are the fewest of a tenth or less.
    assert tried == [0.125, 0.25, 2, 4, 2**1.5, 2**1.75, 2**1.625]
    assert best.rate == 2**1.5


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_a_rate_that_does_well_above_one_that_does_not_is_left_out(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates up to 3, from 5 to 6 and of 16 requests/s meet their targets; 3 is what can be had."""
    tried = scripted(monkeypatch, lambda rate: rate <= 3 or 5 <= rate <= 6 or rate == 16)
    pools: list[list[float]] = []

    def pool(call: Callable[[float], TriedRate], rates: Iterable[float]) -> Iterator[TriedRate]:
        pools.append(list(rates))
        return iter([call(rate) for rate in pools[-1]])

    targets = RequestTargets({"ttft": 1.0}, share)
    best = capacity(prefills(tmp_path), WORK[:3], targets, map_rates=pool, at_once=4)
    # Of 36 steps to twice the rate, 108 from 1 on to 8.
    assert pools[:2] == [[0.125, 0.25, 0.5, 1], [8, 16, 32, 64]]
    assert pools[2] == pytest.approx([2 ** (step / 36) for step in (22, 43, 65, 86)])
    assert len(tried) == 4 * len(pools)
    assert 3 / 1.02 <= best.rate <= 3


def test_targets_that_are_met_again_above_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight steps to twice the rate: tried are those 2, 5 and 8 above the capacity."""
    given: Any = prefills(tmp_path), WORK[:3], TARGETS
    falls, rises = (lambda rate: rate <= 3), (lambda rate: rate <= 3 or 5 <= rate <= 6)
    for holds, rate in ((falls, None), (rises, 2**2.5)):
        scripted(monkeypatch, holds)
        best = capacity(*given, precision=0.1)
        assert best.rate == 2**1.5
        tried = scripted(monkeypatch, holds)
        again = met_above(*given, best, precision=0.1)
        assert (again and again.rate) == rate
        assert tried == [2 ** (step / 8) for step in (14, 17, 20)]
    monkeypatch.setattr("jaxinfer.commands.capacity.cores", lambda ray: nullcontext((map, 1)))
    (tmp_path / "work.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "512,1\n" * 3)
    asked = [tmp_path / "run.yaml", "--workload", tmp_path / "work.csv", "--slo", "ttft=1"]
    ran = CliRunner().invoke(command, list(map(str, asked)), catch_exceptions=False)
    *_, found, said = ran.output.splitlines()
    assert found.startswith("capacity: 3 requests/s")
    assert said.startswith("the targets are met again at 5.99 requests/s: attainment does not fall")


@given(exponent=st.floats(-3.2, 4), met_alone=st.booleans(), at_once=st.integers(1, 3))
@example(exponent=math.log10(1.001 / 1024), met_alone=True, at_once=1)
@example(exponent=math.log10(1.001 / 1024), met_alone=False, at_once=1)
@examples(60)
def test_any_capacity_is_found_whatever_the_sample_says(
    exponent: float, met_alone: bool, at_once: int, tmp_path: Path
) -> None:
    true = 10**exponent
    with pytest.MonkeyPatch.context() as monkeypatch:
        tried = scripted(monkeypatch, lambda rate: rate <= true, met_alone)
        best = capacity(prefills(tmp_path), WORK[:3], TARGETS, at_once=at_once)
    assert len(set(tried)) == len(tried)
    if true < 1 / 1024:
        assert (best.rate, best.goodput, best.verdict.met) == (0, 0, False)
    else:
        assert best.rate <= true <= best.rate * 1.02
    if true < 1 / 1024 and not met_alone:
        assert tried == [1 / 1024]


@given(
    true=st.floats(1e-2, 1e4),
    precision=st.floats(0.005, 0.3),
    at_once=st.integers(1, 5),
    known=st.floats(0.2, 1),
    start=st.floats(1e-4, 1e5),
)
@examples(60)
def test_what_is_found_depends_neither_on_the_cores_nor_on_what_was_known(
    true: float, precision: float, at_once: int, known: float, start: float, tmp_path: Path
) -> None:
    config, ladder = prefills(tmp_path), Ladder(precision)
    with pytest.MonkeyPatch.context() as monkeypatch:
        scripted(monkeypatch, lambda rate: rate <= true)
        one = capacity(config, WORK[:3], TARGETS, precision=precision)
        rate = ladder.rate(min(ladder.step(known * true), ladder.above(one.rate) - 1))
        met = TriedRate(rate, 1, Verdict(True, 1, None, {}), rate)
        how = {"precision": precision, "at_once": at_once}
        many = capacity(config, WORK[:3], TARGETS, **how, met=met)  # type: ignore[arg-type]
        begun = capacity(config, WORK[:3], TARGETS, **how, start=start)  # type: ignore[arg-type]
    assert begun.rate == many.rate == one.rate == ladder.rate(ladder.above(one.rate) - 1)
    assert one.rate <= true < ladder.rate(ladder.above(one.rate)) <= one.rate * (1 + precision)


def test_a_search_that_begins_near_the_rate_tries_none_far_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates go up or down by 2, 4, ... eighths of a doubling, and are then bisected."""
    tried = scripted(monkeypatch, lambda rate: rate <= 3)
    config = prefills(tmp_path)
    steps: list[list[int]] = []
    for start in (8.0, 2.0, 3.0):
        tried.clear()
        best = capacity(config, WORK[:3], TARGETS, precision=0.1, start=start)
        assert best.rate == 2**1.5
        steps.append([round(8 * math.log2(rate)) for rate in tried])
    assert steps == [[24, 22, 18, 10, 14, 12, 13], [8, 10, 14, 12, 13], [13, 11, 12]]


def test_a_search_from_above_that_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = scripted(monkeypatch, lambda rate: False)
    best = capacity(prefills(tmp_path), WORK[:3], TARGETS, start=4.0)
    assert (best.rate, best.goodput, best.verdict.met) == (0, 0, False)
    assert tried == sorted(tried, reverse=True)
    assert (tried[0], tried[-1]) == (4.0, 1 / 1024)
    assert len(set(tried)) == len(tried) < 12
    tried.clear()
    assert capacity(prefills(tmp_path), WORK[:3], TARGETS, start=1e-5).rate == 0
    assert tried == [1 / 1024]


def test_targets_that_some_requests_miss_alone(tmp_path: Path) -> None:
    config = prefills(tmp_path)
    work = [WORK[0], BenchRequest(None, 900, 1, 0.0)] * 2
    limits = {"ttft": 1.01 * alone(config)}
    loads: list[TriedRate] = []
    found = capacity(config, work, RequestTargets(limits), on_load=loads.append)
    assert (found.rate, found.goodput, found.goodput_per_gpu) == (0, 0, 0)
    assert [each.rate for each in loads] == [1 / 1024]
    assert capacity(config, work, RequestTargets(limits, 0.5)).verdict.attainment == 0.5


def test_a_sample_is_spread_over_the_work(tmp_path: Path) -> None:
    """The first half alone would meet the target; every second request of all does not."""
    config = prefills(tmp_path)
    work = [WORK[0]] * 150 + [BenchRequest(None, 900, 1, 0.0)] * 150
    loads: list[TriedRate] = []
    targets = RequestTargets({"ttft": 1.01 * alone(config)})
    assert capacity(config, work, targets, on_load=loads.append).rate == 0
    assert [each.rate for each in loads] == [1 / 1024]


def test_targets_that_any_rate_meets(tmp_path: Path) -> None:
    with pytest.raises(
        JaxinferError,
        match=r"hold at any rate, even if all 3 requests come at once: the workload is too short, "
        r"give \d+ requests or more$",
    ):
        capacity(prefills(tmp_path), WORK[:3], RequestTargets({"ttft": 100.0}), at_once=4)


def test_requests_by_the_number_of_gpus(tmp_path: Path) -> None:
    config = prefills(tmp_path, devices=4)
    halves = {"groups": {"g": config.groups["g"].model_copy(update={"tensor_parallel_size": 2})}}
    assert num_gpus(config) == num_gpus(config.model_copy(update=halves)) == 4
    gpus = num_gpus(config)
    assert requests_for(gpus, WORK, 75) == requests_for(gpus, WORK[:300], 75) == WORK[:300]
    with pytest.raises(JaxinferError) as error:
        requests_for(gpus, WORK[:299], 75)
    assert str(error.value) == (
        "requests_per_gpu is 75, which for 4 GPUs is 300 requests: the workload has 299"
    )


def test_with_a_pool_of_processes(tmp_path: Path) -> None:
    """Targets beside a reference, and all else, get there and back."""
    config = prefills(tmp_path)
    targets = RequestTargets({"ttft": 2.0}, reference=reference_latencies(config, WORK[:50]))
    here = capacity(config, WORK[:50], targets, [0, 1], at_once=2)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        there = capacity(config, WORK[:50], targets, [0, 1], map_rates=pool.map, at_once=2)
    assert there == here
