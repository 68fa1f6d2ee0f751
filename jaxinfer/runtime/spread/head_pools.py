"""Pools with one KV head per page: the KV heads of a spread stage, by device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.models.layouts import DEFAULT_AXIS
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.stage.kv_cache import abstract_pages
from jaxinfer.runtime.stage.stage_plan import StageFacts, StagePlan


@dataclass(frozen=True)
class HeadPool:
    """The pages that one device stores for one stage.

    Attributes:
        mesh: mesh of this device alone; mesh of the stage's first device if another process has
            this one.
        kernels: attention kernels that the device uses.
        pages: shapes of each layer's pages.
        repeats: how often the device repeats its attention, to emulate a slower one.
        is_lent: whether another process has the device.
    """

    mesh: Mesh
    kernels: str
    pages: list[KVPages]
    repeats: int = 1
    is_lent: bool = False

    @cached_property
    def sharding(self) -> NamedSharding:
        """Sharding of the arrays in this pool."""
        return NamedSharding(self.mesh, PartitionSpec())


def head_pools(plan: StagePlan) -> Sequence[HeadPool]:
    """Return the stage's own pool, on its first device, then its attention groups' pools."""
    own, *others = plan.pool_pages
    found = [_pool(plan, plan.devices[0], plan.config.kernels, own)]
    for place, num_pages in zip(plan.attention, others, strict=True):
        if not isinstance(place.device, jax.Device):
            lent = _pool(plan, plan.devices[0], plan.config.kernels, num_pages)
            found.append(replace(lent, is_lent=True))
            continue
        found.append(_pool(plan, place.device, place.kernels, num_pages, place.repeats))
    return found


def lent_pool(plan: StageFacts, number: int) -> HeadPool:
    """Return the pool of attention group ``number``, in the process that has the group's device."""
    place = plan.attention[number]
    assert isinstance(place.device, jax.Device)
    return _pool(plan, place.device, place.kernels, plan.pool_pages[number + 1], place.repeats)


def _pool(
    plan: StageFacts, device: jax.Device, kernels: str, num_pages: int, repeats: int = 1
) -> HeadPool:
    mesh = Mesh(np.array([device]), (DEFAULT_AXIS,))
    one_head = replace(plan.config, num_key_value_heads=1, kernels=kernels)
    pages = abstract_pages(
        one_head, plan.layers, num_pages, plan.limits.page_size, plan.kv_dtype, mesh
    )
    return HeadPool(mesh, kernels, pages, repeats)
