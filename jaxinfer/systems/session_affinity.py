"""Whole requests, all turns of a session on one instance: a load balancer's sticky sessions."""

from collections import Counter
from collections.abc import Collection, Sequence

from jaxinfer.serving.system import Assignment, ClusterView, Leg, RequestView, System
from jaxinfer.systems.instances import least_loaded
from jaxinfer.systems.least_loaded import num_tokens


class SessionAffinity(System):
    """Sends a session's first turn to the least loaded instance by tokens, and the others after it.

    A session whose instance was lost goes to the least loaded one from then on. Requests of no
    session go to the least loaded instance.
    """

    def __init__(self, options: object = None) -> None:
        super().__init__(options)
        self._homes: dict[str, str] = {}

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """An empty sequence: KV stays where it is."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign all waiting requests; each one counts as load for those after it."""
        given: Counter[str] = Counter()
        assignments = []
        for request in waiting:
            name = self._homes.get(request.session) if request.session else None
            if name not in cluster.instances:
                name = least_loaded(cluster.instances, cluster, given, num_tokens)
            assert name
            if request.session:
                self._homes[request.session] = name
            given[name] += request.prompt_len
            assignments.append(Assignment(request.id, (Leg(name),)))
        return assignments
