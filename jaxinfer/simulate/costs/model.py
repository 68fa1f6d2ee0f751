"""How long a modelled instance's steps take."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol

from jaxinfer.config.costs import SimulateOptions, measured_kind
from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.serving.batch import Work
from jaxinfer.steps.shapes import StepLimits

# Bytes of a number of hidden states and logits.
ITEMSIZE = 2


class CostModel(Protocol):
    """The times of one instance's steps."""

    def stages(self, work: Work) -> Sequence[float]:
        """Seconds of each pipeline stage's part."""

    def hops(self, work: Work) -> Sequence[float]:
        """Seconds from each stage's end until the next one has its hidden states."""


class StageCost(Protocol):
    """The times of one pipeline stage's part of a step."""

    def seconds(self, work: Work) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class StagePart:
    """What a pipeline stage has of a model, and where.

    Attributes:
        kind: the GPU's name; ``devices``: how many share each layer.
        layers: how many; ``share``: of the model's.
        first, last: with the embedding, with the head.
        weight_size, kv_size: bytes of a weight, and of a KV entry's number.
        limits: what an engine pads the instance's steps to; None where that is not known.
    """

    gpu: Gpu
    kind: str
    model: ModelShape
    layers: int
    share: float
    first: bool
    last: bool
    devices: int
    weight_size: int
    kv_size: int
    limits: StepLimits | None = None

    @property
    def weight_bytes(self) -> float:
        """Weights on one of the devices."""
        parameters = self.model.parameters(self.layers, self.first, self.last)
        return parameters / self.devices * self.weight_size


# By kind of costs. Each is read when it is asked for: that of tables loads scipy.
STAGES = {
    "roofline": "jaxinfer.simulate.costs.roofline:RooflineStage",
    "linear": "jaxinfer.simulate.costs.linear:LinearStage",
    "phases": "jaxinfer.simulate.costs.phases:PhaseStage",
    "curves": "jaxinfer.simulate.costs.curves:CurveStage",
    "tables": "jaxinfer.simulate.costs.measured_steps:Tables",
}


def make_stage(part: StagePart, costs: SimulateOptions) -> StageCost:
    """By the kind of costs that the options have, which is the roofline's where they have none.

    Raises:
        JaxinferError: as the class of that kind.
    """
    module, name = STAGES[measured_kind(costs) or "roofline"].split(":")
    stage: StageCost = getattr(import_module(module), name).of(part, costs)
    return stage


@dataclass(frozen=True)
class Pipeline:
    """An instance's stages, and what lies between them.

    Attributes:
        send_s: seconds that a stage is busy with sending; it blocks, as vLLM's does.
        latency_s: from stage to stage, until the first byte; ``byte_s``: per byte.
        hidden_bytes: of one token's hidden states.
    """

    parts: tuple[StageCost, ...]
    send_s: float
    latency_s: tuple[float, ...]
    byte_s: tuple[float, ...]
    hidden_bytes: int

    def stages(self, work: Work) -> list[float]:
        """Seconds of each stage."""
        *senders, last = self.parts
        return [*(part.seconds(work) + self.send_s for part in senders), last.seconds(work)]

    def hops(self, work: Work) -> list[float]:
        """Seconds between stages."""
        num_bytes = work.tokens * self.hidden_bytes
        return [
            fixed + per_byte * num_bytes
            for fixed, per_byte in zip(self.latency_s, self.byte_s, strict=True)
        ]


@dataclass(frozen=True)
class Padded:
    """An instance whose steps with prefill are padded to given numbers of tokens.

    Attributes:
        buckets: rising; the last one is the most that a step has.
    """

    cost: CostModel
    buckets: Sequence[int]

    def stages(self, work: Work) -> Sequence[float]:
        """Seconds of each stage."""
        return self.cost.stages(self._padded(work))

    def hops(self, work: Work) -> Sequence[float]:
        """Seconds between stages."""
        return self.cost.hops(self._padded(work))

    def _padded(self, work: Work) -> Work:
        if not work.chunks:
            return work
        tokens = self.buckets[bisect_left(self.buckets, work.tokens)]
        return replace(work, tokens=tokens, halves=[self._padded(half) for half in work.halves])
