"""Sticky sessions, as in load balancers: all turns of a session run on one instance."""

from collections import Counter
from collections.abc import Collection, Sequence

from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.systems.instances import KVRoom, least_loaded, most_entries
from jaxinfer.systems.least_loaded import num_tokens


class SessionAffinity(System):
    """Sends a session's first turn to the least loaded instance, and later turns to the same one.

    If this instance is lost, or cannot hold the next turn, the session continues on the least
    loaded instance that can. Requests without a session go to the least loaded instance.
    """

    def __init__(self, options: object = None) -> None:
        super().__init__(options)
        self._homes: dict[str, str] = {}
        self._room = KVRoom()

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return no routes: KV stays where it is."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign all waiting requests; each one counts as load for those after it."""
        given: Counter[str] = Counter()
        assignments = []
        for request in waiting:
            names = list(cluster.instances)
            holding = self._room.that_hold(most_entries(request), names, cluster) or names
            name = self._homes.get(request.session) if request.session else None
            if name not in holding:
                name = least_loaded(holding, cluster, given, num_tokens)
            assert name
            if request.session:
                self._homes[request.session] = name
            given[name] += request.prompt_len
            assignments.append(Assignment(request.id, (Leg(name),)))
        return assignments
