"""A resolved run file: its instances and system, for both worlds. For stages see ``site.py``."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.run_file import RunFile
from jaxinfer.options.validation import OptionError, did_you_mean
from jaxinfer.serving.system import System
from jaxinfer.systems.registry import make_system


@dataclass(frozen=True)
class Resolved:
    """The facts that follow from a run file, computed once.

    Attributes:
        pairs: pairs of instances (source, destination) between which KV may be sent.
        counts_transfer: whether a first token counts only once its KV has arrived.
        needs_fits: whether the system needs step times.
        needs_attention_fits: whether the system needs the times of attention in each shard.
    """

    run_file: RunFile
    cluster: ClusterConfig
    pairs: Collection[tuple[str, str]]
    counts_transfer: bool
    needs_fits: bool
    needs_attention_fits: bool

    @property
    def instances(self) -> Mapping[str, InstanceConfig]:
        """Instances by name."""
        return self.cluster.instances

    def new_system(self) -> System:
        """Return a new system, in its state before a run."""
        return make_system(self.run_file.system, self.cluster.computing)


def resolve(run_file: RunFile) -> Resolved:
    """Compute what follows from a run file; nothing is loaded.

    Raises:
        JaxinferError: parts of the file do not fit together, or its system is unknown or cannot
            work with them.
    """
    cluster = run_file.cluster()
    system = make_system(run_file.system, cluster.computing)
    for name, instance in cluster.instances.items():
        if system.roles is not None and instance.role not in ("", *system.roles):
            near = did_you_mean(instance.role, system.roles)
            raise OptionError(f"instances.{name}.role is {instance.role!r}: {near}")
        if system.needs_caches and instance.computes and not instance.enable_prefix_caching:
            raise OptionError(
                f"instances.{name}.enable_prefix_caching is False, must be True with system.fetch: "
                "KV is fetched from prefix caches"
            )
    counts = run_file.metrics.ttft_counts_transfer
    pairs = dict.fromkeys(system.routes(cluster.computing))
    for name, tier in cluster.tiers.items():
        pairs |= {(name, tier): None, (tier, name): None}
    return Resolved(
        run_file,
        cluster,
        [*pairs],
        system.ttft_counts_transfer if counts is None else counts,
        system.needs_fits,
        system.needs_attention_fits,
    )
