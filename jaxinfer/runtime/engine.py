"""From a checkpoint and options to an instance that can be run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import EngineOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.models.sharding import (
    HEADS_AXIS,
    RULES,
    Rule,
    load_rules,
    padded,
    pages_sharding,
    shard,
)
from jaxinfer.runtime.checkpoint import Checkpoint, load_weights
from jaxinfer.runtime.devices import configure_jax, take_devices
from jaxinfer.runtime.kv_cache import allocate_pages, pool_size
from jaxinfer.runtime.step import CompiledStep, Parameters
from jaxinfer.runtime.step_inputs import StepLimits
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.page_pool import KVShards, PagePool, Shard

# What the user sees of a long start: a description, and how many parts are left.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Engine:
    """A loaded model on one mesh of devices, ready to step.

    Attributes:
        num_pages: size of the KV pool, the padding page included.
        max_model_len: prompt and output tokens of one request at most.
    """

    worker: Worker
    options: EngineOptions
    devices: list[jax.Device]
    dtype: str
    num_pages: int
    max_model_len: int

    def new_kv(self) -> KVShards:
        """The page pool, all pages free and none cached."""
        pool = PagePool(self.num_pages, self.options.page_size)
        return KVShards([Shard(pool)], self.options.enable_prefix_caching)

    def new_instance(self, kv: KVShards) -> Instance:
        """The scheduling side of the engine."""
        options = InstanceOptions(
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            max_in_flight=2 if self.options.launch_ahead else 1,
            launch_ahead=self.options.launch_ahead,
        )
        return Instance("engine", kv, options)


def load_engine(checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Engine:
    """Load weights, allocate the KV pool and compile every step.

    Raises:
        JaxinferError: the options ask for more than the model or the device can give, or the
            checkpoint's tensors do not fit the architecture.
    """
    configure_jax()
    max_model_len = _max_model_len(checkpoint.config, options)
    devices = take_devices(options.tensor_parallel_size)
    mesh = Mesh(np.array(devices), (HEADS_AXIS,))
    config = padded(checkpoint.config, len(devices))
    dtype = _dtype(options, devices[0])

    rules = load_rules(options.sharding)

    progress("loading weights", 1)
    graphdef, parameters = load_parameters(checkpoint, dtype, mesh, rules)
    progress("loading weights", 0)

    limits = StepLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_pages=-(-max_model_len // options.page_size),
        page_size=options.page_size,
    )
    num_pages = options.num_pages or pool_size(
        config, options.page_size, dtype, devices, options.memory_fraction,
        most_useful=limits.max_pages * options.max_num_seqs + 1,
    )  # fmt: skip
    kv = allocate_pages(config, num_pages, options.page_size, dtype, pages_sharding(mesh))
    whole = NamedSharding(mesh, PartitionSpec())
    previous_S = jax.device_put(np.zeros(options.max_num_seqs, np.int32), whole)
    step = CompiledStep(graphdef, (parameters, kv, previous_S), limits, options.strict_shapes)
    worker = Worker(step, parameters, kv, previous_S)
    for left in worker.prepare():
        progress("compiling steps", left)
    return Engine(worker, options, devices, dtype.name, num_pages, max_model_len)


def load_parameters(
    checkpoint: Checkpoint, dtype: jnp.dtype, mesh: Mesh, rules: Sequence[Rule] = RULES
) -> tuple[nnx.GraphDef[Any], Parameters]:
    """A model's structure, and its parameters on the mesh: matrices in ``dtype``.

    Vectors (the scales of norms) stay float32: they are small, and norms work in float32.

    Raises:
        JaxinferError: the tensors do not fit the architecture, or the rules the parameters.
    """
    architecture = ARCHITECTURES[checkpoint.config.architecture]
    config = padded(checkpoint.config, mesh.size)
    abstract = nnx.eval_shape(lambda: architecture.model(config, nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = nnx.to_flat_state(state)
    parameters = {".".join(map(str, path)): parameter for path, parameter in flat}

    def place(path: str, array: np.ndarray) -> jax.Array:
        shape = parameters[path].get_value().shape
        sharding = shard(path, shape, mesh, rules)
        grown = np.pad(array, [(0, n - old) for n, old in zip(shape, array.shape, strict=True)])
        kept = np.float32 if array.ndim == 1 else dtype
        return jax.device_put(np.ascontiguousarray(grown).astype(kept), sharding)

    loaded = load_weights(checkpoint, architecture.hf_weights(checkpoint.config), place)
    for path, parameter in parameters.items():
        parameter.set_value(loaded.pop(path))
    assert not loaded, f"weights without a parameter: {sorted(loaded)}"
    return graphdef, nnx.from_flat_state(flat)


def _max_model_len(config: ModelConfig, options: EngineOptions) -> int:
    longest = config.max_position_embeddings
    if options.max_model_len and options.max_model_len > longest:
        raise JaxinferError(
            f"max_model_len is {options.max_model_len}, the model was made for {longest}"
        )
    return options.max_model_len or longest


def _dtype(options: EngineOptions, device: jax.Device) -> jnp.dtype:
    automatic = "float32" if device.platform == "cpu" else "bfloat16"
    return jnp.dtype(automatic if options.dtype == "auto" else options.dtype)
