"""The form of a parameter on its devices: padded, cast, or in 8 bits with scales."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models.eight_bits import is_scale, own_scale, quantise, scale_path
from jaxinfer.runtime.stage import join_weights
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import Parameters


class ParameterGoal(NamedTuple):
    """The shape, dtype and sharding that a parameter, and its scales if any, will have.

    Attributes:
        computed: dtype in which weights of 8 bits are multiplied; for others, their own dtype.
    """

    values: jax.ShapeDtypeStruct
    scale: jax.ShapeDtypeStruct | None
    computed: jnp.dtype

    @property
    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """The parameter's array, followed by its scales if it has any."""
        return [self.values] if self.scale is None else [self.values, self.scale]

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings of ``arrays``."""
        return tuple(each.sharding for each in self.arrays)

    @property
    def wide(self) -> jax.ShapeDtypeStruct:
        """The parameter before conversion to 8 bits."""
        to = self.values
        return jax.ShapeDtypeStruct(to.shape, self.computed, sharding=to.sharding)

    def made_of(self, x: Any, xp: Any, scales: Any = None) -> tuple[Any, ...]:
        """Convert a parameter's values with ``xp``, numpy or ``jax.numpy``, without placing them.

        Padding is filled with zeros.

        Args:
            scales: scales of values that already have 8 bits: one per output channel, or one for
                all.
        """
        grown = _padded(x, self.values.shape, xp)
        if self.scale is None:
            return (grown.astype(self.values.dtype),)
        if scales is not None:
            outputs = x.shape[x.ndim - len(self.scale.shape) :]
            each = xp.broadcast_to(scales.astype(xp.float32).reshape(-1), math.prod(outputs))
            return grown, _padded(each.reshape(outputs), self.scale.shape, xp)
        return quantise(grown, len(self.scale.shape), self.values.dtype, xp)


def _padded(x: Any, shape: tuple[int, ...], xp: Any) -> Any:
    more = [(0, n - old) for n, old in zip(shape, x.shape, strict=True)]
    return xp.pad(x, more) if x.shape != shape else x


def goal_of(plan: StagePlan, path: str) -> ParameterGoal:
    """Return the goal of a parameter that is not a scale."""
    scale = own_scale(path, plan.config)
    to = plan.parameters[path]
    return ParameterGoal(
        to, plan.parameters[scale] if scale else None, plan.dtype if scale else to.dtype
    )


# Makes the arrays of a parameter, from a stage's plan, its path and its goal.
Find = Callable[[StagePlan, str, ParameterGoal], Sequence[jax.Array]]


def parameters_of(plans: Sequence[StagePlan], found: Find) -> list[Parameters]:
    """Return the parameters of each stage, joined if the stage's plan says so."""
    stages = [_leaves(plan, found) for plan in plans]
    joined = join_weights.arrays(stages, [plan.joined for plan in plans])
    return [plan.state(leaves) for plan, leaves in zip(plans, joined, strict=True)]


def _leaves(plan: StagePlan, found: Find) -> dict[str, jax.Array]:
    leaves: dict[str, jax.Array] = {}
    for path in plan.parameters:
        if not is_scale(path):
            paths = (path, scale_path(path) or "")
            leaves |= dict(zip(paths, found(plan, path, goal_of(plan, path)), strict=False))
    assert leaves.keys() == plan.parameters.keys(), leaves.keys() ^ plan.parameters.keys()
    return leaves
