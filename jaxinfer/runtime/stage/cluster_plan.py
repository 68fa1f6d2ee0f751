"""Plans of a cluster's instances on the devices of this process, before they are loaded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.layer_split import count_layers
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.stage import Layers, split
from jaxinfer.runtime.stage.attention_plan import plan_attention
from jaxinfer.runtime.stage.devices import configure_jax, open_groups
from jaxinfer.runtime.stage.machine_speed import measure_speed
from jaxinfer.runtime.stage.stage_plan import StagePlan, choose_dtype, make_plan


def divided_layers(config: ClusterConfig, total: int) -> dict[str, list[Layers]]:
    """Layers of each stage, for the instances with stages in several processes.

    Args:
        total: layers of the model.

    Raises:
        JaxinferError: they are not stated.
    """
    found = {}
    for name in filter(config.is_divided, config.instances):
        stages = config.instances[name].places
        if len(stages) > 1 and not all(stage.layers or stage.share for stage in stages):
            raise JaxinferError(
                f"instances.{name}.stages: give layers or share: the speeds of groups in several "
                "processes are not measured beside one another"
            )
        found[name] = split(total, count_layers(total, stages, lambda number: 1.0))
    return found


def plan_cluster(
    model: ModelConfig, config: ClusterConfig, layers: Mapping[str, Sequence[Layers]] | None = None
) -> dict[str, list[StagePlan]]:
    """Plans of each instance's stages, before anything is loaded.

    Args:
        layers: of each stage, for instances that have others in other processes.

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
    plans: dict[str, list[StagePlan]] = {}
    taken = 0
    for name, instance in config.instances.items():
        try:
            if any(groups[stage.group][0].platform == "gpu" for stage in instance.places):
                instance = instance.on_gpu()
            given = (layers or {}).get(name, ())
            stages = _plan_stages(model, config, instance, groups, free, taken, given)
            plans[name] = list(stages)
            taken += _host_bytes(plans[name])
        except JaxinferError as error:
            of = f"instances.{name}: " if len(config.instances) > 1 else ""
            raise JaxinferError(f"{of}{error}") from None
    return plans


def _plan_stages(
    model: ModelConfig,
    config: ClusterConfig,
    instance: InstanceConfig,
    devices_of: Mapping[str, Sequence[jax.Device]],
    free: Mapping[str, Iterator[jax.Device]],
    taken: int,
    given: Sequence[Layers],
) -> Iterator[StagePlan]:
    groups = [config.groups[stage.group] for stage in instance.places]
    devices = [
        [next(free[stage.group]) for _ in range(group.stage_devices)]
        for stage, group in zip(instance.places, groups, strict=True)
    ]

    def speed(number: int) -> float:
        dtype = choose_dtype(instance, devices[number][0])
        return measure_speed(model, dtype, devices[number]) / groups[number].slowdown

    counts = [model.num_hidden_layers]
    if instance.stages and not given:
        counts = count_layers(model.num_hidden_layers, instance.places, speed)
    parts = given or split(model.num_hidden_layers, counts)
    for stage, here, layers in zip(instance.places, devices, parts, strict=True):
        axes = config.groups[stage.group].mesh
        if stage.attention:
            whole = make_plan(model, instance, here, layers, taken, is_spread=True, axes=axes)
            own = _host_bytes([whole])
            plans = [plan_attention(whole, stage, config, devices_of, taken + own)]
        else:
            plans = _plan_segments(model, instance, here, axes, layers, taken)
        taken += _host_bytes(plans)
        yield from plans


def _host_bytes(plans: Iterable[StagePlan]) -> int:
    """Count the bytes that the plans will take of the host's memory."""
    total = 0
    for plan in plans:
        if plan.devices[0].platform == "cpu":
            total += plan.weight_bytes + plan.kv_bytes
        devices = ((place, place.device) for place in plan.attention)
        total += sum(place.kv_bytes for place, on in devices if on and on.platform == "cpu")
    return total


def _plan_segments(
    model: ModelConfig,
    instance: InstanceConfig,
    devices: Sequence[jax.Device],
    axes: Mapping[str, int] | None,
    layers: Layers,
    taken: int,
) -> list[StagePlan]:
    """Plan one stage's segments, which share its devices' memory."""
    whole = make_plan(model, instance, devices, layers, taken, axes=axes)
    if instance.segments == 1:
        return [whole]
    count = layers.stop - layers.start
    if instance.segments > count:
        raise JaxinferError(f"segments is {instance.segments}, a stage has {count} layers")
    sized = instance.model_copy(update={"num_pages": whole.num_pages})
    pieces = layers.pieces(instance.segments)
    return [make_plan(model, sized, devices, piece, taken, axes=axes) for piece in pieces]
