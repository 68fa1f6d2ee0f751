"""From a checkpoint's tensors to parameters on devices.

A tensor goes to the device as it lies in the file, and is transposed, padded, cast and sharded
there, by one program for all tensors alike. Small ones are faster by numpy, since a program takes
30 ms and more to compile.
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
from jaxinfer.checkpoints.open_tensors import Checkpoint, check_tensors, read_tensors
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import WeightSpec
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.models.weights import as_it_is
from jaxinfer.runtime.stage.random_weights import random_parameters
from jaxinfer.runtime.stage.stage_plan import StagePlan, parameter_shapes
from jaxinfer.runtime.stage.step import Parameters

T = TypeVar("T")
# Bytes of a parameter's tensors from which the device has them to convert.
ON_DEVICE = 2**23
# Parameters whose tensors are read at once, each by a thread.
READERS = 2

# What a parameter is to be: shape, dtype and sharding.
Wanted = jax.ShapeDtypeStruct


def load_parameters(checkpoint: Checkpoint, plans: Sequence[StagePlan]) -> list[Parameters]:
    """The weights of several stages on their devices, in the plans' dtypes; padding is zero.

    The host holds the tensors of two parameters at most; of a file in safetensors, they are pages
    of the file, which the system may drop.

    Raises:
        JaxinferError: the tensors do not fit the architecture, or are damaged.
    """
    if plans[0].options.load_format == "dummy":
        return random_parameters(checkpoint.config, plans)
    if checkpoint.converted is not None:
        return [_restore(checkpoint, checkpoint.converted, plan) for plan in plans]
    specs = ARCHITECTURES[checkpoint.config.architecture].hf_weights(checkpoint.config)
    check_tensors(checkpoint, specs)
    # Segments of one stage share a tied embedding.
    wanted = {
        (path, plan.parameters[path]): spec
        for path, spec in specs.items()
        for plan in plans
        if path in plan.parameters
    }
    loaded = dict(zip(wanted, _load(checkpoint, wanted), strict=True))
    states = []
    for plan in plans:
        assert plan.parameters.keys() <= specs.keys(), plan.parameters.keys() - specs.keys()
        leaves = {path: loaded[path, to] for path, to in plan.parameters.items()}
        states.append(plan.state(leaves))
    return states


def _load(
    checkpoint: Checkpoint, wanted: Mapping[tuple[str, Wanted], WeightSpec]
) -> Iterator[jax.Array]:
    """Yield parameters in order, each once it is there."""
    program = cache(_program)
    jobs = (partial(_read, checkpoint, spec, to) for (_, to), spec in wanted.items())
    for (_, to), spec, found in zip(wanted, wanted.values(), _ahead(jobs), strict=False):
        if isinstance(found, list):
            # Programs are launched here alone: several devices must see them in one order.
            convert = program(spec.convert, isinstance(spec.names, str), to)
            yield convert(found).block_until_ready()
        else:
            yield found


def _ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield what jobs return, in their order, some of them being under way at once."""
    under_way: deque[Future[T]] = deque()
    with ThreadPoolExecutor(READERS) as threads:
        for job in jobs:
            under_way.append(threads.submit(job))
            if len(under_way) == READERS:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _read(checkpoint: Checkpoint, spec: WeightSpec, to: Wanted) -> jax.Array | list[jax.Array]:
    """Read a parameter's tensors: one that is done, or those that are yet to be converted."""
    tensors = read_tensors(checkpoint, spec)
    is_done = (
        spec.convert is as_it_is and tensors[0].dtype == to.dtype and tensors[0].shape == to.shape
    )
    if is_done or sum(tensor.nbytes for tensor in tensors) < ON_DEVICE:
        array = _on_host(spec.made_of(tensors, np.stack), to)
        return jax.device_put(array, to.sharding, may_alias=False).block_until_ready()
    places = [_rows(to, tensor.shape) for tensor in tensors]
    return jax.block_until_ready(jax.device_put(tensors, places))


def _on_host(array: np.ndarray, to: Wanted) -> np.ndarray:
    more = [(0, n - old) for n, old in zip(to.shape, array.shape, strict=True)]
    grown = np.pad(array, more) if array.shape != to.shape else array
    return np.ascontiguousarray(grown).astype(to.dtype, copy=False)


def _rows(to: Wanted, shape: tuple[int, ...]) -> NamedSharding:
    """Where a tensor lies until it is converted: a share of the rows on each device, or whole."""
    assert isinstance(to.sharding, NamedSharding)
    mesh = to.sharding.mesh
    divides = mesh.size > 1 and shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names) if divides else PartitionSpec())


def _program(convert: Callable[[Any], Any], is_one: bool, to: Wanted) -> Callable[..., jax.Array]:
    """The program that makes a parameter of its tensors."""
    spec = WeightSpec("" if is_one else (), (), convert)

    def make(tensors: list[jax.Array]) -> jax.Array:
        x = spec.made_of(tensors, jnp.stack)
        grown = jnp.pad(x, [(0, n - old) for n, old in zip(to.shape, x.shape, strict=True)])
        return grown.astype(to.dtype)

    return jax.jit(make, out_shardings=to.sharding)


def _restore(checkpoint: Checkpoint, stored: Shapes, plan: StagePlan) -> Parameters:
    """Restore a converted checkpoint; refuse it if a parameter would silently be padded or cut."""
    wanted = parameter_shapes(checkpoint.config)
    for path in sorted(wanted.keys() | stored.keys()):
        if stored.get(path) != wanted.get(path):
            raise JaxinferError(
                f"{checkpoint.path}: parameter {path} has shape {stored.get(path)}, the "
                f"configuration wants {wanted.get(path)}; convert the model again"
            )
    return plan.state(restore(checkpoint.path, plan.parameters))
