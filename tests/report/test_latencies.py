"""Latencies of requests against numpy's of all values."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.report.latencies import Latencies, LatencyTotals

GAPS = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), GAPS), min_size=1, max_size=12))
def test_means_and_percentiles(requests: list[tuple[float, float, list[float]]]) -> None:
    totals = LatencyTotals()
    values: dict[str, list[float]] = {
        name: [] for name in ("ttft", "tpot", "tbt", "e2e", "normalised", "delay")
    }
    for arrival, delay, gaps in requests:
        times = arrival + np.cumsum(gaps)
        totals.add(arrival, arrival + delay, [float(t) for t in times])
        values["ttft"].append(gaps[0])
        values["e2e"].append(sum(gaps))
        values["normalised"].append(sum(gaps) / len(gaps))
        values["delay"].append(delay)
        values["tbt"] += gaps[1:]
        values["tpot"] += [float(np.mean(gaps[1:]))] if gaps[1:] else []
    found = Latencies(**totals.figures())
    for name, those in values.items():
        p50, p90, p99 = np.percentile(those, [50, 90, 99]) if those else [None] * 3
        expected = {"mean": np.mean(those) if those else None, "p50": p50, "p90": p90, "p99": p99}
        for what, value in expected.items():
            assert getattr(found, f"{name}_{what}") == (
                None if value is None else pytest.approx(value, abs=1e-9)
            )
    assert set(totals.figures()) == {field.name for field in fields(Latencies)}


def test_a_request_that_no_step_has_had_has_no_delay() -> None:
    totals = LatencyTotals()
    totals.add(1.0, None, [2.0])
    assert (totals.delay.mean, totals.ttft.mean) == (None, 1.0)
