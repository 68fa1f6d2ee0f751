"""Run files in a canonical form, independent of their groups' names."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.config.replicas import replicate_cluster
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError


def nameless(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a form that is equal for run files that differ only in the names of groups.

    Groups are numbered in the order in which instances use them. If a group's name also occurs
    elsewhere, where it may have a meaning, all groups keep their names. So do instances, because
    systems know them by name.
    """
    try:
        used = as_run_file(data).cluster().instances
        data = replicate_cluster(data)
    except JaxinferError:
        return data  # It is no such value; a later check reports that.
    if not isinstance(data.get("groups"), dict):
        return data
    places = (place for instance in used.values() for place in instance.places)
    used_by = ((at.group, *at.attention_groups, *filter(None, [at.ffn])) for at in places)
    names = dict.fromkeys(name for groups in used_by for name in groups)
    numbers = {name: f"#{number}" for number, name in enumerate(names)}
    found = dict(data)
    found["groups"] = {numbers[str(name)]: group for name, group in data["groups"].items()}
    found["instances"] = {name: _on(at, numbers) for name, at in data["instances"].items()}
    if "links" in data:
        found["links"] = [
            {**link, "between": sorted(numbers[str(end)] for end in link["between"])}
            for link in data["links"]
        ]
    simulate = data.get("simulate")
    if isinstance(simulate, dict) and isinstance(simulate.get("groups"), dict):
        costs = {numbers[str(name)]: each for name, each in simulate["groups"].items()}
        found["simulate"] = {**simulate, "groups": costs}
    return data if names.keys() & set(_words(found)) else found


def _on(place: Any, numbers: Mapping[str, str]) -> Any:
    """Return an instance, a stage or an attention group with its group's number."""
    if isinstance(place, str):
        return numbers[place]
    found = dict(place)
    if found.get("group") is not None:
        found["group"] = numbers[str(found["group"])]
    if found.get("ffn") is not None:
        found["ffn"] = numbers[str(found["ffn"])]
    for name in ("stages", "attention"):
        if isinstance(found.get(name), list | tuple):
            found[name] = [_on(each, numbers) for each in found[name]]
    return found


def _words(value: object) -> Iterator[str]:
    """Yield all keys and texts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _words(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _words(item)
