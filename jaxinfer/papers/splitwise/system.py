"""Splitwise: separate machines for prompts and for decodes, and a mixed pool (section IV).

The cluster-level scheduler gives each arriving request a machine for its prompt and one for its
decodes. Machines that are out of work help the other phase, in the mixed pool, and later return. A
machine's own policies (``whole_prompts``) decide what it computes in a step.
"""

from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from jaxinfer.papers.splitwise.pools import MachineJob, MachinePools, ReturnWhen
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, HandOffRule, Leg, RequestView
from jaxinfer.systems.by_cache import ByCacheOptions, CachedParts
from jaxinfer.systems.instances import AnyNames, Names, check_roles


class SplitwiseOptions(ByCacheOptions):
    """Options of ``Splitwise``. What the paper leaves open is as in the authors' simulator.

    Attributes:
        prompt, token: Instances of each pool; ``token: []`` makes one pool, in which a request runs
            on the instance with the shortest queue (the paper's baseline).
        max_pending_tokens: Largest number of pending prompt tokens on a machine; beyond it, a
            machine of another pool is used.
        return_when: When a machine leaves the mixed pool: after the last request of the other pool
            (the paper), or after all its requests (the paper's simulator).
        layerwise_from: Smallest prompt, in tokens, whose KV is sent ``per_segment``; that of
            shorter prompts is sent ``at_end``; null: always ``at_end``.
    """

    prompt: Names = ("prompt",)
    token: AnyNames = ("token",)
    max_pending_tokens: int = Field(default=8192, ge=1)
    return_when: ReturnWhen = "opposite_done"
    layerwise_from: int | None = Field(default=512, ge=1)


class Splitwise(System):
    """Gives each request two machines with the shortest queues, by the system's own account."""

    Options = SplitwiseOptions
    options: SplitwiseOptions

    def __init__(self, options: SplitwiseOptions) -> None:
        super().__init__(options)
        self.pools = MachinePools(
            options.prompt,
            options.token,
            options.max_pending_tokens,
            options.return_when,
        )

    def check(self, instances: Collection[str]) -> None:
        """Check that all instances that the options name exist, and that none has two roles."""
        check_roles({"prompt": self.options.prompt, "token": self.options.token}, instances)

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return routes between all machines, since each may be mixed; none with one pool."""
        return super().routes(instances) if self.options.token else ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign all waiting requests at once; if one machine is left, all requests run there."""
        self.pools.look(cluster.instances, cluster.now)
        if not self.pools.everyone:
            # All are lost: the loop fails requests for them, or lets them wait.
            return [Assignment(r.id, (Leg(self.options.prompt[0]),)) for r in waiting]
        return [Assignment(request.id, self._legs(request, cluster)) for request in waiting]

    def _legs(self, request: RequestView, cluster: ClusterView) -> tuple[Leg, ...]:
        """Return a request's legs: two even on one machine, so that the first one's end is
        reported.
        """
        pools, length = self.pools, request.prompt_len
        parts = CachedParts.of(self.options, request, cluster)
        where = cluster.instances, cluster.now
        pools.take_back(request.id, *where)  # Work that a lost machine has not finished.
        entries = length + request.max_tokens
        if request.computed >= length:
            token = pools.for_decodes(entries, *where, parts.kept)
            pools.give(request.id, MachineJob(length, entries, None, token))
            return (Leg(token.name),)
        prompt, token = pools.pair(length, entries, *where, parts.spared, parts.kept)
        spared = parts.spared(prompt.name)
        pools.give(request.id, MachineJob(length, entries, prompt, token, spared))
        least = self.options.layerwise_from
        rule: HandOffRule = "at_end" if least is None or length < least else "per_segment"
        return Leg(prompt.name, length, rule), Leg(token.name)

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        """Record that the request's prompt is done."""
        self.pools.prompt_done(request.id, cluster.instances, cluster.now)

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Forget the request."""
        self.pools.take_back(request.id, cluster.instances, cluster.now)

    def report(self) -> Mapping[str, object]:
        """Return the moves of machines between pools; of many moves, only the first ones."""
        found = {name: [(0.0, "prompt")] for name in self.options.prompt}
        found |= {name: [(0.0, "token")] for name in self.options.token}
        for time, name, where in self.pools.moves:
            found[name].append((time, where))
        return {"pools": found}
