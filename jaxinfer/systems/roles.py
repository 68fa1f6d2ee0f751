"""Instances by what a system has them do: names from its options, and the least loaded."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from jaxinfer.config.validation import OptionError, did_you_mean
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.system import Assignment, ClusterView, InstanceView, Leg, RequestView


def _as_tuple(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


# One name, or a list of them.
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


def check_roles(roles: Mapping[str, str | Sequence[str]], instances: Collection[str]) -> None:
    """Raise JaxinferError if an instance is not there, or named twice.

    Args:
        roles: names of instances by the option that has them; a text for one that takes one name.
    """
    seen: dict[str, str] = {}
    listed = {role: [names] if isinstance(names, str) else names for role, names in roles.items()}
    for role, names in listed.items():
        for number, name in enumerate(names):
            option = role if len(names) == 1 else f"{role}[{number}]"
            if name not in instances:
                hint = _of_replicas(name, instances, listed[role] is not roles[role])
                raise OptionError(
                    f"{option} is {name!r}{hint or f': {did_you_mean(name, instances)}'}"
                )
    for role, names in listed.items():
        for name in names:
            if seen.get(name) == role:
                raise JaxinferError(f"{role} has {name!r} twice")
            if name in seen:
                raise JaxinferError(f"{seen[name]} and {role} are both {name!r}")
            seen[name] = role


def _of_replicas(name: str, instances: Collection[str], only_one: bool) -> str | None:
    """What to write for a name whose replicas are instances, and not itself; None if neither is."""
    replicas = [
        each for number in range(len(instances)) if (each := f"{name}{number}") in instances
    ]
    if len(replicas) < 2:
        return None
    if only_one:
        return f", but there are {replicas[0]} to {replicas[-1]}: give the name of one"
    names = replicas if len(replicas) < 5 else [*replicas[:2], "...", replicas[-1]]
    return f", but there are {replicas[0]} to {replicas[-1]}: give a list, [{', '.join(names)}]"


def alive(names: Iterable[str], cluster: ClusterView) -> list[str]:
    """Those that were not lost."""
    return [name for name in names if name in cluster.instances]


def num_requests(instance: InstanceView) -> int:
    """The load that counts requests."""
    return instance.num_requests


def least_loaded(
    names: Iterable[str],
    cluster: ClusterView,
    given: Mapping[str, int],
    load: Callable[[InstanceView], int] = num_requests,
) -> str:
    """The one with the least load, what it was given in this call included; the first of equals."""
    return min(names, key=lambda name: load(cluster.instances[name]) + given.get(name, 0))


def whole_on_least_loaded(
    names: Collection[str], waiting: Iterable[RequestView], cluster: ClusterView
) -> list[Assignment]:
    """Each request whole on the one of these that has the fewest."""
    given: Counter[str] = Counter()
    assignments = []
    for request in waiting:
        name = least_loaded(names, cluster, given)
        given[name] += 1
        assignments.append(Assignment(request.id, (Leg(name),)))
    return assignments
