"""The seam holds: systems of about ten lines, on the public surface of serving alone."""

from collections.abc import Collection, Iterator, Sequence

import pytest
from fake_world import Timing
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.system import (
    Action,
    Assignment,
    MoveSlices,
    Pause,
    Reassign,
    Resume,
    SetRole,
    System,
)
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView, StepView

LENGTHS = [(9, 6), (5, 1), (12, 8), (3, 9), (7, 4), (10, 2), (1, 5), (8, 8)]
Waiting = Collection[RequestView]
SEEDS = pytest.mark.parametrize("seed", range(6))


def instance(
    name: str,
    pages: int = 12,
    page_size: int = 4,
    role: str = "",
    slices: Sequence[tuple[int, ...]] = ((0,),),
    max_num_seqs: int = 8,
    budget: int = 5,
) -> Instance:
    options = InstanceOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return new_instance(name, make_kv(pages, page_size, slices), options, role=role)


def serve(
    system: System,
    *instances: Instance,
    seed: int = 0,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    gap: float = 2.0,
    max_transfer: int = 6,
) -> Outcome:
    arrivals = [i * gap for i in range(len(lengths))]
    timing = Timing(seed=seed, max_step=3, max_transfer=max_transfer)
    return Run(system, instances, make_requests(lengths, arrivals), timing).verify()


def least_loaded(cluster: ClusterView, role: str) -> InstanceView:
    candidates = [i for i in cluster.instances.values() if i.role == role and not i.draining]
    return min(candidates, key=lambda i: i.num_requests)


# 1. The KV goes over chunk by chunk, while the prompt is still being computed.


class PerChunk(System):
    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        return [Assignment(r.id, (Leg("A", r.prompt_len, "per_chunk"), Leg("B"))) for r in waiting]


@SEEDS
def test_per_chunk(seed: int) -> None:
    outcome = serve(PerChunk(), instance("A"), instance("B", page_size=2), seed=seed, gap=20.0)
    for name, request in outcome.finished.items():
        moved = outcome.transfers_of(name)
        if request.max_tokens == 1:
            assert all(stop < request.prompt_len for _, _, _, stop in moved)
            continue
        # Chunks of 5 tokens at most, one after the other, without gap or overlap.
        assert [start for *_, start, _ in moved] == [0, *[stop for *_, stop in moved][:-1]]
        assert moved[-1][3] == request.prompt_len
        assert len(moved) >= 2 or request.prompt_len <= 5
        assert outcome.route_of(name) == [("A", request.prompt_len), ("B", request.max_tokens - 1)]
    early = [t for t in outcome.world.transfers if t.stop < t.request.prompt_len]
    assert early


class PerSegment(System):
    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        first = [(r.id, Leg("A", r.prompt_len, "per_segment")) for r in waiting]
        return [Assignment(name, (leg, Leg("B"))) for name, leg in first]


@SEEDS
def test_per_segment(seed: int) -> None:
    outcome = serve(PerSegment(), instance("A"), instance("B", page_size=2), seed=seed, gap=20.0)
    along = outcome.world.sent_along
    late = {t.request.id for t in outcome.world.transfers if t not in along}
    assert len(late) < len(outcome.finished) / 2
    for name, request in outcome.finished.items():
        if name in late:
            continue  # There was no room at B for a while.
        # With each step goes what it computes, except that of a request which ends with it.
        steps = [
            (row.start, row.start + row.count)
            for batch in outcome.world.batches
            for row in batch.rows
            if batch.instance == "A" and row.request is request
        ]
        moved = [(start, stop) for *_, start, stop in outcome.transfers_of(name)]
        assert moved == (steps[:-1] if request.max_tokens == 1 else steps)


# 2. Both instances are named when a request comes in (Splitwise).


class PairAtArrival(System):
    def route(self, waiting: Waiting, cluster: ClusterView) -> Iterator[Assignment]:  # type: ignore[override]
        for r in waiting:
            prefill, decode = (least_loaded(cluster, role) for role in ("prefill", "decode"))
            yield Assignment(r.id, (Leg(prefill.name, r.prompt_len, "at_end"), Leg(decode.name)))


@SEEDS
def test_pair_at_arrival(seed: int) -> None:
    pool = [instance(f"p{i}", role="prefill") for i in range(2)]
    pool += [instance(f"d{i}", role="decode", page_size=3) for i in range(2)]
    outcome = serve(PairAtArrival(), *pool, seed=seed)
    used = set()
    for name, request in outcome.finished.items():
        route = outcome.route_of(name)
        used |= {place for place, _ in route}
        assert len(outcome.transfers_of(name)) == (request.max_tokens > 1)
        assert [place[0] for place, _ in route] == ["p", "d"][: 1 + (request.max_tokens > 1)]
    assert len(used) >= 3


# 3. Instances take the other role under load, once they are empty (TetriInfer). The decode
#    leg stays open until the prompt is done.


class RoleFlip(System):
    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        def leg(r: RequestView) -> Leg:
            if r.computed >= r.prompt_len:
                return Leg(least_loaded(cluster, "decode").name)
            return Leg(least_loaded(cluster, "prefill").name, r.prompt_len)

        return [Assignment(r.id, (leg(r),)) for r in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> list[Action]:
        prefills = [i for i in cluster.instances.values() if i.role == "prefill" and not i.draining]
        busy = least_loaded(cluster, "decode").num_requests >= 2
        return [SetRole(prefills[-1].name, "decode")] if busy and len(prefills) > 1 else []


@SEEDS
def test_role_flip(seed: int) -> None:
    roles = {"x": "prefill", "y": "prefill", "z": "decode"}
    pool = [instance(name, role=role) for name, role in roles.items()]
    outcome = serve(RoleFlip(), *pool, seed=seed, lengths=LENGTHS * 3)
    assert {i.name: i.role for i in pool} == {"x": "prefill", "y": "decode", "z": "decode"}
    rows = [(b.instance, r) for b in outcome.world.batches for r in b.rows]
    decoded = [name for name, row in rows if row.start >= row.request.prompt_len]
    assert {"y", "z"} == set(decoded)
    assert "y" in {name for name, row in rows if row.start < row.request.prompt_len}


class TakeTurns(System):
    """The role names the one request that is served: nothing else happens between two of them."""

    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        return [
            Assignment(r.id, (Leg("x"),)) for r in waiting if cluster.instances["x"].role == r.id
        ]

    def on_step(self, step: StepView, cluster: ClusterView) -> list[Action]:
        return [SetRole("x", f"r{int(cluster.instances['x'].role[1:]) + 1}")]


def test_a_role_is_taken_before_the_system_is_asked_again() -> None:
    x = instance("x", role="r0")
    outcome = serve(TakeTurns(), x, gap=0.0)
    assert list(outcome.finished) == [f"r{i}" for i in range(len(LENGTHS))]
    assert x.role == f"r{len(LENGTHS)}"


# 4. A request moves in the middle of its decode; so do some of its heads (Hetis).


class Migrate(System):
    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        return [Assignment(r.id, (Leg("A"),)) for r in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> list[Action]:
        running = cluster.instances["A"].running.values()
        late = [r for r in running if r.num_known >= r.prompt_len + 3]
        return [Reassign(r.id, (Leg("B"),)) for r in late if len(r.legs) == 1]


@SEEDS
def test_migration_of_a_request(seed: int) -> None:
    outcome = serve(Migrate(), instance("A"), instance("B", page_size=3), seed=seed)
    for name, request in outcome.finished.items():
        route = outcome.route_of(name)
        if request.max_tokens < 4:
            assert [place for place, _ in route] == ["A"]
        elif request.max_tokens > 5:
            assert [place for place, _ in route] == ["A", "B"]
            # What was in flight at the decision is still A's; nothing is computed twice.
            assert request.prompt_len + 2 <= route[0][1] <= request.prompt_len + 4
            assert sum(count for _, count in route) == request.peak_tokens
            assert outcome.transfers_of(name) == [("A", "B", 0, route[0][1])]


class MoveHeads(System):
    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        return [Assignment(r.id, (Leg("A"),)) for r in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> list[Action]:
        here = cluster.instances[step.instance]
        full, empty = (shard.num_free_pages for shard in here.shards)
        moves = (
            MoveSlices(r.id, ((0, 1, (1,)),)) for r in here.running.values() if 1 in r.slices[0]
        )
        return [next(moves, Pause("nobody"))] if full < empty / 2 else []


@SEEDS
def test_migration_of_some_heads(seed: int) -> None:
    # Shard 0 has room for 14 pages of each of its slices, shard 1 pages to spare.
    kv = KVShards([Shard(PagePool(29, 4), (0, 1)), Shard(PagePool(60, 4), (2,))])
    a = new_instance("A", kv, InstanceOptions(max_num_seqs=8, max_num_batched_tokens=5))
    outcome = serve(MoveHeads(), a, seed=seed)
    moved = [t for t in outcome.world.transfers if t.slice_move]
    assert moved
    after = [
        row.start
        for batch in outcome.world.batches
        for row in batch.rows
        if any(row.request is t.request and row.start >= t.stop for t in moved)
    ]
    assert after, "a request went on after its heads had moved"
    rests = [t for t in moved if t.start]
    assert any(
        rest.request is full.request
        and row.request is full.request
        and full.stop == rest.start < row.start < rest.stop
        for full in moved
        for rest in rests
        for batch in outcome.world.batches
        for row in batch.rows
    ), "a request went on while its full pages moved"


# 5. The youngest pauses where pages are short, and goes on when there is room.


class PauseYoungest(System):
    tick_interval = 5.0

    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        return [Assignment(r.id, (Leg("A"),)) for r in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> list[Action]:
        running = [r for r in cluster.instances["A"].running.values() if not r.paused]
        short = cluster.instances["A"].num_free_pages < 3 and len(running) > 1
        return [Pause(running[-1].id)] if short else self.on_tick(cluster)

    def on_tick(self, cluster: ClusterView) -> list[Action]:
        a = cluster.instances["A"]
        paused = [r for r in a.running.values() if r.paused]
        room = a.num_free_pages >= 4 or len(paused) == len(a.running)
        return [Resume(paused[0].id)] if paused and room else []


@SEEDS
def test_pause(seed: int) -> None:
    lengths = [(4, 12), (4, 12), (4, 12), (4, 3)]
    outcome = serve(PauseYoungest(), instance("A"), lengths=lengths, seed=seed, gap=1.0)
    assert sum(r.metrics.num_preemptions for r in outcome.finished.values()) == 0
    gaps = [
        b - a
        for r in outcome.finished.values()
        for a, b in zip(r.metrics.token_times, r.metrics.token_times[1:], strict=False)
    ]
    assert max(gaps) > 6


# 6. Further uses of the seam.


class OpenLegs(System):
    """Asked again after each leg, and goes round the instances in pieces of four tokens."""

    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        names = sorted(cluster.instances)
        return [
            Assignment(r.id, (Leg(names[r.computed // 4 % len(names)], r.computed // 4 * 4 + 4),))
            for r in waiting
        ]


@SEEDS
def test_legs_left_open(seed: int) -> None:
    pool = [instance("A"), instance("B", page_size=3), instance("C", page_size=1, pages=40)]
    outcome = serve(OpenLegs(), *pool, seed=seed)
    for name, request in outcome.finished.items():
        pieces = [min(4, request.peak_tokens - i) for i in range(0, request.peak_tokens, 4)]
        assert outcome.route_of(name) == [("ABC"[i % 3], n) for i, n in enumerate(pieces)]


class Gather(System):
    """Holds requests back and routes them in groups at each tick, shortest first."""

    tick_interval = 10.0

    def __init__(self) -> None:
        self.open = False

    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        now, self.open = self.open, False
        order = sorted(waiting, key=lambda r: r.prompt_len)
        return [Assignment(r.id, (Leg("A"),)) for r in order] if now else []

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        self.open = True
        return ()


def test_ticks() -> None:
    outcome = serve(Gather(), instance("A", pages=200, budget=100), gap=1.0)
    first = [row.request for row in outcome.world.batches[0].rows]
    assert len(first) == len(LENGTHS)
    assert [r.prompt_len for r in first] == sorted(n for n, _ in LENGTHS)
    assert all(r.metrics.first_scheduled == 10 for r in first)


@SEEDS
def test_a_tick_and_the_last_arrival_at_one_time(seed: int) -> None:
    run = Run(Gather(), [instance("A")], make_requests([(3, 3)], [10.0]), Timing(seed))
    first = run.verify().finished["r0"].metrics.first_scheduled
    assert first in (10.0, 20.0)


class Cronus(System):
    """Part of the prompt on the slow instance, at most two requests there, the rest on the fast."""

    def route(self, waiting: Waiting, cluster: ClusterView) -> list[Assignment]:
        seats = 2 - cluster.instances["slow"].num_requests
        return [
            Assignment(r.id, (Leg("slow", self.split(r, cluster)), Leg("fast")))
            for r in list(waiting)[: max(0, seats)]
        ]

    def split(self, r: RequestView, cluster: ClusterView) -> int:
        busy = cluster.instances["fast"].num_requests
        return max(1, r.prompt_len * (busy + 1) // (busy + 2))


@SEEDS
def test_cronus(seed: int) -> None:
    most = 0

    def watch(loop) -> None:  # type: ignore[no-untyped-def]
        nonlocal most
        most = max(most, loop.assignments.instances["slow"].num_requests)

    pool = [instance("slow", budget=3), instance("fast")]
    requests = make_requests(LENGTHS, [0.0] * len(LENGTHS))
    outcome = Run(Cronus(), pool, requests, Timing(seed, 3, 6), watch=watch).verify()
    assert most == 2
    partial = [
        name for name, r in outcome.finished.items() if outcome.route_of(name)[0][1] < r.prompt_len
    ]
    assert len(partial) >= 5
    assert all(len(outcome.transfers_of(name)) == 1 for name in partial)
