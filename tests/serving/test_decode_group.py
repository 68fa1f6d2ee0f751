"""Decodes advanced together give what rows of their own give, to the last bit."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import Chaos, Follow, Scenario, examples, scenarios
from serving_checks import make_kv, make_requests

from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Action, ClusterView, System
from jaxinfer.serving.work import Work
from jaxinfer.serving.world import Event, StepDone
from jaxinfer.simulate.world import Lane, SimulatedWorld
from jaxinfer.systems.single import Single


class Costs:
    """A time of its own for whatever a step may hold."""

    def stages(self, work: Work) -> list[float]:
        parts = (work.tokens, work.sampled, work.single_context, work.pairs, work.decodes)
        return [0.1 + sum(0.37**i * part for i, part in enumerate(parts, 1))]

    def hops(self, work: Work) -> list[float]:
        return []


class Ticks(Chaos):
    """Acts at times of its own, not after steps."""

    on_step = System.on_step

    def _any_move(self, name: str, cluster: ClusterView) -> Action:
        return self._act(cluster)

    def on_tick(self, cluster: ClusterView) -> list[Action]:
        for instance in cluster.instances.values():
            for request in instance.running.values():
                assert isinstance(request, RequestState)
                request.check()
        return list(super().on_tick(cluster))


def outcome(scenario: Scenario, system: System, together: bool) -> tuple[object, ...]:
    instances = [
        Instance(name, make_kv(pages, size, layout), options, groups_decodes=together)
        for name, pages, size, layout, options in scenario.instances
    ]
    names = [instance.name for instance in instances]
    lanes = {pair: [Lane(0, 3, (pair,), 0.05)] for pair in permutations(names, 2)}
    lengths = [(s.prompt_len, s.max_tokens) for s in scenario.scripts]
    requests = make_requests(lengths, [s.arrival for s in scenario.scripts])
    world = SimulatedWorld(
        {name: Costs() for name in names}, dict.fromkeys(names, 1), dict.fromkeys(names, (0,)),
        lanes, dict.fromkeys(lanes, 7.0), sorted(requests, key=lambda r: r.arrival),
    )  # fmt: skip
    steps: list[tuple[object, ...]] = []
    ended: list[str] = []

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            batch = event.batch
            steps.append((event.instance, event.start, event.end, batch.work, batch.pages_in_use))

    ServingLoop(
        world, instances, system, on_finish=lambda r: ended.append(r.id), on_event=on_event
    ).run()
    for request in requests:
        assert request.error or len(request.output_token_ids) == request.max_tokens
    assert all(instance.kv.num_in_use == 0 for instance in instances)
    times = [(r.metrics.token_times, r.metrics.num_preemptions, r.metrics.cut) for r in requests]
    # In one step, who ends without a row of its own ends before those with one.
    return steps, sorted(ended), times, world.now()


@examples(300)
@given(scenario=scenarios(max_requests=12))
def test_routes_preemptions_hand_offs(scenario: Scenario) -> None:
    one, other = (outcome(scenario, Follow(scenario.by_id), together) for together in (True, False))
    assert one == other


@examples(300)
@given(scenario=scenarios(max_requests=12), seed=st.integers(0, 2**16))
def test_whatever_a_system_may_do(scenario: Scenario, seed: int) -> None:
    one, other = (
        outcome(scenario, Ticks(scenario.by_id, seed, 6), together) for together in (True, False)
    )
    assert one == other


@pytest.mark.parametrize("ahead", [True, False])
def test_long_decodes_are_together_and_their_times_are_kept(ahead: bool) -> None:
    """One request lives through more steps than the group keeps the times of."""
    requests = make_requests(
        [(5, 30_000), *[(7, 100)] * 40], [0.0, *(i * 900.0 for i in range(40))]
    )
    options = InstanceOptions(max_in_flight=1 + ahead, launch_ahead=ahead)
    instance = Instance("A", make_kv(4000, 16), options, groups_decodes=True)
    world = SimulatedWorld({"A": Costs()}, {"A": 1}, {"A": (0,)}, {}, {}, requests)
    num_rows: list[int] = []
    ends: list[float] = []

    def on_event(event: Event) -> None:
        assert isinstance(event, StepDone)
        num_rows.append(len(event.rows))
        ends.append(event.end)
        assert instance.group
        assert len(instance.group._times) < 10_000

    ServingLoop(world, [instance], Single(), on_event=on_event).run()
    assert sum(num_rows) <= 3 * len(requests)
    first = requests[0].metrics.token_times
    assert len(first) == 30_000
    assert set(first) <= set(ends)
    assert first == sorted(set(first))
