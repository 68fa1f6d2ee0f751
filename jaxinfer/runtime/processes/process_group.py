"""The processes of a cluster in addition to the loop's own: one for each group that has one."""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.processes import part_of, processes_of
from jaxinfer.errors import JaxinferError
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.kv.kv_endpoint import Hear
from jaxinfer.runtime.kv.kv_messages import OpenEnd, SlabMessage
from jaxinfer.runtime.kv.outcome import ProcessLost
from jaxinfer.runtime.kv.sockets import LOOPBACK
from jaxinfer.runtime.processes.gpu_shares import GpuShares
from jaxinfer.runtime.processes.messages import (
    Borrow,
    Left,
    Lend,
    Lent,
    Loaded,
    LoadInstances,
    OpenPools,
)
from jaxinfer.runtime.processes.peers import Child, Peer, RemotePeer, shared_key
from jaxinfer.runtime.processes.pipeline_endpoint import PipelineEndpoint
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote, PipelineWorker
from jaxinfer.runtime.processes.process import Process
from jaxinfer.runtime.processes.remote_worker import RemoteWorker
from jaxinfer.runtime.stage.attention_plan import check_attention
from jaxinfer.runtime.stage.ffn_plan import check_ffn_link
from jaxinfer.runtime.stage.stage_plan import StageFacts

# Reports the progress of a long start to the user: a description, and the number of parts left.
Progress = Callable[[str, int], None]


class RemoteEndpoint:
    """A process started by this one, as a side of channels; another process may replace it."""

    # Empty: it reports each second that it is alive, and is given up if it does not.
    waits_for: Mapping[int, tuple[str, float]] = {}

    def __init__(self, process: Process) -> None:
        self._process = process
        self._ends: list[tuple[OpenEnd, Hear]] = []
        self._on_loss: list[Callable[[str], None]] = []

    @property
    def pieces(self) -> "list[RemoteEndpoint]":
        """See ``PipelineEndpoint``."""
        return [self]

    @property
    def group(self) -> str:
        """Name of the process's group."""
        return self._process.name

    def open(self, message: OpenEnd, hear: Hear) -> None:
        """See KVProcess."""
        self._ends.append((message, hear))
        _open_end(self._process, message, hear)

    def open_on(self, process: Process) -> None:
        """Open the same ends of stage pairs in another process."""
        process.on_loss += self._on_loss
        for message, hear in self._ends:
            _open_end(process, message, hear)

    def move_to(self, process: Process) -> None:
        """Continue in another process, which has opened the ends."""
        self._process = process

    def do(self, message: SlabMessage) -> None:
        """See KVProcess."""
        self._process.send(message)

    def on_loss(self, hear: Callable[[str], None]) -> None:
        """See KVProcess."""
        self._on_loss.append(hear)
        self._process.on_loss.append(hear)

    def why_lost(self, seconds: float) -> str | None:
        """See KVProcess."""
        return self._process.why_lost(seconds)


def _open_end(process: Process, message: OpenEnd, hear: Hear) -> None:
    process.ends[message.end] = hear
    next(process.ask(message))


def reach(
    config: ClusterConfig, names: Collection[str], shares: GpuShares
) -> Iterator[tuple[str, Peer]]:
    """Connect to the groups that have their own processes, and yield each group and its connection.

    Args:
        shares: shares of the memory of this host's GPUs.

    Raises:
        JaxinferError: a process cannot be reached.
    """
    groups = {name: config.groups[name] for name in names}
    if by_ray := {name: group for name, group in groups.items() if group.ray}:
        # Imported here, because its package is no dependency.
        from jaxinfer.runtime.processes.ray_hosts import place

        assert config.ray
        yield from place(config.ray, by_ray)
    for name, group in groups.items():
        if group.process:
            yield name, Child({**group.environment, **shares.environment(name)})
        if group.host:
            try:
                yield name, RemotePeer(group.host, shared_key(), group.environment)
            except JaxinferError as error:
                raise JaxinferError(f"groups.{name}.host: {error}") from None


class OtherProcesses:
    """All processes that a cluster needs in addition to this one.

    Args:
        model: model that each process opens.
        layers: layers of each stage, for instances with stages in several processes.

    Attributes:
        gpu_shares: shares of GPU memory for these processes and for this one, on GPUs that several
            processes use.
    """

    def __init__(
        self, config: ClusterConfig, model: str, layers: Mapping[str, Sequence[Layers]]
    ) -> None:
        self._config, self._model, self._layers = config, model, layers
        self.gpu_shares = GpuShares(config)
        self._processes: dict[str, Process] = {}
        self._there: dict[str, RemoteEndpoint] = {}
        self._pipelines: dict[str, PipelineEndpoint] = {}

    @classmethod
    def start(
        cls, config: ClusterConfig, model: str, layers: Mapping[str, Sequence[Layers]]
    ) -> "OtherProcesses":
        """Start the processes; each loads its group's part in the background.

        Raises:
            JaxinferError: a process cannot be reached, or cannot run attention or FFN.
        """
        for name in layers:
            for group in config.instances[name].attention_groups:
                check_attention(group, config)
            for stage in config.instances[name].stages:
                check_ffn_link(config, stage)
        others = cls(config, model, layers)
        try:
            names = [name for name, group in config.groups.items() if group.is_apart]
            for line in others.gpu_shares.lines():
                print(f"jaxinfer: {line}", file=sys.stderr, flush=True)
            for name, peer in reach(config, names, others.gpu_shares):
                others._processes[name] = Process(name, peer)
            for name in names:
                others._load(name, part_of(config, name))
        except BaseException:
            others.close()
            raise
        return others

    def begin_again(self, group: str, part: ClusterConfig) -> Process:
        """Start a group's process in place of a lost one; the new process loads its part.

        Raises:
            JaxinferError: the process cannot be reached.
        """
        ((_, peer),) = reach(self._config, [group], self.gpu_shares)
        process = self._processes[group] = Process(group, peer)
        self._load(group, part)
        return process

    def _load(self, group: str, part: ClusterConfig) -> None:
        process = self._processes[group]
        layers = {
            name: [
                each
                for each, where in zip(all_, processes_of(self._config, name), strict=True)
                if where == group
            ]
            for name, all_ in self._layers.items()
            if name in part.instances
        }
        with suppress(ProcessLost):  # Threads that wait for it are told.
            process.send(LoadInstances(self._model, part, self.host_of(process), layers))

    def host_of(self, process: Process) -> str:
        """Return the address at which other processes reach a process."""
        return process.peer.way[1] if process.peer.way else self.host

    @property
    def host(self) -> str:
        """The address at which other processes reach this one."""
        ways = [process.peer.way for process in self._processes.values()]
        return next((way[0] for way in ways if way), LOOPBACK)

    def load(self, progress: Progress) -> dict[str, AnyRemote]:
        """Wait until all processes have loaded and compiled; return their workers by instance.

        Raises:
            JaxinferError: a process fails, or has ended.
        """
        workers: dict[str, AnyRemote] = {}
        parts: dict[str, dict[str, tuple[Process, Loaded]]] = defaultdict(dict)
        for group, process in self._processes.items():
            loaded = wait_until_loaded(process, progress)
            for name, plans in loaded.plans.items():
                if name in self._layers:
                    parts[name][group] = process, loaded
                    continue
                workers[name] = RemoteWorker(process, name, plans, loaded.parts[name])
                self._there[name] = RemoteEndpoint(process)
        for name, found in parts.items():
            stages = self._config.instances[name].stages
            groups = dict.fromkeys(stage.group for stage in stages)
            links = [self._config.link(*ends) for ends in pairwise(groups)]
            there = [self.lend(name, group, *found[group], progress) for group in groups]
            lenders = dict.fromkeys(group for stage in stages for group in stage.lenders)
            workers[name] = whole = PipelineWorker(
                name, there, links, [self._processes[group] for group in lenders]
            )
            sides = [RemoteEndpoint(process) for process, _ in there]
            self._pipelines[name] = PipelineEndpoint(sides, whole.first_stages)
        return workers

    def lend(
        self,
        instance: str,
        group: str,
        process: Process,
        loaded: Loaded,
        progress: Progress = lambda what, left: None,
    ) -> tuple[Process, Loaded]:
        """Let attention and FFN groups lend to a process's stages; add the parts to the plans."""
        plans = list(loaded.plans[instance])
        lent: dict[tuple[int, int], Lent] = {}
        groups = dict.fromkeys(group for plan in plans for group in plan.lenders)
        lenders = [self._processes[group] for group in groups]
        # One after the other, because those on one host share its memory.
        for lender in lenders:
            lent |= lend_pools(instance, plans, lender, self.host_of(lender))
        # All start at once, and are read one after the other.
        for lender, answers in [(lender, open_pools(lender)) for lender in lenders]:
            for left in answers:
                progress(f"{lender.name}: {left.what}", left.parts)
        for (stage, number), pool in lent.items():
            next(process.ask(Borrow(instance, stage, number, pool.address)))
            plans[stage] = plans[stage].with_lent(number, pool.plan)
        return process, loaded._replace(plans={**loaded.plans, instance: plans})

    def side_of(self, instance: str) -> RemoteEndpoint | PipelineEndpoint:
        """Return those processes of an instance, other than this one, as a side of channels."""
        return self._pipelines.get(instance) or self._there[instance]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.close()


def lend_pools(
    instance: str, plans: Sequence[StageFacts], lender: Process, host: str
) -> dict[tuple[int, int], Lent]:
    """Let an attention or FFN group's process prepare its parts of all stages that use the group.

    Args:
        plans: plans of the stages.
        host: address of the process.

    Returns:
        The parts that the process lends, by the number of the stage and that of the part in the
        stage.
    """
    return {
        (stage, number): next(lender.ask(Lend(instance, plan, number, host)))
        for stage, plan in enumerate(plans)
        for number, group in enumerate(plan.lenders)
        if group == lender.name
    }


def open_pools(lender: Process) -> Iterator[Left]:
    """Let a process compile the parts that it lends; yield the number of parts left."""
    answers = lender.ask(OpenPools())

    def until_done() -> Iterator[Left]:
        for left in answers:
            yield left
            if not left.parts:
                return

    return until_done()


def wait_until_loaded(process: Process, progress: Progress = lambda what, left: None) -> Loaded:
    """Wait until a process has loaded and compiled, and return its answer.

    Raises:
        JaxinferError: the process cannot, or has ended.
    """
    answers = process.answers()
    while not isinstance(answer := next(answers), Loaded):
        progress(f"{process.name}: {answer.what}", answer.parts)
    return answer
