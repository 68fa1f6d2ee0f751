"""Processes that are started again together, and what comes to be in use with them."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.processes.pipeline_endpoint import PipelineEndpoint
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote, PipelineWorker
from jaxinfer.runtime.processes.process import Process, ProcessGone
from jaxinfer.runtime.processes.process_group import (
    OtherProcesses,
    RemoteEndpoint,
    lend_pools,
    open_pools,
    wait_until_loaded,
)
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.stage_plan import StageFacts


@dataclass(frozen=True)
class Restarted:
    """There is news of a group's process: ``Restarts.take`` tells it."""

    group: str


@dataclass(frozen=True)
class RestartResult:
    """The outcome of a loss.

    Attributes:
        instances: instances of the process, or the one that has gone on without it; none where
            that has it again.
        why: the reason why it was lost.
        seconds: time from then until it was ready, or was given up.
        error: the reason why it could not be started; None if it was.
        without: numbers of the shards that its one instance has gone on without.
    """

    group: str
    instances: Sequence[str]
    why: str
    seconds: float
    error: str | None = None
    without: Sequence[int] = ()


Hear = Callable[[Restarted | Failed], object]


@dataclass
class RestartGroup(ABC):
    """Processes that are started again together.

    Attributes:
        name: of its groups.
        parts: of the cluster, by group; ``processes``: those that have them.
        left: how often they may be started.
        starting: whether a thread is about it, and ``why``: as one before was lost.
        news: an outcome that has not been taken.
        thread: the last one that was about it.
    """

    name: str
    parts: Mapping[str, ClusterConfig]
    left: int
    processes: Mapping[str, Process]
    starting: bool = field(default=False, init=False)
    why: str = field(default="", init=False)
    news: RestartResult | None = field(default=None, init=False)
    thread: threading.Thread | None = field(default=None, init=False)

    @property
    def lenders(self) -> Sequence["PoolRestart"]:
        """Homes whose processes are started again with them."""
        return ()

    @property
    def is_wanted(self) -> bool:
        """True if they are of use once they have started."""
        return True

    @property
    def is_clear(self) -> bool:
        """True if what has started may be used by now."""
        return True

    @property
    @abstractmethod
    def instances(self) -> Sequence[str]:
        """Names of the instances that return with them."""

    @abstractmethod
    def tell_of_loss(self, hear: Hear) -> None:
        """Tell a run what it has to know while they are started."""

    def end(self, why: str) -> None:
        """End what is left of them, since what they have is needed, and wait until all know it."""
        for process in self.processes.values():
            if not process.lost:
                process.give_up(why)
            process.wait_until_told()

    @abstractmethod
    def get_ready(self, processes: Mapping[str, Process]) -> None:
        """Have new processes, by group, load, compile and open all that the lost ones had."""

    @abstractmethod
    def use(self) -> None:
        """Let the new processes take the place of the lost ones; in the loop's thread."""


@dataclass
class WorkerRestart(RestartGroup):
    """A group's process, or those that share an instance, with instances.

    Attributes:
        others: starts the processes.
        rests: instances whose attention groups are started again with their stages; ``processes``
            has those without which they cannot go on.
        prepared: of each instance, the sampler that the new processes have.
        fresh: new processes that are not in use, by group.
    """

    workers: Mapping[str, AnyRemote]
    sides: Mapping[str, RemoteEndpoint | PipelineEndpoint]
    others: OtherProcesses
    rests: Sequence["DegradedInstance"] = ()
    prepared: Mapping[str, SamplerShape] = field(default_factory=dict, init=False)
    fresh: Mapping[str, Process] = field(default_factory=dict, init=False)

    @property
    def lenders(self) -> "Sequence[PoolRestart]":
        """See RestartGroup."""
        return [lender for rest in self.rests for lender in rest.lenders]

    @property
    def instances(self) -> Sequence[str]:
        """See RestartGroup."""
        return [*self.workers]

    def tell_of_loss(self, hear: Hear) -> None:
        """See RestartGroup."""
        for name in self.workers:
            hear(Failed(name, ProcessLost(self.why)))

    def end(self, why: str) -> None:
        """See RestartGroup; a thread that continues an instance or returns a group stops first."""
        for rest in self.rests:
            rest.worker.give_up(ProcessLost(why))
        super().end(why)
        threads = [*(rest.thread for rest in self.rests), *(each.thread for each in self.lenders)]
        for thread in filter(None, threads):
            if thread.ident:  # Else, who was about to start it was interrupted.
                thread.join()
        lent = [process for rest in self.rests for process in rest.worker.lending]
        coming = [process for home in self.lenders for process in home.processes.values()]
        for process in [*lent, *coming, *self.fresh.values()]:
            process.give_up(why)
            process.wait_until_told()

    def get_ready(self, processes: Mapping[str, Process]) -> None:
        """See RestartGroup."""
        self.fresh = processes
        loaded = {group: wait_until_loaded(process) for group, process in processes.items()}
        prepared: dict[str, SamplerShape] = {}
        for name, worker in self.workers.items():
            there = [(piece, piece.process.name) for piece in worker.pieces]
            for piece, group in there:
                _, found = self.others.lend(name, group, processes[group], loaded[group])
                for stage, plan in zip(piece.stages, found.plans[name], strict=True):
                    check_same(name, stage.plan, plan)
            if isinstance(worker, PipelineWorker):
                worker.follow_on([(processes[group], loaded[group]) for _, group in there])
            while prepared.get(name) != (wanted := worker.sampler):
                prepared[name] = wanted
                for piece, group in there:
                    for _ in piece.prepare_on(processes[group], wanted):
                        pass
            for side in self.sides[name].pieces:
                side.open_on(processes[side.group])
            for piece, group in there:
                piece.emulate_on(processes[group])
        self.prepared = prepared

    def use(self) -> None:
        """See RestartGroup."""
        for name, worker in self.workers.items():
            for side in self.sides[name].pieces:
                side.move_to(self.processes[side.group])
            for piece in worker.pieces:
                piece.move_to(self.processes[piece.process.name])
            if isinstance(worker, PipelineWorker):
                worker.begin_again([self.fresh[group] for group in worker.lends])
            if self.prepared[name] != worker.sampler:  # Asked for when it was ready.
                with suppress(ProcessGone):  # The first step for it will show it.
                    next(worker.prepare(worker.sampler, wait=False))
        for lender in self.lenders:
            lender.processes, lender.news = {lender.name: self.fresh[lender.name]}, None
        self.fresh = {}


@dataclass
class DegradedInstance:
    """An instance that can go on without attention groups whose processes are lost.

    Attributes:
        lenders: homes of those that may come back alone.
        why: as one is lost, while a thread is about it; ``news``: an outcome that nobody has taken.
        thread: the last one that was about it.
    """

    worker: PipelineWorker
    lenders: "list[PoolRestart]" = field(default_factory=list)
    why: str | None = None
    news: RestartResult | None = None
    thread: threading.Thread | None = None


@dataclass
class PoolRestart(RestartGroup):
    """An attention group's process, without which its instance goes on meanwhile.

    Attributes:
        others: starts the processes.
        lent: where to call for the pools that the new process lends, by stage and number there.
    """

    rest: DegradedInstance
    others: OtherProcesses
    lent: Mapping[tuple[int, int], Address] = field(default_factory=dict, init=False)

    @property
    def instances(self) -> Sequence[str]:
        """See RestartGroup: its own has not left."""
        return ()

    @property
    def is_wanted(self) -> bool:
        """See RestartGroup."""
        return not self.rest.worker.given_up

    @property
    def is_ready(self) -> bool:
        """True if the new process waits until it is used."""
        return self.news is not None and not self.news.error

    @property
    def is_clear(self) -> bool:
        """True once the instance has forgotten the lost process."""
        there = {process.name for process in self.rest.worker.processes}
        return self.is_wanted and not self.rest.why and there.isdisjoint(self.processes)

    def tell_of_loss(self, hear: Hear) -> None:
        """See RestartGroup; the instance's own failure is told by its worker."""
        hear(Restarted(self.name))

    def get_ready(self, processes: Mapping[str, Process]) -> None:
        """See RestartGroup."""
        (process,), worker = processes.values(), self.rest.worker
        worker.coming.update(processes)
        if not self.is_wanted:  # Who gives the instance up may not have seen this one.
            raise JaxinferError("its instance is lost")
        wait_until_loaded(process)
        plans = [stage.plan for stage in worker.stages]
        lent = lend_pools(worker.instance, plans, process, self.others.host_of(process))
        for _ in open_pools(process):
            pass
        for (stage, number), pool in lent.items():
            if pool.plan != plans[stage].attention[number]:
                raise JaxinferError(
                    f"groups.{self.name} has another plan than before: {pool.plan}, was "
                    f"{plans[stage].attention[number]}"
                )
        self.lent = {place: pool.address for place, pool in lent.items()}

    def use(self) -> None:
        """See RestartGroup."""
        (process,) = self.processes.values()
        self.rest.worker.take_back(process, self.lent)


def check_same(instance: str, before: StageFacts, now: StageFacts) -> None:
    """Raise JaxinferError where the loop's plan is none of what the new process has."""
    # Pages that the loop does not know of are not used.
    sizes = {name: getattr(before, name) for name in ("num_pages", "kv_bytes", "memory_bytes")}
    if now.num_pages < before.num_pages or replace(now, options=before.options, **sizes) != before:
        raise JaxinferError(
            f"instances.{instance} has another plan than before: {now.num_pages} pages of "
            f"{before.num_pages}, devices {now.devices}, layers {now.layers}"
        )
