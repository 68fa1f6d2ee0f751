"""Turns a checkpoint and a cluster configuration into instances that can run."""

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from jaxinfer.caches.eviction import idle_pages, later_uses
from jaxinfer.caches.later_uses import LaterUses
from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig, TransportChoice, instance_options
from jaxinfer.config.processes import is_divided, part_of, processes_of
from jaxinfer.errors import JaxinferError
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.ffn.ffn_stage import FfnStage, describe_ffn
from jaxinfer.runtime.kv.channel import Channel
from jaxinfer.runtime.kv.kv_endpoint import KVProcess, ThisProcess
from jaxinfer.runtime.kv.kv_messages import TransportName
from jaxinfer.runtime.kv.stage_pair import StagePair
from jaxinfer.runtime.processes.gpu_shares import HERE
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote
from jaxinfer.runtime.processes.process_group import OtherProcesses, Progress
from jaxinfer.runtime.processes.remote_worker import RemoteStage
from jaxinfer.runtime.processes.restarts import Restarts
from jaxinfer.runtime.spread.spread_stage import SpreadStage
from jaxinfer.runtime.stage.cluster_plan import divided_layers, plan_cluster
from jaxinfer.runtime.stage.devices import device_name
from jaxinfer.runtime.stage.keeping_stage import KeepingStage
from jaxinfer.runtime.stage.load_weights import load_parameters
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.stage_plan import StageFacts, StagePlan, weight_dtype_name
from jaxinfer.runtime.stage.step import Parameters
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.features.half_batches import by_fits, choice
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.policies import make_policies
from jaxinfer.serving.step_fit import AttentionFit, StepFit


@dataclass(frozen=True)
class Engine:
    """An instance's model on its devices, ready to run steps.

    Attributes:
        plans: plans of its stages, or of its segments if it has any.
        groups: names of the device groups of these stages.
        role: role at the start of a run.
        attention: fitted attention times of each shard, if profiled.
        dense: for each stage, the time of a layer without attention; empty if steps are never
            computed as two halves.
        uses: page uses that are known beforehand, if an instance evicts pages by their next use.
    """

    name: str
    worker: Worker | AnyRemote
    plans: Sequence[StageFacts]
    groups: Sequence[str]
    role: str = ""
    attention: list[AttentionFit] = field(default_factory=list)
    dense: list[Callable[[float], float]] = field(default_factory=list)
    uses: LaterUses | None = None

    @property
    def plan(self) -> StageFacts:
        """Plan of the first stage; facts about the whole instance are the same in all plans."""
        return self.plans[0]

    @property
    def stages(self) -> list[Stage | RemoteStage]:
        """Stages of the instance, one per plan."""
        return [*self.worker.stages]

    def new_kv(self) -> KVShards:
        """Return the page pools with all pages free and none cached.

        For each stage, its own pool with all KV heads comes first, then those of its attention
        groups.
        """
        shards: list[Shard] = []
        for number, (plan, group) in enumerate(zip(self.plans, self.groups, strict=True)):
            heads = plan.num_kv_heads
            slices: tuple[int, ...] = (0,)
            if plan.attention:
                slices = tuple(range(number * heads, (number + 1) * heads))
            places = [(group, 0), *((place.group, place.number) for place in plan.attention)]
            layers = plan.layers.stop - plan.layers.start
            for num_pages, (where, device) in zip(plan.pool_pages, places, strict=True):
                pool = PagePool(num_pages, plan.limits.page_size)
                fit = self.attention[len(shards)] if self.attention else None
                dense = self.dense[len(shards)] if self.dense else None
                shards.append(Shard(pool, slices, number, where, fit, layers, dense, device))
                slices = ()
        for number in self.worker.without:
            shards[number].pool.close()
        options, size = self.plan.options, self.plan.limits.page_size
        idle = idle_pages(options.eviction, size, self.name, self.uses)
        return KVShards(shards, options.enable_prefix_caching, new_idle=idle)

    def new_instance(self, kv: KVShards, fit: StepFit | None = None) -> Instance:
        """Return a new ``Instance``, which stands for this engine in the scheduler."""
        options = instance_options(self.plan.options, len(self.worker.parts))
        policies = make_policies(self.plan.options.policies)
        instance = Instance(self.name, kv, options, policies, self.role, fit)
        instance.halves_pay = choice(self.plan.options.half_batches, by_fits(kv.shards))
        return instance


@dataclass(frozen=True)
class Cluster:
    """All instances by name, and the channels between them by source and destination.

    Attributes:
        measured_gb_s: rate that a probe measured, by ``"source -> destination"``.
        restarts: restarts lost processes; None if none may be restarted.
        uses: see ``Engine``; all engines share it.
    """

    config: ClusterConfig
    engines: Mapping[str, Engine]
    channels: Mapping[tuple[str, str], Channel]
    measured_gb_s: Mapping[str, float]
    restarts: Restarts | None = None
    uses: LaterUses | None = None

    @property
    def stages(self) -> list[Stage | RemoteStage]:
        """Stages of all instances."""
        return [stage for engine in self.engines.values() for stage in engine.stages]

    @property
    def read_ahead(self) -> float:
        """Number of unfinished requests below which a run reads more requests.

        It is twice the number that instances can run at a time, and a few more, so that small
        instances do not wait for each request. All requests are read if pages are evicted by their
        next use.
        """
        if self.uses:
            return math.inf
        engines = self.engines.values()
        return 2 * sum(engine.plan.options.max_num_seqs for engine in engines) + 16

    @property
    def late_compiles(self) -> int:
        """Number of steps compiled during runs."""
        return sum(stage.step.late_compiles for stage in self.stages)

    @property
    def cached_page_size(self) -> int | None:
        """Largest page size of the instances with a prefix cache; None if none has one."""
        plans = [engine.plan for engine in self.engines.values()]
        sizes = [p.limits.page_size for p in plans if p.options.enable_prefix_caching]
        return max(sizes, default=None)

    def slowdowns(self, name: str) -> list[float]:
        """Return how many times slower each stage of an instance is emulated to be."""
        return [self.config.groups[group].slowdown for group in self.engines[name].groups]

    def is_emulated(self, name: str) -> bool:
        """Tell whether any group of an instance emulates slower devices."""
        of_it = *self.engines[name].groups, *self.config.instances[name].ffn_groups
        return any(self.config.groups[group].slowdown > 1 for group in of_it)

    def take_overruns(self) -> dict[str, list[float]]:
        """Return by how many seconds steps were late since the last call, per emulated instance."""
        found = {}
        for name, engine in self.engines.items():
            emulated = [stage for stage in engine.stages if stage.emulate or stage.overruns]
            if emulated:
                found[name] = [late for stage in emulated for late in stage.overruns]
            for stage in emulated:
                stage.overruns = []
        return found

    @property
    def transports(self) -> dict[str, str]:
        """Transport of KV between each two processes, by ``"source -> destination"``."""
        return {
            " -> ".join(pair): "; ".join(
                [channel.transport, *(f"not {name}: {why}" for name, why in channel.failed.items())]
            )
            for pair, channel in self.channels.items()
            if channel.transport != "device"
        }

    def _process(self, name: str) -> str | None:
        """Return the groups whose own processes run an instance."""
        stages = filter(None, processes_of(self.config, name))
        lenders = self.config.instances[name].lenders if is_divided(self.config, name) else []
        return " and ".join(dict.fromkeys([*stages, *lenders])) or None

    def describe(self) -> dict[str, dict[str, object]]:
        """Describe the placement of all instances, as JSON values."""
        return {
            name: {
                "engine": engine.plan.options.model_dump(),
                "process": self._process(name),
                "max_model_len": engine.plan.max_model_len,
                "hidden_size": engine.plan.config.hidden_size,
                "kv_heads": [engine.plan.num_kv_heads, engine.plan.config.head_dim],
                "stages": [
                    {
                        "group": group,
                        "devices": [device_name(device) for device in plan.devices],
                        "layers": plan.layers.stop - plan.layers.start,
                        "dtype": plan.dtype.name,
                        "weight_dtype": weight_dtype_name(plan),
                        "kv_dtype": plan.kv_dtype.name,
                        "kernels": plan.config.kernels,
                        "num_pages": plan.num_pages,
                    }
                    | ({"attention": places} if (places := describe_attention(plan)) else {})
                    | describe_ffn(plan)
                    for plan, group in zip(engine.plans, engine.groups, strict=True)
                ],
            }
            for name, engine in self.engines.items()
        }


def describe_attention(plan: StageFacts) -> list[dict[str, object]]:
    """Describe a stage's attention groups, as JSON values."""
    return [
        {
            "group": place.group,
            "devices": [
                device_name(each.device)
                for each in plan.attention
                if each.group == place.group and each.device
            ],
            "kernels": place.kernels,
            "num_pages": place.num_pages,
            "repeats": place.repeats,
        }
        for place in plan.attention
        if not place.number
    ]


def load_cluster(
    checkpoint: Checkpoint,
    config: ClusterConfig,
    progress: Progress,
    pairs: Collection[tuple[str, str]] = (),
    verify: bool = False,
    transport: TransportChoice = "auto",
    layers: Mapping[str, Sequence[Layers]] | None = None,
) -> Cluster:
    """Load weights, allocate KV pools, compile every step and transfer, and probe the transfers.

    Args:
        pairs: pairs of instances (source, destination) between which KV is sent.
        verify: check each transfer.
        transport: see ``RunFile``.
        layers: layers of each stage, for instances with stages in other processes.

    Raises:
        JaxinferError: the options ask for more than the model or the devices allow, or the
            checkpoint's tensors do not fit the architecture.
    """
    _check_pairs(config, pairs)
    engines: dict[str, Engine] = {}
    stages: dict[str, Sequence[Stage]] = {}
    channels: dict[tuple[str, str], Channel] = {}
    speeds = {}
    # If the cluster fails to load, its threads would keep weights and pages.
    with ExitStack() as opened:
        divided = divided_layers(config, checkpoint.config.num_hidden_layers)
        uses = later_uses(
            (n, each.eviction, each.page_size) for n, each in config.instances.items()
        )
        others = OtherProcesses.start(config, checkpoint.source, divided)
        opened.callback(others.close)
        share = others.gpu_shares.of.get(HERE)
        plans = plan_cluster(checkpoint.config, part_of(config, None), layers, share)
        for name, worker in _load_workers(checkpoint, config, plans, progress):
            opened.callback(worker.close)
            engines[name] = _engine(config, name, worker, plans[name], uses)
            stages[name] = worker.stages
        here = ThisProcess(stages, others.host)
        opened.callback(here.close)
        remotes = others.load(progress)
        for name, remote in remotes.items():
            engines[name] = _engine(config, name, remote, [s.plan for s in remote.stages], uses)
        for name, engine in engines.items():
            of = f" of {name}" if len(engines) > 1 else ""
            kernels = " and ".join(dict.fromkeys(p.config.kernels for p in engine.plans))
            for left in engine.worker.prepare():
                progress(f"compiling steps{of}, {kernels} attention", left)

        def side_of(name: str) -> KVProcess:
            return here if name in stages else others.side_of(name)

        for pair in pairs:
            source, dest = (engines[name] for name in pair)
            by = _transports(config, source, dest, transport)
            sides = side_of(source.name), side_of(dest.name)
            channels[pair] = channel = connect(config, (source, dest), sides, verify, by)
            names = " -> ".join(pair)
            speeds[names] = channel.probe(names)
            for why in channel.failed.values():
                progress(f"KV goes by {channel.transport}: {why}", 0)
        restarts = Restarts(config, others, remotes)
        opened.callback(restarts.close)
        in_order = {name: engines[name] for name in config.instances}
        cluster = Cluster(config, in_order, channels, speeds, restarts, uses)
        # The threads refer to the workers, not to the cluster. Once the cluster is no longer used,
        # everything can be freed. Threads that wake up at the interpreter's end would crash it.
        weakref.finalize(cluster, opened.pop_all().close).atexit = False
    return cluster


def _check_pairs(config: ClusterConfig, pairs: Collection[tuple[str, str]]) -> None:
    """Refuse hand-offs of KV whose heads are on several groups."""
    for pair in pairs:
        for name in pair:
            if config.instances[name].is_spread:
                raise JaxinferError(
                    f"the system hands KV from {pair[0]} to {pair[1]}, but {name} has attention "
                    "groups: its requests must stay on it, as by data_parallel"
                )


def _load_workers(
    checkpoint: Checkpoint,
    config: ClusterConfig,
    plans: Mapping[str, list[StagePlan]],
    progress: Progress,
) -> Iterator[tuple[str, Worker]]:
    """Yield the workers of this process's instances, by name, with their weights loaded."""
    if not plans:
        return
    what = "drawing random weights" if config.load_format == "dummy" else "loading weights"
    progress(what, 1)
    computing = [
        each
        for name, stages in plans.items()
        if config.instances[name].computes
        for plan in stages
        for each in (plan, plan.ffn)
        if each
    ]
    parameters = iter(load_parameters(checkpoint, computing) if computing else ())
    progress(what, 0)
    for name, stages in plans.items():
        if config.instances[name].computes:
            loaded = [_stage(plan, parameters) for plan in stages]
        else:
            loaded = [KeepingStage(plan) for plan in stages]
        yield name, Worker(loaded, stage_groups(config.instances[name]))


def _stage(plan: StagePlan, parameters: Iterator[Parameters]) -> Stage:
    if plan.ffn_group:
        return FfnStage(plan, next(parameters), next(parameters) if plan.ffn else None)
    return (SpreadStage if plan.attention else Stage)(plan, next(parameters))


def _engine(
    config: ClusterConfig,
    name: str,
    worker: Worker | AnyRemote,
    plans: Sequence[StageFacts],
    uses: LaterUses | None,
) -> Engine:
    instance = config.instances[name]
    groups = stage_groups(instance)
    engine = Engine(name, worker, plans, groups, instance.role, uses=uses)
    for stage, before, here in zip(engine.stages[1:], groups, groups[1:], strict=False):
        stage.link = config.link(before, here)
    return engine


def stage_groups(instance: InstanceConfig) -> list[str]:
    """Return the group of each stage of an instance, or of each segment if it has any."""
    return [place.group for place in instance.places for _ in range(instance.segments)]


def _transports(
    config: ClusterConfig, source: Engine, dest: Engine, choice: TransportChoice
) -> list[TransportName]:
    """Return the transports that a probe may choose from."""
    ends = source, dest
    if not any(processes_of(config, end.name)[0] for end in ends):
        return ["device"]
    if choice != "auto":
        return [choice]
    on_gpus = all(end.plan.devices[0].platform == "gpu" for end in ends)
    return ["host", "transfer_server"] if on_gpus else ["host"]


def connect(
    config: ClusterConfig,
    ends: tuple[Engine, Engine],
    sides: tuple[KVProcess, KVProcess],
    verify: bool = False,
    transports: Sequence[TransportName] = ("device",),
) -> Channel:
    """Open a channel from one instance to another, not yet probed.

    Args:
        sides: the processes of the two instances.
        transports: see Channel.
    """
    source, dest = ends
    pairs = []
    for i, ours in enumerate(source.plans):
        for j, theirs in enumerate(dest.plans):
            if ours.layers.overlaps(theirs.layers):
                groups = source.groups[i], dest.groups[j]
                pairs.append(StagePair.between(ours, theirs, i, j, groups, config.link(*groups)))
    return Channel((source.name, dest.name), sides, pairs, verify, transports)
