"""The processes of a cluster: the loop's own, and those of groups that have one."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.runtime.messages import Load, Loaded, OpenLane
from jaxinfer.runtime.port import LaneAnswer, LaneMessage, Port
from jaxinfer.runtime.remote import Process, ProcessLost, RemoteWorker
from jaxinfer.runtime.stage import Stage
from jaxinfer.runtime.worker import Worker

Hear = Callable[[LaneAnswer], None]
# What the user sees of a long start: a description, and how many parts are left.
Progress = Callable[[str, int], None]


class Side(Protocol):
    """One process that slabs come from or go to."""

    def open(self, message: OpenLane, hear: Hear) -> None:
        """Get a lane's end ready; ``hear`` gets its answers, in some thread."""

    def do(self, message: LaneMessage, after: "Future[None] | None" = None) -> None:
        """Carry a message out; raises ProcessLost where nobody can."""

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """Have somebody told when the process is no more."""

    def why_lost(self, seconds: float) -> str | None:
        """Why it is no more, or will not be in so many seconds."""


class ThisProcess:
    """The loop's own process.

    Attributes:
        stages: of each instance whose slabs go to other processes or come from there.
    """

    def __init__(self) -> None:
        self._hear: dict[int, Hear] = {}
        self.stages: dict[str, Sequence[Stage]] = {}
        self.port = Port(self.stages, lambda answer: self._hear[answer.lane](answer))

    def open(self, message: OpenLane, hear: Hear) -> None:
        """See Side."""
        self._hear[message.lane] = hear
        self.port.do(message)

    def do(self, message: LaneMessage, after: "Future[None] | None" = None) -> None:
        """See Side."""
        self.port.do(message, after)

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """It is not lost."""

    def why_lost(self, seconds: float) -> str | None:
        """See Side."""
        return None


class AnotherProcess:
    """One that this has started."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def open(self, message: OpenLane, hear: Hear) -> None:
        """See Side."""
        self._process.lanes[message.lane] = hear
        next(self._process.ask(message))

    def do(self, message: LaneMessage, after: "Future[None] | None" = None) -> None:
        """See Side."""
        self._process.send(message)

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """See Side."""
        self._process.on_loss.append(hear)

    def why_lost(self, seconds: float) -> str | None:
        """See Side."""
        return self._process.why_lost(seconds)


class OtherProcesses:
    """All processes that a cluster needs besides this one.

    Args:
        processes: by group.
    """

    def __init__(self, processes: Mapping[str, Process]) -> None:
        self._processes = processes
        self._here: ThisProcess | None = None
        self._there: dict[str, AnotherProcess] = {}

    @classmethod
    def start(cls, config: ClusterConfig, model: str) -> "OtherProcesses":
        """Start them, each loading what stands on its group, and go on meanwhile."""
        processes: dict[str, Process] = {}
        others = cls(processes)
        try:
            for name, group in config.groups.items():
                if group.process:
                    processes[name] = Process(name, group.environment)
            for name, process in processes.items():
                with suppress(ProcessLost):  # Whoever waits for it hears of it.
                    process.send(Load(model, config.part(name)))
        except BaseException:
            others.close()
            raise
        return others

    def load(self, progress: Progress) -> dict[str, RemoteWorker]:
        """Wait until all have loaded and compiled; their workers, by instance.

        Raises:
            JaxinferError: one cannot, or has ended.
        """
        workers = {}
        for group, process in self._processes.items():
            for answer in process.answers():
                if isinstance(answer, Loaded):
                    break
                progress(f"{group}: {answer.what}", answer.parts)
            for name, plans in answer.plans.items():
                workers[name] = RemoteWorker(process, name, plans, answer.parts[name])
                self._there[name] = AnotherProcess(process)
        return workers

    def side(self, instance: str, worker: Worker | RemoteWorker) -> Side:
        """The process that has an instance."""
        if isinstance(worker, RemoteWorker):
            return self._there[instance]
        if self._here is None:
            self._here = ThisProcess()
        self._here.stages[instance] = worker.stages
        return self._here

    def close(self) -> None:
        """End them all."""
        if self._here:
            self._here.port.close()
        for process in self._processes.values():
            process.close()
