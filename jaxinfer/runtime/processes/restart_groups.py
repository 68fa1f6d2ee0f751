"""Processes that are restarted together, and what must be replaced with them."""

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
    """Event: a group's restart has news, which ``Restarts.take`` returns."""

    group: str


@dataclass(frozen=True)
class RestartResult:
    """The outcome of the loss of a process.

    Attributes:
        instances: instances of the process, or the instance that continued without the process;
            empty if that instance has the process again.
        why: reason for the loss.
        seconds: time from the loss until the process was ready or given up.
        error: reason why the process could not be started; None if it was.
        without: numbers of the shards without which its instance continued.
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
    """Processes that are restarted together.

    Attributes:
        name: name of its groups.
        parts: parts of the cluster, by group.
        left: how often the processes may still be started.
        processes: the running processes, by group.
        starting: whether a restart is in progress.
        why: reason of the last loss.
        news: outcome that has not been taken.
        thread: thread of the last restart.
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
        """Groups whose processes are restarted together with these."""
        return ()

    @property
    def is_wanted(self) -> bool:
        """True if the processes are still needed once they have started."""
        return True

    @property
    def is_clear(self) -> bool:
        """True if the started processes may be used now."""
        return True

    @property
    @abstractmethod
    def instances(self) -> Sequence[str]:
        """Names of the instances that return when these processes do."""

    @abstractmethod
    def tell_of_loss(self, hear: Hear) -> None:
        """Report the loss to the run; it lasts until the processes have been restarted."""

    def end(self, why: str) -> None:
        """End the group's other processes, whose devices are needed; wait until all users know."""
        for process in self.processes.values():
            if not process.lost:
                process.give_up(why)
            process.wait_until_told()

    @abstractmethod
    def get_ready(self, processes: Mapping[str, Process]) -> None:
        """Let new processes, by group, load, compile and open all that the lost ones had."""

    @abstractmethod
    def use(self) -> None:
        """Replace the lost processes by the new ones; called in the loop's thread."""


@dataclass
class WorkerRestart(RestartGroup):
    """Restarts the process of a group with instances, or the processes that share an instance.

    Attributes:
        others: starts the processes.
        rests: instances whose attention groups are restarted with their stages; ``processes`` has
            those that the instances cannot do without.
        prepared: for each instance, the sampler compiled in the new processes.
        fresh: new processes that are not yet used, by group.
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
            if thread.ident:  # Otherwise, the thread that was about to start it was interrupted.
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
    """An instance that can continue without attention groups whose processes are lost.

    Attributes:
        lenders: restart groups of the attention groups that may return alone.
        why: reason of the loss, while a thread handles it.
        news: outcome that has not been taken.
        thread: last thread that handled a loss.
    """

    worker: PipelineWorker
    lenders: "list[PoolRestart]" = field(default_factory=list)
    why: str | None = None
    news: RestartResult | None = None
    thread: threading.Thread | None = None


@dataclass
class PoolRestart(RestartGroup):
    """Restarts an attention group's process, while its instance continues without that group.

    Attributes:
        others: starts the processes.
        lent: addresses of the pools that the new process lends, by stage and number in the stage.
    """

    rest: DegradedInstance
    others: OtherProcesses
    lent: Mapping[tuple[int, int], Address] = field(default_factory=dict, init=False)

    @property
    def instances(self) -> Sequence[str]:
        """See RestartGroup; empty, because the instance continues without this group."""
        return ()

    @property
    def is_wanted(self) -> bool:
        """See RestartGroup."""
        return not self.rest.worker.given_up

    @property
    def is_ready(self) -> bool:
        """True if the new process is ready to be used."""
        return self.news is not None and not self.news.error

    @property
    def is_clear(self) -> bool:
        """True once the instance has forgotten the lost process."""
        there = {process.name for process in self.rest.worker.processes}
        return self.is_wanted and not self.rest.why and there.isdisjoint(self.processes)

    def tell_of_loss(self, hear: Hear) -> None:
        """See RestartGroup; the worker reports the failure of the instance itself."""
        hear(Restarted(self.name))

    def get_ready(self, processes: Mapping[str, Process]) -> None:
        """See RestartGroup."""
        (process,), worker = processes.values(), self.rest.worker
        worker.coming.update(processes)
        if not self.is_wanted:  # A thread that gives the instance up may not know this one.
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
    """Raise JaxinferError if the new process's plan differs from the loop's."""
    # Pages that the loop does not know are not used.
    sizes = {name: getattr(before, name) for name in ("num_pages", "kv_bytes", "memory_bytes")}
    ffn = now.ffn and replace(now.ffn, options=before.options)  # Those of the stage.
    same = replace(now, options=before.options, ffn=ffn, **sizes)
    if now.num_pages < before.num_pages or same != before:
        raise JaxinferError(
            f"instances.{instance} has another plan than before: {now.num_pages} pages of "
            f"{before.num_pages}, devices {now.devices}, layers {now.layers}"
        )
