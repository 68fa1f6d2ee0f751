"""Guesses of rates: near what is simulated, and refused as a simulation would be."""

from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.estimate import guess_rate
from jaxinfer.simulate.capacity import capacity
from jaxinfer.simulate.read_targets import read_targets
from jaxinfer.workload.lengths import BenchRequest

PROMPT, OUTPUT = 200, 50
WORK = [BenchRequest(None, PROMPT, OUTPUT, 0.0)] * 400
STEP, TOKEN = 0.01, 1e-4


def config(pp: int = 1, replicas: int = 1, chunk: int = 64, seqs: int = 16) -> RunFile:
    """Steps of a constant and so much for each token, shared by stages."""
    place: dict[str, Any] = {"stages": [{"group": "g"}] * pp} if pp > 1 else {"group": "g"}
    own = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": seqs,
        "max_model_len": 512,
        "launch_ahead": False,
    }
    return as_run_file(
        {
            "model": "llama-3-8b",
            "groups": {"g": {"kind": "A10", "devices": pp * replicas, "tensor_parallel_size": 1}},
            "instances": {"i": {**place, **own, "replicas": replicas}},
            "system": "least_loaded",
            "simulate": {"linear": {"step_s": STEP, "token_s": TOKEN}},
        }
    )


def guess(file: RunFile, slo: str = "delay:p99=5") -> float:
    return guess_rate(file, WORK, read_targets(slo, WORK, None, None))


def test_means_of_full_steps() -> None:
    """A step of 64 tokens has 12.8 decodes and the 51.2 prompt tokens that keep up with them."""
    step = STEP + (13 + 51) * TOKEN
    assert guess(config()) == pytest.approx(12.8 / OUTPUT / step)
    # Two seats: two decodes, and eight prompt tokens.
    assert guess(config(seqs=2)) == pytest.approx(2 / OUTPUT / (STEP + 10 * TOKEN))
    assert guess(config(replicas=3)) == pytest.approx(3 * guess(config()))


def test_steps_longer_than_the_targets_leave_count_less() -> None:
    step = STEP + 64 * TOKEN
    free, rate = guess(config()), guess(config(), f"ttft:p90=9,tbt:p99={step / 4}")
    assert rate == pytest.approx(free / 4, rel=0.01)
    assert guess(config(), f"tbt:p99={2 * step}") == free
    assert guess(config(), f"tpot={step / 4}") == pytest.approx(rate)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("chunk", [64, 256])
def test_near_what_is_simulated(pp: int, chunk: int) -> None:
    file = config(pp, chunk=chunk)
    targets = read_targets("delay:p99=2", WORK, None, None)
    found = capacity(file, WORK, targets, start=guess(file)).rate
    assert guess(file) == pytest.approx(found, rel=0.35)


def test_what_cannot_be_has_no_rate() -> None:
    file = config().model_copy(update={"model": "llama-2-70b"})
    with pytest.raises(JaxinferError, match="KV pages"):
        guess(file)
