"""The rate that one instance on unlike GPUs can serve, by the simulator's own functions.

HexGen-2, section 3.2, phase two: tensor parallelism within a node, pipeline parallelism across
nodes, and stages that differ in GPU, degree and layers. Rates are those of a full pipeline, not the
paper's reciprocal of a latency (see ``table1``).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Literal, Protocol

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart, stored_sizes
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZE, ModelShape
from jaxinfer.lab.plan.layers import even_times
from jaxinfer.papers.hexgen2.full_steps import LengthStats
from jaxinfer.papers.hexgen2.gpus import Group, Site
from jaxinfer.papers.hexgen2.stages import Shape, Signature, shapes
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.model import StageCost, make_stage
from jaxinfer.simulate.kv_capacity import count_pages

GroupRole = Literal["prefill", "decode"]
ROLES: tuple[GroupRole, GroupRole] = ("prefill", "decode")
# Shares of an instance's sequences; the best one is taken if memory is short.
_BATCHES = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class PlannedStage:
    """A pipeline stage that is planned for a group.

    Attributes:
        place: number of a node among those of its group's signature.
        tp: number of GPUs.
    """

    place: int
    tp: int
    layers: int


@dataclass(frozen=True)
class Carried:
    """The rate that a group can serve in a role, with the best stages.

    Attributes:
        rate: requests per second; 0 if the model, or the longest request, does not fit.
    """

    rate: float = 0.0
    stages: tuple[PlannedStage, ...] = ()


class Capacity(Protocol):
    """Rates that groups can serve, by their signatures and roles."""

    site: Site

    def carried(self, signature: Signature, role: GroupRole) -> Carried:
        """Return the rate that a group with this signature can serve in a role."""


def signature_of(site: Site, group: Group) -> Signature:
    """Return the signature of a group, which does not depend on the names of nodes."""
    return tuple(sorted((site.type_of[node], count) for node, count in group))


def nodes_of(site: Site, group: Group) -> list[int]:
    """Return the node for each place in a group's signature."""
    return [node for _, _, node in sorted((site.type_of[n], count, n) for n, count in group)]


# What the costs of a stage depend on besides its layers: type, GPUs, whether it is first, and last.
End = tuple[int, int, bool, bool]


class Modelled:
    """Rates of groups by the simulator's step times and pools.

    Args:
        engines: engine options by role; only those that affect pools and batches are used.
        costs: costs whose ``groups`` are names of GPUs.
        degrees: degrees of tensor parallelism; those that divide the model's heads are used.
        local: whether to ignore the time between a group's stages, even across nodes, for an upper
            bound.
    """

    def __init__(
        self,
        site: Site,
        model: ModelShape,
        engines: Mapping[GroupRole, InstanceConfig],
        costs: SimulateOptions,
        lengths: LengthStats,
        degrees: Sequence[int],
        local: bool = False,
    ) -> None:
        self.site, self.model, self.lengths = site, model, lengths
        self.engines, self._costs, self._local = engines, costs, local
        heads = model.num_attention_heads, model.num_key_value_heads
        self.degrees = [tp for tp in sorted(degrees) if not any(n % tp for n in heads)]
        self._found: dict[tuple[Signature, GroupRole], Carried] = {}
        self._entries: dict[tuple[object, ...], list[int]] = {}
        self._lines: dict[tuple[object, ...], tuple[float, float]] = {}
        self._limits: dict[tuple[object, ...], int] = {}
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        self._works: dict[tuple[GroupRole, int], tuple[Work, float]] = {}

    def as_local(self) -> "Modelled":
        """Return the same rates as if stages exchanged data in no time."""
        return Modelled(
            self.site, self.model, self.engines, self._costs, self.lengths, self.degrees, True
        )

    def on(self, site: Site) -> "Modelled":
        """Return the rates of groups of other GPUs of the hardware file."""
        return Modelled(
            site, self.model, self.engines, self._costs, self.lengths, self.degrees, self._local
        )

    @property
    def layer_bytes(self) -> float:
        """Bytes sent for one layer's KV of a mean prompt."""
        sizes = [self._sizes(role)[1] for role in self.engines]
        return self.lengths.prompt * self.model.kv_bytes(1, min(sizes))

    def carried(self, signature: Signature, role: GroupRole) -> Carried:
        """Return the rate of a group with this signature and its best stages, first of equals."""
        key = signature, role
        if key not in self._found:
            self._found[key] = self._best(signature, role)
        return self._found[key]

    def carried_by(self, signature: Signature, shape: Shape, role: GroupRole) -> Carried:
        """Return a group's rate with these stages, if they divide the layers in the best way."""
        ends = self._ends(signature, shape)
        lines = [self._line(role, end, len(shape)) for end in ends]
        best = Carried()
        for layers in self._splits(ends, lines, role):
            rate = self._rate(signature, shape, ends, layers, role)
            if rate > best.rate:
                stages = zip(shape, layers, strict=True)
                best = Carried(rate, tuple(PlannedStage(*where, count) for where, count in stages))
        return best

    def _best(self, signature: Signature, role: GroupRole) -> Carried:
        """Return the best stages.

        Shapes that would be best with freely divided layers come first.
        """
        ranked = []
        for shape in shapes(signature, self.site.kind_of_type, self.degrees):
            count = len(shape)
            lines = [self._line(role, end, count) for end in self._ends(signature, shape)]
            level = self.model.num_hidden_layers + sum(fixed / each for fixed, each in lines)
            level /= sum(1 / each for _, each in lines)
            if role == "prefill":
                most = self._work(role, self._full(role, count))[1] / level
            else:
                most = self.engines[role].max_num_seqs / (count * level * self.lengths.decodes)
            ranked.append((most, shape))
        ranked.sort(key=lambda each: -each[0])
        best = Carried()
        for most, shape in ranked:
            if most <= best.rate:
                break
            found = self.carried_by(signature, shape, role)
            if found.rate > best.rate:
                best = found
        return best

    @staticmethod
    def _ends(signature: Signature, shape: Shape) -> list[End]:
        last = len(shape) - 1
        return [(signature[place][0], tp, i == 0, i == last) for i, (place, tp) in enumerate(shape)]

    def most_of_layers(self, type_: int, gpus: int, role: GroupRole) -> float:
        """Return an upper bound on requests per second times the share of layers of these GPUs.

        The bound holds whatever else is in the group, and ignores limits of memory. With more
        stages there are fewer steps, and a token takes less time in a larger step.
        """
        best = 0.0
        for shape in shapes(((type_, gpus),), self.site.kind_of_type, self.degrees):
            stages = len(shape)
            size = self._full(role, stages)
            each = [self._line(role, (type_, tp, False, False), stages)[1] for _, tp in shape]
            if role == "prefill":
                requests = self._work(role, size)[1]
            else:
                requests = size / self.lengths.decodes
            best = max(best, requests * sum(1 / seconds for seconds in each))
        return best / self.model.num_hidden_layers

    def _line(self, role: GroupRole, end: End, stages: int) -> tuple[float, float]:
        """Return the seconds of one of ``stages`` full stages: a fixed part, and a part
        per layer.
        """
        key = role, end, stages
        if key not in self._lines:
            size = self._full(role, stages)
            one, two = (self._time(role, end, count, size) for count in (1, 2))
            sends = 0.0 if end[3] else self._costs.hop_s
            self._lines[key] = 2 * one - two + sends, two - one
        return self._lines[key]

    def _splits(
        self, ends: Sequence[End], lines: Sequence[tuple[float, float]], role: GroupRole
    ) -> Iterator[list[int]]:
        """Yield layers that make the slowest stage as fast as possible, for various sizes of KV."""
        total, shortest = self.model.num_hidden_layers, self.lengths.shortest_pool[role]
        if sum(self._most_layers(role, end, shortest) for end in ends) < total:
            return
        fixed, each = zip(*lines, strict=True)
        if role == "prefill":
            full = self._full(role, len(ends)) * float(len(ends))
        else:
            full = self.engines[role].max_num_seqs * self._occupied
        for share in _BATCHES:
            wanted = max(share * full, shortest)
            most = [self._most_layers(role, end, wanted) for end in ends]
            layers = even_times(total, fixed, each, most)
            if layers is None:
                continue
            yield layers
            if all(count < limit for count, limit in zip(layers, most, strict=True)):
                return

    def _rate(
        self,
        signature: Signature,
        shape: Shape,
        ends: Sequence[End],
        layers: Sequence[int],
        role: GroupRole,
    ) -> float:
        """Return the requests per second of these stages."""
        pairs = list(zip(ends, layers, strict=True))
        entries = min(self._pool(role, end)[n - 1] for end, n in pairs)
        stages, engine = len(shape), self.engines[role]
        if role == "prefill":
            size = min(self._full(role, stages), entries // stages)
        else:
            batch = min(engine.max_num_seqs, entries / self._occupied)
            size = ceil(batch / stages)
        seconds = [self._time(role, end, n, size) for end, n in pairs]
        seconds = [s + self._costs.hop_s * (i < stages - 1) for i, s in enumerate(seconds)]
        # As many steps are in flight as there are stages, from the first start to the last end.
        period = max(stages * max(seconds), sum(seconds) + self._hops(signature, shape, size))
        if role == "prefill":
            return self._work(role, size)[1] * stages / period
        return batch / period / self.lengths.decodes

    def _hops(self, signature: Signature, shape: Shape, tokens: int) -> float:
        if self._local:
            return 0.0
        num_bytes = tokens * self.model.hidden_size * ITEMSIZE
        total = 0.0
        for (here, _), (there, _) in pairwise(shape):
            latency, byte_s = self.site.hop_in(signature, here, there)
            total += latency + byte_s * num_bytes
        return total

    @property
    def _occupied(self) -> float:
        """Mean KV entries that a decode occupies, including the empty part of its last page."""
        return self.lengths.context + self.engines["decode"].page_size / 2

    def prefill_tokens(self, stages: int) -> int:
        """Return the tokens of a prefill step on an instance with ``stages`` stages.

        The prompts that the instance may have at once are divided equally among this number of
        steps.
        """
        return self._full("prefill", stages)

    def _full(self, role: GroupRole, stages: int) -> int:
        """Return the tokens of a prefill step, or sequences of a decode step, of a
        busy instance.
        """
        engine = self.engines[role]
        if role == "decode":
            return ceil(engine.max_num_seqs / stages)
        seats = int(engine.max_num_seqs * self.lengths.prompt / stages)
        return max(min(engine.max_num_batched_tokens, seats), 1)

    def _work(self, role: GroupRole, size: int) -> tuple[Work, float]:
        key = role, size
        if key not in self._works:
            lengths = self.lengths
            self._works[key] = (
                lengths.prefill_step(size) if role == "prefill" else (lengths.decode_step(size), 0)
            )
        return self._works[key]

    def _time(self, role: GroupRole, end: End, layers: int, size: int) -> float:
        key = role, end, layers, size
        if key not in self._seconds:
            stage = end, layers, self._sizes(role)
            if stage not in self._stages:
                part = self._part(role, end, layers)
                self._stages[stage] = make_stage(part, self._costs.of(part.kind))
            self._seconds[key] = self._stages[stage].seconds(self._work(role, size)[0])
        return self._seconds[key]

    def _pool(self, role: GroupRole, end: End) -> list[int]:
        """Return a stage's KV entries by its number of layers, from 1 on; 0 if they do not fit."""
        if (role, end) not in self._entries:
            engine, costs = self.engines[role], self._costs
            found = []
            for layers in range(1, self.model.num_hidden_layers + 1):
                try:
                    part = self._part(role, end, layers)
                    pages = count_pages(engine, costs.of(part.kind).reserve_gb, part, "group")
                except JaxinferError:
                    break
                found.append((pages - 1) * engine.page_size)
            left = self.model.num_hidden_layers - len(found)
            self._entries[role, end] = [*found, *[0] * left]
        return self._entries[role, end]

    def _most_layers(self, role: GroupRole, end: End, wanted: float) -> int:
        """Return the largest number of layers with which a stage's pool has ``wanted`` entries."""
        key = role, end, wanted
        if key not in self._limits:
            # Pools shrink with more layers, so take those before the first that is too small.
            self._limits[key] = bisect_left(
                self._pool(role, end), True, key=lambda entries: entries < wanted
            )
        return self._limits[key]

    def _sizes(self, role: GroupRole) -> tuple[int, int]:
        engine = self.engines[role]
        return stored_sizes(self.model, engine.weight_dtype, engine.kv_cache_dtype)

    def _part(self, role: GroupRole, end: End, layers: int) -> StagePart:
        type_, tp, first, last = end
        site, model = self.site, self.model
        share = layers / model.num_hidden_layers
        return StagePart(
            site.gpu_of_type[type_],
            site.nodes[site.types[type_]].gpu,
            model,
            layers,
            share,
            first,
            last,
            tp,
            *self._sizes(role),
        )
