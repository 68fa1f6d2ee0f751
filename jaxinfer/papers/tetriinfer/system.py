"""TetriInfer: sorted windows of prompts, decodes placed by predicted length, and roles that flip.

This module implements sections 3.2 to 3.5 of the paper. Policies decide how an instance serves its
requests. For chunks of a fixed number of tokens, set the policy ``mixed`` and ``token_buckets`` to
that one number. Decode instances use the admission ``reserve_dynamic`` with the lower bound.
``workload.predictor`` predicts the lengths of answers.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import product

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.papers.tetriinfer.dispatch import Dispatch, LoadReports
from jaxinfer.papers.tetriinfer.role_flips import Flips
from jaxinfer.papers.tetriinfer.sorted_queue import Order, Windows
from jaxinfer.serving.system import Action, Assignment, SetRole, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.systems.instances import KVRoom, Names, alive, check_roles, most_entries


class TetriInferOptions(Options):
    """Options of ``TetriInfer``.

    Attributes:
        prefill, decode: Instances that start in these roles.
        prefill_batch: Number of prompts that are sorted together.
        order: Order of these prompts: shortest first, longest first, or first come, first served.
        dispatch: How the decode instance is chosen. See ``length_aware.choose``.
        heavy_decode: Predicted output tokens above which a request counts as heavy.
        report_s: Seconds between load reports of the instances.
        flip_after_s: Seconds for which an instance must be idle, while the other role is busy,
            before the instance takes that role; null: never.
        flip_below: Share of those seconds during which this condition may be violated.
        seed: Seed of the random choices.
    """

    prefill: Names = ("prefill",)
    decode: Names = ("decode",)
    prefill_batch: int = Field(default=16, ge=1)
    order: Order = "sjf"
    dispatch: Dispatch = "two_choices"
    heavy_decode: int = Field(default=128, ge=0)
    report_s: float = Field(default=0.1, gt=0)
    flip_after_s: float | None = Field(default=60.0, gt=0)
    flip_below: float = Field(default=0.1, ge=0, lt=0.5)
    seed: int = 0


class TetriInfer(System):
    """Queues each prompt where the fewest tokens wait, until the window of prompts is sorted.

    When the prompt is done, its request goes to one of two randomly drawn decode instances, chosen
    by their last reported loads and the requests assigned since. If all instances of a role are
    lost, the others serve alone.
    """

    Options = TetriInferOptions
    options: TetriInferOptions
    roles = "prefill", "decode"

    def __init__(self, options: TetriInferOptions) -> None:
        super().__init__(options)
        self.tick_interval = options.report_s
        self._began = dict.fromkeys(options.prefill, "prefill")
        self._began |= dict.fromkeys(options.decode, "decode")
        self._pools = KVRoom()
        self._windows = Windows(options.prefill_batch, options.order)
        # The prefill instance of each request that has left it.
        self._prefilled: dict[str, str] = {}
        self._ledger = LoadReports(options.seed)
        self._flips = Flips(options.flip_after_s, options.flip_below)
        self._flipped: list[dict[str, object]] = []

    def check(self, instances: Collection[str]) -> None:
        """Check that all instances exist, and that none has two roles."""
        check_roles({"prefill": self.options.prefill, "decode": self.options.decode}, instances)

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return all routes, since roles change; without flips, those from prefill to decode."""
        if self.options.flip_after_s is not None:
            return super().routes(instances)
        return list(product(self.options.prefill, self.options.decode))

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign prompts by windows, and place the decodes of requests whose prompts are done."""
        prefill, decode = self._in_roles(cluster).values()
        if not prefill and not decode:
            # One that drains. If none is left, asking for a lost one tells the loop that all are
            # lost.
            prefill = alive(self._began, cluster) or list(self._began)
        self._windows.keep(prefill)
        queued = self._windows.requests()
        assignments = []
        for request in waiting:
            if request.computed >= request.prompt_len or not prefill:
                leg = Leg(self._dispatch(request, decode, cluster))
                assignments.append(Assignment(request.id, (leg,)))
            elif request.id not in queued:
                self._ledger.forget(request.id)  # It may return from a lost instance.
                self._windows.add(request, cluster)
        there = {request.id: request for request in waiting}
        for name, request in self._windows.take(there, cluster):
            self._prefilled[request.id] = name
            legs = [Leg(name, request.prompt_len)]
            if decode and not self._pools.that_hold(most_entries(request), decode, cluster):
                legs.append(Leg(decode[0]))  # It is refused now, and not after its prefill.
            assignments.append(Assignment(request.id, tuple(legs)))
        return assignments

    def _in_roles(self, cluster: ClusterView) -> dict[str, list[str]]:
        roles: dict[str, list[str]] = {"prefill": [], "decode": []}
        for name, instance in cluster.instances.items():
            role = instance.role or self._began.get(name)
            if role in roles and not instance.draining:
                roles[role].append(name)
        return roles

    def _dispatch(self, request: RequestView, decode: Sequence[str], cluster: ClusterView) -> str:
        """Choose where a request decodes: where its prompt was computed if no instance decodes."""
        if not decode:
            return self._prefilled[request.id]
        if not self._ledger.reports.keys() >= {*decode}:
            self._ledger.report(cluster.instances[name] for name in decode)
        names = self._pools.that_hold(most_entries(request), decode, cluster) or decode
        return self._ledger.place(request, names, self.options.heavy_decode, self.options.dispatch)

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Remove a request that has ended from the accounts."""
        self._ledger.forget(request.id)
        self._prefilled.pop(request.id, None)
        self._windows.remove(request.id)

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        """Report loads, after which one instance may flip."""
        roles, instances = self._in_roles(cluster), cluster.instances
        self._ledger.report(instances[name] for name in roles["decode"])
        idle = [n for n, i in instances.items() if not i.num_requests and n not in self._windows]
        self._flips.watch(instances, idle, cluster.now)
        if flip := self._flips.next(roles, cluster.now):
            name, role = flip
            self._flipped.append({"instance": name, "role": role, "asked": cluster.now})
            return [SetRole(name, role)]
        return ()

    def report(self) -> Mapping[str, object]:
        """Return the flips that were requested, with their times."""
        return {"flips": self._flipped}
