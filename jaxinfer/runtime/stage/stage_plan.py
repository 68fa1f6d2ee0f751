"""Placement of a model on its devices: everything known before anything is loaded."""

import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config.engine import GPU_SHARE, EngineOptions
from jaxinfer.config.stages import head_pages
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.joined import join_modules, joinable
from jaxinfer.models.layout_checks import check_rules
from jaxinfer.models.layouts import DEFAULT_AXIS, ways
from jaxinfer.models.sharding import shard
from jaxinfer.models.stage import Layers, Part, make_model
from jaxinfer.pallas_kernels.choice import choose_kernels
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.stage import join_weights
from jaxinfer.runtime.stage.kv_cache import abstract_pages, available_memory, memory_of
from jaxinfer.runtime.stage.lay_out import DTYPES_OF_8_BITS, dtype_of, lay_out, with_bits
from jaxinfer.runtime.stage.taken import Wanted, new_bytes
from jaxinfer.steps.shapes import StepLimits


class Device(Protocol):
    """A device as any process can describe it; within its own process, JAX's device."""

    platform: str
    id: int
    device_kind: str


@dataclass(frozen=True)
class DeviceFacts:
    """Description of a device in another process."""

    platform: str
    id: int
    device_kind: str


@dataclass(frozen=True)
class AttentionPlan:
    """A device outside a stage's own that holds some of its KV heads and attends to them.

    Attributes:
        device: None if another process has the device and its kernels are not known here.
        num_pages: number of pages that its group has for the stage, counted as if all the stage's
            KV heads lay there.
        kernels: attention kernels that the device uses.
        kv_bytes: bytes of the device's pool.
        repeats: how often the device repeats its attention, to emulate a slower one.
        devices: number of devices in the group, which have equal pools.
        number: index of this device.
    """

    group: str
    device: jax.Device | DeviceFacts | None
    num_pages: int
    kernels: str = ""
    kv_bytes: int = 0
    repeats: int = 1
    devices: int = 1
    number: int = 0

    def pool_pages(self, heads: int) -> int:
        """Return the number of pages of the device's pool, each with one of ``heads`` KV heads."""
        return head_pages(self.group, self.num_pages, heads, self.devices)


@dataclass(frozen=True)
class StageFacts:
    """Facts about one stage of an instance, which may be passed to any process.

    Attributes:
        config: config of the whole model, padded to sizes that the devices divide.
        num_kv_heads: number of KV heads of the model, without padding.
        layers: layers of this stage.
        dtype: dtype of weights.
        kv_dtype: dtype of KV entries.
        num_pages: size of the KV pool, including the padding page; if KV heads may be on other
            devices, counted as if all of them lay here.
        max_model_len: largest number of prompt and output tokens of one request.
        weight_bytes: bytes of weights per memory: that of one device, or the host's for CPU
            devices.
        kv_bytes: bytes of KV per memory.
        memory_bytes: free bytes of that memory when the plan was made; None if the device does not
            report them.
        axes: sizes of the mesh's axes.
        attention: other devices where KV heads may lie.
        ffn_group: group that has the FFN of its layers, if another one has it.
        ffn: plan of that FFN; it has no KV. None in the stage's process if another has the group.
    """

    options: EngineOptions
    config: ModelConfig
    num_kv_heads: int
    layers: Layers
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    limits: StepLimits
    num_pages: int
    max_model_len: int
    weight_bytes: int
    kv_bytes: int
    memory_bytes: int | None
    devices: Sequence[Device]
    axes: Mapping[str, int] = field(kw_only=True)
    attention: Sequence[AttentionPlan] = field(default=(), kw_only=True)
    ffn_group: str | None = field(default=None, kw_only=True)
    ffn: "StageFacts | None" = field(default=None, kw_only=True)

    @property
    def lenders(self) -> list[str]:
        """Names of the groups of the parts that ``with_lent`` takes, by number."""
        return [*(place.group for place in self.attention), *filter(None, [self.ffn_group])]

    def with_lent(self, number: int, plan: "AttentionPlan | StageFacts") -> "StageFacts":
        """Return the facts with the plan of one part that another process computes."""
        if isinstance(plan, StageFacts):
            return replace(self, ffn=plan)
        places = [*self.attention[:number], plan, *self.attention[number + 1 :]]
        return replace(self, attention=places)

    @property
    def kv_ways(self) -> int:
        """Number of pieces into which the stage's devices cut KV heads."""
        return ways(self.config.layout.kv.get("K", ()), self.axes)

    @property
    def pool_pages(self) -> list[int]:
        """Sizes of the stage's pools, in pages of one head if heads may be on several devices."""
        if not self.attention:
            return [self.num_pages]
        heads = self.num_kv_heads
        return [
            (self.num_pages - 1) * heads + 1,
            *(place.pool_pages(heads) for place in self.attention),
        ]


@dataclass(frozen=True)
class StagePlan(StageFacts):
    """A stage's facts with shapes and shardings, for the process that has the devices.

    Attributes:
        devices: devices in the mesh's order.
        parameters: shapes, dtypes and shardings, by path in the whole model.
        joined: modules whose query, key and value weights are one array; see ``models.joined``.
    """

    devices: Sequence[jax.Device]
    mesh: Mesh
    graphdef: nnx.GraphDef[Any]
    parameters: Mapping[str, jax.ShapeDtypeStruct]
    joined: Sequence[str] = field(default=(), kw_only=True)
    ffn: "StagePlan | None" = field(default=None, kw_only=True)

    @property
    def facts(self) -> StageFacts:
        """Those facts of the plan that another process may know."""
        known = {each.name: getattr(self, each.name) for each in fields(StageFacts)}
        devices = [DeviceFacts(d.platform, d.id, d.device_kind) for d in self.devices]
        return StageFacts(**known | {"devices": devices})

    @property
    def whole(self) -> NamedSharding:
        """Sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def step_arguments(self) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
        """The arrays for which a step is compiled: parameters, KV pages, previous tokens."""
        previous_S = jax.ShapeDtypeStruct(
            (self.options.max_num_seqs,), jnp.int32, sharding=self.whole
        )
        return self.abstract_state, self.pages, previous_S

    @property
    def abstract_state(self) -> nnx.State[Any, Any]:
        """The parameters that the step takes, without their values."""
        return self.state(join_weights.abstract(self.parameters, self.joined))

    @property
    def pages(self) -> list[KVPages]:
        """Shapes of the stage's KV pages."""
        return abstract_pages(
            self.config,
            self.layers,
            self.num_pages,
            self.limits.page_size,
            self.kv_dtype,
            self.mesh,
        )

    def state(self, leaves: Mapping[str, Any]) -> nnx.State[Any, Any]:
        """Return parameters, given by path in the whole model, in the form that the step takes."""
        return as_state({self.layers.name(path): leaf for path, leaf in leaves.items()})


def make_plan(
    config: ModelConfig,
    options: EngineOptions,
    devices: Sequence[jax.Device],
    layers: Layers,
    taken: int,
    is_spread: bool = False,
    axes: Mapping[str, int] | None = None,
    there: Set[Wanted] = frozenset(),
    part: Part = "all",
) -> StagePlan:
    """Choose shardings, buckets and the size of the KV pool.

    Args:
        devices: devices of the stage.
        layers: layers of the stage.
        taken: bytes of their memory that other plans will take.
        is_spread: whether KV heads may be on other devices; those that lie here are then on the
            first device.
        axes: sizes of the mesh's axes; by default one axis of all devices.
        there: parameters that are already counted in ``taken``.
        part: part of the layers that the stage has.

    Raises:
        JaxinferError: the options ask for more than the model, the devices or their memory allow,
            or the layout does not fit model or mesh.
    """
    max_model_len = _max_model_len(config, options)
    axes = axes or {DEFAULT_AXIS: len(devices)}
    mesh = Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))
    dtype = choose_dtype(options, devices[0])
    config = with_bits(config, options, dtype)
    kv_dtype = DTYPES_OF_8_BITS.get(options.kv_cache_dtype, dtype)
    kernels = choose_kernels(
        options.kernels,
        devices[0],
        kv_dtype,
        config.head_dim,
        config.num_attention_heads // config.num_key_value_heads,
        options.page_size,
    )
    wide, multiple = lay_out(config, options, axes, kernels, is_spread)
    name = options.layout or "megatron"
    graphdef, parameters = shard_parameters(wide, layers, dtype, mesh, name, part)
    if together := joinable(wide, parameters):
        graphdef, _ = _abstract_model(wide, layers, together, part)
    limits = StepLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_pages=-(-max_model_len // options.page_size),
        page_size=options.page_size,
        given_buckets=options.token_buckets,
        multiple=multiple,
        parts=options.micro_batches,
    )
    weights, new = memory_of(parameters.values()), new_bytes(parameters, dtype, there)
    held, on = (
        (wide, mesh) if not is_spread else (config, Mesh(np.array(devices[:1]), (DEFAULT_AXIS,)))
    )
    page = abstract_pages(held, layers, 1, options.page_size, kv_dtype, on)
    each = memory_of(jax.tree.leaves(page))
    fraction = options.memory_fraction or (0.2 if devices[0].platform == "cpu" else GPU_SHARE)
    free, budget = _memory(devices[0], fraction, weights, taken)
    if free is None and not options.num_pages:
        raise JaxinferError(
            f"{devices[0].device_kind} does not say how much memory it has: set num_pages"
        )
    useful = limits.max_pages * options.max_num_seqs + 1
    heads = wide.num_key_value_heads // ways(wide.layout.kv.get("K", ()), axes)
    addressed = _addressable(wide, kv_dtype, options.page_size, heads)
    num_pages = options.num_pages or min(budget // each, useful, addressed)
    if num_pages > addressed:
        raise JaxinferError(
            f"num_pages is {num_pages}, kernels {kernels} address {addressed} pages of "
            f"{options.page_size} tokens in 8 bits"
        )
    if free is not None and (num_pages < 2 or new + num_pages * each > free):
        what = f"num_pages {num_pages} of {options.page_size} tokens takes"
        if not options.num_pages:
            what = f"memory_fraction {fraction} leaves room for {max(num_pages, 0)} KV pages of"
        raise JaxinferError(
            f"{what} {max(num_pages, 1) * each / 2**30:.3f} GiB, beside "
            f"{new / 2**30:.3f} GiB of weights; {free / 2**30:.1f} GiB are free"
        )
    return StagePlan(
        options, wide, config.num_key_value_heads, layers, dtype, kv_dtype, limits, num_pages,
        max_model_len, weights, num_pages * each, free, devices, mesh, graphdef, parameters,
        joined=together, axes=axes,
    )  # fmt: skip


def _addressable(config: ModelConfig, kv_dtype: jnp.dtype, page_size: int, heads: int) -> int:
    """Return the number of pages that the chosen attention kernels can address.

    Triton's kernels use signed 32-bit offsets for arrays of less than 2^32 bytes.
    """
    if kv_dtype.itemsize > 1 or config.kernels not in ("generic", "hopper", "interpret"):
        return sys.maxsize
    return 2**31 // (heads * page_size * config.head_dim)


def choose_dtype(options: EngineOptions, device: jax.Device) -> jnp.dtype:
    """Choose the dtype of weights and KV cache, unless they have separate dtypes."""
    automatic = "float32" if device.platform == "cpu" else "bfloat16"
    return jnp.dtype(automatic if options.dtype == "auto" else options.dtype)


def weight_dtype_name(plan: StageFacts) -> str:
    """Return the name of the dtype in which linear layers' weights are stored."""
    bits = plan.config.eight_bits
    return bits.stored if bits else plan.dtype.name


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a config's parameters by path."""
    L = config.num_hidden_layers
    _, parameters = _abstract_model(config, Layers(0, L, L))
    return {path: array.shape for path, array in parameters.items()}


def as_state(leaves: Mapping[str, Any]) -> nnx.State[Any, Any]:
    """Return parameters, given by path, in the form that the step takes."""
    flat = [(_path(name), nnx.Param(leaf)) for name, leaf in leaves.items()]
    return nnx.from_flat_state(flat)


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def shard_parameters(
    config: ModelConfig, layers: Layers, dtype: jnp.dtype, mesh: Mesh, layout: str, part: Part
) -> tuple[nnx.GraphDef[Any], dict[str, jax.ShapeDtypeStruct]]:
    """Return a stage's model without values, and its parameters' shapes and shardings by path.

    Raises:
        JaxinferError: the layout does not fit the parameters; the message names it.
    """
    graphdef, abstract = _abstract_model(config, layers, part=part)
    one = replace(config, num_hidden_layers=1, windows=config.windows[:1])
    parameters = {}
    try:
        check_rules(config.layout, list(parameter_shapes(one)), config.num_hidden_layers)
        for path, array in abstract.items():
            kind = dtype_of(path, array.ndim, config, dtype)
            sharding = shard(path, array.shape, mesh, config.layout)
            parameters[path] = jax.ShapeDtypeStruct(array.shape, kind, sharding=sharding)
    except JaxinferError as error:
        raise JaxinferError(f"layout {layout}: {error}") from None
    return graphdef, parameters


def _abstract_model(
    config: ModelConfig, layers: Layers, together: Sequence[str] = (), part: Part = "all"
) -> tuple[nnx.GraphDef[Any], dict[str, jax.ShapeDtypeStruct]]:
    def make() -> Any:
        model = make_model(config, layers, nnx.Rngs(0), part)
        join_modules(model, {layers.name(module) for module in together})
        return model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    flat = nnx.to_flat_state(state)
    return graphdef, {
        layers.path(".".join(map(str, path))): leaf.get_value() for path, leaf in flat
    }


def free_memory(device: jax.Device, taken: int) -> int | None:
    """Return the bytes of a device's memory that are free after other plans have taken theirs.

    The result is None if the device does not report its memory.
    """
    if device.platform == "cpu":
        return available_memory() - taken
    stats = device.memory_stats()
    return int(stats["bytes_limit"] - stats["bytes_in_use"]) - taken if stats else None


def _memory(
    device: jax.Device, fraction: float, weights: int, taken: int
) -> tuple[int | None, int]:
    """Return the free bytes of the memory, and how many of them are left for pages."""
    free = free_memory(device, taken)
    if free is None:
        return None, 0
    if device.platform == "cpu":
        # Memory shared with the rest of the machine: take a share of what is left after the
        # weights.
        return free, math.floor(min(free * fraction, free - weights))
    stats = device.memory_stats()
    own = math.floor(stats["bytes_limit"] * fraction) - stats["bytes_in_use"]
    # Each of several plans for a device has its own share, but at most what is left.
    return free, min(own, free) - weights


def _max_model_len(config: ModelConfig, options: EngineOptions) -> int:
    longest = config.max_position_embeddings
    if options.max_model_len and options.max_model_len > longest:
        raise JaxinferError(
            f"max_model_len is {options.max_model_len}, the model was made for {longest}"
        )
    return options.max_model_len or longest
