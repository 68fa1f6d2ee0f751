"""Interfaces for the times of a modelled instance's steps."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.batch import Work


class CostModel(Protocol):
    """The times of one instance's steps."""

    def stages(self, work: Work) -> Sequence[float]:
        """Return the seconds of each pipeline stage's part."""

    def hops(self, work: Work) -> Sequence[float]:
        """Return the seconds from each stage's end until the next stage has its hidden states."""


class StageCost(Protocol):
    """The times of one pipeline stage's part of a step."""

    def seconds(self, work: Work) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class SlowedStage:
    """A stage on a device that emulates a device ``slowdown`` times slower."""

    cost: StageCost
    slowdown: float

    def seconds(self, work: Work) -> float:
        """Return the seconds of a step."""
        return self.slowdown * self.cost.seconds(work)


def decode_seconds(cost: CostModel, rows: int) -> Callable[[int], float]:
    """Return the seconds of ``rows`` decodes in the only stage, by the KV entries that they see."""
    part = cost.parts[0] if isinstance(cost, Pipeline) else None
    if of_rows := getattr(part, "decode_seconds", None):
        return of_rows(rows)
    return lambda context: cost.stages(Work(rows, rows, rows, rows, context, [], rows))[0]


# Modules by kind of costs. Each is imported when it is needed, because tables import scipy.
STAGES = {
    "roofline": "jaxinfer.simulate.costs.roofline:RooflineStage",
    "layout": "jaxinfer.simulate.costs.layout_roofline:LayoutStage",
    "linear": "jaxinfer.simulate.costs.linear:LinearStage",
    "phases": "jaxinfer.simulate.costs.phases:PhaseStage",
    "curves": "jaxinfer.simulate.costs.curves:CurveStage",
    "tables": "jaxinfer.simulate.costs.measured_steps:MeasuredTables",
}


def make_stage(part: StagePart, costs: SimulateOptions) -> StageCost:
    """Make a stage with measured costs if the options have any, otherwise with a roofline.

    Raises:
        JaxinferError: the source of the costs does not cover this stage, or does not support
            layouts.
    """
    if part.flow and costs.measured:
        raise JaxinferError(
            f"{costs.where}whole steps were measured under a layout of their own: leave out layout "
            "and mesh, or the measured costs"
        )
    kind = costs.measured or ("layout" if part.flow else "roofline")
    if part.model.windowed_layers and kind != "tables":
        raise JaxinferError(f"{kind} has no times of layers with windows: give published tables")
    module, name = STAGES[kind].split(":")
    try:
        stage: StageCost = getattr(import_module(module), name).of(part, costs)
    except JaxinferError as error:
        raise JaxinferError(f"{costs.where}{error}") from None
    return stage


@dataclass(frozen=True)
class Pipeline:
    """An instance's stages and the links between them.

    Attributes:
        send_s: seconds for which a stage is busy with sending, which blocks it, as in vLLM.
        latency_s: for each stage but the last, seconds until its first byte reaches the next one.
        byte_s: for each stage but the last, seconds per byte that it sends.
        hidden_bytes: bytes of one token's hidden states.
    """

    parts: tuple[StageCost, ...]
    send_s: float
    latency_s: tuple[float, ...]
    byte_s: tuple[float, ...]
    hidden_bytes: int

    def stages(self, work: Work) -> list[float]:
        """Return the seconds of each stage."""
        *senders, last = self.parts
        if not senders:  # Most are like this, and there are many steps.
            return [last.seconds(work)]
        return [*(part.seconds(work) + self.send_s for part in senders), last.seconds(work)]

    def hops(self, work: Work) -> list[float]:
        """Return the seconds between stages."""
        if not self.latency_s:
            return []
        num_bytes = work.tokens * self.hidden_bytes
        return [
            fixed + per_byte * num_bytes
            for fixed, per_byte in zip(self.latency_s, self.byte_s, strict=True)
        ]


@dataclass(frozen=True)
class Padded:
    """An instance whose steps with prefill are padded to given numbers of tokens.

    Attributes:
        buckets: increasing sizes; the last one is the largest step.
    """

    cost: CostModel
    buckets: Sequence[int]

    def stages(self, work: Work) -> Sequence[float]:
        """Return the seconds of each stage."""
        return self.cost.stages(self._padded(work))

    def hops(self, work: Work) -> Sequence[float]:
        """Return the seconds between stages."""
        return self.cost.hops(self._padded(work))

    def _padded(self, work: Work) -> Work:
        if not work.chunks:
            return work
        tokens = self.buckets[bisect_left(self.buckets, work.tokens)]
        return replace(work, tokens=tokens, halves=[self._padded(half) for half in work.halves])
