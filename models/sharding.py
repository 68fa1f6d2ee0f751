"""Layouts on a mesh: which axis of a parameter, an activation or KV lies on which of its axes.

A parameter's logical axes are the letters of its name's suffix: ``layers.0.attn.q_DNH`` has D, N
and H. Those of an activation are in ``layouts.ACTIVATIONS``.
"""

import math
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.files.shipped import data_path, why_not
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layout_checks import check_divides, check_tables
from jaxinfer.models.layouts import (
    ACTIVATIONS,
    LAYOUTS,
    Layout,
    Places,
    most_ways,
    named,
    ways,
)
from jaxinfer.options.validation import did_you_mean

# The axis of a mesh whose axes nobody has named.
DEFAULT_AXIS = "tp"


def load_layout(name: str) -> Layout:
    """Get a layout by its name, or by a Python file.

    The file defines LAYOUT, or RULES alone, which are the parameters' and leave all else as
    ``megatron`` has it.

    Raises:
        JaxinferError: there is none of that name; the file cannot be run, or defines none.
    """
    if not name.endswith(".py"):
        if name not in LAYOUTS:
            raise JaxinferError(f"layout {name}: {did_you_mean(name, LAYOUTS)} (files end in .py)")
        return LAYOUTS[name]
    try:
        found = runpy.run_path(str(data_path(name)))
    except OSError as error:
        raise JaxinferError(f"layout {name}: {why_not(name, error)}") from None
    except FAILURES as error:
        raise JaxinferError(f"layout {name}: {raised(error)}") from error
    try:
        return _defined(found)
    except JaxinferError as error:
        raise JaxinferError(f"layout {name}: {error}") from None


def _defined(found: Mapping[str, object]) -> Layout:
    if ("LAYOUT" in found) + ("RULES" in found) != 1:
        raise JaxinferError("must define either LAYOUT or RULES")
    layout = found.get("LAYOUT")
    if "RULES" in found:
        rules = found["RULES"]
        if not isinstance(rules, tuple | list):
            raise JaxinferError("RULES must be a tuple of jaxinfer.models.layouts.Rule")
        layout = replace(LAYOUTS["megatron"], parameters=tuple(rules))
    if not isinstance(layout, Layout):
        raise JaxinferError("LAYOUT must be a jaxinfer.models.layouts.Layout")
    check_tables(layout)
    return layout


def spec(letters: str, table: Places, axes: Sequence[str]) -> PartitionSpec:
    """How an array with these logical axes lies on a mesh with these axes."""
    found = (named(table.get(letter, ()), axes) for letter in letters)
    return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in found))


def shard(path: str, shape: Sequence[int], mesh: Mesh, layout: Layout) -> NamedSharding:
    """Shard by the first rule that matches; none leaves the parameter whole on every device.

    Raises:
        JaxinferError: a rule puts two axes of the parameter on one of the mesh, or the devices do
            not divide the axis.
    """
    letters, table = _letters(path), _table(path, layout)
    placed = [axis for letter in letters for axis in named(table.get(letter, ()), mesh.axis_names)]
    for axis in placed:
        if placed.count(axis) > 1:
            raise JaxinferError(f"two axes of {path} lie on mesh axis {axis!r}")
    for letter, size in zip(letters, shape, strict=True):
        check_divides(letter, path, size, ways(table.get(letter, ()), mesh.shape))
    return NamedSharding(mesh, spec(letters, table, mesh.axis_names))


def for_use(path: str, weight: jax.Array, layout: Layout) -> jax.Array:
    """The weight as it is multiplied: whole over the axes that the layout gathers it over."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    gathered, table = named(layout.gathered, axes), _table(path, layout)
    left = {
        letter: tuple(axis for axis in named(place, axes) if axis not in gathered)
        for letter, place in table.items()
    }
    before, after = (spec(_letters(path), each, axes) for each in (table, left))
    return weight if before == after else jax.lax.with_sharding_constraint(weight, after)


def place(layout: Layout, name: str, x: jax.Array) -> jax.Array:
    """The activation of that name where the layout's table puts it; as it is if it names it not."""
    mesh, table = jax.sharding.get_abstract_mesh(), layout.activations.get(name)
    if table is None or mesh.size <= 1:
        return x
    where = spec(ACTIVATIONS[name], table, mesh.axis_names)
    return jax.lax.with_sharding_constraint(x, where)


def pages_sharding(mesh: Mesh, layout: Layout) -> NamedSharding:
    """Shard keys [P, K, H, B], values [P, K, B, H] and scales [P, K] by heads."""
    return NamedSharding(mesh, spec("PK", layout.kv, mesh.axis_names))


def padded(config: ModelConfig, mesh: Mapping[str, int], layout: Layout) -> ModelConfig:
    """The config with KV groups and feed-forward columns that divide by what they are cut into.

    The added ones have zero weights on both sides, so that they add nothing to any sum.
    """
    groups = _up(config.num_key_value_heads, most_ways("NK", layout, mesh))
    queries = config.num_attention_heads // config.num_key_value_heads
    return replace(
        config,
        num_key_value_heads=groups,
        num_attention_heads=groups * queries,
        intermediate_size=_up(config.intermediate_size, most_ways("F", layout, mesh)),
    )


def _table(path: str, layout: Layout) -> Places:
    return next((rule.axes for rule in layout.parameters if fnmatchcase(path, rule.pattern)), {})


def _letters(path: str) -> str:
    return path.rpartition("_")[2]


def _up(count: int, pieces: int) -> int:
    return math.ceil(count / pieces) * pieces
