"""From a run file to a modelled cluster: instances, their costs and pools, and links."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxinfer.config.cluster import InstanceConfig, instance_options
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.layer_split import count_layers
from jaxinfer.config.resolve import Resolved
from jaxinfer.config.validation import OptionError, within
from jaxinfer.errors import JaxinferError
from jaxinfer.report.yardstick import Yardstick
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import CountedPages, PagePool, Shard
from jaxinfer.serving.policies import make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.simulate.costs import (
    ITEMSIZE,
    CostModel,
    Padded,
    Pipeline,
    StageCost,
    StagePart,
    make_stage,
)
from jaxinfer.simulate.fit import fit_costs
from jaxinfer.simulate.hardware import Gpu, ModelShape
from jaxinfer.simulate.nodes import Placement
from jaxinfer.simulate.world import StagePair
from jaxinfer.simulate.yardstick import make_yardstick
from jaxinfer.steps.network import Link
from jaxinfer.steps.shapes import StepLimits

# Bytes of a number that is stored, by its option's value.
WEIGHT_SIZES = {"auto": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
KV_SIZES = {"auto": 2, "int8": 1, "fp8": 1}
# Entries of 8 bits have a float32 for each page and head, of keys and of values.
_SCALES = 2 * 4


@dataclass(frozen=True)
class ModelledInstance:
    """One instance of a modelled cluster.

    Attributes:
        layers: of each stage; ``groups``: what it stands on; ``num_pages``: its pool, the padding
            page included.
        token_bytes: of the KV of one layer of one token.
        segments: pieces that each stage is computed in.
        devices: of each stage, a number for what it runs on; those with one take turns.
        tables: of each stage, what its tables had, where it has any.
    """

    config: InstanceConfig
    groups: Sequence[str]
    layers: Sequence[int]
    num_pages: Sequence[int]
    token_bytes: int
    cost: CostModel
    segments: int
    devices: Sequence[int]
    tables: Sequence[Mapping[str, object] | None] = ()

    def new_instance(
        self,
        name: str,
        fit: StepFit | None,
        groups_decodes: bool,
        has_tokens: bool,
        num_output: Callable[[RequestState], int],
    ) -> Instance:
        """The scheduling side, with empty pools; without tokens, a prefix cache has no use.

        Args:
            num_output: output tokens that end a request.
        """
        size = self.config.page_size
        caching = self.config.enable_prefix_caching and has_tokens
        pool = PagePool if caching else CountedPages
        shards = [Shard(pool(count, size), stage=i) for i, count in enumerate(self.num_pages)]
        kv = KVShards(shards, caching)
        options = instance_options(self.config, len(self.config.places))
        grouped = groups_decodes and not caching
        policies = make_policies(self.config.policies)
        role = self.config.role
        return Instance(name, kv, options, policies, role, fit, grouped, num_output)


@dataclass(frozen=True)
class ModelledCluster:
    """Instances by name, and what lies between them.

    Attributes:
        gpus: of each group, its kind and how many.
    """

    instances: Mapping[str, ModelledInstance]
    lanes: Mapping[tuple[str, str], Sequence[StagePair]]
    capacities: Mapping[Link, float]
    model: ModelShape | None = None
    gpus: Sequence[tuple[Gpu, int]] = ()
    placement: Placement | None = None

    @property
    def yardstick(self) -> Yardstick:
        """What the figures are measured by; nothing where the model is not known."""
        if self.model is None:
            return Yardstick()
        return make_yardstick(self.model, self.gpus, self.placement)

    def fit(self, name: str, relative: bool) -> StepFit:
        """What profiling an instance would find; see ``fit_costs``."""
        modelled = self.instances[name]
        options = modelled.config
        pool = (min(modelled.num_pages) - 1) * options.page_size
        longest = min(options.max_model_len or 4096, pool)
        limits = options.max_num_batched_tokens, options.max_num_seqs
        return fit_costs(modelled.cost, *limits, longest, pool, relative)

    def describe(self) -> dict[str, object]:
        """What stands where, as JSON values."""
        return {
            name: {
                "engine": modelled.config.model_dump(exclude={"group", "stages"}),
                "stages": [
                    {"group": group, "layers": layers, "num_pages": pages}
                    | ({"tables": tables} if tables else {})
                    for group, layers, pages, tables in zip(
                        modelled.groups,
                        modelled.layers,
                        modelled.num_pages,
                        modelled.tables or [None] * len(modelled.groups),
                        strict=True,
                    )
                ],
            }
            for name, modelled in self.instances.items()
        }


def model_cluster(site: Resolved) -> ModelledCluster:
    """From a run file whose groups name GPUs, or nodes of a hardware file.

    Raises:
        JaxinferError: a GPU, a model or a link is missing, or the model does not fit.
    """
    # A mistake in a group is not an instance's.
    model, gpus = site.model, site.gpus
    instances = {}
    for name, instance in site.instances.items():
        try:
            instances[name] = _model_instance(site, model, instance)
        except JaxinferError as error:
            raise within(f"instances.{name}", error) from None

    capacities: dict[Link, float] = {}

    def path(here: str, there: str) -> tuple[Sequence[Link], float]:
        found = site.path(here, there, "KV")
        capacities.update(found.links)
        return tuple(found.links), found.latency_s

    lanes = {
        (source, dest): lanes_between(instances[source], instances[dest], path)
        for source, dest in site.pairs
    }
    counted = [(gpus[name], group.devices) for name, group in site.groups.items()]
    return ModelledCluster(instances, lanes, capacities, model, counted, site.placement)


def _model_instance(
    site: Resolved, model: ModelShape, instance: InstanceConfig
) -> ModelledInstance:
    if instance.dtype not in WEIGHT_SIZES:
        known = ", ".join(WEIGHT_SIZES)
        raise OptionError(f"dtype is {instance.dtype}, modelled weights are one of: {known}")
    groups = [place.group for place in instance.places]
    options, parts = site.run_file.simulate, stage_parts(site, model, instance)
    costs = [options.of(group) for group in groups]
    pages = [
        count_pages(instance, of_group.reserve_gb, part, group)
        for of_group, part, group in zip(costs, parts, groups, strict=True)
    ]
    stages = [stage_cost(part, cost) for part, cost in zip(parts, costs, strict=True)]
    hops = [site.path(*ends, "hidden states") for ends in pairwise(groups)]
    cost: CostModel = Pipeline(
        tuple(stages),
        options.hop_s,
        tuple(hop.latency_s for hop in hops),
        tuple(1 / hop.rate for hop in hops),
        model.hidden_size * ITEMSIZE,
    )
    if instance.token_buckets:
        cost = Padded(cost, instance.token_buckets)
    token_bytes = model.kv_bytes(1, KV_SIZES[instance.kv_cache_dtype])
    read = tuple(getattr(stage, "read", None) for stage in stages)
    layers = [part.layers for part in parts]
    where = range(len(parts))
    return ModelledInstance(
        instance, groups, layers, pages, token_bytes, cost, instance.segments, where, read
    )


def stage_cost(part: StagePart, costs: SimulateOptions) -> StageCost:
    """How long a stage's steps take.

    Raises:
        JaxinferError: what the costs are made from has nothing for this stage.
    """
    try:
        return make_stage(part, costs)
    except JaxinferError as error:
        raise JaxinferError(f"{costs.where}{error}") from None


def stage_parts(site: Resolved, model: ModelShape, instance: InstanceConfig) -> list[StagePart]:
    """What each stage of an instance has of the model, by stated layers or the groups' peak FLOPs.

    Raises:
        JaxinferError: the layers, or the devices of a group, do not divide the model.
    """
    places = instance.places
    gpus = [site.gpus[place.group] for place in places]
    devices = [site.groups[place.group].stage_devices for place in places]
    for place, count in zip(places, devices, strict=True):
        for heads in (model.num_attention_heads, model.num_key_value_heads):
            if heads % count:
                raise JaxinferError(
                    f"groups.{place.group}: {count} devices do not divide the model's {heads} heads"
                )
    speeds = [gpu.bf16_tflops * count for gpu, count in zip(gpus, devices, strict=True)]
    total = model.num_hidden_layers
    layers = count_layers(total, places, lambda number: speeds[number])
    if instance.segments > min(layers):
        raise OptionError(f"segments is {instance.segments}, a stage has {min(layers)} layers")
    sizes = WEIGHT_SIZES[instance.dtype], KV_SIZES[instance.kv_cache_dtype]
    limits = StepLimits(
        max_num_seqs=instance.max_num_seqs,
        max_num_batched_tokens=instance.max_num_batched_tokens,
        max_pages=-(-(instance.max_model_len or 1) // instance.page_size),
        page_size=instance.page_size,
        given_buckets=instance.token_buckets,
    )
    last = len(places) - 1
    return [
        StagePart(
            gpus[i], str(site.groups[place.group].kind), model, layers[i], layers[i] / total,
            i == 0, i == last, devices[i], *sizes, limits,
        )
        for i, place in enumerate(places)
    ]  # fmt: skip


def count_pages(
    instance: InstanceConfig, reserve_gb: float | None, part: StagePart, group: str
) -> int:
    """Pages of a stage's pool, the padding page included.

    Raises:
        JaxinferError: the GPU's memory holds fewer than are asked for, or than two.
    """
    gpu, model = part.gpu, part.model
    weights = part.weight_bytes
    scales = _SCALES * part.layers * model.num_key_value_heads if part.kv_size == 1 else 0
    page = model.kv_bytes(part.layers, part.kv_size) * instance.page_size + scales
    each = page / part.devices
    # The fraction is for a pool that takes what there is; one that is given may take all.
    memory = gpu.memory_gb * 1e9 * (1.0 if instance.num_pages else instance.memory_fraction or 0.9)
    reserve = (reserve_gb or 0.0) * 1e9
    if reserve_gb is None:
        numbers = 2 * model.hidden_size + 3 * model.intermediate_size
        reserve = instance.max_num_batched_tokens * numbers * ITEMSIZE
        reserve += 4 * instance.max_num_seqs * model.vocab_size
    fits = int((memory - weights - reserve) // each)
    wanted = instance.num_pages or fits
    if wanted < 2 or wanted > fits:
        kept = "for activations" if reserve_gb is None else "by reserve_gb"
        raise JaxinferError(
            f"groups.{group}: {memory / 1e9:.1f} of {gpu.memory_gb:g} GB hold "
            f"{weights / 1e9:.2f} GB of weights, {reserve / 1e9:.2f} GB kept {kept}, and "
            f"{max(fits, 0)} KV pages of {each / 1e6:.2f} MB, not {max(wanted, 2)}"
        )
    return wanted


def lanes_between(
    source: ModelledInstance,
    dest: ModelledInstance,
    link: Callable[[str, str], tuple[Sequence[Link], float]],
) -> list[StagePair]:
    """One for each stage of the source and of the destination that have layers in common.

    Args:
        link: path and latency between two groups.
    """
    lanes = []
    for i, (start, stop) in enumerate(_ranges(source.layers)):
        for j, (begin, end) in enumerate(_ranges(dest.layers)):
            if (shared := min(stop, end) - max(start, begin)) > 0:
                path, latency = link(source.groups[i], dest.groups[j])
                token_bytes = min(source.token_bytes, dest.token_bytes)
                lanes.append(StagePair(i, shared * token_bytes, path, latency))
    return lanes


def _ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    stops = [sum(layers[: i + 1]) for i in range(len(layers))]
    return [(stop - count, stop) for stop, count in zip(stops, layers, strict=True)]
