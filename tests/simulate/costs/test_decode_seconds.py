"""Seconds of decodes as a function of their KV entries: the same floats as those of the step."""

import random

import pytest

from jaxinfer.config.step_costs import LinearCosts, PhaseCosts
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.linear import LinearStage
from jaxinfer.simulate.costs.model import StageCost
from jaxinfer.simulate.costs.phases import PhaseStage
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage

LINEAR = LinearCosts(
    step_s=7e-3, token_s=6.1e-5, sequence_s=1.3e-6, decode_context_s=1.7e-7, chunk_context_s=4e-6
)
PHASES = PhaseCosts.model_validate(
    {
        "prefill": {"step_s": 0.018, "token_s": 1e-4, "pair_s": 7e-9},
        "decode": [
            {"below": 9, "step_s": 0.0199, "context_s": 6.3e-7, "sequence_s": 3.9e-5},
            {"step_s": 0.0072, "context_s": 5.8e-7, "sequence_s": 1.58e-4},
        ],
        "extra": {"step_s": 1.1e-3, "context_s": 2.3e-8},
    }
)
EFFICIENCY = KernelEfficiency(0.6, 0.8, 1e-3, 1e-5)
ROOFLINE = RooflineStage(
    find_gpu("A10"), find_model("llama-3-8b"), 32, True, 2, 2, EFFICIENCY, 24.0, 1e-5
)


@pytest.mark.parametrize(
    "stage",
    [
        LinearStage(LINEAR, 0.3),
        PhaseStage(PHASES),
        PhaseStage(PHASES, 0.3, first=False),
        ROOFLINE,
    ],
    ids=["linear", "phases", "a later stage of phases", "roofline"],
)
def test_the_floats_are_those_of_the_step(stage: StageCost) -> None:
    rng = random.Random(5)
    for rows in (1, 2, 8, 9, 250):
        seconds = stage.decode_seconds(rows)  # type: ignore[attr-defined]
        for _ in range(50):
            entries = rng.randint(rows, rows * 9000)
            assert seconds(entries) == stage.seconds(
                Work(rows, rows, rows, rows, entries, [], rows)
            )
