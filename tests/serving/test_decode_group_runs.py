"""Runs in which decodes go together, and the same one row each."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from operator import attrgetter
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from modelled_world import modelled_world
from properties import examples
from scenarios import Chaos, Follow, Scenario, Script, policy_options, scenarios
from serving_checks import make_kv, make_requests, new_instance

from jaxinfer.serving.batch import Work
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop, Stop
from jaxinfer.serving.policies import Policies, PolicyOptions, make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Action, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.serving.world import Event, StepDone
from jaxinfer.simulate.stage_path import StagePath
from jaxinfer.systems.single import Single


@dataclass
class Costs:
    """A time of its own for whatever a step may hold, and each stage."""

    num_stages: int = 1

    def stages(self, work: Work) -> list[float]:
        parts = (work.tokens, work.sampled, work.single_context, work.pairs, work.decodes)
        seconds = 0.1 + sum(0.37**i * part for i, part in enumerate(parts, 1))
        return [seconds * (1 + 0.3 * number) for number in range(self.num_stages)]

    def hops(self, work: Work) -> list[float]:
        return [0.01 * work.tokens] * (self.num_stages - 1)


class Ticks(Chaos):
    """Acts at times of its own, not after steps."""

    on_step = System.on_step
    make_room = System.make_room  # A simulation does not move slices yet.

    def _any_move(self, name: str, cluster: ClusterView) -> Action:
        return self._act(cluster)

    def on_tick(self, cluster: ClusterView) -> list[Action]:
        for instance in cluster.instances.values():
            for request in instance.running.values():
                assert isinstance(request, RequestState)
                request.check()
        return list(super().on_tick(cluster))


class Hears(Ticks):
    """Keeps what its hooks are told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[tuple[object, ...]] = []

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        self._note("leg", leg, request, cluster)

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        self._note("end", None, request, cluster)

    def _note(self, hook: str, leg: Leg | None, request: RequestView, cluster: ClusterView) -> None:
        views = cluster.instances.values()
        there = [(v.counts, v.longest_decodes(3), list(v.running)) for v in views]
        self.heard.append((request.id, cluster.now, hook, leg, request.num_known, there))


def outcome(
    scenario: Scenario,
    system: System,
    together: bool,
    policies: Callable[[], Policies] = Policies,
    num_output: Callable[[RequestState], int] = attrgetter("max_tokens"),
) -> tuple[object, ...]:
    """Return the outcome of a scenario; ``num_output`` ends requests at other lengths."""

    def check_stop(request: RequestState, token: int) -> Stop | None:
        sampled = len(request.output_token_ids)
        return ("stop", None) if sampled == num_output(request) < request.max_tokens else None

    instances = [
        new_instance(
            name,
            make_kv(pages, size, layout),
            options,
            policies(),
            groups_decodes=together,
            num_output=num_output,
        )
        for name, pages, size, layout, options in scenario.instances
    ]
    names = [instance.name for instance in instances]
    lanes = {pair: [StagePath(0, 3, (pair,), 0.05)] for pair in permutations(names, 2)}
    lengths = [(s.prompt_len, s.max_tokens) for s in scenario.scripts]
    requests = make_requests(lengths, [s.arrival for s in scenario.scripts])
    stages = {name: scenario.timing.stages.get(name, 1) for name in names}
    devices = {name: range(count) for name, count in stages.items()}
    world = modelled_world(
        {name: Costs(count) for name, count in stages.items()},
        dict.fromkeys(names, 1),
        devices,
        lanes,
        dict.fromkeys(lanes, 7.0),
        sorted(requests, key=lambda r: r.arrival),
    )
    steps: list[tuple[object, ...]] = []
    ended: list[str] = []

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            batch = event.batch
            steps.append((event.instance, event.start, event.end, batch.work, batch.pages_in_use))

    ServingLoop(world, instances, system, check_stop, lambda r: ended.append(r.id), on_event).run()
    for request in requests:
        assert request.error or len(request.output_token_ids) == num_output(request)
    assert all(instance.kv.num_in_use == 0 for instance in instances)
    times = [
        (r.metrics.token_times, r.metrics.num_preemptions, r.metrics.cut, r.finish_reason)
        for r in requests
    ]
    return steps, ended, times, world.now()


@examples(150)
@given(scenario=scenarios(max_requests=12))
def test_routes_preemptions_hand_offs(scenario: Scenario) -> None:
    one, other = (outcome(scenario, Follow(scenario.by_id), together) for together in (True, False))
    assert one == other


@examples(150)
@given(scenario=scenarios(max_requests=12), seed=st.integers(0, 2**16))
def test_whatever_a_system_may_do(scenario: Scenario, seed: int) -> None:
    one, other = (
        outcome(scenario, Ticks(scenario.by_id, seed, 6), together) for together in (True, False)
    )
    assert one == other


@examples(75)
@given(scenario=scenarios(max_requests=12), seed=st.integers(0, 2**16))
def test_hooks_hear_the_same_and_leave_decodes_together(scenario: Scenario, seed: int) -> None:
    one, other = (Hears(scenario.by_id, seed, 6) for _ in range(2))
    assert outcome(scenario, one, True) == outcome(scenario, other, False)
    assert one.heard == other.heard
    assert sum(hook == "end" for _, _, hook, *_ in one.heard) == len(scenario.scripts)


@examples(150)
@given(scenario=scenarios(max_requests=12), chosen=policy_options())
def test_any_policies(scenario: Scenario, chosen: PolicyOptions) -> None:
    one, other = (
        outcome(scenario, Follow(scenario.by_id), together, lambda: make_policies(chosen))
        for together in (True, False)
    )
    assert one == other


def test_even_decodes_go_by_admission_grouped_or_not() -> None:
    """A request with legs to come stays a row, and goes before those admitted after it."""

    def script(prompt: int, output: int, arrival: float, *legs: tuple[str, int | None]) -> Script:
        return Script(prompt, output, arrival, None, tuple(Leg(*leg) for leg in legs), 1, 0)

    scripts = [script(1, 1, 0.0, ("A", None)) for _ in range(4)]
    scripts += [script(1, 1, 0.0, ("B", None)), script(2, 1, 1.0, ("A", None))]
    scripts += [script(1, 4, 0.0, ("A", 1), ("A", 2), ("A", None))]
    scripts += [script(3, 6, 1.0, ("A", 4), ("A", None))]
    options = [
        InstanceOptions(2, 2, 2, False, "all", 1, 0.0),
        InstanceOptions(1, 1, 1, False, 1, 1, 0.0),
    ]
    instances = [(name, 8, 1, ((0,),), o) for name, o in zip("AB", options, strict=True)]
    scenario = Scenario(scripts, instances, Timing(0, 1, 1, {"A": 1, "B": 1}), False)
    even = PolicyOptions(batching="even_decodes")
    one, other = (
        outcome(scenario, Follow(scenario.by_id), together, lambda: make_policies(even))
        for together in (True, False)
    )
    assert one == other


@examples(150)
@given(
    scenario=scenarios(max_requests=12),
    seed=st.integers(0, 2**16),
    chosen=st.none() | policy_options(),
)
def test_ends_that_only_the_world_knows(
    scenario: Scenario, seed: int, chosen: PolicyOptions | None
) -> None:
    """Decodes launched behind a request's last one take part in their steps, and are void."""

    def num_output(request: RequestState) -> int:
        return scenario.by_id[request.id].stop_at or request.max_tokens

    def policies() -> Policies:
        return make_policies(chosen or PolicyOptions())

    systems = (Ticks(scenario.by_id, seed, 6 if chosen is None else 0) for _ in range(2))
    one, other = (
        outcome(scenario, system, together, policies, num_output)
        for system, together in zip(systems, (True, False), strict=True)
    )
    assert one == other


@pytest.mark.parametrize("ahead", [True, False])
def test_long_decodes_are_together_and_their_times_are_kept(ahead: bool) -> None:
    """A request lives through more steps than the group keeps the times of."""
    requests = make_requests(
        [(5, 30_000), *[(7, 100)] * 40], [0.0, *(i * 900.0 for i in range(40))]
    )
    options = InstanceOptions(max_in_flight=1 + ahead, launch_ahead=ahead)
    instance = new_instance("A", make_kv(4000, 16), options, groups_decodes=True)
    world = modelled_world({"A": Costs()}, {"A": 1}, {"A": (0,)}, {}, {}, requests)
    num_rows: list[int] = []
    ends: list[float] = []

    def on_event(event: Event) -> None:
        assert isinstance(event, StepDone)
        num_rows.append(len(event.rows))
        ends.append(event.end)
        (group,) = instance.taking_part._groups
        assert len(group._times) < 10_000

    ServingLoop(world, [instance], Single(), on_event=on_event).run()
    assert sum(num_rows) <= 3 * len(requests)
    first = requests[0].metrics.token_times
    assert len(first) == 30_000
    assert set(first) <= set(ends)
    assert first == sorted(set(first))
