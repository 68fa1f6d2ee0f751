"""Times of a stage whose FFN, or experts, are on another group, by rooflines.

A step is computed as micro-batches in turn, as in a real run: each layer's attention of one after
the other on the stage's own group, then each one's FFN on the other group. In between, hidden
states cross the link between the groups, which is a queue in each direction. A link carries each
token once, whatever the number of devices at its ends; KV of hand-offs does not slow it down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxinfer.config.site_values import SiteStage
from jaxinfer.hardware.catalogue import ITEMSIZE
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.roofline import RooflineStage


@dataclass(frozen=True)
class PartTimes:
    """Times of one layer of a micro-batch, in seconds.

    Attributes:
        attention: time on the stage's own group, including projections.
        ffn: time on the FFN group.
        exchange: time for which its hidden states occupy the link, in each direction.
    """

    attention: float
    ffn: float
    exchange: float


def in_turns(layers: int, parts: Sequence[PartTimes], latency_s: float = 0.0) -> float:
    """Return the seconds of ``layers`` layers of micro-batches, which take turns everywhere.

    Args:
        latency_s: seconds from the start of an exchange to its first byte.
    """
    ready = [0.0] * len(parts)  # The time when each one's last FFN has come back.
    attention = there = ffn = back = 0.0  # The times when groups and directions are free.
    last = 0.0
    for layer in range(layers):
        before = [*ready, attention, there, ffn, back]
        for number, part in enumerate(parts):
            attention = max(attention, ready[number]) + part.attention
            there = max(there, attention) + part.exchange
            ffn = max(ffn, there + latency_s) + part.ffn
            back = max(back, ffn) + part.exchange
            ready[number] = back + latency_s
        last = back + latency_s
        now = [*ready, attention, there, ffn, back]
        took = [after - at for after, at in zip(now, before, strict=True)]
        if layer and max(took) - min(took) <= 1e-12 * last:
            return last + (layers - 1 - layer) * took[-1]  # Further layers take as long.
    return last


class Side(RooflineStage):
    """One of the two groups that compute a stage's layers, with times of the parts of a layer."""

    def projections(self, T: float) -> float:
        """Return the seconds of a layer's projections of ``T`` tokens, with one all-reduce."""
        products = (max(T * c, w + T * m) for c, w, m in self._products[:2])
        return (T * self._reduce + self._reduce_each) / 2 + sum(products)

    def attention(self, work: Work) -> float:
        """Return the seconds of a layer's projections and attention."""
        return self.projections(work.tokens) + self._attention(work)

    def ffn(self, T: float) -> float:
        """Return the seconds of a layer's FFN for ``T`` tokens, with its other all-reduce."""
        return self.dense(T) - self.projections(T)

    def besides(self, work: Work) -> float:
        """Return the seconds that a step takes outside the layers."""
        return self.seconds(work) - self.layers * (self.dense(work.tokens) + self._attention(work))


@dataclass(frozen=True)
class ModelledFfnStage:
    """A stage with its attention on one group and its FFN on another.

    Attributes:
        slowdowns: how many times slower than their GPUs the two groups are emulated.
    """

    attention: Side
    ffn: Side
    token_s: float
    latency_s: float
    slowdowns: tuple[float, float] = (1.0, 1.0)

    def seconds(self, work: Work) -> float:
        """Return the seconds of a step, which may be computed as micro-batches."""
        parts = [self.part(each) for each in work.halves or (work,)]
        layers = in_turns(self.attention.layers, parts, self.latency_s)
        return layers + self.slowdowns[0] * self.attention.besides(work)

    def part(self, work: Work) -> PartTimes:
        """Return the times of one layer of a micro-batch."""
        own, other = self.slowdowns
        exchange = work.tokens * self.token_s
        ffn = other * self.ffn.ffn(work.tokens)
        return PartTimes(own * self.attention.attention(work), ffn, exchange)


def ffn_stage(place: SiteStage) -> ModelledFfnStage:
    """Make the cost model of a stage whose FFN is on another group."""
    ffn, part = place.ffn, place.part
    assert ffn
    there = replace(part, gpu=ffn.group.gpu, devices=ffn.group.stage_devices)
    token_s = part.model.hidden_size * ITEMSIZE / ffn.path.rate
    return ModelledFfnStage(
        Side.of(part, place.costs),
        Side.of(there, ffn.costs),
        token_s,
        ffn.path.latency_s,
        (place.group.slowdown, ffn.group.slowdown),
    )
