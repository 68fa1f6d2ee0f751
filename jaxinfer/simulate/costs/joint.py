"""Steps of instances that share each layer's experts: replicas of data-parallel attention.

Each instance attends to its own requests. Before the experts of a layer, all tokens are gathered;
after them, the experts' sums are scattered. All instances therefore begin and end a step together,
and the one with the most work sets the pace. An instance without work takes part with a dummy
token, as in vLLM and SGLang.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.serving.batch import Batch, Work
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.costs.model import CostModel
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear

# Steps of up to twice ``max_num_seqs`` tokens, and of no more than these, are replayed as a graph,
# for which vLLM pads all replicas to the one with the most tokens.
GRAPH_TOKENS = 512


@dataclass(frozen=True)
class Exchange:
    """Seconds to gather and scatter in one layer: ``each_s``, plus ``token_s`` per token."""

    each_s: float
    token_s: float

    @classmethod
    def of(cls, gpu: Gpu, model: ModelShape, sharers: int, itemsize: int) -> Self:
        """Model an all-gather and a reduce-scatter of hidden states, at the rate of collectives."""
        gb_s, each_s = gpu.collective
        byte_s = (sharers - 1) / sharers / (gb_s * 1e9)
        return cls(2 * each_s, 2 * model.hidden_size * itemsize * byte_s)


@dataclass(frozen=True)
class JointExperts:
    """The part of a step that instances share.

    Attributes:
        micros: microseconds of one layer's experts on a device, by the tokens of all instances.
    """

    micros: PiecewiseLinear
    exchange: Exchange
    layers: int

    def seconds(self, tokens: int) -> float:
        """Return the seconds of all layers' experts and exchanges for these tokens."""
        each = self.micros(tokens) * 1e-6 + self.exchange.each_s + self.exchange.token_s * tokens
        return self.layers * each


@dataclass(frozen=True)
class JointSteps:
    """Seconds of steps that several instances take together.

    Attributes:
        own: times without experts, by instance.
        experts: times of each instance's share of the experts.
        graph_tokens: steps in which no instance has more tokens than this are padded: all
            instances then compute as many as the one with the most.
    """

    own: Mapping[str, CostModel]
    experts: Sequence[JointExperts]
    graph_tokens: int

    def seconds(self, works: Mapping[str, Work]) -> float:
        """Return the seconds of one step.

        Args:
            works: work by instance; an instance without work takes part with a single token.
        """
        counts = [works[name].tokens if name in works else 1 for name in self.own]
        most, total = max(counts), sum(counts)
        if most <= self.graph_tokens:
            total = len(counts) * most
        slowest = max(sum(self.own[name].stages(work)) for name, work in works.items())
        return slowest + max(each.seconds(total) for each in self.experts)


def experts_curve(
    points: Mapping[tuple[float, float], float], model: ModelShape, ways: int
) -> dict[float, float]:
    """Return microseconds of a layer's experts on one device, if devices hold whole experts.

    Args:
        points: times by number of tokens, all of whose experts are on the device, and by the
            number of experts that these tokens go to.
        ways: number of devices that share the experts.

    Returns:
        Times by the tokens of all devices. Each device has the mean number of products, with the
        mean number of its experts that the tokens go to (``ModelShape.experts_read``).
    """
    rows: dict[float, dict[float, float]] = {}
    for (tokens, experts), micros in points.items():
        rows.setdefault(tokens, {})[experts] = micros
    curves = {tokens: PiecewiseLinear(row) for tokens, row in rows.items()}

    def at(total: float) -> float:
        read = model.experts_read(total) / ways
        over = {
            tokens: curve(min(max(read, curve.x[0]), curve.x[-1]))
            for tokens, curve in curves.items()
        }
        return PiecewiseLinear(over)(max(total / ways, min(over)))

    totals = {*range(1, 65), *(ways * tokens for tokens in rows if ways * tokens > 64)}
    return {float(total): at(total) for total in sorted(totals)}


class JointRounds:
    """Steps that joint instances have launched, and when the running step ends.

    Args:
        steps: times of the joint steps.
    """

    def __init__(self, steps: JointSteps) -> None:
        self._steps = steps
        self._launched: Mapping[str, deque[Batch]] = {name: deque() for name in steps.own}
        self._until = 0.0

    def add(self, batch: Batch) -> None:
        """Launch a batch after those that its instance launched before."""
        self._launched[batch.instance].append(batch)

    def begin(self, now: float) -> Sequence[StepDone]:
        """Begin a joint step with the first launched batch of each instance, if none runs.

        Returns:
            The end of the step, once for each instance that takes part.
        """
        if now < self._until or not any(self._launched.values()):
            return ()
        batches = [waiting.popleft() for waiting in self._launched.values() if waiting]
        end = now + self._steps.seconds({batch.instance: batch.work for batch in batches})
        self._until = end
        return [
            StepDone(batch, [0] * batch.work.sampled, now, end, stages=[(now, end)])
            for batch in batches
        ]
