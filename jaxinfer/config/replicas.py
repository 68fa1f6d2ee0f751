"""Several of a kind: what has ``replicas: 3`` under the name x is x0, x1 and x2."""

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

from jaxinfer.config.validation import OptionError

# By name of what has replicas, how many.
Counts = Mapping[str, int]


def replicate(section: str, entries: Mapping[Any, Any]) -> tuple[dict[str, Any], Counts]:
    """Entries by name, with each one's replicas in its place, and how many there are of which.

    Raises:
        OptionError: a number of replicas is none, or a name is there already.
    """
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for key, entry in entries.items():
        name, made = str(key), {str(key): entry}
        if isinstance(entry, dict) and "replicas" in entry:
            count = counts[name] = entry["replicas"]
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise OptionError(
                    f"{section}.{name}.replicas is {count!r}, must be an integer from 1 on"
                )
            one = {option: value for option, value in entry.items() if option != "replicas"}
            made = {replica: dict(one) for replica in names_of(name, counts)}
        for replica in made:
            if replica in found:
                raise OptionError(f"{section}.{name}: there are two {replica}, by replicas")
        found |= made
    return found, counts


def names_of(name: str, counts: Counts) -> list[str]:
    """Of a name's replicas; it alone where it has none."""
    return [f"{name}{number}" for number in range(counts[name])] if name in counts else [name]


def replicate_cluster(data: Mapping[str, Any]) -> dict[str, Any]:
    """A run file with all replicas by name, and with what refers to them.

    Instance i stands on group i where the group has replicas, too; what ``simulate.groups`` has of
    such a group holds for each, with its number for ``*`` in ``node``; a link is between all
    replicas of its ends; and in lists of ``system``, the name of such an instance is that of all.

    Raises:
        OptionError: an instance has not as many replicas as its group.
    """
    found = dict(data)
    groups: Counts = {}
    instances: Counts = {}
    if isinstance(data.get("groups"), dict):
        found["groups"], groups = replicate("groups", data["groups"])
    if isinstance(given := data.get("instances"), dict):
        found["instances"], instances = replicate("instances", given)
        for name, count in instances.items():
            for number, replica in enumerate(names_of(name, instances)):
                where = f"instances.{name}"
                stood = _standing(where, found["instances"][replica], groups, count, number)
                found["instances"][replica] = stood
    if groups:
        found |= _of_groups(found, groups)
    if instances and "system" in data:
        found["system"] = _in_lists(data["system"], instances)
    return found


def _standing(
    where: str, instance: Mapping[str, Any], groups: Counts, count: int, number: int
) -> dict[str, Any]:
    """An instance's replica, on the groups of its number."""

    def place(at: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(spread := at.get("attention"), list):
            at = {**at, "attention": [place(_as_mapping(each)) for each in spread]}
        group = str(at.get("group"))
        if group not in groups:
            return dict(at)
        if groups[group] != count:
            raise OptionError(
                f"{where}.replicas is {count}, its group {group} has {groups[group]}: give both "
                "as many"
            )
        return {**at, "group": names_of(group, groups)[number]}

    found = place(instance)
    if isinstance(stages := instance.get("stages"), list):
        found["stages"] = [place(at) if isinstance(at, dict) else at for at in stages]
    return found


def _as_mapping(attention: Any) -> Mapping[str, Any]:
    """An attention group that may be given by its name."""
    return attention if isinstance(attention, dict) else {"group": attention}


def _of_groups(data: Mapping[str, Any], groups: Counts) -> dict[str, Any]:
    """The sections ``links`` and ``simulate`` by groups' replicas."""
    found: dict[str, Any] = {}
    if isinstance(links := data.get("links"), list):
        found["links"] = [each for link in links for each in _links(link, groups)]
    simulate = data.get("simulate")
    if isinstance(simulate, dict) and isinstance(simulate.get("groups"), dict):
        costs = {
            replica: _numbered(own, number) if name in groups else own
            for name, own in simulate["groups"].items()
            for number, replica in enumerate(names_of(str(name), groups))
        }
        found["simulate"] = {**simulate, "groups": costs}
    return found


def _links(link: Any, groups: Counts) -> Iterable[Any]:
    ends = link.get("between") if isinstance(link, dict) else None
    if not isinstance(ends, list) or len(ends) != 2 or not {*map(str, ends)} & set(groups):
        return [link]
    here, there = (names_of(str(end), groups) for end in ends)
    pairs = combinations(here, 2) if here == there else product(here, there)
    return [{**link, "between": list(pair)} for pair in pairs]


def _numbered(costs: Any, number: int) -> Any:
    if isinstance(costs, dict) and isinstance(node := costs.get("node"), str):
        return {**costs, "node": node.replace("*", str(number))}
    return costs


def _in_lists(options: Any, instances: Counts) -> Any:
    if isinstance(options, dict):
        return {key: _in_lists(value, instances) for key, value in options.items()}
    if isinstance(options, list):
        return [
            each
            for value in options
            for each in (
                names_of(value, instances)
                if isinstance(value, str)
                else [_in_lists(value, instances)]
            )
        ]
    return options
