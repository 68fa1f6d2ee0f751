"""Engines by name in virtual time: lockstep, waits of prompts, and requests that come later."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer.config.run_file import as_run_file
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate

STEP_S, TOKEN_S = 0.01, 0.001


def ttfts(concurrency: int, count: int, engine: dict[str, Any], output: int = 8) -> list[float]:
    """Prompts of 100 tokens in a closed loop; by the order in which they came."""
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"num_pages": 400, "enable_prefix_caching": False, **engine},
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"a": {"group": "g"}},
            "simulate": {"linear": {"step_s": STEP_S, "token_s": TOKEN_S}},
            "workload": {
                "synthetic": {"input_len": 100, "output_len": output, "count": count},
                "arrivals": {"kind": "closed", "concurrency": concurrency},
            },
        }
    )
    found: dict[int, float] = {}

    def note(request: RequestState, times: Sequence[float]) -> None:
        found[int(request.id)] = times[0] - request.arrival

    simulate(config, config.requests(), on_request=note)
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("concurrency", [1, 3, 5])
def test_equal_prompts_go_one_after_the_other(concurrency: int) -> None:
    """Prompts first, one in each step of T seconds: the k-th of those at once has k T."""
    engine = {"like": "sglang-0.5", "max_num_batched_tokens": 100, "max_num_seqs": 100}
    prompt_s = STEP_S + 100 * TOKEN_S
    found = ttfts(concurrency, concurrency, engine)
    assert found == pytest.approx([k * prompt_s for k in range(1, concurrency + 1)])


def second_ttft(engine: dict[str, Any]) -> float:
    """Time to first token, in steps, of a request that comes in the midst of the eleventh step."""
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"num_pages": 400, "enable_prefix_caching": False, **engine},
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"a": {"group": "g"}},
            "simulate": {"linear": {"step_s": STEP_S}},
            "workload": {
                "synthetic": {"input_len": 10, "output_len": 50, "count": 2},
                "arrivals": {"kind": "interval", "seconds": 10.5 * STEP_S},
            },
        }
    )
    found: dict[str, float] = {}

    def note(request: RequestState, times: Sequence[float]) -> None:
        found[request.id] = times[0] - request.arrival

    simulate(config, config.requests(), on_request=note)
    return found["1"] / STEP_S


@pytest.mark.parametrize("steps", [0, 1, 20])
def test_a_wait_adds_its_steps(steps: int) -> None:
    """Half of the step that runs, those that it waits, and its own."""
    batching = {"name": "mixed", "whole_prompts": True, "wait_steps": steps}
    engine = {"max_num_batched_tokens": 1000, "max_in_flight": 1}
    found = second_ttft(engine | {"policies": {"batching": batching}})
    assert found == pytest.approx(0.5 + steps + 1)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_each_step_in_flight_delays_who_comes_by_one(in_flight: int) -> None:
    """Half of the step that runs, those that are launched behind it, and its own."""
    found = second_ttft({"max_num_batched_tokens": 1000, "max_in_flight": in_flight})
    assert found == pytest.approx(0.5 + (in_flight - 1) + 1)
