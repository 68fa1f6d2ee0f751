"""Instances that step together: a step of all begins once the last one has ended."""

from collections import deque
from collections.abc import Mapping, Sequence

from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.costs.joint import JointSteps


class JointRounds:
    """Steps that such instances have launched, and when the one that runs will end.

    Args:
        steps: the times of their steps.
    """

    def __init__(self, steps: JointSteps) -> None:
        self._steps = steps
        self._launched: Mapping[str, deque[Batch]] = {name: deque() for name in steps.own}
        self._until = 0.0

    def add(self, batch: Batch) -> None:
        """Launch a batch behind those that its instance has launched before."""
        self._launched[batch.instance].append(batch)

    def begin(self, now: float) -> Sequence[StepDone]:
        """Begin a step of what has been launched, if none runs: the first batch of each.

        Returns:
            Its ends, one for each instance that takes part.
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
