"""Content of a run file, independent of its groups' names."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.config.replicas import replicate_cluster
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError


def nameless(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Equal of run files that differ in names of groups alone, numbered as instances use them.

    A group's name that stands elsewhere, too, may mean something there: then all names count.
    Instances keep theirs, by which systems know them.
    """
    try:
        used = as_run_file(data).cluster().instances
        data = replicate_cluster(data)
    except JaxinferError:
        return data  # It is none, which will be said.
    if not isinstance(data.get("groups"), dict):
        return data
    places = (place for instance in used.values() for place in instance.places)
    names = dict.fromkeys(name for at in places for name in (at.group, *at.attention_groups))
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
    """An instance, a stage or an attention group, by its group's number."""
    if isinstance(place, str):
        return numbers[place]
    found = dict(place)
    if found.get("group") is not None:
        found["group"] = numbers[str(found["group"])]
    for name in ("stages", "attention"):
        if isinstance(found.get(name), list | tuple):
            found[name] = [_on(each, numbers) for each in found[name]]
    return found


def _words(value: object) -> Iterator[str]:
    """Keys and texts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _words(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _words(item)
