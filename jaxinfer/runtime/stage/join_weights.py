"""Queries', keys' and values' weights on devices, joined; see ``models.joined``."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.joined import join, with_joined


def abstract(
    parameters: Mapping[str, jax.ShapeDtypeStruct], modules: Sequence[str]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of parameters by path, with the weights of ``modules`` joined."""
    return with_joined(parameters, modules, _like)


def arrays(leaves: Mapping[str, jax.Array], modules: Sequence[str]) -> dict[str, jax.Array]:
    """Join arrays of weights in the same way, and delete the separate ones from devices."""
    return with_joined(leaves, modules, _join)


def _like(*three: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    like, where = jax.eval_shape(join, *three), three[0].sharding
    assert isinstance(where, NamedSharding)
    # Of the rows, where there are some, and of the KV heads.
    axes = (*where.spec, *[None] * len(like.shape))[: len(like.shape) - 2]
    sharding = NamedSharding(where.mesh, PartitionSpec(*axes, None, None))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def _join(*three: jax.Array) -> jax.Array:
    found = _program(_like(*three).sharding)(*three)
    for part in three:
        part.delete()
    return found


@cache
def _program(to: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(join, out_shardings=to)
