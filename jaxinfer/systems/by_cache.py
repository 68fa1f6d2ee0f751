"""Lets systems that choose instances by other criteria also consider prefix caches."""

from jaxinfer.options.validation import Options
from jaxinfer.serving.views import ClusterView, RequestView


class ByCacheOptions(Options):
    """The option of systems that can consider prefix caches when they choose an instance.

    Attributes:
        by_cache: Whether the choice of an instance takes prefix caches into account: cached prompt
            tokens need no computation, and cached KV need not be sent; the papers ignore caches.
    """

    by_cache: bool = False


class CachedParts:
    """The parts of one request that instances have in their prefix caches.

    Args:
        cluster: the instances; None if caches do not count, so that all parts are 0.
    """

    __slots__ = ("_cluster", "_request")

    def __init__(self, request: RequestView, cluster: ClusterView | None) -> None:
        self._request, self._cluster = request, cluster

    @classmethod
    def of(
        cls, options: ByCacheOptions, request: RequestView, cluster: ClusterView
    ) -> "CachedParts":
        """Return a request's cached parts; all of them are 0 if ``by_cache`` is off."""
        return cls(request, cluster if options.by_cache else None)

    def kept(self, name: str) -> int:
        """Return the number of prompt tokens whose KV need not be sent to an instance."""
        if self._cluster is None:
            return 0
        return self._cluster.instances[name].cached_tokens(self._request)

    def spared(self, name: str) -> int:
        """Return how many prompt tokens without KV an instance need not compute, as it has them."""
        return max(self.kept(name) - self._request.computed, 0)

    def share(self, tokens: int) -> float:
        """Return what share of the prompt ``tokens`` are, for loads that count requests."""
        return tokens / self._request.prompt_len
