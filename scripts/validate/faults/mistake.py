"""The building blocks of the grammar of faults."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.lab.conformance.golden import GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout
from jaxinfer.lab.conformance.mover import Mover
from jaxinfer.lab.conformance.side import Side

Step = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    """A wrong step of a hand-off.

    Attributes:
        name: name that a check must give to the mistake.
        words: description of the mistake.
        steps: functions that replace the mover's methods of these names.
        after: function to call at the end.
        cached: for each request, how many of its first tokens the destination has before.
        before: function that changes the destination before the hand-off.
    """

    name: str
    words: str
    steps: Mapping[str, Step] = field(default_factory=dict)
    after: Callable[[Mover], None] | None = None
    cached: Mapping[int, int] = field(default_factory=dict)
    before: Callable[[Side], None] | None = None


Production = Callable[[KVLayout, KVLayout, GoldenModel], Iterator[Mistake]]


def replacing(name: str, words: str, **steps: Step) -> Mistake:
    """Return a mistake in these steps."""
    return Mistake(name, words, steps)


def afterwards(name: str, words: str, after: Callable[[Mover], None]) -> Mistake:
    """Return a mistake that is made after all requests have been moved."""
    return Mistake(name, words, {}, after)
