"""How long a modelled instance's steps take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.serving.work import Work


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
