"""A step of a spread stage as two halves of its rows in turn.

While some devices attend to KV heads of one half, those with the layers compute the other half's
dense part. So an exchange per layer may cost nothing; but weights are read twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.serving.batch import Batch, Row, Work, shard_work, work_of
from jaxinfer.serving.page_pool import Shard

# Whether a step is to be computed as two halves: its work, and theirs.
ChooseHalves = Callable[[Work, Sequence[Work]], bool]


@dataclass(frozen=True)
class LayerTimes:
    """A layer of a step, or of one half of it, in seconds.

    Attributes:
        dense, own: seconds of the devices with the layers: their dense part, then their attention.
        others: of each other device: that it is busy, and that bytes are on their way besides; both
            0 where it has nothing to do.
    """

    dense: float
    own: float
    others: Sequence[tuple[float, float]]

    @property
    def elsewhere(self) -> float:
        """The time until all other devices' outputs are back."""
        return max((busy + trip for busy, trip in self.others), default=0.0)


def as_a_whole(layers: int, times: LayerTimes) -> float:
    """Seconds of ``layers`` layers of a step that is not cut."""
    return layers * (times.dense + max(times.own, times.elsewhere))


def in_turn(layers: int, first: LayerTimes, second: LayerTimes) -> float:
    """Seconds of ``layers`` layers of both halves.

    Each layer takes what the devices with the layers are busy, or any other one is, or what one
    half takes from its dense part until its outputs are back. At the end, the last layer's outputs
    have nothing to hide behind.
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
    """Return the choice that ``half_batches`` names; None where no step is ever cut."""
    return {"never": None, "by_time": by_time, "always": lambda whole, halves: True}[option]


def halve(batch: Batch, shards: Sequence[Shard], pays: ChooseHalves) -> None:
    """Have a batch, whose work is counted by shards, computed as two halves if that pays.

    With all KV heads at home, there is nothing to hide.
    """
    counted = zip(batch.work.shards, shards, strict=True)
    if not any(work.tokens for work, shard in counted if not shard.slices):
        return
    parts = split(batch.rows)
    if not all(parts):
        return
    works = [work_of(rows) for rows in parts]
    for work, rows in zip(works, parts, strict=True):
        work.shards = shard_work(rows)
    if pays(batch.work, works):
        batch.halves, batch.work.halves = parts, works


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Two halves, equal in tokens as nearly as may be, then in KV entries before these.

    The row with the most goes first, each into the half that has less. Rows keep their order.
    """
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [(0, 0), (0, 0)]
    for number in sorted(range(len(rows)), key=lambda n: (-rows[n].count, -rows[n].start)):
        lighter = loads[1] < loads[0]
        halves[lighter].append(number)
        tokens, entries = loads[lighter]
        loads[lighter] = tokens + rows[number].count, entries + rows[number].start
    first, second = ([rows[number] for number in sorted(half)] for half in halves)
    return first, second


@dataclass(frozen=True)
class FittedStage:
    """A stage by fits to profiles of its shards, its own first.

    Attributes:
        first: number of its first shard, of the instance's.
    """

    shards: Sequence[Shard]
    first: int

    @property
    def layers(self) -> int:
        """Number of the model's layers that the stage has."""
        return self.shards[0].layers

    def layer(self, work: Work) -> LayerTimes:
        """A chunk's attention is told from that of decodes: it reads what it sees once."""
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
    """Choose halves where, by the shards' fits, the stages together take less time."""
    numbers: dict[int, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers.setdefault(shard.stage, []).append(number)
    stages = [FittedStage([shards[n] for n in each], each[0]) for each in numbers.values()]
    spread = [stage for stage in stages if len(stage.shards) > 1]

    def pays(whole: Work, halves: Sequence[Work]) -> bool:
        saved = 0.0
        for stage in spread:
            times = stage.layer(whole)
            if times.elsewhere:  # Else it is not cut.
                first, second = map(stage.layer, halves)
                saved += as_a_whole(stage.layers, times) - in_turn(stage.layers, first, second)
        return saved > 0

    return pays
