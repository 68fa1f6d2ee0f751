"""A trace in windows: each request in one, and what has shifted between two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.lab.plan.replan.trace_windows import LoadMix, cut, split
from jaxinfer.workload.lengths import BenchRequest

arrivals = st.lists(st.floats(0, 100), min_size=1, max_size=40)


def work_of(times: list[float]) -> list[BenchRequest]:
    return [BenchRequest(None, 1 + number, 1, time) for number, time in enumerate(times)]


@given(arrivals, st.floats(0.7, 150))
def test_each_request_is_in_one_window_in_order_of_arrival(
    times: list[float], seconds: float
) -> None:
    work = work_of(times)
    windows = cut(work, seconds)
    assert [item for window in windows for item in window.work] == sorted(
        work, key=lambda item: item.arrival
    )
    assert windows[0].start == 0
    for number, window in enumerate(windows):
        assert (window.start, window.stop) == (number * seconds, (number + 1) * seconds)
        assert all(window.start <= item.arrival < window.stop for item in window.work)
    assert windows[-1].work


@given(arrivals, st.lists(st.floats(0, 100), max_size=4))
def test_a_split_keeps_all_requests_and_their_order(times: list[float], later: list[float]) -> None:
    work, starts = work_of(times), [0.0, *sorted(later)]
    parts = split(work, starts)
    assert len(parts) == len(starts)
    assert sorted(work, key=lambda item: item.arrival) == [i for part in parts for i in part]
    for number, part in enumerate(parts):
        assert all(sum(start <= i.arrival for start in starts) == number + 1 for i in part)


def test_a_mix_is_rate_and_means() -> None:
    (first, empty, last) = cut(
        [
            BenchRequest(None, 100, 10, 1.0),
            BenchRequest(None, 300, 20, 5.0),
            BenchRequest(None, 7, 8, 25.0),
        ],
        10.0,
    )
    assert (first.mix, empty.mix, last.mix) == (LoadMix(0.2, 200, 15), None, LoadMix(0.1, 7, 8))


@pytest.mark.parametrize(
    ("now", "share"),
    [
        (LoadMix(2, 100, 10), 0.0),
        (LoadMix(3, 110, 9), 0.5),  # The rate the most.
        (LoadMix(2, 70, 11), 0.3),  # Prompts, downwards.
        (LoadMix(1.9, 100, 40), 3.0),  # Outputs.
    ],
)
def test_a_shift_is_the_largest_of_the_three(now: LoadMix, share: float) -> None:
    assert now.shift(LoadMix(2, 100, 10)) == pytest.approx(share)
