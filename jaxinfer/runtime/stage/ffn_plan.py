"""Plans a stage whose FFN is on another group, before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layouts import DEFAULT_AXIS
from jaxinfer.models.stage import Layers
from jaxinfer.pallas_kernels.choice import choose_kernels
from jaxinfer.runtime.stage.kv_cache import memory_of
from jaxinfer.runtime.stage.lay_out import lay_out, with_bits
from jaxinfer.runtime.stage.stage_plan import (
    StageFacts,
    StagePlan,
    free_memory,
    make_plan,
    parameter_shapes,
    shard_parameters,
)
from jaxinfer.runtime.stage.taken import TakenMemory, new_bytes


def plan_with_ffn(
    model: ModelConfig,
    config: ClusterConfig,
    instance: InstanceConfig,
    stage: StageConfig,
    groups: Mapping[str, Sequence[jax.Device]],
    devices: Sequence[jax.Device],
    layers: Layers,
    taken: TakenMemory,
) -> StagePlan:
    """Return a stage's plan with its FFN's plan, if the group is here; count the memory of both.

    Args:
        groups: devices by group.
        devices: devices of the stage's own group.
        taken: memory taken by all plans so far; that of these two plans is added.

    Raises:
        JaxinferError: see ``make_plan``; or the model's layers or the link cannot be divided, or
            the FFN group's memory is too small.
    """
    assert stage.ffn
    check_ffn(model, stage.ffn)
    check_ffn_link(config, stage)
    plan = make_plan(
        model, instance, devices, layers, taken.of(devices[0]), there=taken.parameters,
        part="attention",
    )  # fmt: skip
    taken.add(plan.devices, plan.parameters, plan.dtype, plan.kv_bytes)
    plan = replace(plan, ffn_group=stage.ffn)
    if stage.ffn not in config.groups:
        return plan  # Another process has it.
    ffn = plan_ffn(plan, model, groups[stage.ffn], taken)
    taken.add(ffn.devices, ffn.parameters, ffn.dtype, 0)
    return replace(plan, ffn=ffn)


def check_ffn(model: ModelConfig, group: str) -> None:
    """Raise JaxinferError if the model's FFN cannot be on another group."""
    if not any(path.startswith("layers.0.mlp.") for path in parameter_shapes(model)):
        raise JaxinferError(
            f"ffn: {group}: the layers of {model.architecture} are not divided into attention "
            "and FFN: leave out ffn"
        )


def check_ffn_link(config: ClusterConfig, stage: StageConfig) -> None:
    """Raise JaxinferError if the link from a stage to its FFN group, if any, is emulated."""
    for link in config.links:
        if set(link.between) == {stage.group, stage.ffn}:
            raise JaxinferError(
                f"links: {' - '.join(link.between)} would have to be emulated layer by layer, "
                f"{stage.ffn} has the FFN of {stage.group}: leave links to `simulate`"
            )


def plan_ffn(
    plan: StageFacts, model: ModelConfig, devices: Sequence[jax.Device], taken: TakenMemory
) -> StagePlan:
    """Plan the FFN of a stage's layers on its FFN group's devices, which share each layer.

    Args:
        taken: memory taken by other plans in this process.

    Raises:
        JaxinferError: the memory is too small.
    """
    options, axes = plan.options, {DEFAULT_AXIS: len(devices)}
    mesh = Mesh(np.array(devices), tuple(axes))
    config = with_bits(model, options, plan.dtype)
    kernels = choose_kernels(
        options.kernels,
        devices[0],
        plan.kv_dtype,
        config.head_dim,
        config.num_attention_heads // config.num_key_value_heads,
        options.page_size,
    )
    wide, _ = lay_out(config, options, axes, kernels, False)
    graphdef, parameters = shard_parameters(wide, plan.layers, plan.dtype, mesh, "megatron", "ffn")
    free = free_memory(devices[0], taken.of(devices[0]))
    if free is not None and (new := new_bytes(parameters, plan.dtype, taken.parameters)) > free:
        raise JaxinferError(
            f"ffn group {plan.ffn_group}: weights take {new / 2**30:.3f} GiB of each of "
            f"{len(devices)} devices; {free / 2**30:.1f} GiB are free"
        )
    known = {each.name: getattr(plan, each.name) for each in fields(StageFacts)}
    own = {
        "config": wide,
        "num_pages": 0,
        "weight_bytes": memory_of(parameters.values()),
        "kv_bytes": 0,
        "memory_bytes": free,
        "devices": devices,
        "axes": axes,
        "ffn_group": None,
    }
    return StagePlan(**known | own, mesh=mesh, graphdef=graphdef, parameters=parameters)
