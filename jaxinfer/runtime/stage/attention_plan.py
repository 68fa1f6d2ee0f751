"""Plans a stage's attention groups before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.models.layouts import DEFAULT_AXIS
from jaxinfer.pallas_kernels.choice import choose_kernels
from jaxinfer.runtime.stage.kv_cache import abstract_pages, memory_of
from jaxinfer.runtime.stage.stage_plan import AttentionPlan, StageFacts, StagePlan, free_memory
from jaxinfer.runtime.stage.taken import TakenMemory


def plan_attention(
    plan: StagePlan,
    stage: StageConfig,
    config: ClusterConfig,
    devices: Mapping[str, Sequence[jax.Device]],
    taken: TakenMemory,
) -> StagePlan:
    """Return the stage's plan with its attention groups; parts in other processes stay requests.

    Args:
        devices: devices by group.
        taken: memory taken by all plans so far, including this one; the groups' memory is added.

    Raises:
        JaxinferError: a group or its link cannot run attention, or its memory is too small.
    """
    found: list[AttentionPlan] = []
    for place in stage.attention:
        num_pages = place.num_pages or plan.num_pages
        is_here = place.group in config.groups
        if is_here:
            check_attention(place.group, config)
        count = len(devices[place.group]) if is_here else config.lent[place.group]
        asked = AttentionPlan(place.group, None, num_pages, devices=count)
        for number in range(count):
            each = replace(asked, number=number)
            if is_here:
                device = devices[place.group][number]
                group = config.groups[place.group]
                each = plan_pool(plan, each, device, group, taken.of(device))
                taken.add_pool(device, each.kv_bytes)
            found.append(each)
    return replace(plan, attention=tuple(found))


def check_attention(name: str, config: ClusterConfig) -> None:
    """Raise JaxinferError if a group or its link cannot run attention."""
    group = config.groups[name]
    if group.slowdown % 1:
        raise JaxinferError(
            f"groups.{name}.emulate.slowdown is {group.slowdown:g}, must be a whole number: an "
            "attention group repeats its work that number of times"
        )
    for link in config.links:
        if name in link.between:
            raise JaxinferError(
                f"links: {' - '.join(link.between)} would have to be emulated layer by layer, "
                f"{name} is an attention group: leave links to `simulate`"
            )


def plan_pool(
    plan: StageFacts, asked: AttentionPlan, device: jax.Device, group: GroupConfig, taken: int = 0
) -> AttentionPlan:
    """Plan the pool that was requested for one device of an attention group.

    Args:
        taken: bytes of the device's memory that other plans will take.

    Raises:
        JaxinferError: the memory is too small.
    """
    options, config = plan.options, plan.config
    kernels = choose_kernels(
        options.kernels,
        device,
        plan.kv_dtype,
        config.head_dim,
        config.num_attention_heads // config.num_key_value_heads,
        options.page_size,
    )
    held = replace(config, num_key_value_heads=1, kernels=kernels)
    mesh = Mesh(np.array([device]), (DEFAULT_AXIS,))
    pages = abstract_pages(held, plan.layers, 1, options.page_size, plan.kv_dtype, mesh)
    size = asked.pool_pages(plan.num_kv_heads) * memory_of(jax.tree.leaves(pages))
    if (free := free_memory(device, taken)) is not None and size > free:
        raise JaxinferError(
            f"attention group {asked.group}: num_pages {asked.num_pages} of {options.page_size} "
            f"tokens takes {size / 2**30:.3f} GiB on each of {asked.devices} devices; "
            f"{free / 2**30:.1f} GiB are free"
        )
    repeats = int(group.slowdown)
    return replace(asked, device=device, kernels=kernels, kv_bytes=size, repeats=repeats)
