"""The path of KV entries from a stage of one instance to another instance."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.hardware.network import Link


@dataclass(frozen=True)
class StagePath:
    """A source stage's part in a transfer, and its path to the destination.

    Attributes:
        stage: number of the source stage.
        token_bytes: KV bytes per token.
        path: links of the path.
        latency_s: seconds until the first byte lands.
    """

    stage: int
    token_bytes: int
    path: Sequence[Link]
    latency_s: float
