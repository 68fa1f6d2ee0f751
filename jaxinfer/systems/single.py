"""One instance for everything, possibly with layers on several groups (pipeline parallel)."""

from collections.abc import Collection, Sequence

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView


class Single(System):
    """Sends every request to the only instance, at once."""

    def check(self, instances: Collection[str]) -> None:
        """Check that there is exactly one instance."""
        if len(instances) != 1:
            found = ", ".join(instances)
            raise JaxinferError(f"needs exactly one instance, but the run file has {found}")

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return no routes: there is one instance."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign one leg to each request, up to its end."""
        (name,) = cluster.instances
        return [Assignment(request.id, (Leg(name),)) for request in waiting]


class PipelineParallel(Single):
    """Sends every request to the only instance, which has several stages (Cronus, section 3.3)."""
