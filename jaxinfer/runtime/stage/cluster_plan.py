"""Plans a cluster's instances on the devices of this process, before they are loaded."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax

from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.layer_split import count_layers
from jaxinfer.config.processes import is_divided
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.stage import Layers, split
from jaxinfer.runtime.stage.attention_plan import plan_attention
from jaxinfer.runtime.stage.devices import configure_jax, open_groups
from jaxinfer.runtime.stage.ffn_plan import plan_with_ffn
from jaxinfer.runtime.stage.machine_speed import measure_speed
from jaxinfer.runtime.stage.stage_plan import StagePlan, choose_dtype, make_plan
from jaxinfer.runtime.stage.taken import TakenMemory


def divided_layers(config: ClusterConfig, total: int) -> dict[str, list[Layers]]:
    """Return the layers of each stage, for instances with stages in several processes.

    Args:
        total: number of layers of the model.

    Raises:
        JaxinferError: the run file does not state these layers.
    """
    found = {}
    for name in config.instances:
        if not is_divided(config, name):
            continue
        stages = config.instances[name].places
        if len(stages) > 1 and not all(stage.layers or stage.share for stage in stages):
            raise JaxinferError(
                f"instances.{name}.stages: give layers or share: the speeds of groups in several "
                "processes are not measured beside one another"
            )
        found[name] = split(total, count_layers(total, stages, lambda number: 1.0))
    return found


def plan_cluster(
    model: ModelConfig,
    config: ClusterConfig,
    layers: Mapping[str, Sequence[Layers]] | None = None,
    gpu_share: float | None = None,
) -> dict[str, list[StagePlan]]:
    """Plan the stages of each instance before anything is loaded.

    Args:
        layers: layers of each stage, for instances with stages in other processes.
        gpu_share: see ``open_groups``.

    Raises:
        JaxinferError: see ``make_plan``; the message names the instance if there are several.
    """
    configure_jax()
    groups = open_groups(config.groups, gpu_share)
    _check_links(config, groups)
    devices = _devices_of_stages(config, groups)
    users = Counter(device for stages in devices.values() for stage in stages for device in stage)
    plans: dict[str, list[StagePlan]] = {}
    taken = TakenMemory()
    for name, instance in config.instances.items():
        try:
            on_gpus = [device for stage in devices[name] for device in stage]
            if any(device.platform == "gpu" for device in on_gpus):
                users_here = max(users[device] for device in on_gpus)
                instance = instance.on_gpu().sharing_gpu(users_here)
            given = (layers or {}).get(name, ())
            stages = _plan_stages(model, config, instance, groups, devices[name], taken, given)
            plans[name] = list(stages)
        except JaxinferError as error:
            of = f"instances.{name}: " if len(config.instances) > 1 else ""
            raise JaxinferError(f"{of}{error}") from None
    return plans


def _check_links(config: ClusterConfig, groups: Mapping[str, Sequence[jax.Device]]) -> None:
    """Refuse emulated links between GPUs that are not emulated."""
    for link in config.links:
        for end in link.between:
            if groups[end][0].platform != "cpu" and not config.groups[end].emulate:
                raise JaxinferError(
                    f"links: {' - '.join(link.between)} is emulated, between CPUs and groups with "
                    f"emulate only, and {end} is a GPU: leave links to `simulate`"
                )


def _devices_of_stages(
    config: ClusterConfig, groups: Mapping[str, Sequence[jax.Device]]
) -> dict[str, list[list[jax.Device]]]:
    """Assign devices to each instance's stages: the next ones of their groups."""
    free = {name: iter(devices) for name, devices in groups.items()}
    return {
        name: [
            [next(free[stage.group]) for _ in range(config.groups[stage.group].stage_devices)]
            for stage in instance.places
        ]
        for name, instance in config.instances.items()
    }


def _plan_stages(
    model: ModelConfig,
    config: ClusterConfig,
    instance: InstanceConfig,
    groups: Mapping[str, Sequence[jax.Device]],
    devices: Sequence[Sequence[jax.Device]],
    taken: TakenMemory,
    given: Sequence[Layers],
) -> Iterator[StagePlan]:
    places = instance.places
    own = [config.groups[stage.group] for stage in places]

    def speed(number: int) -> float:
        dtype = choose_dtype(instance, devices[number][0])
        return measure_speed(model, dtype, devices[number]) / own[number].slowdown

    counts = [model.num_hidden_layers]
    if instance.stages and not given:
        counts = count_layers(model.num_hidden_layers, places, speed)
    parts = given or split(model.num_hidden_layers, counts)
    for stage, group, here, layers in zip(places, own, devices, parts, strict=True):
        if stage.attention:
            plan = make_plan(
                model, instance, here, layers, taken.of(here[0]), True, group.mesh, taken.parameters
            )
            _count(plan, taken)
            yield plan_attention(plan, stage, config, groups, taken)
        elif stage.ffn:
            yield plan_with_ffn(model, config, instance, stage, groups, here, layers, taken)
        else:
            yield from _plan_segments(model, instance, here, group.mesh, layers, taken)


def _count(plan: StagePlan, taken: TakenMemory) -> None:
    taken.add(plan.devices, plan.parameters, plan.dtype, plan.kv_bytes)


def _plan_segments(
    model: ModelConfig,
    instance: InstanceConfig,
    devices: Sequence[jax.Device],
    axes: Mapping[str, int] | None,
    layers: Layers,
    taken: TakenMemory,
) -> list[StagePlan]:
    """Plan one stage's segments, which share its devices' memory."""

    def plan(asked: InstanceConfig, layers: Layers) -> StagePlan:
        before = taken.of(devices[0])
        return make_plan(model, asked, devices, layers, before, axes=axes, there=taken.parameters)

    plans = [plan(instance, layers)]
    if instance.segments > 1:
        count = layers.stop - layers.start
        if instance.segments > count:
            raise JaxinferError(f"segments is {instance.segments}, a stage has {count} layers")
        sized = instance.model_copy(update={"num_pages": plans[0].num_pages})
        plans = [plan(sized, piece) for piece in layers.pieces(instance.segments)]
    for each in plans:
        _count(each, taken)
    return plans
