"""Hypothesis strategies for clusters, workloads and routes, and a system that follows them."""

import functools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fake_world import Timing
from hypothesis import strategies as st
from serving_checks import Outcome, Run, make_kv, make_requests

from jaxinfer.serving.features.head_slices import Placement
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.policies import Policies, PolicyOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Action, Assignment, MoveSlices, Pause, Reassign, Resume, System
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView, StepView

RULES = ("on_demand", "at_end", "per_chunk", "per_segment", "when_room")
# Layouts of an instance's KV: one shard, pipeline stages, ranges of heads, empty shards, and two
# stages with several shards each.
LAYOUTS = (
    ((0,),),
    ((0,), (0,)),
    ((0, 1), (2, 3)),
    ((0, 1), (2,), ()),
    ((0, 1, 2), (), ()),
    (((0, 1), ()), ((2, 3), (), ())),
)


@dataclass(frozen=True)
class Script:
    """A request: its legs, how many of them are named at a time, and where it stops."""

    prompt_len: int
    max_tokens: int
    arrival: float
    stop_at: int | None
    legs: tuple[Leg, ...]
    at_once: int
    shared: int = 0

    @property
    def peak(self) -> int:
        return self.prompt_len + self.max_tokens - 1


class Follow(System):
    """Routes every request by its script, ``at_once`` legs at a time."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self.scripts = scripts

    def legs_left(self, request: RequestView) -> tuple[Leg, ...]:
        legs = self.scripts[request.id].legs
        return tuple(leg for leg in legs if leg.until is None or leg.until > request.computed)

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        return [Assignment(r.id, self.legs_left(r)[: self.scripts[r.id].at_once]) for r in waiting]


class Survivor(Follow):
    """Follows the scripts, and takes another instance for one that is lost."""

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        alive = sorted(cluster.instances)
        return [
            Assignment(
                a.request,
                tuple(
                    leg if leg.instance in alive else replace(leg, instance=alive[0])
                    for leg in a.legs
                ),
            )
            for a in super().route(waiting, cluster)
        ]


class Chaos(Follow):
    """Follows the scripts and now and then does to a request whatever a system may do."""

    tick_interval = 7.0

    def __init__(
        self, scripts: dict[str, Script], seed: int, num_actions: int, caching: bool = False
    ) -> None:
        super().__init__(scripts)
        self.caching = caching
        self.rng = random.Random(seed)
        self.actions_left = num_actions
        self.paused: set[str] = set()
        self.rooms = 0

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        """By the scripts; beginnings may come from whatever cache has them."""
        found = super().route(waiting, cluster)
        for assignment in found if self.caching else ():
            if self.rng.random() < 0.7:
                assignment.fetch_from = self.rng.choice(sorted(cluster.instances))
        return found

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        return [self._act(cluster)] if self._in_the_mood() else []

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        resumed: list[Action] = [Resume(name) for name in sorted(self.paused)]
        self.paused.clear()
        return [*resumed, self._act(cluster)] if self._in_the_mood() else resumed

    def _in_the_mood(self) -> bool:
        mood = self.actions_left > 0 and self.rng.random() < 0.4
        self.actions_left -= mood
        return mood

    def _act(self, cluster: ClusterView) -> Action:
        name = self.rng.choice(sorted(self.scripts))
        kind = self.rng.choice(("pause", "reassign", "reassign", "move"))
        if kind == "pause":
            self.paused.add(name)
            return Pause(name)
        if kind == "reassign":
            rule = self.rng.choice(RULES)
            return Reassign(name, self._any_legs(name, cluster), rule)
        return self._any_move(name, cluster)

    def _any_legs(self, name: str, cluster: ClusterView) -> tuple[Leg, ...]:
        peak, legs, until = self.scripts[name].peak, [], 0
        for _ in range(self.rng.randint(0, 2)):
            until += self.rng.randint(1, peak)
            instance = self.rng.choice(sorted(cluster.instances))
            legs.append(Leg(instance, until, self.rng.choice(RULES)))
        return (*legs, Leg(self.rng.choice(sorted(cluster.instances))))

    def place(self, request: RequestView, instance: InstanceView) -> Placement | None:
        """Anywhere, where it fits; now and then, and where it does not, the usual place."""
        pages = -(-request.num_known // instance.page_size)
        found: list[list[int]] = [[] for _ in instance.shards]
        for shard in instance.shards:
            here = [n for n, other in enumerate(instance.shards) if other.stage == shard.stage]
            for piece in shard.slices:
                found[self.rng.choice(here)].append(piece)
        fits = all(
            shard.num_free_pages >= pages * len(pieces)
            for shard, pieces in zip(instance.shards, found, strict=True)
        )
        return found if fits and self.rng.random() < 0.7 else None

    def make_room(
        self, request: RequestView, shard: int, instance: InstanceView
    ) -> Sequence[MoveSlices]:
        """Now and then, the slices of someone there go elsewhere, if there is room or not."""
        stage = instance.shards[shard].stage
        others = [n for n, s in enumerate(instance.shards) if s.stage == stage and n != shard]
        there = [r for r in instance.running.values() if r.slices and r.slices[shard]]
        if not others or not there or self.rng.random() < 0.5:
            return []
        victim = self.rng.choice(there)
        moves = [(shard, self.rng.choice(others), (s,)) for s in sorted(victim.slices[shard])]
        moves = [m for m in moves if not set(m[2]) & set(victim.slices[m[1]])]  # On its way.
        self.rooms += 1
        return [MoveSlices(victim.id, tuple(moves))]

    def _any_move(self, name: str, cluster: ClusterView) -> Action:
        for instance in cluster.instances.values():
            if name not in instance.running:
                continue
            if self.caching:
                continue  # Slices stay where pages may be shared.
            slices = instance.running[name].slices
            stage = self.rng.choice([shard.stage for shard in instance.shards])
            here = [n for n, shard in enumerate(instance.shards) if shard.stage == stage]
            moves = []
            for source in here if len(here) > 1 else ():
                for piece in sorted(slices[source]):
                    dest = self.rng.choice(here)
                    if dest != source and self.rng.random() < 0.6:
                        moves.append((source, dest, (piece,)))
            if moves:
                return MoveSlices(name, tuple(moves))
        return Pause("nobody")


class SparesTheOldest(Instance):
    """Asserts the promise that makes every request reach its end.

    The oldest may only lose its pages where it fills a shard alone: it is placed anew, elsewhere.
    """

    def preempt(self, request: RequestState) -> None:
        assert request.hold
        alone = any(
            table and shard.num_pairs == len(table)
            for shard, table in zip(self.kv.shards, request.hold.tables, strict=True)
        )
        assert request.id != next(iter(self.running)) or (self.kv.is_spread and alone)
        super().preempt(request)


@st.composite
def options(draw: st.DrawFn) -> InstanceOptions:
    return InstanceOptions(
        max_num_seqs=draw(st.sampled_from((1, 2, 3, 8))),
        max_num_batched_tokens=draw(st.sampled_from((1, 2, 3, 5, 16))),
        max_in_flight=draw(st.integers(1, 3)),
        launch_ahead=draw(st.booleans()),
        chunks_in_flight=draw(st.sampled_from((1, "all"))),
        max_transfers_in_flight=draw(st.integers(1, 3)),
        watermark=draw(st.sampled_from((0.0, 0.01, 0.25))),
    )


# Strategies are kept: to make one takes longer than to draw from it.
OPTIONS = options()


@functools.cache
def none_or_up_to(most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, most)


@st.composite
def scripts(draw: st.DrawFn, names: tuple[str, ...], max_legs: int) -> Script:
    prompt_len, max_tokens = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    legs, until = [], 0
    for _ in range(draw(st.integers(0, max_legs - 1))):
        until += draw(st.integers(1, prompt_len + 3))
        legs.append(Leg(draw(st.sampled_from(names)), until, draw(st.sampled_from(RULES))))
    return Script(
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        arrival=float(draw(st.integers(0, 12))),
        stop_at=draw(none_or_up_to(max_tokens)),
        legs=(*legs, Leg(draw(st.sampled_from(names)))),
        at_once=draw(st.integers(1, max_legs)),
        shared=draw(st.integers(0, prompt_len)),
    )


@functools.cache
def workloads(names: tuple[str, ...], max_legs: int, most: int) -> st.SearchStrategy[list[Script]]:
    return st.lists(scripts(names, max_legs), min_size=1, max_size=most)


@dataclass
class Scenario:
    """Data that a run needs, in a form that hypothesis can print."""

    scripts: list[Script]
    instances: list[tuple[str, int, int, tuple[Any, ...], InstanceOptions]]
    timing: Timing
    caching: bool

    @property
    def by_id(self) -> dict[str, Script]:
        return {f"r{i}": script for i, script in enumerate(self.scripts)}

    def too_long_for(self, name: str, number: int) -> Script:
        """The script, changed to one leg on ``name`` with one token more than its pool holds."""
        _, pages, page_size, _, _ = next(i for i in self.instances if i[0] == name)
        tokens = pages * page_size + 1 - self.scripts[number].prompt_len + 1
        return replace(self.scripts[number], max_tokens=tokens, stop_at=None, legs=(Leg(name),))

    def run(
        self,
        system: System,
        policies: Callable[[], Policies] = Policies,
        instance_type: type[Instance] = Instance,
        after: Outcome | None = None,
    ) -> Run:
        """See ``Run``; with the pages as another one has left them, if ``after`` is given."""
        lengths = [(s.prompt_len, s.max_tokens) for s in self.scripts]

        def make(name: str, kv: KVShards | None = None) -> Instance:
            _, pages, size, layout, opts = next(i for i in self.instances if i[0] == name)
            kv = kv or make_kv(pages, size, layout, self.caching)
            return instance_type(name, kv, opts, policies())

        kept = {name: i.kv for name, i in after.world.instances.items()} if after else {}
        return Run(
            system,
            [make(name, kept.get(name)) for name, *_ in self.instances],
            make_requests(
                lengths,
                [s.arrival for s in self.scripts],
                [s.shared for s in self.scripts] if self.caching else (),
            ),
            self.timing,
            {name: s.stop_at for name, s in self.by_id.items() if s.stop_at},
            greedy=policies is Policies,
            renew=make,
            cells=after.world.cells if after else {},
        )


@st.composite
def scenarios(
    draw: st.DrawFn, max_instances: int = 3, max_legs: int = 3, max_requests: int = 7
) -> Scenario:
    """Feasible ones: each pool can hold the longest request, and often hardly more."""
    names = ("A", "B", "C")[: draw(st.integers(1, max_instances))]
    requests = draw(workloads(names, max_legs, max_requests))
    instances, stages = [], {}
    for name in names:
        page_size = draw(st.sampled_from((1, 2, 3, 4, 8)))
        needed = -(-max(s.peak for s in requests) // page_size)
        spare = draw(st.sampled_from((0, 0, 1, 2, 4, 50)))
        layout = draw(st.sampled_from(LAYOUTS))
        instances.append((name, needed + spare, page_size, layout, draw(OPTIONS)))
        stages[name] = draw(st.sampled_from((1, 1, 2, 3)))
    timing = Timing(
        seed=draw(st.integers(0, 2**16)),
        max_step=draw(st.sampled_from((1, 2, 6))),
        max_transfer=draw(st.sampled_from((1, 4, 25))),
        stages=stages,
    )
    return Scenario(requests, instances, timing, caching=draw(st.booleans()))


BOUNDS = st.sampled_from(("low", "high"))
ADMISSIONS = st.sampled_from(("greedy", "whole_request")) | st.one_of(
    st.fixed_dictionaries({"name": st.just("reserve_longest"), "tokens": st.integers(2, 40)}),
    *(
        st.fixed_dictionaries({"name": st.just(name), "bound": BOUNDS})
        for name in ("reserve_static", "reserve_dynamic", "peak")
    ),
)
BATCHES = st.sampled_from(("mixed", "even_decodes", "one_batch")) | st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("prefill_first"), "prefill_tokens": st.none() | st.integers(1, 12)}
    ),
    st.fixed_dictionaries(
        {
            "name": st.just("whole_prompts"),
            "step_tokens": st.integers(1, 12),
            "max_skips": st.integers(1, 3),
        }
    ),
)


@st.composite
def policy_options(draw: st.DrawFn) -> PolicyOptions:
    orders = ("fcfs", "shortest_prompt_first", "longest_prompt_first")
    return PolicyOptions(
        order=draw(st.sampled_from(orders)),
        admit=draw(ADMISSIONS),
        batching=draw(BATCHES),
    )
