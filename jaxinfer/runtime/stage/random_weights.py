"""Draws random weights on their devices, to measure speed without a checkpoint."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.runtime.stage.goal import ParameterGoal, parameters_of
from jaxinfer.runtime.stage.stage_plan import StagePlan, parameter_shapes
from jaxinfer.runtime.stage.step import Parameters

_SCALE = 0.02


def random_parameters(config: ModelConfig, plans: Sequence[StagePlan]) -> list[Parameters]:
    """Draw stages' parameters on their devices; the values depend on ``seed``, not on the plan.

    Matrices and biases are drawn from a normal distribution; scales of norms are 1, and padding
    is zero.

    Args:
        config: the model's configuration, without padding.
    """
    shapes = parameter_shapes(config)
    program = cache(_program)  # All layers are equal.
    # Segments of one stage share a tied embedding.
    drawn: dict[tuple[str, ParameterGoal], tuple[jax.Array, ...]] = {}

    def found(plan: StagePlan, path: str, goal: ParameterGoal) -> tuple[jax.Array, ...]:
        if (path, goal) not in drawn:
            is_scale = path.rpartition(".")[2].startswith("scale_")
            draw = program(shapes[path], goal, is_scale)
            drawn[path, goal] = draw(_key_data(plan.options.seed, path))
        return drawn[path, goal]

    return parameters_of(plans, found)


def _key_data(seed: int, path: str) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint32)


def _program(
    shape: tuple[int, ...], goal: ParameterGoal, is_scale: bool
) -> Callable[[np.ndarray], tuple[jax.Array, ...]]:
    """Compile a program that draws shards on devices; values are the same for any sharding."""

    def draw(key_data: jax.Array) -> tuple[jax.Array, ...]:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        x = jnp.ones(shape) if is_scale else _SCALE * jax.random.normal(key, shape)
        return goal.made_of(x, jnp)

    return jax.jit(draw, out_shardings=goal.shardings)
