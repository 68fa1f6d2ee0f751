"""Applies layouts to a mesh: shards each axis of parameters, activations and KV.

A parameter's logical axes are the letters of its name's suffix: ``layers.0.attn.q_DNH`` has D, N
and H. Those of an activation are in ``layouts.ACTIVATIONS``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layout_checks import check_divides
from jaxinfer.models.layouts import (
    ACTIVATIONS,
    Layout,
    Places,
    letters_of,
    most_ways,
    named,
    table_in_use,
    table_of,
    ways,
)
from jaxinfer.models.layouts import Rule as Rule  # Files of rules import it from here.


def spec(letters: str, table: Places, axes: Sequence[str]) -> PartitionSpec:
    """Return the spec of an array with these logical axes on a mesh with these axes."""
    found = (named(table.get(letter, ()), axes) for letter in letters)
    return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in found))


def shard(path: str, shape: Sequence[int], mesh: Mesh, layout: Layout) -> NamedSharding:
    """Return a parameter's sharding by the first rule that matches; replicated if none does.

    Raises:
        JaxinferError: a rule puts two axes of the parameter on one axis of the mesh, or the devices
            do not divide the axis.
    """
    letters, table = letters_of(path), table_of(path, layout)
    placed = [axis for letter in letters for axis in named(table.get(letter, ()), mesh.axis_names)]
    for axis in placed:
        if placed.count(axis) > 1:
            raise JaxinferError(f"two axes of {path} lie on mesh axis {axis!r}")
    for letter, size in zip(letters, shape, strict=True):
        check_divides(letter, path, size, ways(table.get(letter, ()), mesh.shape))
    return NamedSharding(mesh, spec(letters, table, mesh.axis_names))


def for_use(path: str, weight: jax.Array, layout: Layout) -> jax.Array:
    """Return the weight as it is multiplied, gathered over the axes that the layout names."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    tables = table_of(path, layout), table_in_use(path, layout, axes)
    before, after = (spec(letters_of(path), each, axes) for each in tables)
    return weight if before == after else jax.lax.with_sharding_constraint(weight, after)


def place(layout: Layout, name: str, x: jax.Array) -> jax.Array:
    """Place an activation by the layout's table; if its name is missing, leave it unchanged."""
    mesh, table = jax.sharding.get_abstract_mesh(), layout.activations.get(name)
    if table is None or mesh.size <= 1:
        return x
    where = spec(ACTIVATIONS[name], table, mesh.axis_names)
    return jax.lax.with_sharding_constraint(x, where)


def pages_sharding(mesh: Mesh, layout: Layout) -> NamedSharding:
    """Shard keys [P, K, H, B], values [P, K, B, H] and scales [P, K] by heads."""
    return NamedSharding(mesh, spec("PK", layout.kv, mesh.axis_names))


def padded(config: ModelConfig, mesh: Mapping[str, int], layout: Layout) -> ModelConfig:
    """Pad KV groups and feed-forward columns so that the mesh divides them evenly.

    Padding has zero weights on both sides, so that it adds nothing to any sum.
    """
    groups = _up(config.num_key_value_heads, most_ways("NK", layout, mesh))
    queries = config.num_attention_heads // config.num_key_value_heads
    return replace(
        config,
        num_key_value_heads=groups,
        num_attention_heads=groups * queries,
        intermediate_size=_up(config.intermediate_size, most_ways("F", layout, mesh)),
    )


def _up(count: int, pieces: int) -> int:
    return math.ceil(count / pieces) * pieces
