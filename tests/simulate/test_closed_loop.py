"""Closed loops in virtual time: closed forms, Little's law, and what holds of any of them."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.capacity import capacity
from jaxinfer.simulate.read_targets import read_targets
from jaxinfer.simulate.run import simulate

Served = list[tuple[float, float, int]]


def config(
    concurrency: int, count: int, lengths: Any, think_s: float = 0.0, **more: Any
) -> RunFile:
    """Two instances, a step of which takes a second."""
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"max_num_batched_tokens": 64, "launch_ahead": False, "num_pages": 200},
            "groups": {name: {"kind": "A10"} for name in ("g", "h")},
            "instances": {"a": {"group": "g"}, "b": {"group": "h"}},
            "system": {"name": "least_loaded", "choose": "join_shortest_queue", "load": "requests"},
            "simulate": {"linear": {"step_s": 1.0}},
            "workload": {
                "synthetic": {"count": count, **lengths},
                "arrivals": {"kind": "closed", "concurrency": concurrency, "think_s": think_s},
            },
        }
        | more
    )


def served(given: RunFile) -> Served:
    """Return the arrival, end and output tokens of each request, by arrival."""
    found: Served = []

    def note(request: RequestState, times: Sequence[float]) -> None:
        assert request.metrics.arrival == request.arrival
        found.append((request.arrival, times[-1], len(times)))

    metrics = simulate(given, given.requests(), on_request=note)
    assert metrics.requests == len(found)
    return sorted(found)


def in_system(found: Served) -> list[tuple[float, int]]:
    """Return how many there are from each moment on; ends come before arrivals."""
    changes = sorted([(a, 1) for a, _, _ in found] + [(e, -1) for _, e, _ in found])
    there, course = 0, []
    for time, by in changes:
        there += by
        if course and course[-1][0] == time:
            course[-1] = time, there
        else:
            course.append((time, there))
    return course


@pytest.mark.parametrize("think_s", [0.0, 0.25])
def test_one_at_a_time_adds_up(think_s: float) -> None:
    """A prompt of 100 takes 2 steps of 64 tokens, and each output token but the first one more."""
    found = served(config(1, 6, {"input_len": 100, "output_len": 5}, think_s))
    assert [(a, e) for a, e, _ in found] == [
        (i * (6 + think_s), i * (6 + think_s) + 6) for i in range(6)
    ]


@pytest.mark.parametrize("concurrency", [2, 3, 7])
def test_as_many_as_asked_until_the_tail(concurrency: int) -> None:
    lengths = {"input_len": 20, "output_len": {"kind": "uniform", "min": 1, "max": 9}}
    found = served(config(concurrency, 60, lengths))
    course = in_system(found)
    last = max(arrival for arrival, _, _ in found)
    assert {there for time, there in course if time < last} == {concurrency}
    tail = [there for time, there in course if time >= last]
    assert tail == sorted(tail, reverse=True)
    assert tail[-1] == 0


def test_little_s_law() -> None:
    """The mean number there is the rate of arrivals x the mean time there, thinkers or not."""
    lengths = {"input_len": 30, "output_len": {"kind": "lognormal", "median": 9, "sigma": 0.8}}
    found = served(config(5, 300, lengths, think_s=3.0))
    end = max(e for _, e, _ in found)
    course = in_system(found)
    area = sum(n * (b - a) for (a, n), (b, _) in pairwise(course))
    assert area / end == pytest.approx(len(found) / end * sum(e - a for a, e, _ in found) / 300)
    # Of closed loops: N = rate x (time there + thinking), but for the start and the tail.
    rate = 300 / end
    mean = sum(e - a for a, e, _ in found) / 300
    assert rate * (mean + 3.0) == pytest.approx(5, rel=0.05)


@examples(25)
@given(
    concurrency=st.integers(1, 12),
    count=st.integers(1, 40),
    think_s=st.sampled_from([0.0, 0.5, 4]),
    seed=st.integers(0, 99),
    pages=st.sampled_from([12, 200]),
)
def test_any_closed_loop(
    concurrency: int, count: int, think_s: float, seed: int, pages: int
) -> None:
    """Requests come at the start or a while after an end of their own; nobody is lost."""
    rng = random.Random(seed)
    lengths = {
        "input_len": rng.randint(1, 150),
        "seed": seed,
        "output_len": {"kind": "uniform", "min": 1, "max": rng.randint(1, 40)},
    }
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 3, "num_pages": pages}
    found = served(config(concurrency, count, lengths, float(think_s), engine=engine))
    assert len(found) == count
    at_first = min(concurrency, count)
    arrivals = [arrival for arrival, _, _ in found]
    assert arrivals[:at_first] == [0.0] * at_first
    ends = sorted(end for _, end, _ in found)
    assert arrivals[at_first:] == pytest.approx([end + think_s for end in ends[: count - at_first]])
    assert max(there for _, there in in_system(found)) <= concurrency


def test_where_a_rate_is_searched_it_is_refused() -> None:
    closed = config(3, 50, {"input_len": 20, "output_len": 3})
    with pytest.raises(JaxinferError, match=r"^workload\.arrivals\.kind is closed, .*a rate"):
        capacity(closed, closed.requests(), read_targets("ttft=5", closed.requests()))
    problem = Problem.model_validate(
        {
            "planner": "any_system",
            "goal": {"maximise": "gpu", "slo": "ttft=1"},
            "run": {
                "workload": {
                    "synthetic": "sharegpt",
                    "arrivals": {"kind": "closed", "concurrency": 2},
                }
            },
        }
    )
    with pytest.raises(JaxinferError, match=r"^run\.workload\.arrivals\.kind is closed"):
        _ = problem.work
