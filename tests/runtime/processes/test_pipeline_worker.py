"""Stages of one instance in several processes: steps put together, and whose failure it is."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from fake_pipelines import LINK, FakeProcess, answer, batch, pipeline, plan
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.runtime.kv.hidden_states import HiddenStates
from jaxinfer.runtime.kv.kv_messages import Drop, OpenEnd
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost, StepEnd
from jaxinfer.runtime.processes.messages import (
    FollowOn,
    Launch,
    Loaded,
    Prepare,
)
from jaxinfer.runtime.processes.pipeline_endpoint import PipelineEndpoint
from jaxinfer.runtime.processes.pipeline_worker import (
    PipelineWorker,
)
from jaxinfer.runtime.stage.cluster_plan import divided_layers
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.serving.world import StepDone


def test_a_step_is_what_all_of_them_tell_of_it() -> None:
    """Stages are told of their own pages alone, by their own clocks; ends as they count them."""
    one, two = FakeProcess(), FakeProcess(ahead=5.0)
    worker = pipeline(one, two)
    assert worker.parts == [[0], [1, 2]]
    assert [stage.number for stage in worker.stages] == [0, 0, 1]
    assert one.sent == []
    assert two.sent == [FollowOn("x", "address 0", LINK)]
    posted: list[Any] = []
    ends: list[Any] = []
    given = batch()
    for _ in range(2):
        worker.launch(given, 1.0, posted.append, lambda *end: ends.append(end))
    (told, _), (other, _) = ([m for m in p.sent if isinstance(m, Launch)] for p in (one, two))
    tables = given.rows[0].hold.tables
    assert told.pages == [(0, 0, [tables[0][0]])]
    assert other.pages == [(0, 0, [tables[1][0], tables[2][0]])]
    assert (told.origin, other.origin) == (1.0, 6.0)
    first = [(0, StepEnd("x", 0, 0)), (1, StepEnd("x", 0, 0)), (2, StepEnd("x", 0, 1))]
    assert ends[:3] == first
    two.workers["x"].on_step(answer(0, [7], (0.3, 0.4), (0.4, 0.6)))
    one.workers["x"].on_step(answer(1, [], (0.2, 0.5)))
    assert posted == []
    one.workers["x"].on_step(answer(0, [], (0.0, 0.2)))
    stages = ((0.0, 0.2), (0.3, 0.4), (0.4, 0.6))
    assert posted == [StepDone(given, [7], 0.0, 0.6, [-0.5], stages=[*stages])]
    assert [*worker.prepare()] == [2, 2, 0]


def test_a_sampler_that_is_waited_for_by_nobody() -> None:
    """Processes that say nothing, as when they are stopped, or what they wait for is."""
    wanted = PLAIN_SAMPLER._replace(top=3)

    def silent(message: Any) -> Any:
        one.sent.append(message)
        return iter(lambda: pytest.fail("is waited for"), None)

    one, two = FakeProcess(), FakeProcess()
    worker = pipeline(one, two)
    one.ask = silent  # type: ignore[method-assign]
    with one.asking, two.asking:
        assert next(worker.prepare(wanted, wait=False)) == 0
    message = Prepare("x", wanted, wait=False)
    assert worker.sampler == wanted
    assert [one.sent[-1], two.sent[-1]] == [message] * 2


@pytest.mark.parametrize("ended", [True, False])
def test_who_misses_another_s_process_is_not_to_blame(ended: bool) -> None:
    """Steps fail once each, the next cannot be launched, and no process is left with its KV."""
    one, two = FakeProcess(), FakeProcess()
    worker = pipeline(one, two)
    two.workers["other"] = SimpleNamespace()
    posted: list[Any] = []
    for _ in range(2):
        worker.launch(batch(), 0.0, posted.append)
    one.workers["x"].on_step(answer(0, [], (0.0, 0.2)))
    if ended:
        one.lost = "process of group a was ended by signal 9"
    two.workers["x"].on_loss(ProcessLost("EOFError: "))
    one.workers["x"].on_loss(ProcessLost("later"))
    why = one.lost or "EOFError: "
    assert {(type(p), p.instance, str(p.error)) for p in posted} == {(Failed, "x", why)}
    assert one.given_up == [f"instance x: {why}"]
    assert two.given_up == []  # It has another instance.
    with pytest.raises(ProcessLost, match=f"^{why}$"):
        worker.launch(batch(), 0.0, posted.append)


def test_stages_must_pad_steps_alike() -> None:
    one, two = FakeProcess(), FakeProcess()
    loaded = [
        Loaded({"x": [plan(*buckets)]}, {"x": [[0]]}, {"x": None}) for buckets in ((7, 8), (8,))
    ]
    with pytest.raises(JaxinferError, match=r"^instances\.x: its stages have steps of unlike"):
        PipelineWorker("x", [*zip((one, two), loaded, strict=True)], [None])  # type: ignore


def test_an_end_is_on_the_side_that_has_its_stage() -> None:
    done: list[list[Any]] = [[], []]
    told: list[list[Callable[[str], None]]] = [[], []]

    def side(number: int) -> Any:
        return SimpleNamespace(
            open=lambda message, hear: done[number].append(message),
            do=done[number].append,
            on_loss=told[number].append,
            why_lost=lambda seconds: "gone" if number else None,
        )

    whole = PipelineEndpoint([side(0), side(1)], [0, 2])
    form: Any = None
    for end, stage in enumerate((0, 1, 2, 3)):
        whole.open(OpenEnd(end, "x", stage, form, True, False), lambda said: None)
    for end in range(4):
        whole.do(Drop(end, 10 + end, "host"))
    for number in range(2):
        opened, dropped = done[number][:2], done[number][2:]
        assert [message.stage for message in opened] == [0, 1]
        assert [message.slab for message in dropped] == [10 + 2 * number, 11 + 2 * number]
    whole.on_loss(print)
    assert told == [[print], [print]]
    assert whole.why_lost(0) == "gone"


def cluster(**stage: Any) -> ClusterConfig:
    stages = tuple(StageConfig(group=name, **stage) for name in "ab")
    return ClusterConfig(
        groups={name: GroupConfig(process="own") for name in "abc"},
        instances={"x": InstanceConfig(stages=stages), "y": InstanceConfig(group="c")},
    )


def test_layers_of_stages_in_several_processes_are_stated() -> None:
    found = divided_layers(cluster(share=2.0), 7)
    assert {name: [(x.start, x.stop) for x in each] for name, each in found.items()} == {
        "x": [(0, 4), (4, 7)]
    }
    with pytest.raises(JaxinferError, match=r"^instances\.x\.stages: give layers or share: "):
        divided_layers(cluster(), 7)


def test_hidden_states_are_those_of_the_step_that_is_asked_for() -> None:
    """A side that asks before they are offered waits; one left alone by the other hears of it.

    Of a step that the side was never told of, as after an interrupt, nothing is taken.
    """
    one, two = HiddenStates("127.0.0.1"), HiddenStates("127.0.0.1")
    two.before = one.address
    given = [np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * n for n in range(5)]
    asked = (0, 1, 3, 4)
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct((3, 2), np.float32, sharding=on)
    found: list[np.ndarray] = []
    failed: list[Exception] = []

    def take() -> None:
        try:
            for step in (*asked, 5):
                found.append(np.asarray(two.take(step, like)))
        except (OSError, EOFError) as error:
            failed.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    for step, each in enumerate(given):
        one.give(step, jax.device_put(each, on))
    wait_until(lambda: len(found) == len(asked))
    for step, each in zip(asked, found, strict=True):
        assert np.array_equal(each, given[step])
    assert [*one._transport._offers] == [2]
    one.forget()
    assert not one._transport._offers
    one._transport.close()
    thread.join(HANG_S)
    assert len(failed) == 1
