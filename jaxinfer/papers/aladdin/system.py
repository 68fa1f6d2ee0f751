"""Aladdin: packs requests onto as few workers as meet their targets (sections 4 and 5).

Steps have either prompts or decodes: the policy ``batching`` is ``prefill_first``.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean
from jaxinfer.papers.aladdin.best_fit import Job, WorkerAccount, best_fit, fits_alone, to_open
from jaxinfer.papers.aladdin.ledger import WorkerLedger, limits_of
from jaxinfer.serving.system import Action, Assignment, Reassign, SetRole, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.systems.instances import AnyNames, alive, check_roles, least_loaded

OFF, ON = "off", "on"


class AladdinOptions(Options):
    """Options of ``Aladdin``.

    Attributes:
        ttft_s, atgt_s: Targets in seconds for a request's first token, and for its mean time
            between tokens.
        theta: Share of the targets that plans may use. See ``Limits``; the paper gives no value.
        gamma: Point of an answer at which its time per token must meet the target: 0 is the first
            token, 1 the last. See ``Limits``; the paper uses 0.5.
        grant_gap: Whether a prompt may use the gap between tokens that has already begun. See
            ``WorkerLedger``.
        prefill: Instances that only compute prompts; without any, workers run whole requests.
        heartbeat_s: Interval in seconds at which the system may switch on instances with role
            ``off`` and move waiting requests; null: never.
        off_after_s: Idle seconds after which an instance is switched off; null: never.
        usd_per_hour: Dollars per hour of each worker; an idle worker is then chosen by its cost for
            the request. Among workers that are idle or off, the system chooses the one whose share
            for the request costs the least.
    """

    ttft_s: float = Field(gt=0)
    atgt_s: float = Field(gt=0)
    theta: float = Field(default=0.8, gt=0, le=1)
    gamma: float = Field(default=0.5, ge=0, le=1)
    grant_gap: bool = True
    prefill: AnyNames = ()
    heartbeat_s: float | None = Field(default=None, gt=0)
    off_after_s: float | None = Field(default=None, gt=0)
    usd_per_hour: Named[Annotated[float, Field(gt=0)]] = Field(default_factory=dict)

    def model_post_init(self, context: object, /) -> None:
        """Refuse options that have no effect."""
        if self.off_after_s is not None and self.heartbeat_s is None:
            raise OptionError("off_after_s: needs heartbeat_s, when it is looked at")

    def usd(self, worker: str) -> float:
        """Return the dollars per hour of one worker; 1 if no price is given."""
        return self.usd_per_hour.get(worker, 1.0)


class Aladdin(System):
    """Places each request on the fullest worker that then still meets all targets.

    If there is no such worker, the system switches on the one that is cheapest for the waiting
    requests. If all workers are on, the request waits until its first token could no longer be in
    time. It then goes to the worker with the shortest iterations.
    """

    Options = AladdinOptions
    options: AladdinOptions
    needs_fits = True
    roles = OFF, ON

    def __init__(self, options: AladdinOptions) -> None:
        super().__init__(options)
        self.tick_interval = options.heartbeat_s
        asked = options.ttft_s, options.atgt_s, options.theta, options.gamma
        self.placed = WorkerLedger(
            lambda instance: limits_of(instance, *asked), options.grant_gap, options.usd
        )
        self._waiting: list[Job] = []
        self._counts = Counter(opened=0, moved=0)

    def check(self, instances: Collection[str]) -> None:
        """Check that prompt instances exist, a worker is left, and all or none have prices."""
        check_roles({"prefill": self.options.prefill}, instances)
        workers = [name for name in instances if name not in self.options.prefill]
        if not workers:
            raise OptionError("prefill: has all instances, must leave one that decodes")
        names = self.options.usd_per_hour
        if names and (missing := next((name for name in workers if name not in names), None)):
            raise OptionError(f"usd_per_hour: has none of {missing!r}, must have all or none")
        if unused := next((name for name in names if name not in workers), None):
            raise OptionError(f"usd_per_hour.{unused}: no worker: {did_you_mean(unused, workers)}")

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return the routes from instances that only compute prompts to the other instances."""
        prefill = self.options.prefill
        return [(source, dest) for source in prefill for dest in instances if dest not in prefill]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Place the requests that fit on a worker or can wait no longer."""
        workers, off = self._look(cluster)
        prefill, given = alive(self.options.prefill, cluster), Counter[str]()
        self._waiting, found = [], []
        for request in waiting:
            self.placed.take_back(request.id)  # It may return from a lost instance.
        for request in waiting:
            prefills, leg = request.computed < request.prompt_len, None
            if prefill and (prefills or not (workers or off)):
                until = request.prompt_len if workers or off else None
                leg = Leg(request.held_by or least_loaded(prefill, cluster, given), until)
            else:
                job, late = self.placed.job(request, prefills), cluster.now - request.arrival
                if worker := self._worker(job, late, workers, off):
                    leg = Leg(worker.name)
            if leg:
                given[leg.instance] += 1
                found.append(Assignment(request.id, (leg,)))
        return found

    def _look(self, cluster: ClusterView) -> tuple[list[WorkerAccount], list[WorkerAccount]]:
        """Return the workers that are on, and those that are off."""
        names: tuple[list[str], list[str]] = [], []
        beats = self.tick_interval
        for name, instance in cluster.instances.items():
            if name not in self.options.prefill:
                names[bool((beats and instance.role == OFF) or instance.draining)].append(name)
        on, off = self.placed.look(cluster, *names)
        return on, off

    def _worker(
        self, job: Job, late: float, on: list[WorkerAccount], off: list[WorkerAccount]
    ) -> WorkerAccount | None:
        """Choose a worker for a request that has waited ``late`` seconds; None if it waits on."""
        worker = best_fit(on, job, self.placed.see)
        if worker is None:
            if not on or fits_alone(job, off) or fits_alone(job, on, late):
                self._waiting.append(job)
                return None
            holding = [each for each in on if job.longest <= each.limits.room]
            worker = min(holding or on, key=lambda each: each.seconds)
        self.placed.give(job, worker)
        return worker

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Record the length of the request's answer."""
        self.placed.ended(request, cluster.now)
        self._waiting = [job for job in self._waiting if job.id != request.id]

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        """Move requests that have not started, and switch workers on and off."""
        workers, off = self._look(cluster)
        moves = self.placed.rebalance(workers)
        opened = to_open(self._waiting, workers, off, self.placed.see)
        self._counts.update(opened=len(opened), moved=len(moves))
        idle = [each for each in workers if not each.jobs and not self._waiting]
        last = cluster.now - (self.options.off_after_s or math.inf)
        roles = [SetRole(name, ON) for name in opened]
        roles += [SetRole(each.name, OFF) for each in idle if each.empty_since <= last]
        return [*(Reassign(name, (Leg(to),)) for name, to in moves.items()), *roles]

    def report(self) -> Mapping[str, object]:
        """Return how often workers were switched on, and how many unstarted requests were moved."""
        return dict(self._counts)
