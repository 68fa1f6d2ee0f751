"""A stage's emulation, inputs and tokens, with a step that only notes what it is given."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.stage import stage as stages
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.stage import Stage, put_whole
from jaxinfer.runtime.stage.step import Key
from jaxinfer.steps.shapes import StepLimits, StepShape

NOTHING: Any = None


class Step:
    """Pages are numbered by the steps that have replaced them; hidden states are its rows."""

    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=8, max_pages=3, page_size=4)

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def compile_ahead(self, sampler: SamplerShape, run: Any) -> Any:
        run(Key(StepShape(4, 8, 4), sampler))
        return iter([0])

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, 2), "float32", sharding=whole(1))

    def forward(
        self, key: Any, parameters: Any, kv: int, previous: Any, inputs: Any, x: Any
    ) -> Any:
        self.seen.append(("forward", kv, x if x is None else x.shape))
        return kv + 1, "to sample from", "all"

    def leaves(self, parameters: Any) -> Any:
        return parameters

    def sample(self, key: Any, parameters: Any, hidden: Any, previous: Any, *more: Any) -> Any:
        self.seen.append(("sample", hidden, previous))
        return SimpleNamespace(token_S=jax.numpy.arange(4) + 5), "prompt"


def whole(devices: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("tp",)), PartitionSpec())


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(stages, "CompiledStep", lambda plan: Step())
    monkeypatch.setattr(stages, "allocate", lambda pages: 0)
    previous = jax.ShapeDtypeStruct((4,), "int32", sharding=whole(1))
    plan: Any = SimpleNamespace(
        pages=[],
        step_arguments=(None, None, previous),
        whole=whole(1),
        layers=SimpleNamespace(first=True, last=True),
    )
    return Stage(plan, NOTHING)


def test_tokens_feed_back_and_pages_are_replaced(stage: Stage) -> None:
    step: Any = stage.step
    assert np.asarray(stage.previous_S).tolist() == [0, 0, 0, 0]
    first = stage.previous_S
    for _ in range(2):
        assert stage.forward(NOTHING, NOTHING, None) == ("to sample from", "all")
    samples, prompt = stage.sample(NOTHING, ("hidden", "states"), NOTHING, None)  # type: ignore[arg-type]
    assert prompt == "prompt"
    assert stage.previous_S is samples.token_S
    stage.sample(NOTHING, ("hidden", "states"), NOTHING, None)  # type: ignore[arg-type]
    assert [kv for _, kv, _ in step.seen[:2]] == [0, 1]
    assert stage.kv == 2
    assert [previous is first for *_, previous in step.seen[2:]] == [True, False]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_first_run_has_what_the_stage_is_given(stage: Stage, first: bool, last: bool) -> None:
    """Hidden states of the stage before, but for the first; a draw on the last alone."""
    parts: Any = stage.plan.layers
    parts.first, parts.last = first, last
    assert list(stage.compile_ahead(SamplerShape())) == [0]
    step: Any = stage.step
    (_, _, x), *draws = step.seen
    assert x == (None if first else (8, 2))
    assert [kind for kind, *_ in draws] == ["sample"] * last


class Clock:
    """Stands for the module ``time``: it sleeps by being set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stages, "time", clock)
    return clock


def test_a_step_of_a_slower_device_ends_later(stage: Stage, clock: Clock) -> None:
    """The step began at 99, and was done by 100; the slower device takes 1.5 seconds."""
    stage.emulate = lambda batch: 1.5
    assert stage.end_of(NOTHING, 99.0) == 100.5
    assert clock.now == 100.5
    assert stage.overruns == []


def test_a_step_that_takes_longer_than_the_slower_device_is_late(
    stage: Stage, clock: Clock
) -> None:
    stage.emulate = lambda batch: 0.75
    assert stage.end_of(NOTHING, 99.0) == 100
    assert stage.overruns == [0.25]
    assert clock.now == 100
    # To the moment is not late.
    stage.emulate = lambda batch: 1.0
    assert stage.end_of(NOTHING, 99.0) == 100
    assert stage.overruns == [0.25]


def test_without_emulation_a_step_ends_when_it_is_done(stage: Stage, clock: Clock) -> None:
    assert stage.end_of(NOTHING, 99.0) == 100
    assert (clock.now, stage.overruns) == (100, [])


def test_hidden_states_come_over_the_link(stage: Stage) -> None:
    """800 bytes at 10^9 bytes a second, and the latency."""
    x = jax.numpy.zeros((100, 2))
    assert stage.start_of(5.0, x) == 5
    stage.link = LinkConfig(between=("a", "b"), gb_s=1, latency_s=0.5)
    assert stage.start_of(5.0, x) == 5  # Profiles serve others' links, too.
    stage.emulate = lambda batch: 1.0
    assert stage.start_of(5.0, x) == pytest.approx(5.5 + 8e-7, abs=1e-12)


def test_hidden_states_go_from_mesh_to_mesh() -> None:
    """Hidden states stay as they are on their own mesh; on another each device gets them whole."""
    there: Any = SimpleNamespace(whole=whole(2), devices=jax.devices()[:2])
    here: Any = SimpleNamespace(whole=whole(1), devices=jax.devices()[:1])
    x = jax.device_put(np.arange(6.0).reshape(3, 2), here.whole)
    assert put_whole(x, here) is x
    moved = put_whole(x, there)
    assert moved.sharding == there.whole
    for part in moved.addressable_shards:
        np.testing.assert_array_equal(part.data, x)


def test_forward_takes_hidden_states_to_its_mesh(stage: Stage) -> None:
    plan: Any = stage.plan
    plan.devices = jax.devices()[:1]
    step: Any = stage.step
    stage.forward(NOTHING, NOTHING, jax.device_put(np.zeros((8, 2)), whole(2)))
    assert step.seen == [("forward", 0, (8, 2))]
