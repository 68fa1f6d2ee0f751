"""Runs are decided alike again by what their ledgers measured; broken simulators are not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_world import FakeWorld, Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import Chaos, Scenario, Script, Survivor, scenarios
from serving_checks import make_kv, make_requests

from jaxinfer.lab.validate.measured_world import MeasuredWorld, measured
from jaxinfer.lab.validate.same_decisions import run_to_its_end
from jaxinfer.ledger.difference import first_difference
from jaxinfer.ledger.ledger_file import Entries, Entry
from jaxinfer.ledger.observer import Ledger
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.policies import Policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import System
from jaxinfer.serving.views import Leg
from jaxinfer.serving.world import Event, GoesWithout, InstanceLost

Make = Callable[[str], Instance]


def instances_of(scenario: Scenario, spare: int = 0) -> tuple[list[Instance], Make]:
    def make(name: str) -> Instance:
        _, pages, size, layout, options = next(i for i in scenario.instances if i[0] == name)
        kv = make_kv(pages + spare, size, layout, scenario.caching)
        return Instance(name, kv, options, Policies())

    return [make(name) for name, *_ in scenario.instances], make


def ledger_of(scenario: Scenario, system: System) -> list[Entry]:
    """A run in a world whose events tie, and come in any order."""
    instances, make = instances_of(scenario)
    requests = make_requests(
        [(s.prompt_len, s.max_tokens) for s in scenario.scripts],
        [s.arrival for s in scenario.scripts],
        [s.shared for s in scenario.scripts] if scenario.caching else (),
    )
    world = FakeWorld(instances, requests, scenario.timing)

    def check_stop(request: RequestState, token: int) -> Any:
        at = scenario.by_id[request.id].stop_at
        return ("stop", None) if len(request.output_token_ids) == at else None

    return serve(world, instances, system, check_stop, lambda n: world.renew(make(n)), world)


def again(
    entries: Sequence[Entry],
    scenario: Scenario,
    system: System,
    world_type: type[MeasuredWorld] = MeasuredWorld,
    spare: int = 0,
    change: Callable[[Instance], None] = lambda instance: None,
) -> list[Entry]:
    instances, make = instances_of(scenario, spare)
    for instance in instances:
        change(instance)
    known = measured(entries)
    return serve(world_type(known), instances, system, known.check_stop, make)


def serve(
    world: Any,
    instances: list[Instance],
    system: System,
    check_stop: Any,
    renew: Make,
    fake: FakeWorld | None = None,
) -> list[Entry]:
    ledger = Ledger(Entries())
    told = {"on_event": fake.committed} if fake else {}
    loop = ServingLoop(
        ledger.around(world), instances, system, check_stop, ledger.ended, renew=renew, **told
    )
    ledger.watch(loop)
    if fake:
        loop.run()
    else:
        run_to_its_end(loop, ledger)
    return ledger.entries.parsed()


@st.composite
def outages(draw: st.DrawFn) -> Scenario:
    scenario = draw(scenarios())
    lost = {
        name: draw(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=3).map(sorted))
        for name, *_ in scenario.instances
        if draw(st.booleans())
    }
    return replace(scenario, timing=replace(scenario.timing, lost=lost))


@examples(25)
@given(scenarios(), st.integers(0, 2**16), st.integers(0, 30))
def test_whatever_a_system_does(scenario: Scenario, seed: int, actions: int) -> None:
    def system() -> System:
        return Chaos(scenario.by_id, seed, actions, scenario.caching)

    real = ledger_of(scenario, system())
    assert first_difference(real, again(real, scenario, system())) is None


@st.composite
def lost_shards(draw: st.DrawFn) -> Scenario:
    """Some of those shards are lost that another of their stage may stand in for."""
    scenario = draw(outages())
    without = {}
    for name, pages, size, layout, _ in scenario.instances if not scenario.caching else ():
        stages = [shard.stage for shard in make_kv(pages, size, layout).shards]
        others = [n for n, stage in enumerate(stages) if stage in stages[:n]]
        if others:
            shards = draw(st.lists(st.sampled_from(others), unique=True, min_size=1))
            without[name] = shards, draw(st.none() | st.integers(0, 20))
    return replace(scenario, timing=replace(scenario.timing, without=without))


@examples(50)
@given(lost_shards())
def test_whatever_shards_are_lost_and_back(scenario: Scenario) -> None:
    real = ledger_of(scenario, Survivor(scenario.by_id))
    assert first_difference(real, again(real, scenario, Survivor(scenario.by_id))) is None


@examples(25)
@given(outages())
def test_whatever_is_lost_and_back(scenario: Scenario) -> None:
    real = ledger_of(scenario, Survivor(scenario.by_id))
    assert first_difference(real, again(real, scenario, Survivor(scenario.by_id))) is None


# Two legs over pools that hardly hold the decodes; A is lost, and back.
TWO_LEGS = (Leg("A", 6, "per_chunk"), Leg("B"))
BY_HAND = Scenario(
    [Script(6, 9, float(number // 2), None, TWO_LEGS, 2) for number in range(6)],
    [
        ("A", 12, 2, ((0,),), InstanceOptions(max_num_batched_tokens=4)),
        ("B", 14, 2, ((0,),), InstanceOptions(max_num_batched_tokens=8)),
    ],
    Timing(seed=3, max_step=2, max_transfer=2, lost={"A": [9.0, 12.0]}),
    False,
)


class ReversedEvents(MeasuredWorld):
    def _then(self, when: Any, happens: Any) -> None:
        super()._then((when[0], -when[1]), happens)


class LateTransfers(MeasuredWorld):
    def start_transfer(self, transfer: Any) -> None:
        for known in self._given.transfers.values():
            if known and known[0][0][0] < 8:
                known[0] = (known[0][0][0] + 1.0, known[0][0][1]), known[0][1]
        super().start_transfer(transfer)


class DeafToLosses(MeasuredWorld):
    def due_events(self) -> Sequence[Event]:
        return [event for event in super().due_events() if not isinstance(event, InstanceLost)]


class DeafToShards(MeasuredWorld):
    def due_events(self) -> Sequence[Event]:
        return [event for event in super().due_events() if not isinstance(event, GoesWithout)]


def oldest_first(instance: Instance) -> None:
    instance.policies = Policies(victim=lambda candidates: candidates[0])


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "victim order": ({"change": oldest_first}, "real: B preempts request 'r"),
    "page count": ({"spare": -1}, "simulated: B preempts request 'r"),
    "event order": ({"world_type": ReversedEvents}, "real: request 'r0' arrives (6 prompt, 9 o"),
    "transfer": ({"world_type": LateTransfers}, "real: KV 0 to 4 of request 'r0' has come from A"),
    "loss": ({"world_type": DeafToLosses}, "real: instance A is lost; simulated: "),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_simulator_is_caught(fault: str) -> None:
    more, words = BROKEN[fault]
    real = ledger_of(BY_HAND, Survivor(BY_HAND.by_id))
    kinds = {kind for kind, *_ in real}
    assert kinds >= {"legs", "batch", "send", "victim", "lost", "back", "landed", "end"}
    assert first_difference(real, again(real, BY_HAND, Survivor(BY_HAND.by_id))) is None
    broken = again(real, BY_HAND, Survivor(BY_HAND.by_id), **more)
    found = first_difference(real, broken)
    assert found is not None
    assert words in found


def test_a_simulator_that_is_deaf_to_shards_is_caught() -> None:
    """A is back without one of its three shards, which is back a while later."""
    name, pages, size, _, options = BY_HAND.instances[0]
    spread = (name, pages, size, ((0, 1), (2,), ()), options)
    timing = replace(BY_HAND.timing, without={"A": ((1,), 20)})
    scenario = replace(BY_HAND, instances=[spread, BY_HAND.instances[1]], timing=timing)
    real = ledger_of(scenario, Survivor(scenario.by_id))
    told = [decided for kind, decided, _ in real if kind == "without"]
    assert told == [["A", [1], True], ["A", [], False]]
    assert first_difference(real, again(real, scenario, Survivor(scenario.by_id))) is None
    deaf = again(real, scenario, Survivor(scenario.by_id), DeafToShards)
    found = first_difference(real, deaf)
    assert found is not None
    assert "real: instance A goes without shards [1]; simulated: " in found
