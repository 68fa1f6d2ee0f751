"""A modelled cluster as finished values: its groups, its instances' stages, and paths between.

``site.model_site`` works them out of a run file; what simulates a cluster reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.nodes import NetworkPath, Placement
from jaxinfer.config.resolve import Resolved
from jaxinfer.config.stage_part import StagePart
from jaxinfer.hardware.catalogue import Gpu, ModelShape, sum_known


@dataclass(frozen=True)
class SiteGroup:
    """A device group of equal GPUs.

    Attributes:
        kind: the GPU's name; ``devices``: how many; ``stage_devices``: of one stage, or 1 of a
            group for attention, each of whose devices has KV heads of its own.
        mesh: axes of a stage's devices and their sizes, where they are given.
        slowdown: how many times longer a step takes than on the GPU.
        shares: the group whose devices these are; None where they are its own.
    """

    name: str
    gpu: Gpu
    kind: str
    devices: int
    stage_devices: int
    mesh: Mapping[str, int] | None = None
    slowdown: float = 1.0
    shares: str | None = None

    @property
    def own_devices(self) -> int:
        """Devices that no other group has lent it."""
        return 0 if self.shares else self.devices


@dataclass(frozen=True)
class SiteAttention:
    """A group besides a stage's own, for KV heads.

    Attributes:
        num_pages: of its pool for this stage; None for what its memory has room for.
        path: from the stage's own group.
    """

    group: SiteGroup
    costs: SimulateOptions
    num_pages: int | None
    path: NetworkPath


@dataclass(frozen=True)
class SiteStage:
    """A pipeline stage of an instance.

    Attributes:
        costs: those of its group.
        hop: what hidden states go over to the next stage; None after the last one.
    """

    group: SiteGroup
    part: StagePart
    costs: SimulateOptions
    attention: Sequence[SiteAttention]
    hop: NetworkPath | None

    @property
    def groups(self) -> list[SiteGroup]:
        """Groups where its KV heads may lie: its own, then the others, one for each device."""
        return [
            self.group,
            *(each.group for each in self.attention for _ in range(each.group.devices)),
        ]


@dataclass(frozen=True)
class ModelledSite:
    """A cluster that is modelled.

    Attributes:
        placement: of the groups on the nodes of a hardware file; None without one.
        stages: of each instance, in the layers' order.
        paths: from group to group, for KV; all those that it may take.
        sharing: instances that share the experts of each layer.
        relative_fits: whether step times are fitted by relative error, and not in seconds.
    """

    resolved: Resolved
    placement: Placement | None
    groups: Mapping[str, SiteGroup]
    model: ModelShape
    stages: Mapping[str, Sequence[SiteStage]]
    paths: Mapping[tuple[str, str], NetworkPath]
    sharing: Sequence[str] = ()
    relative_fits: bool = True


def total_watts(placement: Placement | None, groups: Iterable[SiteGroup]) -> float | None:
    """Add up the watts of the GPUs, or of whole nodes if placed on nodes; None if not known."""
    if placement:
        return placement.watts
    return sum_known(group.gpu.watts for group in groups for _ in range(group.own_devices))
