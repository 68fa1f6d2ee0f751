"""Views of a system: decode groups, not brought up to date, are what a count would find."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import Chaos, Scenario, policy_options, scenarios
from schedules import pool, serve, unit
from serving_checks import make_kv, make_requests, new_instance
from test_decode_group_runs import Ticks, outcome

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.policies import Policies, make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment, Reassign, System
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView
from jaxinfer.serving.waiting import Waiting

Counts = tuple[Any, ...]


def seen(instance: InstanceView) -> Counts:
    return (
        instance.num_running,
        instance.kv_entries,
        instance.prompt_tokens_left,
        instance.num_pages,
        instance.num_awaited_pages,
        instance.counts,
        [entries for _, entries in instance.longest_decodes(3)],
    )


def todo(request: RequestView) -> int:
    """Prompt positions without KV that its leg is to compute."""
    until = request.legs[0].until
    goal = range(request.computed, request.prompt_len)
    return sum(until is None or position < until for position in goal)


def counted(instance: InstanceView) -> Counts:
    """Counts one by one, groups settled."""
    running = instance.running.values()
    here = [*instance.waiting, *instance.importing.values(), *running]
    assert isinstance(instance, Instance)
    decodes = {r.id: r.computed for r in running if r.computed >= r.prompt_len}
    longest = instance.longest_decodes(3)
    assert all(decodes[name] == entries for name, entries in longest)
    assert len({name for name, _ in longest}) == len(longest)
    return (
        len(running),
        sum(r.computed for r in running),
        sum(map(todo, here)),
        instance.kv.shards[0].pool.num_usable // max(len(instance.kv.shards[0].slices), 1),
        sum(
            instance.kv.pages_for(r.num_known)
            for r in instance.waiting
            if r.held_by != instance.name
        ),
        (
            len(running),
            len(decodes),
            sum(decodes.values()),
            sum(r.computed for r in running),
            sum(map(todo, here)),
        ),
        sorted(decodes.values(), reverse=True)[:3],
    )


class Looks(Ticks):
    """Compares, whenever it is asked or hears of something, before and after settling."""

    looks = 0

    def _look(self, cluster: ClusterView) -> None:
        self.looks += 1
        for instance in cluster.instances.values():
            before = seen(instance)
            if self.rng.random() < 0.5:  # Else groups go on unsettled.
                assert before == counted(instance) == seen(instance)

    def route(self, waiting: Any, cluster: ClusterView) -> Any:
        self._look(cluster)
        return super().route(waiting, cluster)

    def on_tick(self, cluster: ClusterView) -> Any:
        self._look(cluster)
        return Chaos.on_tick(self, cluster)

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        self._look(cluster)

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        self._look(cluster)


@examples(300)
@given(
    scenario=scenarios(max_requests=12),
    seed=st.integers(0, 2**16),
    actions=st.integers(0, 6),
    together=st.booleans(),
    chosen=policy_options(),
)
def test_counts_in_a_simulation(
    scenario: Scenario, seed: int, actions: int, together: bool, chosen: Any
) -> None:
    system = Looks(scenario.by_id, seed, actions)
    outcome(scenario, system, together, lambda: make_policies(chosen))
    assert system.looks > len(scenario.scripts)


@examples(150)
@given(scenarios(), st.integers(0, 2**16), st.integers(1, 20))
def test_counts_at_every_event(scenario: Scenario, seed: int, actions: int) -> None:
    """Counts hold with prefix cache hits, hand-offs of all kinds, and KV that is dropped."""
    run = scenario.run(Chaos(scenario.by_id, seed, actions, scenario.caching))

    def watch(loop: ServingLoop) -> None:
        for instance in loop.assignments.instances.values():
            assert seen(instance) == counted(instance)

    run.watch = watch
    run.verify()


class Watches(System):
    """A leg each, of the first eight tokens on A; what it sees at each half second."""

    tick_interval = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[float, tuple[Counts, Counts]] = {}
        self.first: dict[str, float | None] = {}

    def route(self, waiting: Any, cluster: ClusterView) -> Any:
        self.requests = list(waiting)
        return [Assignment(r.id, (Leg("A", 8), Leg("B"))) for r in waiting]

    def on_tick(self, cluster: ClusterView) -> tuple[Reassign, ...]:
        a, b = cluster.instances.values()
        self.counts[cluster.now] = seen(a)[:3], seen(b)[:3]
        return ()

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        self.first[request.id] = request.first_token_at


def test_by_hand() -> None:
    """Ten tokens and six, four a step: the second waits for a seat at A, and for one at B."""
    system = Watches()
    pools = [pool("A", max_num_seqs=1), pool("B", max_num_seqs=1)]
    serve(system, pools, [(10, 2), (6, 2)], timing=unit(transfers={"B": 2}))
    zero = (0, 0, 0)
    assert {now: counts for now, counts in system.counts.items() if now % 1} == {
        0.5: ((1, 0, 14), zero),
        1.5: ((1, 4, 10), zero),
        2.5: ((1, 0, 6), (0, 0, 2)),  # r0's eight entries are on the way.
        3.5: ((1, 4, 2), (0, 0, 2)),
        4.5: ((1, 6, 0), (1, 8, 2)),  # r1 decodes at A, up to the end of its leg.
        5.5: (zero, (1, 10, 0)),
    }
    assert system.first == {"r1": 4, "r0": 5}


def test_a_view_tells_when_the_first_token_was_there() -> None:
    request = RequestState("r", 4, 9)
    assert (request.first_token_at, request.predicted) == (None, None)
    request.metrics.token_times += [3.5, 4.0]
    assert request.first_token_at == 3.5


@pytest.mark.parametrize(
    ("until", "computed", "left"),
    [(None, 0, 10), (None, 10, 0), (None, 15, 0), (7, 3, 4), (20, 3, 7)],
)
def test_what_is_left_of_a_prompt(until: int | None, computed: int, left: int) -> None:
    request = RequestState("r", 10, 9)
    request.legs, request.computed = [Leg("A", until)], computed
    assert request.prompt_tokens_left == left


def test_a_queue_counts() -> None:
    queue, (r, s) = Waiting("A", 4), make_requests([(10, 1), (5, 1)])
    r.legs, s.legs = [Leg("A")], [Leg("A", 3)]
    queue.append(r)
    assert (queue.prompt_tokens_left, queue.pages) == (10, 3)
    r.computed = 0
    queue.appendleft(s)
    assert (queue.prompt_tokens_left, queue.pages, list(queue)) == (13, 5, [s, r])
    queue.remove(r)
    assert (queue.prompt_tokens_left, queue.pages, list(queue)) == (3, 2, [s])
    s.computed = 0
    queue.void_kv(s)
    assert (queue.prompt_tokens_left, s.epoch) == (3, 1)


def test_kv_that_is_forgotten_is_to_be_computed_again() -> None:
    queue, (r,) = Waiting("A", 4), make_requests([(10, 1)])
    r.legs, r.computed, r.launched = [Leg("A")], 6, 6
    queue.append(r)
    assert queue.prompt_tokens_left == 4
    queue.void_kv(r)
    assert (queue.prompt_tokens_left, r.computed) == (10, 0)


def test_counts_settle_no_group() -> None:
    """Members' own integers stand still while the counts go on."""
    instance = new_instance(
        "A", make_kv(100, 4), InstanceOptions(), Policies(), groups_decodes=True
    )
    request = RequestState("r", 4, 50)
    request.legs = [Leg("A")]
    instance.waiting.append(request)
    found = []
    for _ in range(6):
        batch = instance.next_batch()
        assert batch
        instance.in_flight -= 1
        if batch.grouped:
            instance.taking_part.commit_group(batch, 1.0)
        else:
            request.computed, request.pending = 4, 0
            request.output_token_ids.append(0)
        found.append((instance.kv_entries, request.computed))
    assert found == [(4, 4), (5, 4), (6, 4), (7, 4), (8, 4), (9, 4)]
