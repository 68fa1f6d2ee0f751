"""Bounds of sampling parameters, at which they turn; and what a request's times say."""

from typing import Any

import pytest

from jaxinfer import JaxinferError, SamplingParams
from jaxinfer.request import RequestMetrics


@pytest.mark.parametrize(
    ("name", "least", "most", "beyond"),
    [
        ("n", 1, 128, (0, 129)),
        ("temperature", 0, 100, (-1e-9, 100.001)),
        ("top_k", -1, 10**30, (-2,)),
        ("top_p", 1e-300, 1, (0, 1.001)),
        ("min_p", 0, 1, (-0.001, 1.001)),
        ("repetition_penalty", 0.01, 100, (0.009, 100.1)),
        ("presence_penalty", -2, 2, (-2.01, 2.01)),
        ("frequency_penalty", -2, 2, (-2.01, 2.01)),
        ("seed", 0, 2**63 - 1, (-1, 2**63)),
        ("max_tokens", 1, 10**30, (0,)),
        ("min_tokens", 0, 16, (-1, 17)),
        ("logprobs", 0, 20, (-1, 21)),
        ("prompt_logprobs", 0, 20, (-1, 21)),
    ],
)
def test_bounds(name: str, least: Any, most: Any, beyond: tuple[Any, ...]) -> None:
    for value in (least, most):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in beyond:
        with pytest.raises(JaxinferError, match=rf"^{name} is {value}, must be "):
            SamplingParams(**{name: value})


def test_tokens_of_a_bias_as_json_has_them() -> None:
    given: Any = {"7": 1.0, "49151": -100, "999999999999": 100, 8: 0.5}
    bias = SamplingParams(logit_bias=given).logit_bias
    assert bias == {7: 1.0, 49151: -100, 999999999999: 100, 8: 0.5}
    with pytest.raises(JaxinferError, match=r"^logit_bias: a token is named twice$"):
        SamplingParams(logit_bias={"7": 1, 7: 2})  # type: ignore[dict-item]
    for wrong in ({"-1": 1}, {"1": 100.1}, {"1": -100.1}):
        with pytest.raises(JaxinferError, match=r"^logit_bias\.-?1 is "):
            SamplingParams(logit_bias=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_any_penalty_is_one(options: dict[str, float], expected: bool) -> None:
    assert SamplingParams(**options).has_penalties == expected


def test_times_of_a_request() -> None:
    metrics = RequestMetrics(10.0, token_times=[12.0, 13.0, 15.5])
    assert metrics.ttft == 2.0
    assert metrics.tbt == [1.0, 2.5]
    assert metrics.delivered(True) == metrics.delivered(False) == [12.0, 13.0, 15.5]
    metrics.received = 12.75
    assert metrics.delivered(False) == [12.0, 13.0, 15.5]
    assert metrics.delivered(True) == [12.75, 13.0, 15.5]
    assert RequestMetrics(10.0).ttft is None


def test_the_first_start_s_cached_tokens_count() -> None:
    metrics = RequestMetrics(0.0)
    for found in (8, 24):
        metrics.add_cached(found)
    assert metrics.num_cached_tokens == 8
