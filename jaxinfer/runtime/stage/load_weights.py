"""Loads parameters onto devices from a checkpoint's tensors.

A tensor is sent to the device as stored in the file. It is transposed, padded, cast and sharded
there, by one program for all equal tensors. Small tensors are converted faster by numpy, since a
program takes 30 ms or more to compile.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.checkpoints.converted import Shapes, restore
from jaxinfer.checkpoints.open_tensors import (
    Checkpoint,
    check_tensors,
    read_scales,
    read_tensors,
)
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import WeightSpec
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.models.weights import as_it_is
from jaxinfer.runtime.stage.goal import ParameterGoal, goal_of, parameters_of
from jaxinfer.runtime.stage.random_weights import random_parameters
from jaxinfer.runtime.stage.stage_plan import StagePlan, parameter_shapes
from jaxinfer.runtime.stage.step import Parameters

T = TypeVar("T")
# Arrays of parameters by path and goal; stages on the same devices share them.
Loaded = dict[tuple[str, ParameterGoal], Sequence[jax.Array]]
# Parameters with at least this many bytes are converted on the device.
ON_DEVICE = 2**23
# Number of parameters whose tensors are read at once, each by a thread.
READERS = 2


def load_parameters(checkpoint: Checkpoint, plans: Sequence[StagePlan]) -> list[Parameters]:
    """Load the weights of several stages onto their devices, in the plans' dtypes.

    Padding is zero. The host holds the tensors of at most two parameters; those of a safetensors
    file are pages of the file, which the system may drop.

    Raises:
        JaxinferError: the tensors do not fit the architecture, or are damaged.
    """
    if plans[0].options.load_format == "dummy":
        return random_parameters(checkpoint.config, plans)
    if checkpoint.converted is not None:
        there: Loaded = {}
        for plan in plans:
            _restore(checkpoint, checkpoint.converted, plan, there)
        return parameters_of(plans, lambda plan, path, goal: there[path, goal])
    specs = ARCHITECTURES[checkpoint.config.architecture].hf_weights(checkpoint.config)
    check_tensors(checkpoint, specs)
    # Segments of one stage share a tied embedding.
    wanted = {
        (path, goal_of(plan, path)): spec
        for path, spec in specs.items()
        for plan in plans
        if path in plan.parameters
    }
    loaded = dict(zip(wanted, _load(checkpoint, wanted), strict=True))
    return parameters_of(plans, lambda plan, path, goal: loaded[path, goal])


def _load(
    checkpoint: Checkpoint, wanted: Mapping[tuple[str, ParameterGoal], WeightSpec]
) -> Iterator[Sequence[jax.Array]]:
    """Yield parameters in order, each once it is loaded."""
    program = cache(_program)
    jobs = (partial(_read, checkpoint, spec, goal) for (_, goal), spec in wanted.items())
    for (_, goal), spec, found in zip(wanted, wanted.values(), _ahead(jobs), strict=False):
        if isinstance(found, list):
            # Programs are launched only here, because several devices must see them in one order.
            make = program(spec.convert, isinstance(spec.names, str), goal)
            yield jax.block_until_ready(make(found))
        else:
            yield found


def _ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of jobs in order, while later ones already run."""
    under_way: deque[Future[T]] = deque()
    with ThreadPoolExecutor(READERS) as threads:
        for job in jobs:
            under_way.append(threads.submit(job))
            if len(under_way) == READERS:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _read(
    checkpoint: Checkpoint, spec: WeightSpec, goal: ParameterGoal
) -> tuple[jax.Array, ...] | list[jax.Array]:
    """Read a parameter's tensors: the finished arrays, or tensors that must still be converted."""
    tensors, to = read_tensors(checkpoint, spec, ON_DEVICE), goal.values
    has_scales = goal.scale is not None and checkpoint.config.stored_bits is not None
    scales = [read_scales(checkpoint, spec)] if has_scales else []
    is_done = (
        spec.convert is as_it_is and tensors[0].dtype == to.dtype and tensors[0].shape == to.shape
    )
    has_blocks = tensors[0].dtype == np.uint8
    if is_done or (not has_blocks and sum(tensor.nbytes for tensor in tensors) < ON_DEVICE):
        arrays = goal.made_of(spec.made_of(tensors, np.stack), np, *scales)
        found = [
            jax.device_put(np.ascontiguousarray(array), each.sharding, may_alias=False)
            for array, each in zip(arrays, goal.arrays, strict=True)
        ]
        return tuple(jax.block_until_ready(found))
    places = [_rows(to, tensor.shape) for tensor in (*tensors, *scales)]
    return jax.block_until_ready(jax.device_put([*tensors, *scales], places))


def _rows(to: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of an unconverted tensor: rows divided over devices, or replicated."""
    assert isinstance(to.sharding, NamedSharding)
    mesh = to.sharding.mesh
    divides = mesh.size > 1 and shape != () and shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names) if divides else PartitionSpec())


def _program(
    convert: Callable[[Any], Any], is_one: bool, goal: ParameterGoal
) -> Callable[[list[jax.Array]], tuple[jax.Array, ...]]:
    """Compile the program that makes a parameter, and its scales, from its tensors."""
    spec = WeightSpec("" if is_one else (), (), convert)

    def make(tensors: list[jax.Array]) -> tuple[jax.Array, ...]:
        weights, scales = (tensors[:1], tensors[1:]) if goal.scale else (tensors, [])
        weights = [_dequantised(x) if x.dtype == jnp.uint8 else x for x in weights]
        return goal.made_of(spec.made_of(weights, jnp.stack), jnp, *scales)

    return jax.jit(make, out_shardings=goal.shardings)


def _dequantised(blocks: jax.Array) -> jax.Array:
    """Return a float32 matrix [out, in] from blocks of Q8_0: a half that scales 32 int8."""
    scale = jax.lax.bitcast_convert_type(blocks[..., :2], jnp.float16)
    values = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8)
    x = values.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]
    return x.reshape(len(blocks), -1)


def _restore(checkpoint: Checkpoint, stored: Shapes, plan: StagePlan, there: Loaded) -> None:
    """Restore a converted checkpoint; refuse it if a parameter would be padded or cut.

    Args:
        there: parameters that other plans have restored; those of this plan are added.
    """
    wanted = parameter_shapes(checkpoint.config)
    for path in sorted(wanted.keys() | stored.keys()):
        if stored.get(path) != wanted.get(path):
            raise JaxinferError(
                f"{checkpoint.path}: parameter {path} has shape {stored.get(path)}, the "
                f"configuration wants {wanted.get(path)}; convert the model again"
            )
    paths = [path for path in wanted if path in plan.parameters]
    missing = [path for path in paths if (path, goal_of(plan, path)) not in there]
    for batch in _batches(plan, missing):
        goals = {path: goal_of(plan, path) for path in batch}
        arrays = restore(checkpoint.path, {path: goal.wide for path, goal in goals.items()})
        there |= {
            (path, goal): _program(as_it_is, True, goal)([arrays.pop(path)])
            if goal.scale
            else (arrays[path],)
            for path, goal in goals.items()
        }


def _batches(plan: StagePlan, paths: Sequence[str]) -> list[list[str]]:
    """Return paths to restore together: few that become 8 bits, which are wide, or all others."""
    wide = [path for path in paths if goal_of(plan, path).scale]
    rest = [path for path in paths if path not in wide]
    few = (wide[i : i + 16] for i in range(0, len(wide), 16))
    return [batch for batch in (rest, *few) if batch]
