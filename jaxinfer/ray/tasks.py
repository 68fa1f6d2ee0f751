"""Runs simulations on the cores of a Ray cluster."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.processes.ray_client import connect

T = TypeVar("T")
R = TypeVar("R")


class RayMap:
    """``map`` whose calls run as Ray tasks, one per core; those of a lost node run again elsewhere.

    Args:
        address: see ``connect``.

    Attributes:
        cores: number of cores of the whole cluster.

    Raises:
        JaxinferError: there is no such cluster, or it has no cores.
    """

    def __init__(self, address: str) -> None:
        self._ray = connect(address)
        self.cores = int(self._ray.cluster_resources().get("CPU", 0))
        if not self.cores:
            raise JaxinferError(f"Ray's cluster at {address} has no CPUs to simulate on")
        self._task = self._ray.remote(num_cpus=1)(_call)
        self._sent: tuple[object, Any] = None, None

    def __call__(self, call: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
        """Start all calls at once; yield results in order. Results not asked for are abandoned."""
        if self._sent[0] is not call:  # A search calls the same function again and again.
            self._sent = call, self._ray.put(call)
        left = deque(self._task.remote(self._sent[1], item) for item in items)
        try:
            while left:
                found, mistake = self._ray.get(left[0])
                # Ray 2.60 aborts if a task is cancelled whose end it has not noticed yet.
                left.popleft()
                if mistake:
                    raise JaxinferError(mistake)
                yield found
        finally:
            for reference in left:
                self._ray.cancel(reference)


def _call(call: Callable[[T], R], item: T) -> tuple[R | None, str | None]:
    """Return the result, or the user's mistake, because Ray's own errors have many lines."""
    try:
        return call(item), None
    except JaxinferError as error:
        return None, str(error)
