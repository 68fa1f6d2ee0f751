"""Finds out which process has which part of a cluster.

A process is named by its group; None is the process of the loop.
"""

from typing import Any

from jaxinfer.config.cluster import ClusterConfig


def processes_of(cluster: ClusterConfig, instance: str) -> tuple[str | None, ...]:
    """Return the processes of an instance's stages, in order."""
    groups = [place.group for place in cluster.instances[instance].places]
    return tuple(group if cluster.groups[group].is_apart else None for group in groups)


def is_divided(cluster: ClusterConfig, instance: str) -> bool:
    """Tell whether an instance's stages, attention and FFN groups are in several processes."""
    # The part of one process does not contain those of others.
    apart = [g for g in cluster.instances[instance].lenders if g in cluster.groups]
    apart = [g for g in apart if cluster.groups[g].is_apart]
    return len({*processes_of(cluster, instance), *apart}) > 1


def part_of(cluster: ClusterConfig, process: str | None) -> ClusterConfig:
    """Return the part of a cluster that one process has, as a cluster.

    If an instance has stages in several processes, the part has only those of this process.
    """
    here: dict[str, Any] = {"environment": {}, "restart": 0}
    groups = {
        name: group.model_copy(update=dict.fromkeys(("process", "host", "ray")) | here)
        for name, group in cluster.groups.items()
        if (name if group.is_apart else None) == process
    }
    instances, lent = {}, {**cluster.lent}
    for name, instance in cluster.instances.items():
        if is_divided(cluster, name):
            lent |= {each: cluster.groups[each].devices for each in instance.lenders}
            stages = tuple(stage for stage in instance.stages if stage.group in groups)
            instance = instance.model_copy(update={"stages": stages})
        if instance.places[0].group in groups:
            instances[name] = instance
    links = tuple(link for link in cluster.links if set(link.between) <= groups.keys())
    part = {"groups": groups, "instances": instances, "links": links, "lent": lent}
    return cluster.model_copy(update=part)


def started_together(cluster: ClusterConfig) -> list[list[str]]:
    """Return the groups that may be restarted, in lists of those that are started together.

    If an instance's stages may be restarted, its attention and FFN groups are restarted with them.
    """
    found = [[name] for name, group in cluster.groups.items() if group.restart]
    for name, instance in cluster.instances.items():
        of_it = dict.fromkeys(filter(None, processes_of(cluster, name)))
        if is_divided(cluster, name) and any(cluster.groups[group].restart for group in of_it):
            of_it |= dict.fromkeys(instance.lenders)
        joined = [groups for groups in found if of_it.keys() & {*groups}]
        found = [groups for groups in found if groups not in joined]
        if joined:
            with_them = [group for groups in joined for group in groups]
            found.append([*dict.fromkeys([*of_it, *with_them])])
    return found
