"""Computing a step as parts of its rows, in turn: two halves of a spread stage, or micro-batches.

While some devices attend to KV heads of one half, the devices with the layers compute the dense
part of the other half. This can hide the exchange in each layer, but weights are read twice. The
run file sets the number of micro-batches of a stage with an FFN group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from jaxinfer.serving.batch import Batch, Row, Work, shard_work, work_of
from jaxinfer.serving.page_pool import Shard

# Tells whether to compute a step as two halves, from its work and theirs.
ChooseHalves = Callable[[Work, Sequence[Work]], bool]


@dataclass(frozen=True)
class LayerTimes:
    """Times of a layer of a step, or of one half of the step, in seconds.

    Attributes:
        dense: time of the layer's dense part on the devices that have the layers.
        own: time of these devices' own attention, which follows the dense part.
        others: for each other device, the time that it is busy and the additional time of its
            messages; both are 0 if it has nothing to do.
    """

    dense: float
    own: float
    others: Sequence[tuple[float, float]]

    @property
    def elsewhere(self) -> float:
        """Time until the outputs of all other devices are back."""
        return max((busy + trip for busy, trip in self.others), default=0.0)


def as_a_whole(layers: int, times: LayerTimes) -> float:
    """Return the seconds of ``layers`` layers of a step that is not split."""
    return layers * (times.dense + max(times.own, times.elsewhere))


def in_turn(layers: int, first: LayerTimes, second: LayerTimes) -> float:
    """Return the seconds of ``layers`` layers of both halves.

    A layer takes the longest of three times: that for which the devices with the layers are busy,
    that for which any other device is busy, and that of one half from its dense part until its
    outputs are back. At the end, nothing is left to hide the outputs of the last layer.
    """
    busy = first.dense + first.own + second.dense
    both = zip(first.others, second.others, strict=True)
    shared = [(busy_1 + busy_2, trip) for (busy_1, trip), (busy_2, _) in both]
    each = max(
        busy + second.own,
        first.dense + first.elsewhere,
        second.dense + second.elsewhere,
        max((seconds for seconds, _ in shared), default=0.0),
    )
    once = max(
        busy + second.own,
        first.dense + first.elsewhere,
        first.dense + first.own + second.dense + second.elsewhere,
        first.dense + max((seconds + trip for seconds, trip in shared), default=0.0),
    )
    return (layers - 1) * each + once


def choice(option: str, by_time: ChooseHalves) -> ChooseHalves | None:
    """Return the rule that ``half_batches`` names; None if no step is ever split."""
    return {"never": None, "by_time": by_time, "always": lambda whole, halves: True}[option]


def halve(batch: Batch, shards: Sequence[Shard], pays: ChooseHalves) -> None:
    """Split a batch into two halves if ``pays`` says so; its work must be counted by shards.

    A batch whose KV heads are all in the stages' own shards is not split: no exchange could be
    hidden.
    """
    counted = zip(batch.work.shards, shards, strict=True)
    if not any(work.tokens for work, shard in counted if not shard.slices):
        return
    parts = split(batch.rows, 2)
    if not all(parts):
        return
    works = [work_of(rows) for rows in parts]
    for work, rows in zip(works, parts, strict=True):
        work.shards = shard_work(rows)
    if pays(batch.work, works):
        batch.halves, batch.work.halves = parts, works


def in_parts(batch: Batch, count: int) -> None:
    """Split a batch into ``count`` micro-batches, or as many as it has rows."""
    parts = split(batch.rows, min(count, len(batch.rows)))
    if len(parts) > 1:
        batch.halves, batch.work.halves = parts, [work_of(rows) for rows in parts]


def split(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """Split rows into parts with nearly equal tokens and, second, nearly equal earlier KV entries.

    The largest rows are assigned first, each to the part that has least so far. Within a part, rows
    keep their order.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, 0, part) for part in range(count)]
    for number in sorted(range(len(rows)), key=lambda n: (-rows[n].count, -rows[n].start)):
        tokens, entries, part = loads[0]
        parts[part].append(number)
        row = rows[number]
        heapreplace(loads, (tokens + row.count, entries + row.start, part))
    return [[rows[number] for number in sorted(part)] for part in parts]


@dataclass(frozen=True)
class FittedStage:
    """The times of a stage, from fits to profiles of its shards; its own shard comes first.

    Attributes:
        first: number of the stage's first shard within the instance.
    """

    shards: Sequence[Shard]
    first: int

    @property
    def layers(self) -> int:
        """Number of model layers in this stage."""
        return self.shards[0].layers

    def layer(self, work: Work) -> LayerTimes:
        """Return the times of a layer.

        The attention of a chunk is counted separately from that of decodes: it reads each KV entry
        once.
        """
        own = self.shards[0]
        assert own.dense, "times of dense layers are there where steps are halved by them"
        counted = work.shards[self.first : self.first + len(self.shards)]
        busy, trips = [], []
        for shard, one in zip(self.shards, counted, strict=True):
            assert shard.fit
            chunks = sum(slices * (start + count) for start, count, slices in one.chunks)
            busy.append(shard.fit.busy(one.tokens, one.entries + chunks))
            trips.append(shard.fit.exchange if one.tokens else 0.0)
        others = list(zip(busy[1:], trips[1:], strict=True))
        return LayerTimes(own.dense(work.tokens), busy[0], others)


def by_fits(shards: Sequence[Shard]) -> ChooseHalves:
    """Return a rule that chooses halves if, by the shards' fits, the stages then take less time."""
    numbers: dict[int, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers.setdefault(shard.stage, []).append(number)
    stages = [FittedStage([shards[n] for n in each], each[0]) for each in numbers.values()]
    spread = [stage for stage in stages if len(stage.shards) > 1]

    def pays(whole: Work, halves: Sequence[Work]) -> bool:
        saved = 0.0
        for stage in spread:
            times = stage.layer(whole)
            if times.elsewhere:  # Otherwise it is not cut.
                first, second = map(stage.layer, halves)
                saved += as_a_whole(stage.layers, times) - in_turn(stage.layers, first, second)
        return saved > 0

    return pays
