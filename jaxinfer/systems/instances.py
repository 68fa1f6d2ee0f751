"""Helpers for instances by role: names from a system's options, and the least loaded one."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated

from pydantic import BeforeValidator, Field

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, did_you_mean
from jaxinfer.serving.system import Assignment
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView


def _as_tuple(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


# One name, or a list of names, which may be empty in one type and not in the other.
AnyNames = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Names = Annotated[AnyNames, Field(min_length=1)]


def check_roles(roles: Mapping[str, str | Sequence[str]], instances: Collection[str]) -> None:
    """Raise JaxinferError if an instance does not exist, or is named twice.

    Args:
        roles: option -> the names of instances that it has, or the one name that it takes.
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
    """Return a hint if replicas of a name, or of a similar one, are instances; otherwise None."""
    replicas = [
        each for number in range(len(instances)) if (each := f"{name}{number}") in instances
    ]
    if len(replicas) < 2:
        return _near_replicas(name, instances)
    if only_one:
        return f", but there are {replicas[0]} to {replicas[-1]}: give the name of one"
    return f", but there are {replicas[0]} to {replicas[-1]}: give a list, [{name}] for all of them"


def _near_replicas(name: str, instances: Collection[str]) -> str | None:
    """Return the replicas whose name is nearest to an unknown name."""
    digits = "0123456789"
    bases = Counter(base for each in instances if (base := each.rstrip(digits)) != each)
    several = [base for base, count in bases.items() if count > 1]
    if name in several or not (near := get_close_matches(name.rstrip(digits), several, n=1)):
        return None
    numbers = [int(each[len(near[0]) :]) for each in instances if each.rstrip(digits) == near[0]]
    return f": did you mean {near[0]}{min(numbers)} to {near[0]}{max(numbers)}?"


def alive(names: Iterable[str], cluster: ClusterView) -> list[str]:
    """Return the instances that are not lost."""
    return [name for name in names if name in cluster.instances]


def num_requests(instance: InstanceView) -> int:
    """Return an instance's load, counted as its number of requests."""
    return instance.num_requests


def least_loaded(
    names: Iterable[str],
    cluster: ClusterView,
    given: Mapping[str, int],
    load: Callable[[InstanceView], int] = num_requests,
) -> str:
    """Return the instance with the least load; among equal ones, the first.

    Args:
        given: load that was just assigned to instances, which they do not show yet.
    """
    return min(names, key=lambda name: load(cluster.instances[name]) + given.get(name, 0))


def capacity(instance: InstanceView) -> int:
    """Return the number of KV entries that fit into an instance's whole pool."""
    return instance.num_pages * instance.page_size


class KVRoom:
    """The number of KV entries that each pool can hold, read again only after a loss or return."""

    def __init__(self) -> None:
        self._capacities: dict[str, int] = {}
        self._of: Mapping[str, InstanceView] | None = None
        self._least = 0

    def that_hold(self, entries: int, names: Sequence[str], cluster: ClusterView) -> Sequence[str]:
        """Return the instances that can hold ``entries`` KV entries."""
        if cluster.instances is not self._of:
            self._of = cluster.instances
            self._capacities |= {name: capacity(i) for name, i in cluster.instances.items()}
            self._least = min(self._capacities.values())
        if entries <= self._least:
            return names
        return [name for name in names if entries <= self._capacities[name]]


def most_entries(request: RequestView) -> int:
    """Return the largest number of KV entries of a request; its last token needs none."""
    return request.prompt_len + request.max_tokens - 1


def whole_on_least_loaded(
    names: Collection[str], waiting: Iterable[RequestView], cluster: ClusterView
) -> list[Assignment]:
    """Assign whole requests to the instance with the fewest, as many as keep its steps full.

    Only instances whose pools hold the request are considered, or all if none does. A request whose
    KV is on one of them continues there, because there may be no route to the others. Further
    requests wait, because a lost instance may return and take a part.
    """
    room = {name: _prompt_tokens_wanted(cluster.instances[name]) for name in names}
    entries = {name: capacity(cluster.instances[name]) for name in names}
    given: Counter[str] = Counter()
    assignments = []
    for request in waiting:
        held_by, most = request.held_by, most_entries(request)
        if held_by in room:
            name = held_by
        else:
            holding = [name for name in names if most <= entries[name]]
            name = least_loaded(holding or names, cluster, given)
        if room[name] <= 0:
            break
        room[name] -= request.num_known - request.computed
        given[name] += 1
        assignments.append(Assignment(request.id, (Leg(name),)))
    return assignments


def _prompt_tokens_wanted(instance: InstanceView) -> int:
    """Return the prompt tokens that fill two steps: one that runs, and one launched ahead."""
    return 2 * instance.max_num_batched_tokens - instance.prompt_tokens_left
