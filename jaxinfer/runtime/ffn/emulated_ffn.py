"""A stage and its FFN group at the speeds of slower devices.

Each piece of work, a layer's attention or FFN of one micro-batch, is computed and then held back
until the emulated devices would have ended it. Pieces on one group follow one another; those of
both groups and of different micro-batches overlap as they do without emulation.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxinfer.serving.batch import Work
from jaxinfer.steps.times import StepTimes


@dataclass(frozen=True)
class PartSeconds:
    """How long the attention and the FFN of a layer take on the emulated devices.

    Attributes:
        own: times that steps without the FFN take here.
        ffn: seconds of a layer's FFN here, by bucket of tokens.
        layers: number of the stage's layers.
        slowdowns: how many times slower the stage's own group and its FFN group are.
    """

    own: StepTimes
    ffn: Mapping[int, float]
    layers: int
    slowdowns: tuple[float, float]

    def of_attention(self, work: Work) -> float:
        """Return the seconds that a micro-batch's attention takes in one layer.

        The time that a step takes outside its layers is divided evenly among the layers.
        """
        return self.slowdowns[0] * self.own.seconds(work) / self.layers

    def of_ffn(self, tokens: int) -> float:
        """Return the seconds that a layer's FFN takes for ``tokens`` tokens, including padding."""
        return self.slowdowns[1] * self.ffn[tokens]


@dataclass
class EmulatedGroup:
    """An emulated device group, which does one piece of work at a time.

    Attributes:
        free: time at which the group has ended all work so far, by ``time.perf_counter``.
        late: seconds by which pieces were late.
    """

    free: float = 0.0
    late: list[float] = field(default_factory=list)

    def end_of(self, ready: float, seconds: float) -> float:
        """Wait until the emulated group has ended a piece of work that is done; return that time.

        Args:
            ready: time at which the inputs of the work were available.
        """
        end = max(ready, self.free) + seconds
        now = time.perf_counter()
        if now > end:
            self.late.append(now - end)
            end = now
        else:
            time.sleep(end - now)
        self.free = end
        return end


class EmulatedFfn:
    """The two emulated groups of a stage: its own, and that of its FFN.

    Attributes:
        own: the stage's own group.
        ffn: its FFN group.
    """

    def __init__(self, seconds: PartSeconds) -> None:
        self.seconds = seconds
        self.own, self.ffn = EmulatedGroup(), EmulatedGroup()
        # It computes one FFN after the other. Its thread ends once this object is no longer used.
        self._thread = ThreadPoolExecutor(1)

    def ask(
        self, launch: Callable[[], Any], tokens: int, ready: float
    ) -> "Future[tuple[Any, float]]":
        """Start a layer's FFN; the future has the output, and the time when it was available.

        Args:
            tokens: tokens of the micro-batch with their padding.
            ready: time at which the hidden states were available.
        """

        def compute() -> tuple[Any, float]:
            found = jax.block_until_ready(launch())
            return found, self.ffn.end_of(ready, self.seconds.of_ffn(tokens))

        return self._thread.submit(compute)

    def take_late(self) -> float:
        """Return by how many seconds pieces of work were late since the last call."""
        late = sum(self.own.late) + sum(self.ffn.late)
        self.own.late, self.ffn.late = [], []
        return late
