"""A worker that only pretends."""

import threading
from collections.abc import Callable
from typing import Any

from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import StepDone


class Pretended:
    """Reports each step ``seconds`` after its launch, or never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def launch(
        self, batch: Batch, origin: float, post: Callable[[Any], None], launched: object
    ) -> None:
        if self.seconds is not None:
            threading.Timer(self.seconds, post, [StepDone(batch, [], 0.0, 0.0)]).start()
