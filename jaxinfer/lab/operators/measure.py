"""Measures the parts of an engine's steps on the user's devices (``profile --operators``).

Each step runs on two engines, one with few layers and one with more, in turn, so that other work on
the machine affects both. ``steps/operators.py`` derives layers, attention and the rest from these
times.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import jax
import numpy as np

from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layouts import DEFAULT_AXIS, LAYOUTS
from jaxinfer.models.sharding import padded
from jaxinfer.options.validation import OptionError
from jaxinfer.runtime.cluster import Engine, load_cluster
from jaxinfer.runtime.processes.process_group import Progress
from jaxinfer.runtime.profiling.measure_steps import measure_in_a_row
from jaxinfer.runtime.profiling.profile import Grid
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key
from jaxinfer.runtime.stage.step_inputs import empty_inputs
from jaxinfer.steps.operators import Depths, Operators
from jaxinfer.steps.times import Part

ROUNDS = 3
# Number of times that each step runs in a row; the first includes the host's part.
_STEPS = 3


@dataclass(frozen=True)
class MeasuredDegree:
    """The times measured for steps with one degree of tensor parallelism.

    Attributes:
        model: the model, padded to the devices.
        over_devices: whether layers were measured on as many devices as will share them, with
            all-reduces; otherwise, one device computed its shard.
        depths: numbers of layers of the two models.
        checks: seconds of steps of the deeper model from which no table was made.
        host_s: seconds that the host adds to a step that is not launched ahead: per step and per
            sequence.
        spread: how much the rounds of a step differ: the interquartile range divided by the median.
    """

    engine: Engine
    model: ModelConfig
    over_devices: bool
    depths: tuple[int, int]
    operators: Operators
    checks: Mapping[tuple[Part, ...], float]
    host_s: tuple[float, float]
    spread: float


def the_instance(cluster: ClusterConfig) -> str:
    """Return the name of a cluster's only instance.

    Raises:
        JaxinferError: there are several instances, or the instance has stages.
    """
    if len(cluster.instances) != 1:
        raise OptionError(
            f"instances are {', '.join(cluster.instances)}: operators are measured of one, leave "
            "the others out"
        )
    ((name, instance),) = cluster.instances.items()
    if len(instance.places) > 1 or instance.segments > 1:
        raise OptionError(
            f"instances.{name}: has several stages or segments: operators are measured of one "
            "group; stages are then simulated with as many layers as they have"
        )
    group = instance.places[0].group
    if cluster.groups[group].is_apart:
        raise OptionError(
            f"groups.{group}: has a process of its own: operators are measured in this one, leave "
            "process, host and ray out"
        )
    if instance.layout not in (None, "megatron"):
        raise OptionError(
            f"instances.{name}.layout is {instance.layout}: operators are measured of megatron"
        )
    if cluster.groups[group].mesh:
        raise OptionError(f"groups.{group}.mesh: operators are measured on one axis, leave it out")
    return name


def choose_depths(config: ModelConfig, given: tuple[int, int] | None) -> tuple[int, int]:
    """Return how many layers the two models have: the given numbers, or a third and all.

    Raises:
        JaxinferError: the model has fewer layers, the additional layers of the deeper model are of
            other kinds than those of the shallower one, or the model is a mixture of experts.
    """
    if config.num_experts:
        raise JaxinferError(
            "operators of a mixture of experts are not measured: how long a layer takes depends on "
            "which experts its tokens choose, and random weights choose others"
        )
    total = config.num_hidden_layers
    shallow, deep = given or (max(total // 3, 1), total)
    if not 1 <= shallow < deep <= total:
        raise OptionError(f"--layers {shallow},{deep}: must rise, up to the model's {total}")
    kinds, more = Counter(config.windows[:shallow]), Counter(config.windows[shallow:deep])
    if any(more[kind] * shallow != kinds[kind] * (deep - shallow) for kind in kinds | more):
        raise OptionError(
            f"--layers {shallow},{deep}: the model's layers are of several kinds (windows), of "
            "which the first ones and the others must have the same shares: give others"
        )
    return shallow, deep


def measure_operators(
    checkpoint: Checkpoint,
    cluster: ClusterConfig,
    degree: int,
    depths: tuple[int, int],
    progress: Progress,
) -> MeasuredDegree:
    """Measure the cluster's only instance with random weights; nothing else should run meanwhile.

    Args:
        degree: degree of tensor parallelism; if there are enough devices, it is measured on this
            number, otherwise with one device's shard.

    Raises:
        JaxinferError: the model does not fit, or its sizes do not divide.
    """
    name = the_instance(cluster)
    group = cluster.instances[name].places[0].group
    platform = cluster.groups[group].platform
    there = len(jax.devices(platform)) if degree > 1 else 1
    over_devices = there >= degree
    model = config = padded(checkpoint.config, {DEFAULT_AXIS: degree}, LAYOUTS["megatron"])
    if not over_devices:
        config = replace(
            config,
            num_attention_heads=config.num_attention_heads // degree,
            num_key_value_heads=config.num_key_value_heads // degree,
            intermediate_size=config.intermediate_size // degree,
        )
    wanted = cluster.groups[group].model_copy(
        update={
            "devices": degree if over_devices else 1,
            "tensor_parallel_size": None,
            "mesh": None,
            "emulate": None,
        }
    )
    instance = cluster.instances[name].model_copy(update={"load_format": "dummy"})
    alone = cluster.model_copy(
        update={"groups": {group: wanted}, "instances": {name: instance}, "links": ()}
    )
    loaded = []  # Their threads end with them.
    for layers in depths:
        short = replace(config, num_hidden_layers=layers, windows=config.windows[:layers])
        loaded.append(load_cluster(replace(checkpoint, config=short), alone, progress))
    shallow, deep = (each.engines[name] for each in loaded)
    return _measure(shallow, deep, model, over_devices, depths, progress)


def _measure(
    shallow: Engine,
    deep: Engine,
    model: ModelConfig,
    over_devices: bool,
    depths: tuple[int, int],
    progress: Progress,
) -> MeasuredDegree:
    grid = Grid.of(deep)
    pure = [parts for parts in grid.steps if len({count == 1 for _, count in parts}) == 1]
    checks = [parts for parts in grid.steps if parts not in set(pure)]
    times: dict[tuple[str, tuple[Part, ...]], list[float]] = defaultdict(list)
    host: list[tuple[int, float]] = []
    left = ROUNDS * len(grid.steps)
    for _ in range(ROUNDS):
        for parts in grid.steps:
            for called, engine in (("shallow", shallow), ("deep", deep)):
                if called == "shallow" and parts not in pure:
                    continue
                first, *ahead = measure_in_a_row(engine.worker, engine.new_kv(), parts, _STEPS)
                times[called, parts].append(median(ahead))
                host.append((len(parts), first - median(ahead)))
            progress("measuring steps", left := left - 1)
    medians = {key: median(found) for key, found in times.items()}
    points = [Depths(p, medians["shallow", p], medians["deep", p]) for p in pure]
    heads = measure_heads(deep)
    operators = Operators.split(deep.plan.limits, points, depths, heads)
    spread = median(
        float(np.subtract(*np.percentile(found, [75, 25]))) / median(found)
        for found in times.values()
    )
    return MeasuredDegree(
        deep,
        model,
        over_devices,
        depths,
        operators,
        {parts: medians["deep", parts] for parts in checks},
        _line(host),
        spread,
    )


def measure_heads(engine: Engine) -> dict[int, float]:
    """Return the seconds of logits and sampling, by the number of rows that steps are padded to."""
    (stage,) = engine.stages
    assert isinstance(stage, Stage)
    found: dict[int, float] = {}
    for shape in engine.plan.limits.shapes():
        key = Key(shape, PLAIN_SAMPLER)
        hidden = stage.forward(key, empty_inputs(shape, stage.step.limits), None)
        sampling = empty_sampling(shape.rows, PLAIN_SAMPLER)
        seconds = []
        for _ in range(3 * ROUNDS):
            jax.block_until_ready(hidden)
            start = time.perf_counter()
            samples, _ = stage.sample(key, hidden, sampling, None)
            samples.token_S.block_until_ready()
            seconds.append(time.perf_counter() - start)
        found[shape.rows] = min(found.get(shape.rows, np.inf), median(seconds))
    return found


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Fit a line through the medians: seconds per step and per sequence, neither below 0."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for rows, seconds in points:
        by_rows[rows].append(seconds)
    x = np.array([[1.0, rows] for rows in by_rows])
    y = np.array([median(found) for found in by_rows.values()])
    if len(by_rows) < 2:
        return max(float(y.mean()), 0.0), 0.0
    (step, sequence), *_ = np.linalg.lstsq(x, y, rcond=None)
    if sequence < 0 or step < 0:
        return max(float(np.median(y)), 0.0), 0.0
    return float(step), float(sequence)
