"""Parts that the grammar of faults is written in."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.lab.conformance.golden import GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout
from jaxinfer.lab.conformance.mover import Mover

Step = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    """A step of a hand-off that is wrong.

    Attributes:
        name: what a check is to call it; ``words``: what is done.
        steps: in place of the mover's methods of these names; ``after``: done at the end.
    """

    name: str
    words: str
    steps: Mapping[str, Step] = field(default_factory=dict)
    after: Callable[[Mover], None] | None = None


Production = Callable[[KVLayout, KVLayout, GoldenModel], Iterator[Mistake]]


def replacing(name: str, words: str, **steps: Step) -> Mistake:
    """A mistake in these steps."""
    return Mistake(name, words, steps)


def afterwards(name: str, words: str, after: Callable[[Mover], None]) -> Mistake:
    """A mistake that is made when all requests have been moved."""
    return Mistake(name, words, {}, after)
