"""Plans of a stage's attention groups, before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.stages import AttentionConfig, StageConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.models.layouts import DEFAULT_AXIS
from jaxinfer.pallas_kernels.choice import choose_kernels
from jaxinfer.runtime.stage.kv_cache import abstract_pages, memory_of
from jaxinfer.runtime.stage.stage_plan import AttentionPlan, StagePlan, free_memory


def plan_attention(
    plan: StagePlan,
    stage: StageConfig,
    config: ClusterConfig,
    devices: Mapping[str, Sequence[jax.Device]],
    taken: int,
) -> StagePlan:
    """The stage's plan with its attention groups.

    Args:
        devices: by group.
        taken: bytes of the host's memory that all plans so far will take, this one included.

    Raises:
        JaxinferError: a group or its link is what cannot be run, or its memory is too small.
    """
    found: list[AttentionPlan] = []
    for place in stage.attention:
        _check(place.group, config)
        (device,) = devices[place.group]
        try:
            repeats = int(config.groups[place.group].slowdown)
            found.append(_plan(plan, place, device, repeats, taken))
        except JaxinferError as error:
            raise JaxinferError(f"attention group {place.group}: {error}") from None
        taken += found[-1].kv_bytes if device.platform == "cpu" else 0
    return replace(plan, attention=tuple(found))


def _check(name: str, config: ClusterConfig) -> None:
    group = config.groups[name]
    if group.devices > 1:
        raise JaxinferError(
            f"groups.{name}.devices is {group.devices}, an attention group runs on 1: make it "
            "several groups"
        )
    if group.slowdown % 1:
        raise JaxinferError(
            f"groups.{name}.emulate.slowdown is {group.slowdown:g}, must be a whole number: an "
            "attention group does its work so many times"
        )
    for link in config.links:
        if name in link.between:
            raise JaxinferError(
                f"links: {' - '.join(link.between)} would have to be emulated layer by layer, "
                f"{name} is an attention group: leave links to `simulate`"
            )


def _plan(
    plan: StagePlan, place: AttentionConfig, device: jax.Device, repeats: int, taken: int
) -> AttentionPlan:
    options, config = plan.options, plan.config
    kernels = choose_kernels(
        options.kernels,
        device,
        plan.kv_dtype,
        config.head_dim,
        config.num_attention_heads // config.num_key_value_heads,
        options.page_size,
    )
    num_pages = place.num_pages or plan.num_pages
    held = replace(config, num_key_value_heads=plan.num_kv_heads, kernels=kernels)
    mesh = Mesh(np.array([device]), (DEFAULT_AXIS,))
    pages = abstract_pages(held, plan.layers, 1, options.page_size, plan.kv_dtype, mesh)
    size = num_pages * memory_of(jax.tree.leaves(pages))
    if (free := free_memory(device, taken)) is not None and size > free:
        raise JaxinferError(
            f"num_pages {num_pages} of {options.page_size} tokens takes {size / 2**30:.3f} GiB; "
            f"{free / 2**30:.1f} GiB are free"
        )
    return AttentionPlan(place.group, device, num_pages, kernels, size, repeats)
