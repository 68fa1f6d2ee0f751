"""Runs a loop on the fake world and asserts the invariants after every event and launch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_tokens import logprob_of
from fake_world import Cells, FakeWorld, Timing

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import HeldPages, KVShards
from jaxinfer.serving.loop import ServingLoop, Stop
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.policies import Policies
from jaxinfer.serving.prefix_cache import CachedPage
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import System


def new_instance(
    name: str,
    kv: KVShards,
    options: InstanceOptions | None = None,
    policies: Policies | None = None,
    **more: Any,
) -> Instance:
    """Return an instance with the usual options and policies where none are given."""
    return Instance(name, kv, options or InstanceOptions(), policies or Policies(), **more)


def make_kv(
    num_usable: int,
    page_size: int,
    slices: Sequence[Sequence[Any]] = ((0,),),
    caching: bool = False,
) -> KVShards:
    """Shards that each have ``num_usable`` pages per slice.

    Args:
        slices: of each shard, of one stage unless they have the same slices; or of each stage, its
            shards'. With ``caching``, each shard with slices is a stage.
    """
    if not any(isinstance(piece, tuple) for here in slices for piece in here):
        pieces = [piece for here in slices for piece in here]
        slices = [slices] if len(set(pieces)) == len(pieces) else [[here] for here in slices]
    if caching:
        slices = [[here] for stage in slices for here in stage if here]
    shards = [
        Shard(PagePool(num_usable * max(1, len(here)) + 1, page_size), here, number)
        for number, stage in enumerate(slices)
        for here in stage
    ]
    return KVShards(shards, caching)


def make_requests(
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float] | None = None,
    shared: Sequence[int] = (),
) -> list[RequestState]:
    """Requests from (prompt, output) lengths, all at time 0 unless said otherwise.

    With ``shared``, they have prompts: the first so many tokens are the same for all.
    """
    times = arrivals or [0.0] * len(lengths)
    prompts = [
        [*range(min(count, prompt)), *(100 * (i + 1) + p for p in range(count, prompt))]
        for i, ((prompt, _), count) in enumerate(zip(lengths, shared, strict=False))
    ] or [[]] * len(lengths)
    return [
        RequestState(f"r{i}", prompt, output, arrival=time, prompt_token_ids=tokens)
        for i, ((prompt, output), time, tokens) in enumerate(
            zip(lengths, times, prompts, strict=True)
        )
    ]


def pages_of(hold: HeldPages, shard: int) -> list[int]:
    """Return the pages of slices, and of the places they are on their way to."""
    found = [page for pages in hold.tables[shard].values() for page in pages]
    for table in hold.copies[shard : shard + 1]:
        found += [page for pages in table.values() for page in pages]
    return found


def check_pools(loop: ServingLoop, world: FakeWorld) -> None:
    """Free, held and pinned pages are counted independently and make up each pool.

    Of a lost instance, nobody has any, and none is cached.
    """
    for name in world.instances.keys() - loop.assignments.instances.keys():
        kv = world.instances[name].kv
        check_all_free(kv)
        assert not kv.reserved
        assert not (kv.cache and kv.cache._pages)
    in_flight = world.holds_in_flight()
    held = []
    for request in loop.assignments.live.values():
        exported = request.exported[1] if request.exported else None
        held += [h for h in (request.hold, exported, request.incoming) if h]
    assert len(set(held)) == len(held)
    for hold in held:
        assert not hold.released
        assert hold.users == in_flight[hold]
    pinned = [hold for hold in in_flight if hold.released]
    assert all(hold in held or hold.released for hold in in_flight)
    for instance in loop.assignments.instances.values():
        in_holds = [h for h in held if h.kv is instance.kv]
        in_pins = [h for h in pinned if h.kv is instance.kv]
        here = [*in_holds, *in_pins]
        if instance.kv.cache:
            check_cached_pages(instance, here)
            continue
        for number, shard in enumerate(instance.kv.shards):
            pool = shard.pool
            pins = [page for hold in in_pins for page in pages_of(hold, number)]
            holds = [page for hold in in_holds for page in pages_of(hold, number)]
            everything = sorted([*pool._free, *holds, *pins])
            assert everything == list(range(1, pool.num_usable + 1)), (instance.name, number)
            assert pool.num_free == len(pool._free)
            assert pool.num_pinned == len(pins)


def check_cached_pages(instance: Instance, here: list[HeldPages]) -> None:
    """The same of an instance with a prefix cache, whose pages several may have."""
    idle = check_cache(instance.kv, here)
    cached = {c for h in here for c in h.cached.values()}
    for number, shard in enumerate(instance.kv.shards):
        pool = shard.pool
        kept = [p for c in [*cached, *idle] for p in c.pages[number].values()]
        own = [
            pages[i]
            for h in here
            for pages in h.tables[number].values()
            for i in range(h.num_pages)
            if i not in h.cached
        ]
        everything = sorted([*pool._free, *kept, *own])
        assert everything == list(range(1, pool.num_usable + 1)), (instance.name, number)
        assert pool.num_free == len(pool._free) + len(idle) * len(shard.slices)


def check_all_free(kv: KVShards) -> None:
    for shard in kv.shards:
        assert shard.pool.num_free == shard.pool.num_usable
        assert (shard.pool.num_pinned, shard.num_pairs) == (0, 0)


def check_cache(kv: KVShards, holds: list[HeldPages]) -> list[CachedPage]:
    """Check that cached pages count the holds that have them; returns the idle ones."""
    assert kv.cache
    counts = Counter(page for hold in holds for page in hold.cached.values())
    assert kv.paging.twins or not kv.cache._twins
    assert kv.cache._twins.keys() <= kv.cache._pages.keys()
    assert all(kv.cache._twins.values())
    for digest, oldest in kv.cache._pages.items():
        for page in (oldest, *kv.cache._twins.get(digest, ())):
            assert page.is_kept
            assert page.digest == digest
            assert page.holds == counts.pop(page, 0)
            assert (page in kv.cache._idle) == (page.holds == 0)
    assert not counts, "a hold has a page that the cache does not know"
    for hold in holds:
        for index, page in hold.cached.items():
            for table, pages in zip(hold.tables, page.pages, strict=True):
                assert {piece: p[index] for piece, p in table.items()} == pages
    return list(kv.cache._idle)


def check_requests(loop: ServingLoop, world: FakeWorld) -> None:
    """Check that live requests are in one place, with the pages that go with them."""
    exported: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    moving: Counter[str] = Counter()
    for step in world.in_flight_steps.values():
        rows.update(r.request.id for r in step.batch.rows if r.epoch == r.request.epoch)
    for transfer, _, _ in world.in_flight_transfers.values():
        moving[transfer.request.id] += transfer.epoch == transfer.request.epoch
    for request in loop.assignments.live.values():
        request.check()
        assert request.finish_reason is None
        assert request.transfers == moving[request.id]
        if request.exported:
            exported[request.exported[0]] += 1
            assert request.exported[1].kv is loop.assignments.instances[request.exported[0]].kv
        if request.id in loop.assignments.unrouted:
            assert not request.legs
            assert request.hold is None
            assert request.incoming is None
            continue
        here = loop.assignments.instances[request.legs[0].instance]
        waits, imports = request in here.waiting, request.id in here.importing
        runs = request.id in here.running
        assert waits + imports + runs == 1
        assert (request.hold is None) == waits
        assert request.hold is None or request.hold.kv is here.kv
        assert runs or (request.launched == request.computed and not rows[request.id])
        assert (request.launched > request.computed) == (rows[request.id] > 0)
        assert bool(request.exported) == imports or waits
        if request.incoming:
            assert runs
            assert request.incoming.kv is not here.kv
    ahead = {r.incoming for r in loop.assignments.live.values() if r.incoming}
    held = {r.exported[1]: r for r in loop.assignments.live.values() if r.exported}
    for hold in (h for i in loop.assignments.instances.values() for h in i.kv.reserved):
        fetched = hold in held and held[hold].id not in moving and not hold.transfers
        assert hold in ahead or (fetched and hold.num_pages == len(hold.cached))
        ahead.discard(hold)
    assert not ahead
    for instance in loop.assignments.instances.values():
        options = instance.options
        assert instance.num_exported == exported[instance.name]
        assert len(instance.running) + len(instance.importing) <= options.max_num_seqs
        assert len(instance.importing) <= options.max_transfers_in_flight
        assert 0 <= instance.in_flight <= options.max_in_flight
        batches = [
            s.batch for s in world.in_flight_steps.values() if s.batch.instance == instance.name
        ]
        assert instance.in_flight == len(batches)
        for batch in batches:
            assert batch.work.tokens <= options.max_num_batched_tokens
            assert len({row.request.id for row in batch.rows}) == len(batch.rows)
        if options.chunks_in_flight == 1:
            chunks = [
                (row.request.id, row.epoch)
                for batch in batches
                for row in batch.rows
                if not row.samples
            ]
            assert len(set(chunks)) == len(chunks)
        queues = [*instance.waiting, *instance.importing.values(), *instance.running.values()]
        assert all(loop.assignments.live.get(r.id) is r for r in queues)
        assert all(r.legs[0].instance == instance.name for r in queues)
    assert set(loop.assignments.unrouted) <= set(loop.assignments.live)


def follows_a_chunk(request: RequestState) -> bool:
    return request.launched > request.computed and not request.pending


def check_nobody_idles(loop: ServingLoop) -> None:
    """Check that an instance with room for a batch leaves no request that could join it."""
    for instance in loop.assignments.instances.values():
        options = instance.options
        if instance.in_flight >= options.max_in_flight:
            continue
        for request in instance.running.values():
            assert request.hold
            chunk = min(request.leg_goal, request.launched + options.max_num_batched_tokens)
            assert (
                request.paused
                or request.slice_move
                or chunk <= request.launched
                or (request.pending and not options.launch_ahead)
                or (options.chunks_in_flight == 1 and follows_a_chunk(request))
                or chunk > request.hold.capacity
            ), f"{instance.name} has nothing in flight for {request}"
        if instance.waiting and instance.has_seat and not instance.keeps_pages:
            head, leg = instance.waiting[0], instance.waiting[0].legs[0]
            if head.exported and head.exported[0] == instance.name:
                fits = True
            elif head.exported and not instance.can_import:
                fits = False
            else:
                extra = instance.pages_to_take(head, leg)
                fits = instance.policies.admit(instance, head, leg)
                if instance.has_more and not head.computed and instance.has_more(head):
                    extra += len(instance.running)  # A fetch leaves a page for each.
                fits = fits and extra <= instance.kv.num_free
            assert not fits, f"{instance.name} has room for {head}"


@dataclass
class Outcome:
    """The outcome of a verified run; ``ended`` has the time when each request was given back."""

    loop: ServingLoop
    world: FakeWorld
    finished: dict[str, RequestState]
    ended: dict[str, float]

    def transfers_of(self, request: str) -> list[tuple[str, str, int, int]]:
        """(source, destination, start, stop) of each transfer."""
        moved = [t for t in self.world.transfers if t.request.id == request]
        return [(t.source, t.dest, t.start, t.stop) for t in moved]

    def route_of(self, request: str) -> list[tuple[str, int]]:
        """(instance, KV entries computed there), in order of time, adjacent ones joined."""
        route: list[tuple[str, int]] = []
        for batch in self.world.batches:
            for row in batch.rows:
                if row.request.id != request:
                    continue
                if route and route[-1][0] == batch.instance:
                    route[-1] = (batch.instance, route[-1][1] + row.count)
                else:
                    route.append((batch.instance, row.count))
        return route


@dataclass
class Run:
    """A workload on instances under a system; ``verify`` runs it to the end and checks it.

    ``stop_at`` gives the number of output tokens after which a request stops by itself.
    """

    system: System
    instances: Sequence[Instance]
    requests: Sequence[RequestState]
    timing: Timing = field(default_factory=Timing)
    stop_at: dict[str, int] = field(default_factory=dict)
    max_steps: int | None = None
    watch: Callable[[ServingLoop], None] = lambda loop: None
    # Makes an instance of a name anew.
    renew: Callable[[str], Instance] | None = None
    # Whether each step takes in whatever it can.
    greedy: bool = True
    # What the pages hold to begin with: those of the run that has left them.
    cells: Cells = field(default_factory=dict)

    def _check_stop(self, request: RequestState, token: int) -> Stop | None:
        stop_at = self.stop_at.get(request.id)
        return ("stop", token) if len(request.output_token_ids) == stop_at else None

    def verify(self) -> Outcome:
        finished: dict[str, RequestState] = {}
        ended: dict[str, float] = {}

        def finish(request: RequestState) -> None:
            assert request.id not in finished
            finished[request.id] = request
            ended[request.id] = world.now()

        def check() -> None:
            check_pools(loop, world)
            check_requests(loop, world)
            self.watch(loop)

        work = sum(r.peak_tokens for r in self.requests)
        bound = self.max_steps or 20 + work * (4 + len(self.requests))
        world = FakeWorld(
            self.instances,
            self.requests,
            self.timing,
            check,
            max_steps=bound,
            at_rest=lambda: check_nobody_idles(loop) if self.greedy else None,
            cells=self.cells,
        )
        loop = ServingLoop(
            world,
            self.instances,
            self.system,
            check_stop=self._check_stop,
            on_finish=finish,
            on_event=world.committed,
            renew=lambda name: world.renew(self.renew(name)) if self.renew else None,
        )
        loop.run()
        self._check_end(loop, world, finished)
        return Outcome(loop, world, finished, ended)

    def _check_end(
        self, loop: ServingLoop, world: FakeWorld, finished: dict[str, RequestState]
    ) -> None:
        check_pools(loop, world)
        check_requests(loop, world)
        assert not loop.assignments.live
        assert not world.in_flight_steps
        assert not world.in_flight_transfers
        for instance in loop.assignments.instances.values():
            assert not instance.num_requests
            check_all_free(instance.kv)
        assert set(finished) == {r.id for r in self.requests}
        named = {tuple(pair) for pair in self.system.routes([i.name for i in self.instances])}
        assert {(t.source, t.dest) for t in world.transfers if t.source != t.dest} <= named
        for request in self.requests:
            if request.finish_reason not in ("error", "lost"):
                self._check_output(request, world)

    def _check_output(self, request: RequestState, world: FakeWorld) -> None:
        stop_at = self.stop_at.get(request.id, request.max_tokens)
        count = min(stop_at, request.max_tokens)
        assert request.output_token_ids == world.references[request.id].output(count)
        stopped = self.stop_at.get(request.id) == count
        assert request.finish_reason == ("stop" if stopped else "length")
        times = request.metrics.token_times
        assert len(times) == count
        assert times == sorted(times)
        tokens = request.output_token_ids
        assert request.stop_reason == (tokens[-1] if stopped else None)
        assert request.cumulative_logprob == sum(logprob_of(token) for token in tokens)
        assert request.details == [("sampled", token) for token in tokens]
        for position, detail in request.prompt_details.items():
            assert detail == ("prompt", world.references[request.id].token(position))
        if not world.caching:
            assert sorted(request.prompt_details) == list(range(request.prompt_len))
        self._check_times(request, world)
        if count == 1:  # Whatever comes after the first token is never sent.
            moved = [t for t in world.transfers if t.request is request]
            moved = [t for t in moved if not (t.slice_move or t.is_copy)]
            if request.max_tokens > 1:  # What leaves with the step that turns out to be the last.
                moved = [t for t in moved if t not in world.sent_along]
            assert all(t.stop < request.prompt_len for t in moved)

    def _check_times(self, request: RequestState, world: FakeWorld) -> None:
        """Tokens come at the ends of steps that sample them; the first of its steps was earlier."""
        steps = [
            (step.start, step.end, row)
            for step in world.steps
            for row in step.batch.rows
            if row.request is request
        ]
        times = request.metrics.token_times
        for position, time in enumerate(times, request.prompt_len):
            ends = [
                end for _, end, row in steps if row.samples and row.start + row.count == position
            ]
            assert time in ends
        first = request.metrics.first_scheduled
        assert first in [start for start, _, _ in steps]
        assert request.arrival <= first < times[0]
