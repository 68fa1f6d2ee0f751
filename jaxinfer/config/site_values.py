"""A modelled cluster in final values: its groups, its instances' stages, and their paths.

``site.model_site`` computes them from a run file, and the simulator reads them.
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
        kind: name of the GPU.
        devices: number of devices.
        stage_devices: number of devices of one stage; 1 in a group for attention, where each device
            has KV heads of its own.
        mesh: axes of a stage's devices and their sizes, if given.
        slowdown: factor by which a step takes longer than on the GPU.
        shares: group whose devices these are; None if they are its own.
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
        """Number of devices that belong to this group, not to a group whose devices it shares."""
        return 0 if self.shares else self.devices


@dataclass(frozen=True)
class SiteAttention:
    """An attention group: a group other than a stage's own that stores KV heads.

    Attributes:
        num_pages: pages of its pool for this stage; None for as many as its memory holds.
        path: path from the stage's own group.
    """

    group: SiteGroup
    costs: SimulateOptions
    num_pages: int | None
    path: NetworkPath


@dataclass(frozen=True)
class SiteFfn:
    """A group that has the FFN of a stage's layers.

    Attributes:
        path: path of hidden states from the stage's own group.
    """

    group: SiteGroup
    costs: SimulateOptions
    path: NetworkPath


@dataclass(frozen=True)
class SiteStage:
    """A pipeline stage of an instance.

    Attributes:
        costs: costs of its group.
        hop: path of hidden states to the next stage; None after the last one.
        ffn: group of the FFN, if it is another one.
    """

    group: SiteGroup
    part: StagePart
    costs: SimulateOptions
    attention: Sequence[SiteAttention]
    hop: NetworkPath | None
    ffn: SiteFfn | None = None

    @property
    def groups(self) -> list[SiteGroup]:
        """The group of each shard of its KV heads: its own, then one per attention device."""
        return [
            self.group,
            *(each.group for each in self.attention for _ in range(each.group.devices)),
        ]


@dataclass(frozen=True)
class ModelledSite:
    """A modelled cluster.

    Attributes:
        placement: groups on the nodes of a hardware file; None without such a file.
        stages: stages of each instance, in the layers' order.
        paths: all paths that KV may take, from group to group.
        sharing: instances that share the experts of each layer.
        relative_fits: whether fits of step times minimise the relative error; otherwise the error
            in seconds.
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
    """Return the watts of all GPUs, or of the nodes if there is a placement; None if unknown."""
    if placement:
        return placement.watts
    return sum_known(group.gpu.watts for group in groups for _ in range(group.own_devices))
