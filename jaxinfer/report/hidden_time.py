"""Finds the part of each transfer's time that was hidden behind steps."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.world import StepDone, TransferDone

# A landed transfer, and its hidden seconds.
Settled = tuple[TransferDone, float]


class HasSteps(Protocol):
    """An instance, as far as ``HiddenTime`` uses it."""

    @property
    def in_flight(self) -> int:
        """Number of steps launched and not yet ended."""


@dataclass(slots=True)
class _EndedStep:
    """A step that has ended, and the requests whose prompts it computed in part."""

    start: float
    end: float
    prompts: frozenset[str]


@dataclass(slots=True)
class _Landed:
    """A transfer, and by instance the unfinished steps that may have overlapped with it."""

    done: TransferDone
    steps: dict[str, int]


class HiddenTime:
    """Finds the hidden seconds of each transfer; keeps only the steps that may still be needed.

    A transfer is hidden by any step of the destination, and by steps of the source that compute the
    same prompt. All of these are known once the steps that were in flight on both instances when
    the last byte landed have ended, because later steps start after it.
    """

    def __init__(self) -> None:
        # By instance, in the order of their ends.
        self._steps: defaultdict[str, deque[_EndedStep]] = defaultdict(deque)
        self._landed: list[_Landed] = []

    def add_step(self, done: StepDone, moving: Sequence[Transfer]) -> list[Settled]:
        """Record a step that has ended.

        Args:
            moving: transfers that have not landed.

        Returns:
            The transfers whose hidden seconds are final after this step.
        """
        steps = self._steps[done.instance]
        if moving or self._landed:
            prompts = frozenset(
                row.request.id for row in done.rows if row.start < row.request.prompt_len
            )
            steps.append(_EndedStep(done.start, done.end, prompts))
            # Bytes that have not landed yet did not leave earlier.
            oldest = min(
                [transfer.requested for transfer in moving]
                + [landed.done.start for landed in self._landed]
            )
            while steps and steps[0].end <= oldest:
                steps.popleft()
        else:
            steps.clear()
        for landed in self._landed:
            if landed.steps.get(done.instance):
                landed.steps[done.instance] -= 1
        return self._take_settled()

    def add_transfer(self, done: TransferDone, instances: Mapping[str, HasSteps]) -> list[Settled]:
        """Record a transfer that has landed.

        Args:
            instances: all instances that are not lost.

        Returns:
            See ``add_step``.
        """
        ends = {done.transfer.source, done.transfer.dest} & instances.keys()
        self._landed.append(_Landed(done, {name: instances[name].in_flight for name in ends}))
        return self._take_settled()

    def lose(self, instance: str) -> list[Settled]:
        """Record the loss of an instance, whose steps in flight never end.

        Returns:
            See ``add_step``.
        """
        for landed in self._landed:
            landed.steps.pop(instance, None)
        return self._take_settled()

    def _take_settled(self) -> list[Settled]:
        settled = [landed.done for landed in self._landed if not any(landed.steps.values())]
        if settled:
            self._landed = [landed for landed in self._landed if any(landed.steps.values())]
        return [(done, self._hidden(done)) for done in settled]

    def _hidden(self, done: TransferDone) -> float:
        transfer = done.transfer
        busy = [(step.start, step.end) for step in self._steps[transfer.dest]]
        busy += [
            (step.start, step.end)
            for step in self._steps[transfer.source]
            if transfer.request.id in step.prompts
        ]
        return _overlap(done.start, done.end, busy)


def _overlap(start: float, end: float, busy: Iterable[tuple[float, float]]) -> float:
    """Return the seconds from ``start`` to ``end`` in which an instance was busy.

    Its steps may overlap.
    """
    covered, at = 0.0, start
    for a, b in sorted(busy):
        if b > at and a < end:
            covered += min(b, end) - max(a, at)
            at = min(b, end)
    return covered
