"""Collectives in numbers: the array in a ring, and how much of it each device sends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Collective:
    """An array that a group of devices moves.

    Attributes:
        kind: XLA's name of the collective.
        axes: axes of the mesh that the group spans.
        devices: number of devices in one group.
        numbers: size of the array: the output of each device for an all-gather, otherwise its
            input.
        what: name of the array.
        letters: logical axes of the array.
        asked: whether the program itself asks for it, so that each compiler emits it.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    numbers: float
    what: str
    letters: str
    asked: bool = False

    @property
    def moved(self) -> float:
        """Number of values that each device sends in a ring."""
        return moved(self.kind, self.devices) * self.numbers


def moved(kind: str, devices: int) -> float:
    """Return the share of an array that each of ``devices`` devices sends.

    See ``Collective.numbers``.
    """
    if kind == "collective-permute":
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (devices - 1) / devices


def is_the_compilers(each: Collective) -> bool:
    """Tell whether it is a reduce-scatter that no program asks for."""
    return each.kind == "reduce-scatter" and not each.asked


def without_reduce_scatter(found: Sequence[Collective]) -> list[Collective]:
    """Return the collectives of a compiler that reduces everywhere and then cuts, like XLA for
    CPUs.
    """
    return [replace(each, kind="all-reduce") if is_the_compilers(each) else each for each in found]
