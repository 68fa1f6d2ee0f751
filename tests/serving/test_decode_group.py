"""Decodes advanced together give what rows of their own give, to the last bit."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import Chaos, Follow, Scenario, examples, scenarios
from serving_checks import make_kv, make_requests

from jaxinfer.serving import decode_group
from jaxinfer.serving.decode_group import DecodeGroup
from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Action, ClusterView, Leg, MoveSlices, System
from jaxinfer.serving.work import Work
from jaxinfer.serving.world import Event, Row, StepDone
from jaxinfer.simulate.world import Lane, SimulatedWorld
from jaxinfer.systems.single import Single


def member(name: str, computed: int = 4, output: int = 1, prompt_len: int = 4) -> RequestState:
    """A request with nine output tokens at most, whose hold has two tokens a page."""
    request = RequestState(name, prompt_len, 9)
    request.legs = [Leg("A")]
    request.output_token_ids = [0] * output
    request.computed = request.launched = computed
    request.hold = make_kv(50, 2).reserve(computed)
    return request


@pytest.mark.parametrize(
    ("computed", "output", "pending", "takes"),
    [
        (4, 1, 0, True),
        (3, 0, 0, False),  # The prompt's last token is no decode.
        (4, 0, 1, True),  # Its first token is in flight.
        (4, 2, 0, False),  # Two to go: it was preempted.
        (11, 8, 0, True),  # The last token is to come.
        (11, 7, 1, True),
        (12, 9, 0, False),
        (12, 8, 1, False),
    ],
)
def test_who_only_has_to_decode(computed: int, output: int, pending: int, takes: bool) -> None:
    request = member("r", computed, output)
    request.pending = pending
    assert DecodeGroup.takes(request) == takes


def test_who_is_not_to_decode_to_the_end() -> None:
    ends, paused, moves = (member(name) for name in "abc")
    ends.legs = [Leg("A", 9), Leg("B")]
    paused.paused = True
    moves.slice_move = MoveSlices("c", 0, 1, (0,))
    assert not any(DecodeGroup.takes(request) for request in (ends, paused, moves))


def step(group: DecodeGroup) -> tuple[int, int]:
    """A step; the instance may have been asked in vain before."""
    group.retire()
    group.retire()
    return group.launch(group.full())


def integers(request: RequestState) -> tuple[int, int, int, int]:
    return request.computed, request.launched, request.pending, len(request.output_token_ids)


def test_a_member_from_its_first_step_to_its_last() -> None:
    """r has three tokens to go, s one; of nine each."""
    group, r, s = DecodeGroup(2), member("r", 9, 6), member("s", 11, 8)
    group.join(r)
    group.join(s)
    assert (r in group, member("t") in group) == (True, False)
    assert step(group) == (2, 10 + 12)
    assert step(group) == (1, 11)  # s has launched its last one.
    assert list(group.active) == ["r"]
    assert integers(r) == (9, 9, 0, 6)  # They stand still.
    group.settle()
    assert integers(r) == (9, 11, 2, 6)
    assert integers(s) == (11, 12, 1, 8)
    assert group.commit(1.5) == ([s], [])
    assert (s in group, integers(s), s.metrics.token_times) == (False, (12, 12, 0, 9), [1.5])
    assert integers(r) == (9, 11, 2, 6)
    group.settle()
    assert (integers(r), r.metrics.token_times) == ((10, 11, 1, 7), [1.5])
    assert step(group) == (1, 12)
    assert group.commit(2.5) == ([], [])
    assert group.commit(3.5) == ([r], [])
    assert (integers(r), r.metrics.token_times) == ((12, 12, 0, 9), [1.5, 2.5, 3.5])
    group.retire()
    assert not group.active
    assert not group._ends


def test_pages_are_taken_where_a_member_needs_one() -> None:
    """Two tokens a page: with 4 and 6 entries now, with 5 in the next step."""
    group = DecodeGroup(2)
    requests = [member("r", 4, 1), member("s", 5, 2), member("t", 6, 3)]
    for request in requests:
        group.join(request)
    for pages in ([3, 3, 4], [3, 4, 4], [4, 4, 5]):
        group.retire()
        full = group.full()
        assert group.launch(full)[0] == 3
        assert [r.hold.num_pages for r in requests if r.hold] == pages
        assert all(hold.num_pages == -(-tokens // 2) for hold, tokens in full)


def test_who_leaves_has_rows_of_the_steps_in_flight() -> None:
    group, r, s = DecodeGroup(2), member("r"), member("s", 6, 3)
    group.join(r)
    step(group)
    group.join(s)
    assert [step(group), step(group)] == [(2, 6 + 7), (2, 7 + 8)]
    assert group.commit(1.0) == ([], [])
    group.leave(r)
    group.leave(s)
    assert (integers(r), integers(s)) == ((5, 7, 2, 2), (6, 8, 2, 3))
    assert (group.active, r in group) == ({}, False)
    for end, starts in ((2.0, (5, 6)), (3.0, (6, 7))):
        ended, rows = group.commit(end)
        assert not ended
        assert rows == [
            Row(request, start, 1, True, True, 0, request.hold)
            for request, start in zip((r, s), starts, strict=True)
            if request.hold
        ]
    assert [request.hold.users for request in (r, s) if request.hold] == [2, 2]
    assert (group._times, r.metrics.token_times) == ([1.0, 2.0, 3.0], [1.0])
    assert step(group) == (0, 0)


def test_members_take_their_times_before_these_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_group, "_TIMES_KEPT", 3)
    group, r, s = DecodeGroup(2), member("r"), member("s", 6, 3)
    group.join(r)
    for number in range(8):
        if number == 2:
            group.join(s)
        step(group)
        step(group) if number == 0 else None  # One is always in flight besides.
        ended, _ = group.commit(float(number))
        assert len(group._times) == (number + 1) % 3
        assert ended == ([r] if number == 7 else [])
    group.settle()
    assert r.metrics.token_times == [float(i) for i in range(8)]
    assert s.metrics.token_times == [float(i) for i in range(3, 8)]


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
