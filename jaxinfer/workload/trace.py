"""The common type and helpers of all readers of traces."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jaxinfer.errors import JaxinferError
from jaxinfer.workload.bench_request import BenchRequest

# Returns the token ids of a text.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Trace:
    """The requests of a file.

    Attributes:
        requests: requests in the file's order.
        has_times: whether the file has arrival times, even if all are 0.
        note: a line on requests that were left out or moved; empty if there are none.
    """

    requests: list[BenchRequest]
    has_times: bool = False
    note: str = ""


def from_start(requests: list[BenchRequest]) -> list[BenchRequest]:
    """Shift requests in time so that the earliest one arrives at 0."""
    start = min((item.arrival for item in requests), default=0.0)
    if not start:
        return requests
    # With seconds since 1970, a float has no digits below a microsecond.
    return [replace(item, arrival=round(item.arrival - start, 6)) for item in requests]


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put a place, such as ``a.csv line 3``, in front of the errors of the code inside."""
    try:
        yield
    except JaxinferError as error:
        raise JaxinferError(f"{place}: {error}") from None
