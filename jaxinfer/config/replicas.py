"""Replicas in run files: an entry x with ``replicas: 3`` becomes x0, x1 and x2."""

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

from jaxinfer.options.validation import OptionError

# Refusing more replicas of one name, if they have no place, would take minutes.
MOST = 10_000
# Number of replicas, by name.
Counts = Mapping[str, int]


def replicate(section: str, entries: Mapping[Any, Any]) -> tuple[dict[str, Any], Counts]:
    """Return the entries, each replaced by its replicas, and the numbers of replicas.

    Raises:
        OptionError: a number of replicas is wrong, or a name is already taken.
    """
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for key, entry in entries.items():
        name, made = str(key), {str(key): entry}
        if isinstance(entry, dict) and "replicas" in entry:
            count = counts[name] = entry["replicas"]
            if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
                raise OptionError(
                    f"{section}.{name}.replicas is {count!r}, must be an integer from 1 to {MOST}"
                )
            one = {option: value for option, value in entry.items() if option != "replicas"}
            made = {replica: dict(one) for replica in names_of(name, counts)}
        for replica in made:
            if replica in found:
                raise OptionError(f"{section}.{name}: there are two {replica}, by replicas")
        found |= made
    return found, counts


def names_of(name: str, counts: Counts) -> list[str]:
    """Return the names of the replicas of ``name``, or ``name`` itself if it has none."""
    return [f"{name}{number}" for number in range(counts[name])] if name in counts else [name]


def replicate_cluster(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file in which replicas are separate entries, and references name them.

    If an instance and its group both have replicas, instance i runs on group i; if groups share
    devices, group i shares those of group i. Costs in ``simulate.groups`` apply to each replica,
    whose number replaces ``*`` in ``node``. A link connects all replicas of its ends. In ``system``
    and in ``simulate.shared_experts``, in lists and as a key of mappings, the name of a replicated
    instance or group stands for all replicas.

    Raises:
        OptionError: an instance and its group have different numbers of replicas, or a mapping has
            a replica twice.
    """
    found = dict(data)
    groups: Counts = {}
    instances: Counts = {}
    if isinstance(data.get("groups"), dict):
        found["groups"], groups = replicate("groups", data["groups"])
        for name, count in groups.items():
            for number, replica in enumerate(names_of(name, groups)):
                own = found["groups"][replica]
                if (lender := str(own.get("shares"))) in groups:
                    _as_many(f"groups.{name}", count, lender, groups)
                    own["shares"] = names_of(lender, groups)[number]
    if isinstance(given := data.get("instances"), dict):
        found["instances"], instances = replicate("instances", given)
        for name, count in instances.items():
            for number, replica in enumerate(names_of(name, instances)):
                where = f"instances.{name}"
                stood = _standing(where, found["instances"][replica], groups, count, number)
                found["instances"][replica] = stood
        if isinstance(costs := data.get("simulate"), dict) and "shared_experts" in costs:
            sharing = _of_option(costs["shared_experts"], instances, "simulate.shared_experts")
            found["simulate"] = {**costs, "shared_experts": sharing}
        if "system" in data:
            # If a group and an instance have the same name, the instance is meant.
            own = {name: many for name, many in groups.items() if name not in found["instances"]}
            found["system"] = _of_system(data["system"], {**own, **instances})
    if groups:
        found |= _of_groups(found, groups)
    return found


def _standing(
    where: str, instance: Mapping[str, Any], groups: Counts, count: int, number: int
) -> dict[str, Any]:
    """Return an instance's replica, on the groups with its number."""

    def place(at: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(spread := at.get("attention"), list):
            at = {**at, "attention": [place(_as_mapping(each)) for each in spread]}
        found = dict(at)
        for key in ("group", "ffn"):
            if (group := str(at.get(key))) in groups:
                _as_many(where, count, group, groups)
                found[key] = names_of(group, groups)[number]
        return found

    found = place(instance)
    if isinstance(stages := instance.get("stages"), list):
        found["stages"] = [place(at) if isinstance(at, dict) else at for at in stages]
    return found


def _as_many(where: str, count: int, group: str, groups: Counts) -> None:
    if groups[group] != count:
        raise OptionError(
            f"{where}.replicas is {count}, its group {group} has {groups[group]}: give both as many"
        )


def _as_mapping(attention: Any) -> Mapping[str, Any]:
    """Return an attention group, which may be given by its name only, as a mapping."""
    return attention if isinstance(attention, dict) else {"group": attention}


def _of_groups(data: Mapping[str, Any], groups: Counts) -> dict[str, Any]:
    """Return the sections ``links`` and ``simulate`` with groups' replicas."""
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


def _of_system(options: Any, names: Counts, where: str = "system") -> Any:
    """Return a system's options, or a part of them whose keys are not names."""
    if not isinstance(options, dict):
        return options
    return {
        option: _of_option(value, names, f"{where}.{option}") for option, value in options.items()
    }


def _of_option(value: Any, names: Counts, where: str) -> Any:
    """Return an option with replicas in place of their name, as keys or in a list."""
    if isinstance(value, list):
        return [part for each in value for part in _listed(each, names, where)]
    if not isinstance(value, dict):
        return value
    found: dict[Any, Any] = {}
    for key, own in value.items():
        for name in names_of(str(key), names) if str(key) in names else [key]:
            if name in found:
                raise OptionError(f"{where}.{key}: there are two {name}, by replicas")
            found[name] = _of_option(own, names, f"{where}.{name}")
    return found


def _listed(value: Any, names: Counts, where: str) -> list[Any]:
    if isinstance(value, dict):
        return [_of_system(value, names, where)]
    return names_of(value, names) if isinstance(value, str) else [_of_option(value, names, where)]
