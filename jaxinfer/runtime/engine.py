"""From a checkpoint and options to an instance that can be run."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.config import EngineOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.runtime.converted import Shapes, restore
from jaxinfer.runtime.kv_cache import allocate
from jaxinfer.runtime.plan import Plan, as_state, make_plan, parameter_shapes
from jaxinfer.runtime.step import CompiledStep, Parameters
from jaxinfer.runtime.weights import Checkpoint, load_weights
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.page_pool import KVShards, PagePool, Shard

# What the user sees of a long start: a description, and how many parts are left.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Engine:
    """A loaded model on its devices, ready to step."""

    worker: Worker
    plan: Plan

    def new_kv(self) -> KVShards:
        """The page pool, all pages free and none cached."""
        pool = PagePool(self.plan.num_pages, self.plan.options.page_size)
        return KVShards([Shard(pool)], self.plan.options.enable_prefix_caching)

    def new_instance(self, kv: KVShards) -> Instance:
        """The scheduling side of the engine."""
        options = InstanceOptions(
            max_num_seqs=self.plan.options.max_num_seqs,
            max_num_batched_tokens=self.plan.options.max_num_batched_tokens,
            max_in_flight=2 if self.plan.options.launch_ahead else 1,
            launch_ahead=self.plan.options.launch_ahead,
        )
        return Instance("engine", kv, options)


def load_engine(checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Engine:
    """Load weights, allocate the KV pool and compile every step.

    Raises:
        JaxinferError: the options ask for more than the model or the device can give, or the
            checkpoint's tensors do not fit the architecture.
    """
    plan = make_plan(checkpoint.config, options)
    progress("loading weights", 1)
    parameters = load_parameters(checkpoint, plan)
    progress("loading weights", 0)
    _, pages, previous = plan.step_arguments
    kv = allocate(pages)
    previous_S = jax.device_put(np.zeros(previous.shape, previous.dtype), previous.sharding)
    step = CompiledStep(plan.graphdef, plan.step_arguments, plan.limits, options.strict_shapes)
    worker = Worker(step, parameters, kv, previous_S)
    for left in worker.prepare():
        progress("compiling steps", left)
    return Engine(worker, plan)


def load_parameters(checkpoint: Checkpoint, plan: Plan) -> Parameters:
    """The weights on their devices, in the plan's dtypes; padding is zero.

    Raises:
        JaxinferError: the tensors do not fit the architecture, or are damaged.
    """
    if checkpoint.converted is not None:
        _check_shapes(checkpoint, checkpoint.converted, plan)
        return as_state(restore(checkpoint.path, plan.parameters))
    architecture = ARCHITECTURES[checkpoint.config.architecture]

    def place(path: str, array: np.ndarray) -> jax.Array:
        to = plan.parameters[path]
        grown = np.pad(array, [(0, n - old) for n, old in zip(to.shape, array.shape, strict=True)])
        return jax.device_put(np.ascontiguousarray(grown).astype(to.dtype), to.sharding)

    loaded = load_weights(checkpoint, architecture.hf_weights(checkpoint.config), place)
    assert loaded.keys() == plan.parameters.keys(), loaded.keys() ^ plan.parameters.keys()
    return as_state(loaded)


def _check_shapes(checkpoint: Checkpoint, stored: Shapes, plan: Plan) -> None:
    """Refuse what restoring would pad or cut without a word."""
    wanted = {path: array.shape for path, array in plan.parameters.items()}
    if plan.config != checkpoint.config:
        wanted = parameter_shapes(checkpoint.config)
    for path in sorted(wanted.keys() | stored.keys()):
        if stored.get(path) != wanted.get(path):
            raise JaxinferError(
                f"{checkpoint.path}: parameter {path} has shape {stored.get(path)}, the "
                f"configuration wants {wanted.get(path)}; convert the model again"
            )
