"""Checks for clusters that cannot be simulated."""

from collections.abc import Sequence

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.options.validation import OptionError, did_you_mean


def check_played(cluster: ClusterConfig) -> None:
    """Refuse groups on the same devices whose steps would have to take turns.

    Raises:
        JaxinferError: groups share devices but do not emulate their own, or one of them belongs to
            an instance with attention groups.
    """
    sharers = {name: cluster.home(name) for name, group in cluster.groups.items() if group.shares}
    spread = [name for name, instance in cluster.instances.items() if instance.is_spread]
    for instance in spread:
        stages = [place.group for place in cluster.instances[instance].places]
        for name in (*stages, *cluster.instances[instance].attention_groups):
            if cluster.groups[name].emulate or cluster.groups[name].shares:
                raise JaxinferError(
                    f"groups.{name}: instances.{instance} has attention groups, which are modelled "
                    "on GPUs of their own and at these GPUs' speed: leave out shares and emulate"
                )
    for name in (*sharers, *sharers.values()):
        if not cluster.groups[name].emulate:
            raise OptionError(
                f"groups.{name}.emulate is missing: groups that share devices take turns, which is "
                "not modelled; with a slowdown, each is modelled at the speed that it plays"
            )


def check_sharing(names: Sequence[str], cluster: ClusterConfig, model: ModelShape) -> None:
    """Refuse to share experts among instances that cannot step together."""
    where = "simulate.shared_experts"
    if names and not model.num_experts:
        raise OptionError(f"{where}: the model has no experts: leave it out")
    if len(names) == 1 or len(set(names)) < len(names):
        raise OptionError(f"{where} must name two instances or more, each once")
    devices = {}
    for name in names:
        if name not in cluster.instances:
            near = did_you_mean(name, cluster.instances)
            raise OptionError(f"{where}: no instance {name!r}: {near}")
        places = cluster.instances[name].places
        if len(places) > 1 or places[0].attention or places[0].ffn:
            raise OptionError(
                f"{where}: {name} must be one stage, without attention groups and ffn"
            )
        group = cluster.groups[places[0].group]
        if group.emulate:
            raise OptionError(f"{where}: {name} steps with others, must be without emulate")
        if group.mesh is not None or cluster.instances[name].layout is not None:
            raise OptionError(f"{where}: {name} must have neither mesh nor layout")
        devices[name] = group.stage_devices
    if len(set(devices.values())) > 1:
        raise OptionError(f"{where}: {devices} devices, must be as many of each")
