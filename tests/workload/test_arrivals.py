"""Arrivals: times in closed form, and a Poisson process by its moments."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from jaxinfer import JaxinferError
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest

TRACE = [0.5, 0.75, 3.0]
WORK = [BenchRequest(None, 10 + i, 2, time) for i, time in enumerate(TRACE)]


@pytest.mark.parametrize(
    ("arrivals", "times"),
    [
        (Arrivals(), [0, 0, 0]),
        (Arrivals(kind="interval", seconds=0.4), [0, 0.4, 0.8]),
        (Arrivals(kind="trace"), TRACE),
        (Arrivals(kind="trace", scale=2.0), [1.0, 1.5, 6.0]),
    ],
)
def test_times(arrivals: Arrivals, times: list[float]) -> None:
    assert [item.arrival for item in with_arrivals(WORK, arrivals)] == pytest.approx(times)
    assert [item.prompt_len for item in with_arrivals(WORK, arrivals)] == [10, 11, 12]


def test_poisson() -> None:
    many = [BenchRequest(None, 1, 1, 0.0)] * 20_001
    times = [r.arrival for r in with_arrivals(many, Arrivals(kind="poisson", rate=4.0, seed=3))]
    gaps = np.array([b - a for a, b in pairwise(times)])
    # Exponential: mean and standard deviation are both 1 / rate; 4 standard errors.
    assert abs(gaps.mean() - 0.25) < 4 * 0.25 / np.sqrt(len(gaps))
    assert abs(gaps.std() - 0.25) < 4 * 0.25 * np.sqrt(2 / len(gaps))
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 4 / np.sqrt(len(gaps))
    again = with_arrivals(many, Arrivals(kind="poisson", rate=4.0, seed=3))
    assert [r.arrival for r in again] == times
    other = with_arrivals(many, Arrivals(kind="poisson", rate=4.0, seed=4))
    assert [r.arrival for r in other] != times


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma(cv: float) -> None:
    many = [BenchRequest(None, 1, 1, 0.0)] * 40_001
    arrivals = Arrivals(kind="gamma", rate=4.0, cv=cv, seed=3)
    gaps = np.array([b.arrival - a.arrival for a, b in pairwise(with_arrivals(many, arrivals))])
    assert abs(gaps.mean() - 0.25) < 4 * cv * 0.25 / np.sqrt(len(gaps))
    # The variance of a gamma's sample variance: its excess kurtosis is 6 cv^2.
    error = np.sqrt((2 + 6 * cv**2) / len(gaps))
    assert abs(gaps.var() / (0.25 * cv) ** 2 - 1) < 4 * error


def ramp(a: float, b: float, seconds: float, **options: Any) -> Arrivals:
    return Arrivals.model_validate({"kind": "ramp", "from": a, "to": b, "over": seconds, **options})


@pytest.mark.parametrize(("a", "b"), [(0.0, 8.0), (2.0, 6.0), (9.0, 1.0), (3.0, 3.0)])
def test_an_even_ramp_by_integration(a: float, b: float) -> None:
    """Request k comes when the integral of the rate is k: found by quadrature, and beyond."""
    many = [BenchRequest(None, 1, 1, 0.0)] * 80
    times = [item.arrival for item in with_arrivals(many, ramp(a, b, 10.0, spacing="even"))]
    assert times[0] == 0.0
    assert times[-1] > 10.0

    def rate(t: float) -> float:
        return a + (b - a) * min(t / 10.0, 1.0)

    for k, time in enumerate(times):
        assert integrate.quad(rate, 0.0, time, points=[10.0])[0] == pytest.approx(k, abs=1e-6)


@pytest.mark.parametrize(("a", "b"), [(0.0, 8.0), (12.0, 2.0)])
def test_a_ramp_is_a_poisson_process_of_that_rate(a: float, b: float) -> None:
    """Gaps by the integral of the rate are exponential, and counts in two parts are Poisson."""
    many = [BenchRequest(None, 1, 1, 0.0)] * 20_000
    arrivals = ramp(a, b, 2000.0, seed=5)
    times = np.array([item.arrival for item in with_arrivals(many, arrivals)])
    early = np.minimum(times, 2000.0)
    masses = a * early + (b - a) * early**2 / 4000.0 + b * (times - early)
    assert stats.kstest(np.diff(masses), "expon").pvalue > 0.01
    half = a * 1000.0 + (b - a) * 250.0
    assert abs((times < 1000.0).sum() - half) < 4 * np.sqrt(half)
    whole = (a + b) * 1000.0
    assert abs((times < 2000.0).sum() - whole) < 4 * np.sqrt(whole)
    assert with_arrivals(many, ramp(a, b, 2000.0, seed=6))[1].arrival != times[1]


def test_closed() -> None:
    """Two at first; each end lets one more come, after a while to think."""
    arrivals = Arrivals(kind="closed", concurrency=2, think_s=0.5)
    found = [(item.after_ends, item.arrival) for item in with_arrivals([*WORK, *WORK], arrivals)]
    assert found == [(0, 0.0), (0, 0.0), (1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    again = with_arrivals(with_arrivals(WORK, arrivals), Arrivals(kind="interval", seconds=1.0))
    assert [(item.after_ends, item.arrival) for item in again] == [(0, 0.0), (0, 1.0), (0, 2.0)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "closed"}, "kind closed needs concurrency"),
        ({"kind": "closed", "concurrency": 0}, "concurrency"),
        ({"kind": "poisson", "rate": 1.0, "think_s": 1.0}, "think_s is for kind closed, not poi"),
        ({"kind": "ramp", "to": 2.0, "over": 1.0}, "kind ramp needs from"),
        ({"kind": "poisson", "rate": 1.0, "from": 1.0}, "from is for kind ramp, not poisson"),
        ({"kind": "ramp", "from": -1.0, "to": 2.0, "over": 1.0}, "from"),
        (
            {"kind": "ramp", "from": 1.0, "to": 2.0, "over": 1.0, "spacing": "even", "seed": 1},
            "seed is for spacing poisson",
        ),
    ],
)
def test_closed_loops_and_ramps_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError, match=message) as error:
        Arrivals.model_validate(given)
    assert "\n" not in str(error.value)
    assert "from_" not in str(error.value)


def test_what_a_kind_lacks_or_does_not_use() -> None:
    with pytest.raises(JaxinferError, match="kind interval needs seconds"):
        Arrivals(kind="interval")
    with pytest.raises(JaxinferError, match="rate is for kind poisson or gamma, not at_once"):
        Arrivals(rate=1.0)
    with pytest.raises(JaxinferError, match="seed is for kind poisson or gamma or ramp, not trace"):
        Arrivals(kind="trace", seed=1)
    with pytest.raises(JaxinferError, match="kind gamma needs cv"):
        Arrivals(kind="gamma", rate=1.0)
    with pytest.raises(JaxinferError, match="scale is for kind trace, not interval"):
        Arrivals(kind="interval", seconds=1.0, scale=2.0)


@pytest.mark.parametrize(
    ("arrivals", "remedy"),
    [
        (Arrivals(kind="poisson", rate=1e-308), "give a larger rate"),
        (Arrivals(kind="gamma", rate=1e-12, cv=2.0), "give a larger rate"),
        (Arrivals(kind="interval", seconds=1e9), "give fewer seconds"),
        (Arrivals(kind="trace", scale=1e300), "give a smaller scale"),
    ],
)
def test_requests_that_come_too_late_are_refused(arrivals: Arrivals, remedy: str) -> None:
    """Arrivals later than 10^9 seconds (32 years) are refused, where a run would never end."""
    work = [BenchRequest(None, 1, 1, float(i)) for i in range(3)]
    # A trace need not be in order.
    for each in (work, work[::-1]):
        with pytest.raises(JaxinferError, match=rf"^workload\.arrivals: .*within 1e\+09: {remedy}"):
            with_arrivals(each, arrivals)
