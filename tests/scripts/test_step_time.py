"""Costs of a host in a step of a stage that takes a known time."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxinfer.steps.shapes import StepShape
from scripts.bench import step_time
from scripts.bench.step_time import SAMPLERS, StepWatch

SMALL, LARGE = StepShape(4, 4, 0), StepShape(8, 8, 0)
DEVICE_S, LAUNCH_S = 4e-3, 1e-3


class Clock:
    """Stands for the module ``time``."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_time, "time", clock)
    return clock


class Stage:
    """A stage whose launches take a while, and what was launched another, all at the end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.plan = SimpleNamespace(whole=SingleDeviceSharding(jax.devices()[0]))
        self.step = SimpleNamespace(limits=SimpleNamespace(shape_for=lambda batch: batch.shape))
        self.launched = 0
        self.drawn: set[tuple[Any, ...]] = set()

    def inputs(self, batch: Any, shape: StepShape, slots: Any, shard: int) -> Any:
        assert slots["whoever"] == shard == 0
        return np.full(shape.tokens, batch.number)

    def forward(self, key: Any, inputs: Any, x_TD: None) -> Any:
        assert inputs.tolist() == [13] * 8
        self.clock.now += LAUNCH_S
        self.launched += 1
        return "hidden"

    def sample(self, key: Any, hidden: str, sampling: Any, next_token_T: None) -> Any:
        assert len(sampling.temperature_S) == key.shape.rows
        name = next(name for name, sampler in SAMPLERS.items() if sampler == key.sampler)
        options = sampling.temperature_S, sampling.top_k_S, sampling.top_p_S
        self.drawn.add((name, *(float(option[0]) for option in options)))
        return SimpleNamespace(token_S=self), None

    def block_until_ready(self) -> None:
        self.clock.now += self.launched * (DEVICE_S - LAUNCH_S)
        self.launched = 0


def steps(watch: StepWatch, *kinds: tuple[StepShape, int, int]) -> None:
    """Steps by their shape, tokens and decodes, each of which ends 0.1 s after the one before."""
    for number, (shape, tokens, decodes) in enumerate(kinds):
        work = SimpleNamespace(tokens=tokens, decodes=decodes)
        batch = SimpleNamespace(shape=shape, work=work, number=number)
        watch.on_step(SimpleNamespace(batch=batch, end=0.1 * number))  # type: ignore[arg-type]


DECODES = (LARGE, 8, 8)


def test_a_step_in_the_middle_of_its_like(clock: Clock) -> None:
    """Steps 10 to 16: those before are cut short by a chunk, by another shape, and by too few."""
    stage = Stage(clock)
    watch = StepWatch(stage, 6, 3)  # type: ignore[arg-type]
    cut = [DECODES] * 4 + [(LARGE, 8, 7), DECODES, DECODES, (SMALL, 6, 6), DECODES, (LARGE, 5, 5)]
    assert watch.figures("greedy") == "no such steps in the run"
    steps(watch, *cut, *[DECODES] * 9)
    found = watch.figures("top_p")
    assert isinstance(found, dict)
    assert found["rows"] == 8
    np.testing.assert_allclose(found["step_s"], 0.1)
    assert list(found["alone"]) == list(SAMPLERS)
    for alone in found["alone"].values():
        assert alone == pytest.approx({"launch_s": LAUNCH_S, "device_s": DEVICE_S})
    np.testing.assert_allclose(found["host_share"], 1 - DEVICE_S / 0.1)
    assert stage.drawn == {
        ("greedy", 0, 0, 1),
        ("drawn", 1, 0, 1),
        ("top_p", 1, 0, np.float32(0.9)),
        ("top_k, top_p", 1, 50, np.float32(0.9)),
    }


def test_too_few_steps_of_a_kind(clock: Clock) -> None:
    watch = StepWatch(Stage(clock), 6, 3)  # type: ignore[arg-type]
    steps(watch, *[DECODES] * 6)
    assert watch.figures("greedy") == "no such steps in the run"
