"""Hetis: the KV heads of one request on unlike devices (arXiv 2509.08309, section 5).

Each stage of an instance has a group with its layers, and attention groups where KV heads may also
lie. The run file names these groups; ``head_dispatch`` decides where heads go.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pydantic import Field

from jaxinfer.options.validation import Named, OptionError, Options
from jaxinfer.papers.hetis.head_dispatch import (
    DeviceLoad,
    as_halves,
    can_do,
    dispatch,
    dispatch_by_memory,
)
from jaxinfer.serving.features.head_slices import Placement, SliceMove
from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.serving.system import Action, Assignment, MoveSlices, System
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView, ShardView, StepView
from jaxinfer.systems.instances import KVRoom, most_entries


class AttentionSeconds(Options):
    """Coefficients of eqs. 3 and 4 for one device group, in seconds; see ``AttentionFit``."""

    per_pair: float = Field(ge=0)
    per_entry: float = Field(ge=0)
    constant: float = Field(default=0.0, ge=0)
    exchange_per_pair: float = Field(default=0.0, ge=0)
    exchange: float = Field(default=0.0, ge=0)


class HetisOptions(Options):
    """Options of ``Hetis``.

    Attributes:
        theta: Slowdown of a stage, compared with the ideal, above which a request is placed again;
            null: never. Without placement, a request that runs out of pages is preempted (LIFO).
        placement: Whether KV heads are placed by attention time, or only by free pages.
        attention: Coefficients of a layer's attention time, in seconds, for each group; by default,
            they are profiled or modelled. Keys are ``per_pair``, ``per_entry``, ``constant``,
            ``exchange_per_pair``, ``exchange``.
    """

    theta: float | None = Field(default=0.5, gt=0)
    placement: Literal["time", "memory"] = "time"
    attention: Named[AttentionSeconds] = Field(default_factory=dict)


class Hetis(System):
    """Places heads where attention stays fastest; later moves the heads of one request at a time.

    A request goes to the instance with the largest share of free pages. Its prompt is attended to
    on the devices with layers, if they have room (section 3.2); its heads are distributed after
    that. It is placed again if a stage is slower than Theta allows (section 5.3.1), or if a shard
    has no page left (5.3.2).
    """

    Options = HetisOptions
    options: HetisOptions

    def __init__(self, options: HetisOptions | None = None) -> None:
        super().__init__(options)
        given = self.options.attention.items()
        self._given = {group: AttentionFit(**fit.model_dump()) for group, fit in given}
        self.needs_attention_fits = not given
        self._pools = KVRoom()
        self._counts = Counter(handed_out=0, moved_for_time=0, moved_for_memory=0)
        # By instance, requests that were told to move, and may not have moved yet.
        self._moving: defaultdict[str, set[str]] = defaultdict(set)
        # Requests whose prompts are attended to on the devices with layers.
        self._prompts: set[str] = set()

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return no routes: KV is not sent between instances."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Send each request to where it fits and the largest share of pages is free."""
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
        """Place each stage's heads for the prompt on its own device or, without room, by eq. 7."""
        pages = -(-request.num_known // instance.page_size)
        placement: list[list[int]] = [[] for _ in instance.shards]
        for numbers in _stages(instance.shards):
            own = next(number for number in numbers if instance.shards[number].slices)
            slices = list(instance.shards[own].slices)
            counts: list[int] | None = [len(slices) * (number == own) for number in numbers]
            if instance.shards[own].num_free_pages < pages * len(slices):
                loads = self._loads(instance, numbers, coming=1)
                counts = self._dispatch(loads, len(slices), request.num_known, pages)
            if counts is None:
                return None
            left = iter(slices)
            for number, count in zip(numbers, counts, strict=True):
                placement[number] = [next(left) for _ in range(count)]
        self._prompts.add(request.id)
        return placement

    def make_room(
        self, request: RequestView, shard: int, instance: InstanceView
    ) -> Sequence[MoveSlices]:
        """Move the latest request that has heads on a full device, if there is room elsewhere."""
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
        # Move as few as leave a page for each slice of the request; fewer if there are no more.
        lacking = len(request.slices[shard]) - instance.shards[shard].num_free_pages
        count = min(max(-(-lacking // pages), 1), len(slices))
        loads = list(self._loads(instance, numbers))
        at = numbers.index(shard)
        counts = self._dispatch([*loads[:at], *loads[at + 1 :]], count, entries, pages)
        if counts is None:
            return ()
        changes = [*counts[:at], -count, *counts[at:]]
        # The ideal must also hold the requested page.
        after = [
            load.plus(n, entries, pages).grown(len(request.slices[number]))
            for load, n, number in zip(loads, changes, numbers, strict=True)
        ]
        if self._is_slow(after):
            return ()
        moves = _moves(shard, others, counts, slices)
        return [self._move(instance, victim, moves, "moved_for_memory")]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Distribute the heads of requests whose prompts are done, or place one request again."""
        instance = cluster.instances[step.instance]
        done = [row.request for row in step.rows if self._has_done_its_prompt(row.request)]
        self._prompts.difference_update(request.id for request in done)
        there = [each for each in done if each.id in instance.running]
        moves = self._hand_out(instance, [each for each in there if not _moves_now(each, instance)])
        if moves or self.options.theta is None or self._is_moving(instance):
            return moves
        for numbers in _stages(instance.shards):
            action = self._relieve(instance, numbers) if len(numbers) > 1 else None
            if action:
                return [action]
        return ()

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Forget a request, which may end before its prompt is done."""
        self._prompts.discard(request.id)

    def report(self) -> Mapping[str, object]:
        """Return the number of requests that were told to move, by reason."""
        return dict(self._counts)

    def _is_slow(self, loads: Sequence[DeviceLoad]) -> bool:
        """Tell whether the slowest device is more than Theta slower than the ideal."""
        theta, slowest = self.options.theta, max(load.seconds for load in loads)
        assert theta is not None
        return slowest > 0 and can_do(slowest / (1 + theta), loads)

    def _has_done_its_prompt(self, request: RequestView) -> bool:
        return request.id in self._prompts and request.computed + 1 >= request.num_known

    def _hand_out(
        self, instance: InstanceView, requests: Sequence[RequestView]
    ) -> Sequence[MoveSlices]:
        """Place heads by eq. 7, now that only decodes remain."""
        moves: dict[str, list[SliceMove]] = {request.id: [] for request in requests}
        for numbers in _stages(instance.shards) if requests else ():
            loads = self._loads(instance, numbers)
            for request in requests:
                anew = self._place_anew(instance, request, numbers, loads)
                if anew:
                    loads, changes = anew
                    moves[request.id] += changes
        return [
            self._move(instance, request, moves[request.id], "handed_out")
            for request in requests
            if moves[request.id]
        ]

    def _relieve(self, instance: InstanceView, numbers: Sequence[int]) -> MoveSlices | None:
        """Place the largest request on a device that is too slow again, if that helps."""
        loads = self._loads(instance, numbers)
        if not self._is_slow(loads):
            return None
        slowest = max(range(len(loads)), key=lambda i: loads[i].seconds)
        shard = numbers[slowest]
        there = [each for each in instance.running.values() if each.slices[shard]]
        if not there:
            return None
        request = max(there, key=lambda each: len(each.slices[shard]) * each.num_known)
        anew = self._place_anew(instance, request, numbers, loads)
        if anew is None:
            return None
        after, moves = anew
        if max(load.seconds for load in after) >= loads[slowest].seconds:
            return None
        return self._move(instance, request, moves, "moved_for_time") if moves else None

    def _place_anew(
        self,
        instance: InstanceView,
        request: RequestView,
        numbers: Sequence[int],
        loads: Sequence[DeviceLoad],
    ) -> tuple[list[DeviceLoad], list[SliceMove]] | None:
        """Place a request again; return the new loads of a stage's devices, and the moves."""
        entries, pages = request.num_known, -(-request.num_known // instance.page_size)
        here = [len(request.slices[number]) for number in numbers]
        without = [
            load.plus(-count, entries, pages) for load, count in zip(loads, here, strict=True)
        ]
        counts = self._dispatch(without, sum(here), entries, pages)
        if counts is None:
            return None
        after = [load.plus(n, entries, pages) for load, n in zip(without, counts, strict=True)]
        return after, _changes(request, numbers, counts)

    def _move(
        self, instance: InstanceView, request: RequestView, moves: Sequence[SliceMove], why: str
    ) -> MoveSlices:
        self._moving[instance.name].add(request.id)
        self._counts[why] += 1
        return MoveSlices(request.id, tuple(moves))

    def _is_moving(self, instance: InstanceView) -> bool:
        """Tell whether requests are being moved."""
        told = (instance.running.get(name) for name in self._moving[instance.name])
        still = {each.id for each in told if each and _moves_now(each, instance)}
        self._moving[instance.name] = still
        return bool(still)

    def _dispatch(
        self, loads: Sequence[DeviceLoad], slices: int, entries: float, pages: int
    ) -> list[int] | None:
        if self.options.placement == "memory":
            return dispatch_by_memory(loads, slices, pages)
        return dispatch(loads, slices, entries, pages)

    def _loads(
        self, instance: InstanceView, numbers: Sequence[int], coming: int = 0
    ) -> Sequence[DeviceLoad]:
        """Return the loads of the shards of one stage, its own first.

        A pipeline's requests are in as many steps as it has stages. The fixed part of a step's time
        therefore counts once for each of these steps.

        Args:
            coming: number of additional requests that will run.
        """
        stages = len({shard.stage for shard in instance.shards})
        running = max(instance.num_running + coming, 1)
        steps = min(running, stages)
        loads = [self._load(instance, instance.shards[number], steps) for number in numbers]
        dense = instance.shards[numbers[0]].dense
        if dense is None:
            return loads
        whole, half = (steps * dense(running / steps / parts) for parts in (1, 2))
        return as_halves(loads, whole, half)

    def _load(self, instance: InstanceView, shard: ShardView, steps: int) -> DeviceLoad:
        """Return the load of a shard, with the time that its device works for other stages.

        While this stage computes its layers, the other stages compute theirs.
        """
        fit = self._fit(shard).of_steps(steps)
        others = sum(
            other.layers
            * self._fit(other).of_steps(steps).busy(other.num_pairs, _used(instance, other))
            for other in instance.shards
            if (other.group, other.device) == (shard.group, shard.device)
            and other.stage != shard.stage
        )
        return DeviceLoad(
            fit,
            shard.num_pairs,
            _used(instance, shard),
            shard.num_free_pages,
            instance.page_size,
            others / shard.layers,
        )

    def _fit(self, shard: ShardView) -> AttentionFit:
        fit = self._given.get(shard.group) or shard.fit
        if fit is None:
            raise OptionError(
                f"system.attention.{shard.group} is missing: how long attention takes there is not "
                "known"
            )
        return fit


def _moves_now(request: RequestView, instance: InstanceView) -> bool:
    """Tell whether some of its slices are in two places."""
    return sum(map(len, request.slices)) > sum(len(shard.slices) for shard in instance.shards)


def _used(instance: InstanceView, shard: ShardView) -> int:
    """Return the KV entries in a shard, estimated from its used pages."""
    return (shard.num_pages - shard.num_free_pages) * instance.page_size


def _share_left(instance: InstanceView, given: int) -> float:
    """Return the share of all pages that waiting prompts and ``given`` more tokens leave free."""
    prompts = instance.prompt_tokens_left + given
    return (instance.num_free_pages - prompts / instance.page_size) / instance.num_pages


def _stages(shards: Sequence[ShardView]) -> list[list[int]]:
    """Return the numbers of the shards of each stage."""
    found = defaultdict(list)
    for number, shard in enumerate(shards):
        found[shard.stage].append(number)
    return list(found.values())


def _moves(
    source: int, dests: Sequence[int], counts: Sequence[int], slices: Sequence[int]
) -> list[SliceMove]:
    """Move the first ``counts`` of some slices to several shards."""
    left = iter(slices)
    return [
        (source, dest, tuple(next(left) for _ in range(count)))
        for dest, count in zip(dests, counts, strict=True)
        if count
    ]


def _changes(
    request: RequestView, numbers: Sequence[int], counts: Sequence[int]
) -> list[SliceMove]:
    """Return moves after which each shard has its count; as many slices as possible stay."""
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
