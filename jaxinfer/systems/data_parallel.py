"""Data parallelism over unequal instances (Cronus, sections 3.2 and 5.1)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from jaxinfer.options.validation import OptionError, Options, did_you_mean
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView


class Share(Options):
    """The share of requests that one instance takes.

    Attributes:
        weight: Number of requests that it takes in one round.
        max_waiting: Largest number of requests in its queue; an instance at its limit is skipped.
    """

    weight: int = Field(ge=1)
    max_waiting: int = Field(ge=1)


class DataParallelOptions(Options):
    """Options of ``DataParallel``.

    Attributes:
        shares: For each instance, its ``weight`` (requests per turn) and ``max_waiting`` (length of
            the queue at which it is skipped), as in ``{a: {weight: 3, max_waiting: 3}}``. The paper
            uses 3 and 3 for the strong instance, 1 and 1 for the weak one.
    """

    shares: dict[str, Share]


class DataParallel(System):
    """Weighted round-robin: each request runs whole on one instance."""

    Options = DataParallelOptions
    options: DataParallelOptions

    def __init__(self, options: DataParallelOptions) -> None:
        super().__init__(options)
        shares = options.shares.items()
        # With 3 and 1, the strong one gets three in a row, and the weak one gets the next.
        self._turns = [name for name, share in shares for _ in range(share.weight)]
        self._next = 0

    def check(self, instances: Collection[str]) -> None:
        """Check that there is one share per instance."""
        for name in self.options.shares:
            if name not in instances:
                raise OptionError(f"shares.{name}: {did_you_mean(name, instances)}")
        if left := [name for name in instances if name not in self.options.shares]:
            raise OptionError(f"shares: instance {left[0]!r} has none")

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return no routes: KV stays where it is."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign requests to the instances in turn, as long as some queue has room."""
        given: Counter[str] = Counter()
        assignments = []
        for request in waiting:
            name = self._take_turn(cluster, given)
            if name is None:
                break
            given[name] += 1
            assignments.append(Assignment(request.id, (Leg(name),)))
        return assignments

    def _take_turn(self, cluster: ClusterView, given: Mapping[str, int]) -> str | None:
        for _ in self._turns:
            name = self._turns[self._next]
            self._next = (self._next + 1) % len(self._turns)
            if name not in cluster.instances:
                continue  # It was lost.
            room = self.options.shares[name].max_waiting - given.get(name, 0)
            if len(cluster.instances[name].waiting) < room:
                return name
        return None
