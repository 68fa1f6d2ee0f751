"""When requests come in: times in closed form, and a Poisson process by its moments."""

from itertools import pairwise

import numpy as np
import pytest

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


def test_what_a_kind_lacks_or_does_not_use() -> None:
    with pytest.raises(JaxinferError, match="kind interval needs seconds"):
        Arrivals(kind="interval")
    with pytest.raises(JaxinferError, match="rate is for kind poisson or gamma, not at_once"):
        Arrivals(rate=1.0)
    with pytest.raises(JaxinferError, match="seed is for kind poisson or gamma, not trace"):
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
        (Arrivals(kind="interval", seconds=1e9), "give less seconds"),
        (Arrivals(kind="trace", scale=1e300), "give a smaller scale"),
    ],
)
def test_requests_that_come_too_late_are_refused(arrivals: Arrivals, remedy: str) -> None:
    """In place of a run that never ends: at most 10^9 seconds, which is 32 years."""
    work = [BenchRequest(None, 1, 1, float(i)) for i in range(3)]
    with pytest.raises(JaxinferError, match=rf"^workload\.arrivals: .*within 1e\+09: {remedy}"):
        with_arrivals(work, arrivals)
