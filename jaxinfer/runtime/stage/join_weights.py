"""Joins the weights of queries, keys and values on devices; see ``models.joined``."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.joined import join, with_joined


def abstract(
    parameters: Mapping[str, jax.ShapeDtypeStruct], modules: Sequence[str]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of parameters by path, with the weights of ``modules`` joined."""
    return with_joined(parameters, modules, _like)


def arrays(
    stages: Sequence[Mapping[str, jax.Array]], modules: Sequence[Sequence[str]]
) -> list[dict[str, jax.Array]]:
    """Join each stage's weights in the same way; stages with the same weights share one array.

    Separate weights are deleted from their devices, except those that a stage does not join.

    Args:
        modules: modules to join, by stage.
    """
    whole: Any = object()
    kept = {
        id(array)
        for leaves, names in zip(stages, modules, strict=True)
        for array in with_joined(leaves, names, lambda *three: whole).values()
    }
    # Weights are identified by ``id``; ``stages`` keeps them alive.
    joined: dict[tuple[int, ...], jax.Array] = {}

    def join_once(*three: jax.Array) -> jax.Array:
        key = tuple(map(id, three))
        if key not in joined:
            joined[key] = _program(_like(*three).sharding)(*three)
            for part in three:
                if id(part) not in kept:
                    part.delete()
        return joined[key]

    both = zip(stages, modules, strict=True)
    return [with_joined(leaves, names, join_once) for leaves, names in both]


def _like(*three: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    like, where = jax.eval_shape(join, *three), three[0].sharding
    assert isinstance(where, NamedSharding)
    # Axes of the rows, if there are any, and of the KV heads.
    axes = (*where.spec, *[None] * len(like.shape))[: len(like.shape) - 2]
    sharding = NamedSharding(where.mesh, PartitionSpec(*axes, None, None))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


@cache
def _program(to: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(join, out_shardings=to)
