"""How long a modelled instance's steps take."""

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.serving.work import Work


class CostModel(Protocol):
    """The times of one instance's steps."""

    def stages(self, work: Work) -> Sequence[float]:
        """Seconds of each pipeline stage's part."""

    def hops(self, work: Work) -> Sequence[float]:
        """Seconds from each stage's end until the next one has its hidden states."""
