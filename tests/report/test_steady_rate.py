"""Throughput between ramp and drain, against a look at all requests."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.report import steady_rate
from jaxinfer.report.steady_rate import SteadyRate

ENDED = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=60)


@given(ENDED)
def test_the_window_is_from_a_tenth_to_nine_tenths_of_the_requests(
    ended: list[tuple[int, int]],
) -> None:
    found, time, times = SteadyRate(), 0, []
    for gap, tokens in ended:
        time += gap
        times.append(time)
        found.add(float(time), tokens)
    count = len(ended)
    first, last = math.ceil(count / 10), math.ceil(count * 9 / 10)
    seconds = times[last - 1] - times[first - 1]
    if not seconds:
        assert found.steady() is None
        return
    tokens = sum(tokens for _, tokens in ended[first:last])
    assert found.steady() == pytest.approx(((last - first) / seconds, tokens / seconds))


def test_of_nothing() -> None:
    assert SteadyRate().steady() is None


@pytest.mark.parametrize("count", [64, 65, 1000, 4321])
def test_memory_is_bounded(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request a second; the first and the last twentieth are a hundred times slower."""
    monkeypatch.setattr(steady_rate, "_POINTS", 64)
    found, time = SteadyRate(), 0.0
    for number in range(count):
        time += 100 if number < count // 20 or number >= count - count // 20 else 1
        found.add(time, 3)
        assert len(found._points) <= 64
    assert found.steady() == pytest.approx((1.0, 3.0))


@given(ENDED, st.integers(2, 10))
def test_of_many_every_so_many_th_counts(ended: list[tuple[int, int]], room: int) -> None:
    """Every 2nd, then every 4th and so on: as many as there is room for, the start included."""
    most, stride = 2 * room, 1
    while len(ended) // stride + 1 > most:
        stride *= 2
    # Of all requests, those that are kept: how many there were, their tokens and the time.
    kept = [(0, 0, 0.0)]
    for number in range(stride, len(ended) + 1, stride):
        before = ended[:number]
        kept.append((number, sum(t for _, t in before), float(sum(gap for gap, _ in before))))
    begin, end = (
        next((at for at in kept if 10 * at[0] >= tenths * len(ended)), kept[-1])
        for tenths in (1, 9)
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(steady_rate, "_POINTS", most)
        found, time = SteadyRate(), 0.0
        for gap, tokens in ended:
            time += gap
            found.add(time, tokens)
        steady = found.steady()
    seconds = end[2] - begin[2]
    if not seconds:
        assert steady is None
        return
    assert steady == pytest.approx(((end[0] - begin[0]) / seconds, (end[1] - begin[1]) / seconds))
