"""The type that all readers of traces return, and what they share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
        note: on what was left out or moved, in one line; empty where nothing was.
    """

    requests: list[BenchRequest]
    has_times: bool = False
    note: str = ""


def from_start(requests: list[BenchRequest]) -> list[BenchRequest]:
    """Requests whose earliest arrives at 0: a window of a trace begins as late as it was cut."""
    start = min((item.arrival for item in requests), default=0.0)
    if not start:
        return requests
    # Seconds since 1970 leave a float no digits beyond the microsecond.
    return [replace(item, arrival=round(item.arrival - start, 6)) for item in requests]


@contextmanager
def at(place: str) -> Iterator[None]:
    """Name the place in errors, such as ``a.csv line 3``."""
    try:
        yield
    except JaxinferError as error:
        raise JaxinferError(f"{place}: {error}") from None
