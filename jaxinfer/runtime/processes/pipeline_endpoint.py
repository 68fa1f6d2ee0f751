"""The processes of one instance as a side of channels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.runtime.kv.kv_endpoint import Hear, KVProcess
from jaxinfer.runtime.kv.kv_messages import OpenEnd, SlabMessage


class PipelineEndpoint:
    """All processes of one instance as one side of channels; see ``KVProcess``.

    Args:
        sides: processes in the order of their stages.
        first_stages: number of each process's first stage.
    """

    waits_for: Mapping[int, tuple[str, float]] = {}

    def __init__(self, sides: Sequence[Any], first_stages: Sequence[int]) -> None:
        self.pieces = self._sides = sides
        self._first = first_stages
        self._of: dict[int, KVProcess] = {}

    def open(self, message: OpenEnd, hear: Hear) -> None:
        """See KVProcess; the stage is numbered within the whole instance."""
        number = max(i for i, first in enumerate(self._first) if first <= message.stage)
        side = self._of[message.end] = self._sides[number]
        side.open(message._replace(stage=message.stage - self._first[number]), hear)

    def do(self, message: SlabMessage) -> None:
        """See KVProcess."""
        self._of[message.end].do(message)

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """See KVProcess; the loss of one process is the loss of all."""
        for side in self._sides:
            side.on_loss(hear)

    def why_lost(self, seconds: float) -> str | None:
        """See KVProcess."""
        each = seconds / len(self._sides)
        return next((why for side in self._sides if (why := side.why_lost(each))), None)
