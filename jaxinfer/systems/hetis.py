"""Hetis: the KV heads of one request on unlike devices (arXiv 2509.08309, section 5).

Each stage of an instance has a group with its layers, and attention groups where KV heads may lie
besides. Which group is which, the run file says; ``head_dispatch`` decides where heads go.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pydantic import Field

from jaxinfer.config.validation import Named, OptionError, Options
from jaxinfer.serving.attention_fit import AttentionFit
from jaxinfer.serving.kv_shards import Placement, SliceMove
from jaxinfer.serving.system import (
    Action,
    Assignment,
    ClusterView,
    InstanceView,
    Leg,
    MoveSlices,
    RequestView,
    ShardView,
    StepView,
    System,
)
from jaxinfer.systems.head_dispatch import Load, can_do, dispatch, dispatch_by_memory
from jaxinfer.systems.roles import Pools, most_entries


class AttentionSeconds(Options):
    """Coefficients of eqs. 3 and 4 for one device group, in seconds: see ``AttentionFit``."""

    per_pair: float = Field(ge=0)
    per_entry: float = Field(ge=0)
    constant: float = Field(default=0.0, ge=0)
    exchange_per_pair: float = Field(default=0.0, ge=0)
    exchange: float = Field(default=0.0, ge=0)


class HetisOptions(Options):
    """Options of ``Hetis``.

    Attributes:
        theta: how much slower than the ideal a stage's slowest device may be before a request is
            placed anew; null: nothing ever moves, and who has no page is preempted (LIFO).
        placement: by the ``time`` of attention, or by free ``memory`` alone.
        attention: by group, how long attention takes there, in place of what is known of it; a real
            run then profiles no group.
    """

    theta: float | None = Field(default=0.5, gt=0)
    placement: Literal["time", "memory"] = "time"
    attention: Named[AttentionSeconds] = Field(default_factory=dict)


class Hetis(System):
    """Heads of new requests where attention stays fastest; later they move, one request at a time.

    A request goes to the instance with the largest share of free pages. It is placed anew where a
    stage is slower than Theta allows (section 5.3.1), and where a shard has no page left (5.3.2).
    """

    Options = HetisOptions
    options: HetisOptions

    def __init__(self, options: HetisOptions | None = None) -> None:
        super().__init__(options)
        given = self.options.attention.items()
        self._given = {group: AttentionFit(**fit.model_dump()) for group, fit in given}
        self.needs_attention_fits = not given
        self._pools = Pools()
        self._counts = Counter(moved_for_time=0, moved_for_memory=0)
        # By instance, the request that was told to move last.
        self._moving: dict[str, str] = {}

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """No KV goes from instance to instance."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Each to the instance with the largest share of free pages that holds it."""
        given: Counter[str] = Counter()
        found = []
        for request in waiting:
            alive = list(cluster.instances)
            names = self._pools.that_hold(most_entries(request), alive, cluster) or alive
            chosen = max(names, key=lambda name: _share_left(cluster.instances[name], given[name]))
            given[chosen] += request.num_known
            found.append(Assignment(request.id, (Leg(chosen),)))
        return found

    def place(self, request: RequestView, instance: InstanceView) -> Placement | None:
        """By eq. 7, with what runs where it is."""
        pages = -(-request.num_known // instance.page_size)
        placement: list[list[int]] = [[] for _ in instance.shards]
        for numbers in _stages(instance.shards):
            slices = [piece for n in numbers for piece in instance.shards[n].slices]
            loads = self._loads(instance, numbers)
            counts = self._dispatch(loads, len(slices), request.num_known, pages)
            if counts is None:
                return None
            left = iter(slices)
            for number, count in zip(numbers, counts, strict=True):
                placement[number] = [next(left) for _ in range(count)]
        return placement

    def make_room(
        self, request: RequestView, shard: int, instance: InstanceView
    ) -> Sequence[MoveSlices]:
        """The latest request with heads on a full device goes elsewhere, if there is room."""
        if self.options.theta is None or self._is_moving(instance):
            return ()
        there = [each for each in instance.running.values() if each.slices[shard]]
        victim = max(there, key=lambda each: each.arrival)
        stage = instance.shards[shard].stage
        numbers = next(n for n in _stages(instance.shards) if instance.shards[n[0]].stage == stage)
        others = [number for number in numbers if number != shard]
        if not others:
            return ()
        slices = list(victim.slices[shard])
        entries, pages = victim.num_known, -(-victim.num_known // instance.page_size)
        # As few as leave a page for each slice of the request; fewer where there are no more.
        lacking = len(request.slices[shard]) - instance.shards[shard].num_free_pages
        count = min(max(-(-lacking // pages), 1), len(slices))
        loads = self._loads(instance, others)
        counts = self._dispatch(loads, count, entries, pages)
        if counts is None:
            return ()
        after = [load.plus(n, entries, pages) for load, n in zip(loads, counts, strict=True)]
        (full,) = self._loads(instance, [shard])
        if self._is_slow([*after, full.plus(-count, entries, pages)]):
            return ()
        moves = _moves(shard, others, counts, slices)
        return [self._move(instance, victim, moves, "moved_for_memory")]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Place one request anew where a stage's slowest device is too slow."""
        instance = cluster.instances[step.instance]
        if self.options.theta is None or self._is_moving(instance):
            return ()
        for numbers in _stages(instance.shards):
            action = self._relieve(instance, numbers) if len(numbers) > 1 else None
            if action:
                return [action]
        return ()

    def report(self) -> Mapping[str, object]:
        """How many requests were told to move, and for what."""
        return dict(self._counts)

    def _is_slow(self, loads: Sequence[Load]) -> bool:
        """Whether the slowest is more than Theta behind the ideal."""
        theta, slowest = self.options.theta, max(load.seconds for load in loads)
        assert theta is not None
        return slowest > 0 and can_do(slowest / (1 + theta), loads)

    def _relieve(self, instance: InstanceView, numbers: Sequence[int]) -> MoveSlices | None:
        """Place the largest request on a device that is too slow anew, if that helps."""
        loads = self._loads(instance, numbers)
        if not self._is_slow(loads):
            return None
        slowest = max(range(len(loads)), key=lambda i: loads[i].seconds)
        shard = numbers[slowest]
        there = [each for each in instance.running.values() if each.slices[shard]]
        if not there:
            return None
        request = max(there, key=lambda each: len(each.slices[shard]) * each.num_known)
        entries, pages = request.num_known, -(-request.num_known // instance.page_size)
        here = [len(request.slices[number]) for number in numbers]
        without = [
            load.plus(-count, entries, pages) for load, count in zip(loads, here, strict=True)
        ]
        counts = self._dispatch(without, sum(here), entries, pages)
        if counts is None:
            return None
        after = [load.plus(n, entries, pages) for load, n in zip(without, counts, strict=True)]
        if max(load.seconds for load in after) >= loads[slowest].seconds:
            return None
        moves = _changes(request, numbers, counts)
        return self._move(instance, request, moves, "moved_for_time") if moves else None

    def _move(
        self, instance: InstanceView, request: RequestView, moves: Sequence[SliceMove], why: str
    ) -> MoveSlices:
        self._moving[instance.name] = request.id
        self._counts[why] += 1
        return MoveSlices(request.id, tuple(moves))

    def _is_moving(self, instance: InstanceView) -> bool:
        """Whether a request moves: some of its slices are in two places then."""
        request = instance.running.get(self._moving.get(instance.name, ""))
        if request is None:
            return False
        total = sum(len(shard.slices) for shard in instance.shards)
        return sum(len(pieces) for pieces in request.slices) > total

    def _dispatch(
        self, loads: Sequence[Load], slices: int, entries: float, pages: int
    ) -> list[int] | None:
        if self.options.placement == "memory":
            return dispatch_by_memory(loads, slices, pages)
        return dispatch(loads, slices, entries, pages)

    def _loads(self, instance: InstanceView, numbers: Sequence[int]) -> list[Load]:
        return [self._load(instance.shards[n], instance.page_size) for n in numbers]

    def _load(self, shard: ShardView, page_size: int) -> Load:
        """What lies in a shard; pages in use stand for entries."""
        fit = self._given.get(shard.group) or shard.fit
        if fit is None:
            raise OptionError(
                f"system.attention.{shard.group} is missing: how long attention takes there is not "
                "known"
            )
        used = (shard.num_pages - shard.num_free_pages) * page_size
        return Load(fit, shard.num_pairs, used, shard.num_free_pages, page_size)


def _share_left(instance: InstanceView, given: int) -> float:
    """What prompts that wait, and so many tokens more, leave of the pages that are free."""
    prompts = instance.prompt_tokens_left + given
    return (instance.num_free_pages - prompts / instance.page_size) / instance.num_pages


def _stages(shards: Sequence[ShardView]) -> list[list[int]]:
    """Numbers of the shards of each stage."""
    found = defaultdict(list)
    for number, shard in enumerate(shards):
        found[shard.stage].append(number)
    return list(found.values())


def _moves(
    source: int, dests: Sequence[int], counts: Sequence[int], slices: Sequence[int]
) -> list[SliceMove]:
    """The first of some slices to several shards, so many to each."""
    left = iter(slices)
    return [
        (source, dest, tuple(next(left) for _ in range(count)))
        for dest, count in zip(dests, counts, strict=True)
        if count
    ]


def _changes(
    request: RequestView, numbers: Sequence[int], counts: Sequence[int]
) -> list[SliceMove]:
    """Moves after which each shard has its count; what can stay stays."""
    surplus = [
        (number, piece)
        for number, count in zip(numbers, counts, strict=True)
        for piece in list(request.slices[number])[count:]
    ]
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, count in zip(numbers, counts, strict=True):
        for _ in range(count - len(request.slices[number])):
            source, piece = surplus.pop(0)
            found[source, number].append(piece)
    return [(source, dest, tuple(pieces)) for (source, dest), pieces in found.items()]
