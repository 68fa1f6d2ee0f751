"""A run file, resolved: what stands where, and by which system, for both worlds."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxinfer.config.cluster import ClusterConfig, GroupConfig, InstanceConfig
from jaxinfer.config.nodes import NetworkPath, Placement, place_groups
from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, Gpu, ModelShape
from jaxinfer.options.validation import OptionError, did_you_mean, within
from jaxinfer.serving.system import System
from jaxinfer.systems.registry import make_system


@dataclass(frozen=True)
class Resolved:
    """What follows from a run file, found once.

    Attributes:
        pairs: instances from the first of which KV may go to the second.
        counts_transfer: whether a first token counts only once its KV has arrived.
        needs_fits: whether the system has to know what steps take; ``needs_attention_fits``: and
            attention, by shard.
    """

    run_file: RunFile
    cluster: ClusterConfig
    pairs: Collection[tuple[str, str]]
    counts_transfer: bool
    needs_fits: bool
    needs_attention_fits: bool

    @property
    def instances(self) -> Mapping[str, InstanceConfig]:
        """By name."""
        return self.cluster.instances

    def new_system(self) -> System:
        """The system, as it is before a run."""
        return make_system(self.run_file.system, self.instances)

    @cached_property
    def placement(self) -> Placement | None:
        """The groups on the nodes of a hardware file; None without one.

        Raises:
            JaxinferError: see ``place_groups``.
        """
        return place_groups(self.cluster, self.run_file.simulate, self.run_file.own)

    @property
    def groups(self) -> Mapping[str, GroupConfig]:
        """By name; of nodes, with what they have."""
        return (self.placement.cluster if self.placement else self.cluster).groups

    @property
    def catalogue(self) -> Catalogue:
        """GPUs and models by name, those that the files add included."""
        return self.placement.known if self.placement else self.run_file.own

    @cached_property
    def gpus(self) -> Mapping[str, Gpu]:
        """What each group is modelled on.

        Raises:
            JaxinferError: a group names none that is known, or is of another platform.
        """
        return {group: self._gpu(group) for group in self.groups}

    @property
    def model(self) -> ModelShape:
        """The model's numbers.

        Raises:
            JaxinferError: none is named, or it is not known.
        """
        return self.catalogue.model(self.run_file.require_model())

    def _gpu(self, group: str) -> Gpu:
        config = self.groups[group]
        try:
            if config.emulate or config.platform == "cpu":
                raise JaxinferError(
                    "a modelled group is a GPU: platform cpu and emulate do not apply"
                )
            if self.placement:
                return self.placement.gpu(group)
            if config.kind is None:
                raise OptionError("kind is missing, must name the GPU that is modelled")
            return self.catalogue.gpu(config.kind)
        except JaxinferError as error:
            raise within(f"groups.{group}", error) from None

    def path(self, source: str, dest: str, what: Literal["KV", "hidden states"]) -> NetworkPath:
        """What lies between two groups that are modelled; within one, what connects its GPUs.

        KV goes over as many pairs of GPUs as there are where both groups stand on one node.

        Raises:
            JaxinferError: there is no link.
        """
        pairs = _gpu_pairs(self.cluster, source, dest) if what == "KV" else 1
        if self.placement:
            return self.placement.path(source, dest, pairs)
        if source == dest:
            return NetworkPath({(source, dest): pairs * self.gpus[source].link_gb_s * 1e9}, 0.0)
        link = self.cluster.link(source, dest)
        if link is None:
            raise JaxinferError(f"links: none between {source} and {dest}, where {what} must go")
        return NetworkPath({(source, dest): link.gb_s * 1e9}, link.latency_s)


def resolve(run_file: RunFile) -> Resolved:
    """Find out what follows from a run file; nothing is loaded.

    Raises:
        JaxinferError: its parts do not fit together, or its system is none or cannot work on them.
    """
    cluster = run_file.cluster()
    system = make_system(run_file.system, cluster.instances)
    for name, instance in cluster.instances.items():
        if system.roles is not None and instance.role not in ("", *system.roles):
            near = did_you_mean(instance.role, system.roles)
            raise OptionError(f"instances.{name}.role is {instance.role!r}: {near}")
    counts = run_file.metrics.ttft_counts_transfer
    return Resolved(
        run_file,
        cluster,
        system.routes(cluster.instances),
        system.ttft_counts_transfer if counts is None else counts,
        system.needs_fits,
        system.needs_attention_fits,
    )


def _gpu_pairs(cluster: ClusterConfig, source: str, dest: str) -> int:
    """Pairs of GPUs between which KV goes at once from group to group, where they share a node.

    As many as the group with fewer devices has; within a group, as one of its stages has, since
    the other end is another of them.
    """
    here, there = cluster.groups[source], cluster.groups[dest]
    return here.stage_devices if source == dest else min(here.devices, there.devices)
