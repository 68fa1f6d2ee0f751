"""The type that all readers of traces return, and what they share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jaxinfer.errors import JaxinferError
from jaxinfer.workload.bench_request import BenchRequest

# From a text to its token ids.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Trace:
    """The requests of a file.

    Attributes:
        requests: in the file's order.
        has_times: whether the file says when they come, be it all at 0.
        note: on what was left out, in one line; empty where nothing was.
    """

    requests: list[BenchRequest]
    has_times: bool = False
    note: str = ""


@contextmanager
def at(place: str) -> Iterator[None]:
    """Name the place in errors, such as ``a.csv line 3``."""
    try:
        yield
    except JaxinferError as error:
        raise JaxinferError(f"{place}: {error}") from None
