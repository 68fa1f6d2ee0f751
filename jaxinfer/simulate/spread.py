"""A stage whose KV heads are on several device groups.

Attention takes as long as the slowest group, including the exchange (Hetis eqs. 3, 4 and 7, by
rooflines).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.serving.batch import ShardWork, Work
from jaxinfer.serving.features.half_batches import LayerTimes, as_a_whole, in_turn
from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.simulate.costs.roofline import RooflineStage


@dataclass(frozen=True)
class ShardCost:
    """Cost of a layer's attention on one group that has KV heads of a stage.

    The own group's devices share the heads evenly, whatever their number.

    Attributes:
        head_flops: FLOPs of one query token for each KV entry of one KV head that it sees.
        head_bytes: bytes of one KV entry of one KV head.
        per_flop: seconds per FLOP, of all devices of the own group or of one device of another
            group.
        per_byte: seconds per byte, of the same devices.
        per_query: seconds on its part of the link to exchange one token's queries of one KV head
            with the stage's own group: queries, keys and values there, outputs back.
        round_trip: seconds until the first bytes have arrived and come back.
    """

    head_flops: int
    head_bytes: int
    per_flop: float
    per_byte: float
    per_query: float = 0.0
    round_trip: float = 0.0

    def seconds(self, work: ShardWork) -> float:
        """Return the seconds of a step in one layer; 0 if none of its heads is here."""
        return self.busy(work) + self.round_trip if work.tokens else 0.0

    def busy(self, work: ShardWork) -> float:
        """Return the seconds for which one layer of a step occupies the group and its link.

        Counts are multiplied as integers first. With all heads here, the result equals the
        roofline's time of the stage to the last bit.
        """
        decodes = work.entries * self.head_bytes * self.per_byte
        seen = sum(slices * (start + count) for start, count, slices in work.chunks)
        pairs = sum(
            slices * (count * (start + (count + 1) / 2)) for start, count, slices in work.chunks
        )
        chunks = pairs * self.head_flops * self.per_flop
        attention = decodes + max(chunks, seen * self.head_bytes * self.per_byte)
        return attention + work.tokens * self.per_query

    @property
    def fit(self) -> AttentionFit:
        """The fit that one would get by profiling decodes here."""
        per_entry = self.head_bytes * self.per_byte
        return AttentionFit(0.0, per_entry, 0.0, self.per_query, self.round_trip)


@dataclass(frozen=True)
class Visit:
    """A stage's attention work on a device that works for several stages.

    Attributes:
        device: name of its group, and its number in the group.
        shard: number of its shard within the instance.
        layers: number of layers of the stage.
    """

    device: tuple[str, int]
    shard: int
    cost: ShardCost
    layers: int

    def seconds(self, work: Work) -> float:
        """Return the seconds for which a step keeps the device busy."""
        return self.layers * self.cost.busy(work.shards[self.shard])


class ModelledSpreadStage(RooflineStage):
    """A stage with its layers on one group, and KV heads there and on other groups.

    Attributes:
        shards: attention on each of the groups, the own one first.
        first: number of the own group's shard within the instance.
    """

    shards: tuple[ShardCost, ...]
    first: int

    @classmethod
    def of(cls, part: StagePart, costs: SimulateOptions) -> Self:
        """Make the stage without attention groups, as the first stage of the instance."""
        stage = super().of(part, costs)
        heads = part.model.num_key_value_heads
        each = stage._attention_flops // heads, stage._kv_bytes // heads
        stage.shards, stage.first = (ShardCost(*each, stage._per_flop, stage._per_byte),), 0
        return stage

    def seconds(self, work: Work) -> float:
        """Return the seconds of a step.

        A step that has halves, and heads on other groups, is computed as halves.
        """
        if not (work.halves and any(one.tokens for one in self._counted(work)[1:])):
            return super().seconds(work)
        first, second = map(self.layer, work.halves)
        besides = super().seconds(work) - as_a_whole(self.layers, self.layer(work))
        return in_turn(self.layers, first, second) + besides

    def layer(self, work: Work) -> LayerTimes:
        """Return the times of one layer."""
        counted = self._counted(work)
        others = [
            (cost.busy(one), cost.round_trip) if one.tokens else (0.0, 0.0)
            for cost, one in zip(self.shards[1:], counted[1:], strict=True)
        ]
        return LayerTimes(self.dense(work.tokens), self.shards[0].seconds(counted[0]), others)

    def _attention(self, work: Work) -> float:
        """Return the slowest group's time. Work without shards has all heads on the own group."""
        if not work.shards:
            return super()._attention(work)
        counted = self._counted(work)
        return max(cost.seconds(one) for cost, one in zip(self.shards, counted, strict=True))

    def _counted(self, work: Work) -> Sequence[ShardWork]:
        """Return the work of each of its shards."""
        return work.shards[self.first : self.first + len(self.shards)]
