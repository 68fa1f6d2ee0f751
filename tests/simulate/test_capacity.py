"""Targets of requests, and the rate that meets them."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config import RunFile, load_run_file
from jaxinfer.simulate.capacity import Load, Slo, capacity, load, read_slo
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest


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
        ("ttft=2, tbt=3", True),
        ("ttft=2,tbt=2.9", False),
    ],
)
def test_targets(slo: str, met: bool) -> None:
    """Arrived at 10; tokens at 12, 15, 16."""
    assert read_slo(slo).met(10.0, [12.0, 15.0, 16.0]) == met


def test_one_token_has_no_time_between() -> None:
    assert Slo(tpot=0.1, tbt=0.1).met(0.0, [5.0])


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("ttft", "slo 'ttft': must look like ttft=1.5"),
        ("ttft=fast", "slo 'ttft=fast'"),
        ("tfft=1", "tfft: unknown option, did you mean 'ttft'?"),
        ("ttft=0", "ttft is 0"),
        ("ttft=inf", "ttft is inf"),
        ("ttft=1,ttft=2", "slo 'ttft=1,ttft=2': ttft is given twice, give it once"),
        ("ttft=1,tbt=2, ttft=1", "ttft is given twice"),
    ],
)
def test_what_is_no_target(slo: str, message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        read_slo(slo)
    assert message in str(error.value)


@pytest.mark.parametrize("attainment", [float("nan"), float("inf"), 0.0, -0.5, 1.1, 90])
def test_what_is_no_share(tmp_path: Path, attainment: float) -> None:
    work = [BenchRequest(None, 10, 1, 0.0)]
    with pytest.raises(JaxinferError, match=r"^attainment is .*, must be above 0 and at most 1$"):
        capacity(prefills(tmp_path), work, read_slo("ttft=1"), attainment)


def test_no_target_at_all() -> None:
    with pytest.raises(JaxinferError, match=r"^no target: give ttft, tpot, tbt or e2e$"):
        Slo()


def prefills(folder: Path) -> RunFile:
    """One prefill at a time."""
    path = folder / "run.yaml"
    engine = {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "launch_ahead": False,
              "max_model_len": 1024, "enable_prefix_caching": False}  # fmt: skip
    run = {"model": "llama-3-8b", "engine": engine, "groups": {"g": {"kind": "A10"}}}
    path.write_text(yaml.safe_dump(run | {"instances": {"i": {"group": "g"}}}))
    return load_run_file(path)


def alone(config: RunFile) -> float:
    """Seconds of one prefill."""
    found: list[float] = []
    simulate(config, WORK[:1], on_request=lambda request, times: found.extend(times))
    return found[0]


WORK = [BenchRequest(None, 512, 1, 0.0)] * 6_000


def lindley(count: int, seconds: float, rate: float, seed: int) -> tuple[list[float], float]:
    """How long each request waits in an M/D/1 queue, and when the last one is done."""
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
    found = load(config, WORK, Slo(ttft=d + 1e-6), 0, 0.1 / d)
    assert found.attainment == pytest.approx(0.9, abs=0.01)
    waits, end = lindley(len(WORK), d, 0.1 / d, seed=0)
    met = sum(wait < 1e-6 for wait in waits)
    assert found == Load(0.1 / d, met / len(WORK), pytest.approx(met / end))


class InProcess:
    """In place of a pool of processes, whose start takes longer than what is tried here."""

    def __init__(self, *given: object) -> None:
        pass

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    map = staticmethod(map)


def on_cores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.simulate.capacity.os.cpu_count", lambda: count)
    monkeypatch.setattr("jaxinfer.simulate.capacity.ProcessPoolExecutor", InProcess)


@pytest.mark.parametrize(("cores", "seed", "target"), [(1, 0, None), (2, 7, 0.97), (4, 1, 0.5)])
def test_the_rate_is_the_largest_that_meets_the_targets(
    cores: int, seed: int, target: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rate tried is as Lindley's recursion has it on the very arrivals."""
    on_cores(cores, monkeypatch)
    config, work = prefills(tmp_path), WORK[:300]
    d, loads = alone(config), list[Load]()
    share = {} if target is None else {"attainment": target}
    best = capacity(config, work, Slo(ttft=2 * d), seed=seed, on_load=loads.append, **share)
    target = target or 0.9
    for each in loads:
        waits, end = lindley(len(work), d, each.rate, seed)
        met = sum(wait <= d + 1e-9 for wait in waits)
        assert (each.attainment, each.goodput) == pytest.approx((met / 300, met / end))
    met_at = [each.rate for each in loads if each.attainment >= target]
    missed_at = [each.rate for each in loads if each.attainment < target]
    assert best == max(loads, key=lambda each: (each.rate in met_at, each.rate))
    assert max(met_at) == best.rate < min(missed_at) <= 1.02 * best.rate
    assert len(set(met_at + missed_at)) == len(loads)
    # Twice the rate each time, as many at once as there are cores, then equal steps between.
    assert loads[0].rate == 1e-3
    first = [each.rate / 0.125 for each in loads[1 : max(cores, 2) + 1]]
    assert first == [2**i for i in range(max(cores, 2))]
    last = [each.rate for each in loads[-cores:]]
    steps = [b - a for a, b in pairwise(last)]
    assert steps == pytest.approx(steps[:1] * len(steps))


def test_a_rate_that_does_well_above_one_that_does_not_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All up to 3, from 5 to 6 and at 16 requests/s meet their targets; 3 is what can be had."""
    on_cores(4, monkeypatch)

    def scripted(config: object, work: object, slo: object, seed: int, rate: float) -> Load:
        return Load(rate, float(rate <= 3 or 5 <= rate <= 6 or rate == 16), rate)

    monkeypatch.setattr("jaxinfer.simulate.capacity.load", scripted)
    loads = list[Load]()
    best = capacity(prefills(tmp_path), WORK[:3], Slo(ttft=1), on_load=loads.append)
    # From 1 on, to 8: four equal steps.
    assert [each.rate for each in loads[5:13]] == pytest.approx([8, 16, 32, 64, 2.4, 3.8, 5.2, 6.6])
    assert 3 / 1.02 <= best.rate <= 3


def test_targets_that_some_requests_miss_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cores(1, monkeypatch)
    config = prefills(tmp_path)
    work = [WORK[0], BenchRequest(None, 900, 1, 0.0)] * 2
    slo = Slo(ttft=1.01 * alone(config))
    with pytest.raises(JaxinferError) as error:
        capacity(config, work, slo)
    assert str(error.value) == (
        "50.0% of the requests meet their targets even one at a time, not 90%"
    )
    assert capacity(config, work, slo, attainment=0.5).attainment == 0.5


def test_targets_that_any_rate_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cores(4, monkeypatch)
    with pytest.raises(JaxinferError, match=r"hold at any rate: 262144 requests/s"):
        capacity(prefills(tmp_path), WORK[:3], Slo(ttft=100.0))


def test_targets_that_no_rate_meets(tmp_path: Path) -> None:
    work = [BenchRequest(None, 512, 1, 0.0)] * 20
    with pytest.raises(JaxinferError, match=r"0\.0% of the requests .* one at a time, not 90%"):
        capacity(prefills(tmp_path), work, Slo(ttft=1e-6))
