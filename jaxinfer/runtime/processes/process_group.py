"""The processes of a cluster: the loop's own, and those of groups that have one."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.processes.kv_endpoint import LaneAnswer, LaneMessage, Port
from jaxinfer.runtime.processes.messages import Load, Loaded, OpenLane
from jaxinfer.runtime.processes.peers import Child, Elsewhere, Peer, shared_key
from jaxinfer.runtime.processes.remote_worker import Process, ProcessLost, RemoteWorker
from jaxinfer.runtime.processes.sockets import LOOPBACK
from jaxinfer.runtime.stage.stage import Stage

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
        """Wait so many seconds at most for the process to end; return why it did, or None."""


class ThisProcess:
    """The loop's own process.

    Args:
        host: the address by which others reach it.

    Attributes:
        stages: of each instance whose slabs go to other processes or come from there.
    """

    def __init__(self, host: str) -> None:
        self._hear: dict[int, Hear] = {}
        self.stages: dict[str, Sequence[Stage]] = {}
        self.port = Port(self.stages, lambda answer: self._hear[answer.lane](answer), host)

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
    """One that this has started; another one may take its place."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lanes: list[tuple[OpenLane, Hear]] = []
        self._on_loss: list[Callable[[str], None]] = []

    def open(self, message: OpenLane, hear: Hear) -> None:
        """See Side."""
        self._lanes.append((message, hear))
        _open_lane(self._process, message, hear)

    def open_on(self, process: Process) -> None:
        """Get the same ends ready in another process."""
        process.on_loss += self._on_loss
        for message, hear in self._lanes:
            _open_lane(process, message, hear)

    def move_to(self, process: Process) -> None:
        """Let another process, in which the ends are open, take its place from here on."""
        self._process = process

    def do(self, message: LaneMessage, after: "Future[None] | None" = None) -> None:
        """See Side."""
        self._process.send(message)

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """See Side."""
        self._on_loss.append(hear)
        self._process.on_loss.append(hear)

    def why_lost(self, seconds: float) -> str | None:
        """See Side."""
        return self._process.why_lost(seconds)


def _open_lane(process: Process, message: OpenLane, hear: Hear) -> None:
    process.lanes[message.lane] = hear
    next(process.ask(message))


def reach(config: ClusterConfig, names: Collection[str]) -> Iterator[tuple[str, Peer]]:
    """The processes that these groups have of their own, one after the other as they are got at.

    Raises:
        JaxinferError: one is not.
    """
    groups = {name: config.groups[name] for name in names}
    if by_ray := {name: group for name, group in groups.items() if group.ray}:
        # Needs a package that is no dependency.
        from jaxinfer.runtime.processes.ray_hosts import place

        assert config.ray
        yield from place(config.ray, by_ray)
    for name, group in groups.items():
        if group.process:
            yield name, Child(group.environment)
        if group.host:
            try:
                yield name, Elsewhere(group.host, shared_key(), group.environment)
            except JaxinferError as error:
                raise JaxinferError(f"groups.{name}.host: {error}") from None


class OtherProcesses:
    """All processes that a cluster needs besides this one.

    Args:
        model: what each opens.
    """

    def __init__(self, config: ClusterConfig, model: str) -> None:
        self._config, self._model = config, model
        self._processes: dict[str, Process] = {}
        self._here: ThisProcess | None = None
        self._there: dict[str, AnotherProcess] = {}

    @classmethod
    def start(cls, config: ClusterConfig, model: str) -> "OtherProcesses":
        """Start them, each loading what stands on its group, and go on meanwhile.

        Raises:
            JaxinferError: one cannot be got at.
        """
        others = cls(config, model)
        try:
            names = [name for name, group in config.groups.items() if group.is_apart]
            for name, peer in reach(config, names):
                others._processes[name] = Process(name, peer)
            for name in names:
                others._load(name, config.part(name))
        except BaseException:
            others.close()
            raise
        return others

    def begin_again(self, group: str, part: ClusterConfig) -> Process:
        """Start a group's process, which loads its part, in the place of one that is lost.

        Raises:
            JaxinferError: it cannot be got at.
        """
        ((_, peer),) = reach(self._config, [group])
        process = self._processes[group] = Process(group, peer)
        self._load(group, part)
        return process

    def _load(self, group: str, part: ClusterConfig) -> None:
        process = self._processes[group]
        host = process.peer.way[1] if process.peer.way else self._host
        with suppress(ProcessLost):  # Whoever waits for it hears of it.
            process.send(Load(self._model, part, host))

    @property
    def _host(self) -> str:
        """This one, as others reach it."""
        ways = [process.peer.way for process in self._processes.values()]
        return next((way[0] for way in ways if way), LOOPBACK)

    def load(self, progress: Progress) -> dict[str, RemoteWorker]:
        """Wait until all have loaded and compiled; their workers, by instance.

        Raises:
            JaxinferError: one cannot, or has ended.
        """
        workers = {}
        for process in self._processes.values():
            loaded = wait_until_loaded(process, progress)
            for name, plans in loaded.plans.items():
                workers[name] = RemoteWorker(process, name, plans, loaded.parts[name])
                self._there[name] = AnotherProcess(process)
        return workers

    def there(self, instance: str) -> AnotherProcess:
        """The process other than this one that has an instance."""
        return self._there[instance]

    def side(self, instance: str, stages: Sequence[Stage] | None) -> Side:
        """The process that has an instance; this one if the instance's stages are given."""
        if stages is None:
            return self.there(instance)
        if self._here is None:
            self._here = ThisProcess(self._host)
        self._here.stages[instance] = stages
        return self._here

    def close(self) -> None:
        """End them all."""
        if self._here:
            self._here.port.close()
        for process in self._processes.values():
            process.close()


def wait_until_loaded(process: Process, progress: Progress = lambda what, left: None) -> Loaded:
    """Wait until a process has loaded and compiled, and return its answer.

    Raises:
        JaxinferError: the process cannot, or has ended.
    """
    answers = process.answers()
    while not isinstance(answer := next(answers), Loaded):
        progress(f"{process.name}: {answer.what}", answer.parts)
    return answer
