"""Everything on one instance: continuous batching with chunked prefill."""

from collections.abc import Collection, Sequence

from jaxinfer.serving.system import Assignment, ClusterView, Leg, RequestView, System


class Single(System):
    """Sends every request to the one instance there is, at once."""

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """One leg each, to the end."""
        (name,) = cluster.instances
        return [Assignment(request.id, (Leg(name),)) for request in waiting]
