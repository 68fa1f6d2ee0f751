"""From a checkpoint and a cluster to instances that can be run."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.config.cluster import ClusterConfig, InstanceConfig, instance_options
from jaxinfer.config.layer_split import count_layers
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.models.stage import Layers, split
from jaxinfer.runtime.converted import Shapes, restore
from jaxinfer.runtime.devices import configure_jax, device_name, open_groups
from jaxinfer.runtime.lane import Lane
from jaxinfer.runtime.plan import Plan, choose_dtype, make_plan, parameter_shapes
from jaxinfer.runtime.random_weights import random_parameters
from jaxinfer.runtime.speed import measure_speed
from jaxinfer.runtime.stage import Stage
from jaxinfer.runtime.step import Parameters
from jaxinfer.runtime.transfer import Channel
from jaxinfer.runtime.weights import Checkpoint, load_weights
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.policies import make_policies
from jaxinfer.serving.step_fit import StepFit

# What the user sees of a long start: a description, and how many parts are left.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Engine:
    """One instance's model on its devices, ready to step.

    Attributes:
        plans: of its stages, or where it has segments, of those; ``groups``: names of those that
            they stand on.
        role: at the start of a run.
    """

    name: str
    worker: Worker
    plans: Sequence[Plan]
    groups: Sequence[str]
    role: str = ""

    @property
    def plan(self) -> Plan:
        """The first stage's; what is the instance's own is the same in all."""
        return self.plans[0]

    def new_kv(self) -> KVShards:
        """The page pools, all pages free and none cached."""
        shards = [Shard(PagePool(plan.num_pages, plan.limits.page_size)) for plan in self.plans]
        return KVShards(shards, self.plan.options.enable_prefix_caching)

    def new_instance(self, kv: KVShards, fit: StepFit | None = None) -> Instance:
        """The scheduling side of the engine."""
        options = instance_options(self.plan.options, len(self.worker.parts))
        policies = make_policies(self.plan.options.policies)
        return Instance(self.name, kv, options, policies, self.role, fit)


@dataclass(frozen=True)
class Cluster:
    """All instances, by name, and the ways between them, by source and destination.

    Attributes:
        measured_gb_s: of each way, by ``"source -> destination"``, what a probe has shown.
    """

    config: ClusterConfig
    engines: Mapping[str, Engine]
    channels: Mapping[tuple[str, str], Channel]
    measured_gb_s: Mapping[str, float]

    @property
    def stages(self) -> list[Stage]:
        """Of all instances."""
        return [stage for engine in self.engines.values() for stage in engine.worker.stages]

    @property
    def read_ahead(self) -> int:
        """Unfinished requests up to which a run reads on: all instances full, and as many waiting.

        A few more, so that small instances do not wait for each request.
        """
        engines = self.engines.values()
        return 2 * sum(engine.plan.options.max_num_seqs for engine in engines) + 16

    @property
    def late_compiles(self) -> int:
        """Steps compiled during runs."""
        return sum(stage.step.late_compiles for stage in self.stages)

    @property
    def cached_page_size(self) -> int | None:
        """The largest page that the prefix cache of some instance shares, or None."""
        plans = [engine.plan for engine in self.engines.values()]
        sizes = [p.limits.page_size for p in plans if p.options.enable_prefix_caching]
        return max(sizes, default=None)

    def slowdowns(self, name: str) -> list[float]:
        """How many times slower each stage of an instance is emulated to be."""
        return [self.config.groups[group].slowdown for group in self.engines[name].groups]

    def take_overruns(self) -> dict[str, list[float]]:
        """Of each emulated instance, by how many seconds steps were late since the last call."""
        found = {}
        for name, engine in self.engines.items():
            emulated = [stage for stage in engine.worker.stages if stage.emulate]
            if emulated:
                found[name] = [late for stage in emulated for late in stage.overruns]
            for stage in emulated:
                stage.overruns = []
        return found

    def describe(self) -> dict[str, dict[str, object]]:
        """What runs where, as JSON values."""
        return {
            name: {
                "engine": engine.plan.options.model_dump(),
                "max_model_len": engine.plan.max_model_len,
                "hidden_size": engine.plan.config.hidden_size,
                "kv_heads": [engine.plan.num_kv_heads, engine.plan.config.head_dim],
                "stages": [
                    {
                        "group": group,
                        "devices": [device_name(device) for device in plan.devices],
                        "layers": plan.layers.stop - plan.layers.start,
                        "dtype": plan.dtype.name,
                        "kv_dtype": plan.kv_dtype.name,
                        "kernels": plan.config.kernels,
                        "num_pages": plan.num_pages,
                    }
                    for plan, group in zip(engine.plans, engine.groups, strict=True)
                ],
            }
            for name, engine in self.engines.items()
        }


def load_cluster(
    checkpoint: Checkpoint,
    config: ClusterConfig,
    progress: Progress,
    pairs: Collection[tuple[str, str]] = (),
    verify: bool = False,
) -> Cluster:
    """Load weights, allocate KV pools, compile every step and transfer, and probe the latter.

    Args:
        pairs: instances from the first of which KV goes to the second.
        verify: check each transfer.

    Raises:
        JaxinferError: the options ask for more than the model or the devices can give, or the
            checkpoint's tensors do not fit the architecture.
    """
    plans = plan_cluster(checkpoint.config, config)
    what = "drawing random weights" if config.load_format == "dummy" else "loading weights"
    progress(what, 1)
    parameters = iter(load_parameters(checkpoint, [p for stages in plans.values() for p in stages]))
    progress(what, 0)
    engines, channels, speeds = {}, {}, {}
    # Threads would keep weights and pages of a cluster that fails to load.
    with ExitStack() as opened:
        for name, stages in plans.items():
            worker = Worker([Stage(plan, next(parameters)) for plan in stages])
            opened.callback(worker.close)
            engines[name] = _engine(config, name, worker, stages)
            of = f" of {name}" if len(plans) > 1 else ""
            kernels = " and ".join(dict.fromkeys(plan.config.kernels for plan in stages))
            for left in worker.prepare():
                progress(f"compiling steps{of}, {kernels} attention", left)
        for pair in pairs:
            source, dest = (engines[name] for name in pair)
            channels[pair] = channel = Channel(_lanes(config, source, dest, verify))
            opened.callback(channel.close)
            names = " -> ".join(pair)
            speeds[names] = min(lane.probe(names) for lane in channel.lanes)
        cluster = Cluster(config, engines, channels, speeds)
        # The threads know the workers, not the cluster: once that is gone, all of it can go.
        # At the interpreter's end, threads that wake up would crash it.
        weakref.finalize(cluster, opened.pop_all().close).atexit = False
    return cluster


def _engine(config: ClusterConfig, name: str, worker: Worker, plans: Sequence[Plan]) -> Engine:
    instance = config.instances[name]
    groups = [place.group for place in instance.places for _ in range(instance.segments)]
    for stage, before, here in zip(worker.stages[1:], groups, groups[1:], strict=False):
        stage.link = config.link(before, here)
    return Engine(name, worker, plans, groups, instance.role)


def _lanes(config: ClusterConfig, source: Engine, dest: Engine, verify: bool) -> list[Lane]:
    """Of all stages that have layers in common."""
    return [
        Lane(ours, theirs, i, j, (here, there), config.link(here, there), verify)
        for i, (ours, here) in enumerate(zip(source.worker.stages, source.groups, strict=True))
        for j, (theirs, there) in enumerate(zip(dest.worker.stages, dest.groups, strict=True))
        if ours.plan.layers.overlaps(theirs.plan.layers)
    ]


def plan_cluster(model: ModelConfig, config: ClusterConfig) -> dict[str, list[Plan]]:
    """Each instance's stages, before anything is loaded.

    Raises:
        JaxinferError: as ``make_plan``, with the instance's name where there are several.
    """
    configure_jax()
    groups = open_groups(config.groups)
    for link in config.links:
        for end in link.between:
            if groups[end][0].platform != "cpu":
                raise JaxinferError(
                    f"links: {' - '.join(link.between)} is emulated, on CPU only, and {end} is a "
                    "GPU: leave links to `simulate`"
                )
    free = {name: iter(devices) for name, devices in groups.items()}
    plans: dict[str, list[Plan]] = {}
    taken = 0
    for name, instance in config.instances.items():
        try:
            plans[name] = list(_plan_stages(model, config, instance, free, taken))
            taken += _host_bytes(plans[name])
        except JaxinferError as error:
            of = f"instances.{name}: " if len(config.instances) > 1 else ""
            raise JaxinferError(f"{of}{error}") from None
    return plans


def _plan_stages(
    model: ModelConfig,
    config: ClusterConfig,
    instance: InstanceConfig,
    free: Mapping[str, Iterator[jax.Device]],
    taken: int,
) -> Iterator[Plan]:
    groups = [config.groups[stage.group] for stage in instance.places]
    devices = [
        [next(free[stage.group]) for _ in range(group.stage_devices)]
        for stage, group in zip(instance.places, groups, strict=True)
    ]

    def speed(number: int) -> float:
        dtype = choose_dtype(instance, devices[number][0])
        return measure_speed(model, dtype, devices[number]) / groups[number].slowdown

    counts = [model.num_hidden_layers]
    if instance.stages:
        counts = count_layers(model.num_hidden_layers, instance.places, speed)
    for here, layers in zip(devices, split(model.num_hidden_layers, counts), strict=True):
        plans = _plan_segments(model, instance, here, layers, taken)
        taken += _host_bytes(plans)
        yield from plans


def _host_bytes(plans: Iterable[Plan]) -> int:
    """What they will take of the host's memory."""
    on_host = [plan for plan in plans if plan.devices[0].platform == "cpu"]
    return sum(plan.weight_bytes + plan.kv_bytes for plan in on_host)


def _plan_segments(
    model: ModelConfig,
    instance: InstanceConfig,
    devices: Sequence[jax.Device],
    layers: Layers,
    taken: int,
) -> list[Plan]:
    """One stage's, which share its devices' memory."""
    whole = make_plan(model, instance, devices, layers, taken)
    if instance.segments == 1:
        return [whole]
    count = layers.stop - layers.start
    if instance.segments > count:
        raise JaxinferError(f"segments is {instance.segments}, a stage has {count} layers")
    sized = instance.model_copy(update={"num_pages": whole.num_pages})
    pieces = layers.pieces(instance.segments)
    return [make_plan(model, sized, devices, piece, taken) for piece in pieces]


def load_parameters(checkpoint: Checkpoint, plans: Sequence[Plan]) -> list[Parameters]:
    """The weights of several stages on their devices, in the plans' dtypes; padding is zero.

    Raises:
        JaxinferError: the tensors do not fit the architecture, or are damaged.
    """
    if plans[0].options.load_format == "dummy":
        return random_parameters(checkpoint.config, plans)
    if checkpoint.converted is not None:
        return [_restore(checkpoint, checkpoint.converted, plan) for plan in plans]
    architecture = ARCHITECTURES[checkpoint.config.architecture]

    def place(path: str, array: np.ndarray) -> list[jax.Array | None]:
        # Segments of one stage share a tied embedding.
        wanted = [plan.parameters.get(path) for plan in plans]
        placed = {to: _put(array, to) for to in wanted}
        return [placed[to] for to in wanted]

    loaded = load_weights(checkpoint, architecture.hf_weights(checkpoint.config), place)
    states = []
    for number, plan in enumerate(plans):
        leaves = {
            path: arrays[number] for path, arrays in loaded.items() if arrays[number] is not None
        }
        assert leaves.keys() == plan.parameters.keys(), leaves.keys() ^ plan.parameters.keys()
        states.append(plan.state(leaves))
    return states


def _put(array: np.ndarray, to: jax.ShapeDtypeStruct | None) -> jax.Array | None:
    if to is None:
        return None
    grown = np.pad(array, [(0, n - old) for n, old in zip(to.shape, array.shape, strict=True)])
    return jax.device_put(np.ascontiguousarray(grown).astype(to.dtype), to.sharding)


def _restore(checkpoint: Checkpoint, stored: Shapes, plan: Plan) -> Parameters:
    """From a converted checkpoint; refuses what restoring would pad or cut without a word."""
    wanted = parameter_shapes(checkpoint.config)
    for path in sorted(wanted.keys() | stored.keys()):
        if stored.get(path) != wanted.get(path):
            raise JaxinferError(
                f"{checkpoint.path}: parameter {path} has shape {stored.get(path)}, the "
                f"configuration wants {wanted.get(path)}; convert the model again"
            )
    return plan.state(restore(checkpoint.path, plan.parameters))
