"""Shortest predicted answer first, against its closed form."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.predict.order import shortest_answer_first
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

LENGTHS = [90, 10, 50, 30, 70]


def last_token(request: RequestState) -> float:
    return request.metrics.token_times[-1]


def one_by_one(**workload: Any) -> list[float]:
    """Ends in steps of a machine that serves one request at a time, all there at the start."""
    config = RunFile.model_validate(
        {
            "model": "llama-3-8b",
            "engine": {
                "max_num_seqs": 1,
                "max_model_len": 256,
                "num_pages": 100,
                "launch_ahead": False,
                "policies": {"order": "jaxinfer.lab.predict.order:shortest_answer_first"},
            },
            "groups": {"gpu": {"kind": "A10"}},
            "instances": {"engine": {"group": "gpu"}},
            "simulate": {
                "linear": {
                    "step_s": 1.0,
                    "token_s": 0.0,
                    "chunk_context_s": 0.0,
                    "decode_context_s": 0.0,
                }
            },
            "workload": {"max_tokens": 100, **workload},
        }
    )
    ends: list[float] = []
    work = [BenchRequest(None, 8, length, 0.0) for length in LENGTHS]
    simulate(config, work, on_request=lambda request, _: ends.append(last_token(request)))
    return ends


def test_exact_predictions_are_shortest_job_first() -> None:
    exact = {"granularity": 1, "accuracy": 1.0}
    assert one_by_one(predictor=exact) == pytest.approx(list(accumulate(sorted(LENGTHS))))


def test_without_predictions_the_limit_stands_in() -> None:
    assert one_by_one() == pytest.approx(list(accumulate(LENGTHS)))


def test_of_equal_ones_the_nearest_to_the_head() -> None:
    waiting: list[Any] = [
        SimpleNamespace(name=n, predicted=p, max_tokens=m)
        for n, p, m in [("a", (32, 64), 9), ("b", (0, 32), 99), ("c", (0, 64), 9), ("d", None, 5)]
    ]
    assert shortest_answer_first(waiting).name == "b"
