"""Routing by load and prefix caches, as in llm-d and Dynamo; each request runs on one instance."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView
from jaxinfer.systems.instances import KVRoom, most_entries
from jaxinfer.systems.least_loaded import num_tokens


class PrefixAwareOptions(Options):
    """Options of ``PrefixAware``.

    Attributes:
        weight: Weight of the prompt tokens that an instance's cache lacks, relative to its present
            load; 0 ignores the caches.
        load: Unit of the load and of the missing tokens: ``tokens``, or the predicted ``seconds``
            to compute them, for instances that differ in speed.
    """

    weight: float = Field(default=1.0, ge=0)
    load: Literal["tokens", "seconds"] = "tokens"


class PrefixAware(System):
    """Sends each request to the instance with the lowest cost; ties go by order.

    The cost is the instance's load (prompt tokens to compute, and KV entries that decodes read)
    plus ``weight`` times the number of prompt tokens that its prefix cache lacks. If nothing is
    cached and ``load`` is ``tokens``, it chooses as ``least_loaded`` does with that load.
    """

    Options = PrefixAwareOptions
    options: PrefixAwareOptions

    def __init__(self, options: PrefixAwareOptions | None = None) -> None:
        super().__init__(options)
        self.needs_fits = self.options.load == "seconds"
        self._room = KVRoom()

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return no routes: KV stays where it is."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign all waiting requests; each one counts as load for those after it."""
        cost = _seconds if self.options.load == "seconds" else _tokens
        given: Counter[str] = Counter()
        assignments = []
        names = list(cluster.instances)
        for request in waiting:
            holding = self._room.that_hold(most_entries(request), names, cluster) or names
            lacking = {
                name: request.prompt_len - cluster.instances[name].cached_tokens(request)
                for name in holding
            }
            name = min(
                holding,
                key=lambda name: cost(
                    cluster.instances[name], given[name], self.options.weight * lacking[name]
                ),
            )
            given[name] += lacking[name]
            assignments.append(Assignment(request.id, (Leg(name),)))
        return assignments


def _tokens(instance: InstanceView, given: int, lacking: float) -> float:
    return num_tokens(instance) + given + lacking


def _seconds(instance: InstanceView, given: int, lacking: float) -> float:
    """Seconds until the queue's and the request's prompt tokens are computed, beside decodes."""
    assert instance.fit
    steps = (instance.prompt_tokens_left + given + lacking) / instance.max_num_batched_tokens
    return steps * instance.fit.mixed.seconds(0, instance.kv_entries)
