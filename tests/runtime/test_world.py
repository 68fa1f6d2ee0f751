"""The real world's clock: arrivals, watchdog; with workers that only pretend."""

import threading
import time
from collections.abc import Callable
from typing import Any

from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.world import Batch, InstanceLost, StepDone


class Pretended:
    """Reports each step ``seconds`` after its launch, or never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def launch(
        self, batch: Batch, origin: float, post: Callable[[Any], None], launched: object
    ) -> None:
        if self.seconds is not None:
            threading.Timer(self.seconds, post, [StepDone(batch, [], 0.0, 0.0)]).start()


def test_one_that_hangs_is_given_up_while_another_reports() -> None:
    workers: dict[str, Any] = {"busy": Pretended(0.01), "hangs": Pretended(None)}
    world = RealWorld(workers, [], watchdog_s=0.3)
    begin = time.perf_counter()
    for name in workers:
        world.launch(Batch(name, [], 0, 0, 0))
    lost: list[InstanceLost] = []
    while not lost:
        assert time.perf_counter() - begin < 30
        for event in world.due_events():
            if isinstance(event, InstanceLost):
                lost.append(event)
            else:
                world.launch(Batch("busy", [], 0, 0, 0))
    assert [event.instance for event in lost] == ["hangs"]
    assert time.perf_counter() - begin >= 0.3
