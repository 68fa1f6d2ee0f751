"""What a server takes with each request before the scheduler has it."""

from collections.abc import Sequence

import pytest

from jaxinfer.config.run_file import as_run_file
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.bench_request import BenchRequest


def first_tokens(request_s: float, work: Sequence[BenchRequest]) -> list[float]:
    """Seconds from each request's arrival to its first token; a step takes one second."""
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_in_flight": 1},
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"a": {"group": "g"}},
            "simulate": {"linear": {"step_s": 1.0}, "request_s": request_s},
        }
    )
    found = {}

    def add(request: RequestState, times: Sequence[float]) -> None:
        found[int(request.id)] = times[0] - request.arrival

    simulate(config, work, on_request=add)
    return [found[number] for number in range(len(work))]


def test_requests_are_taken_one_after_another() -> None:
    """At 0.25 and 0.5 s the first two are there; the second one waits for the first one's step."""
    work = [BenchRequest(None, 4, 1, at) for at in (0.0, 0.0, 10.0)]
    assert first_tokens(0.25, work) == [1.25, 2.25, 1.25]
    assert first_tokens(0.0, work) == [1.0, 1.0, 1.0]


def test_a_request_that_waits_for_another_s_end_is_taken_then() -> None:
    """The first one ends at 1.25 s; two more come then, and the server has them at 1.5 and 1.75."""
    work = [BenchRequest(None, 4, 1, 0.0)]
    work += [BenchRequest(None, 4, 1, 0.0, after_ends=1)] * 2
    assert first_tokens(0.25, work) == pytest.approx([1.25, 1.25, 2.25])
