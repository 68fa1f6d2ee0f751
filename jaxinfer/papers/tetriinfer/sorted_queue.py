"""Queues of prompts in front of instances, sorted in windows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

from jaxinfer.serving.views import ClusterView, RequestView
from jaxinfer.systems.instances import KVRoom

Order = Literal["sjf", "ljf", "fcfs"]
# A window is taken early enough to fill the step after the current one.
STEPS_AHEAD = 2


def in_order(window: Sequence[RequestView], order: Order) -> list[RequestView]:
    """Order requests by shortest prompt, longest prompt or arrival; ties are broken by arrival."""
    match order:
        case "sjf":
            return sorted(window, key=lambda request: request.prompt_len)
        case "ljf":
            return sorted(window, key=lambda request: -request.prompt_len)
        case "fcfs":
            return list(window)


class Windows:
    """One queue of prompts for each instance.

    Args:
        size: number of prompts that are sorted together.
    """

    def __init__(self, size: int, order: Order) -> None:
        self._size, self._order = size, order
        self._pools = KVRoom()
        # By instance, the tokens of prompts by id.
        self._queues: dict[str, dict[str, int]] = {}

    def __contains__(self, name: str) -> bool:
        return bool(self._queues.get(name))

    def requests(self) -> set[str]:
        """Return the requests that are in any queue."""
        return {request for queue in self._queues.values() for request in queue}

    def keep(self, names: Iterable[str]) -> None:
        """Keep the queues of only these instances; the requests in other queues are forgotten."""
        self._queues = {name: self._queues.get(name, {}) for name in names}

    def add(self, request: RequestView, cluster: ClusterView) -> None:
        """Add a prompt to the queue with the fewest tokens, of instances that can hold it."""

        def tokens(name: str) -> int:
            left = cluster.instances[name].prompt_tokens_left
            return left + sum(queue.values()) if (queue := self._queues[name]) else left

        names = self._pools.that_hold(request.prompt_len, list(self._queues), cluster)
        name = min(names or self._queues, key=tokens)
        self._queues[name][request.id] = request.prompt_len

    def remove(self, request: str) -> None:
        """Remove a request that has ended, if it is queued."""
        for queue in self._queues.values():
            queue.pop(request, None)

    def take(
        self, there: Mapping[str, RequestView], cluster: ClusterView
    ) -> Iterator[tuple[str, RequestView]]:
        """Yield instances that have too little work, and their next requests in order.

        Args:
            there: all queued requests, by id.
        """
        for name, queue in self._queues.items():
            if not queue:
                continue
            instance = cluster.instances[name]
            left = instance.prompt_tokens_left
            while queue and left < STEPS_AHEAD * instance.max_num_batched_tokens:
                window = [there[request] for request in islice(queue, self._size)]
                for request in in_order(window, self._order):
                    left += queue.pop(request.id)
                    yield name, request
