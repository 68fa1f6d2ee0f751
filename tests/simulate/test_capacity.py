"""Targets of requests, and the rate that meets them."""

from pathlib import Path

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config import RunFile, load_run_file
from jaxinfer.simulate.capacity import Load, Slo, capacity, read_slo
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
        ("tfft=1", "unknown option 'tfft': did you mean 'ttft'?"),
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


def prefills(folder: Path) -> RunFile:
    """One prefill at a time."""
    path = folder / "run.yaml"
    engine = {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "launch_ahead": False,
              "max_model_len": 1024, "enable_prefix_caching": False}  # fmt: skip
    run = {"model": "llama-3-8b", "engine": engine, "groups": {"g": {"kind": "A10"}}}
    path.write_text(yaml.safe_dump(run | {"instances": {"i": {"group": "g"}}}))
    return load_run_file(path)


def test_who_finds_an_m_d_1_server_idle(tmp_path: Path) -> None:
    """A share 1 - R D of Poisson arrivals does not wait: so R = 0.1 / D lets 90 % through."""
    config, work = prefills(tmp_path), [BenchRequest(None, 512, 1, 0.0)] * 6_000
    alone: list[float] = []
    simulate(config, work[:1], on_request=lambda request, times: alone.extend(times))
    (d,) = alone
    loads: list[Load] = []
    best = capacity(config, work, Slo(ttft=d + 1e-6), on_load=loads.append)
    assert best.attainment >= 0.9
    assert best.rate == pytest.approx(0.1 / d, rel=0.1)
    # The run ends soon after the last arrival.
    assert best.goodput == pytest.approx(best.rate * best.attainment, rel=0.05)
    worse = min((x for x in loads if x.attainment < 0.9), key=lambda x: x.rate)
    assert best.rate < worse.rate <= 1.02 * best.rate


def test_targets_that_no_rate_meets(tmp_path: Path) -> None:
    work = [BenchRequest(None, 512, 1, 0.0)] * 20
    with pytest.raises(JaxinferError, match=r"0\.0% of the requests .* one at a time, not 90%"):
        capacity(prefills(tmp_path), work, Slo(ttft=1e-6))
