"""Parts that the grammar of faults is written in."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.conformance.golden import GoldenModel
from jaxinfer.conformance.layout import Layout
from jaxinfer.conformance.mover import Mover

Step = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    """A step of a mover that is wrong; see ``faults.Fault``."""

    name: str
    mistake: str
    steps: Mapping[str, Step] = field(default_factory=dict)
    after: Callable[[Mover], None] | None = None


Production = Callable[[Layout, Layout, GoldenModel], Iterator[Mistake]]


def replacing(name: str, mistake: str, **steps: Step) -> Mistake:
    """A mistake in these steps."""
    return Mistake(name, mistake, steps)


def afterwards(name: str, mistake: str, after: Callable[[Mover], None]) -> Mistake:
    """A mistake that is made when all requests have been moved."""
    return Mistake(name, mistake, {}, after)
