"""From a run file to a modelled cluster: instances, their costs and pools, and links."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from jaxinfer.config.cluster import InstanceConfig, instance_options
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.layer_split import count_layers
from jaxinfer.config.nodes import Placement
from jaxinfer.config.resolve import Resolved
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.hardware.efficiency import Yardstick
from jaxinfer.hardware.network import Link
from jaxinfer.options.validation import OptionError, within
from jaxinfer.serving.batch import Work
from jaxinfer.serving.half_batches import choice
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import CountedPages, PagePool, Shard
from jaxinfer.serving.policies import make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.simulate.attention import (
    ModelledShard,
    shared_visits,
    slice_lanes,
    spread_shards,
    spread_stage,
)
from jaxinfer.simulate.costs.fit import fit_costs
from jaxinfer.simulate.costs.model import (
    ITEMSIZE,
    CostModel,
    Padded,
    Pipeline,
    StageCost,
    StagePart,
    make_stage,
)
from jaxinfer.simulate.efficiency import make_yardstick
from jaxinfer.simulate.kv_capacity import count_pages
from jaxinfer.simulate.spread import Visit
from jaxinfer.simulate.world import StagePair
from jaxinfer.steps.shapes import StepLimits

# Bytes of a number that is stored, by its option's value.
WEIGHT_SIZES = {"auto": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
KV_SIZES = {"auto": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class ModelledInstance:
    """One instance of a modelled cluster.

    Attributes:
        layers: of each stage; ``groups``: what it stands on; ``num_pages``: its pool there, the
            padding page included.
        token_bytes: of the KV of one layer of one token.
        segments: pieces that each stage is computed in.
        devices: of each stage, a number for what it runs on; those with one take turns.
        tables: of each stage, what its tables had, where it has any.
        shards: where KV heads of the stages may lie, if some have attention groups.
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
    shards: Sequence[ModelledShard] = ()

    @property
    def num_tokens(self) -> int:
        """KV entries that fit at once, wherever the KV heads lie."""
        pages = [count - 1 for count in self.num_pages]
        for shard in self.shards:
            pages[shard.stage] += 0 if shard.is_own else shard.num_pages - 1
        return min(pages) * self.config.page_size

    @property
    def pool_pages(self) -> int:
        """Pages of all pools together, without padding pages."""
        counts = [shard.num_head_pages for shard in self.shards] or self.num_pages
        return sum(counts) - len(counts)

    @property
    def visits(self) -> Sequence[Sequence[Visit]]:
        """Of each stage, what it has done by groups that work for several stages."""
        return shared_visits(self.shards, len(self.layers))

    def describe_stages(self) -> list[dict[str, object]]:
        """What stands where, as JSON values."""
        stages: list[dict[str, object]] = []
        both = zip(self.groups, self.layers, self.num_pages, strict=True)
        for number, (group, layers, pages) in enumerate(both):
            stage: dict[str, object] = {"group": group, "layers": layers, "num_pages": pages}
            if self.tables and self.tables[number]:
                stage["tables"] = self.tables[number]
            if others := [s for s in self.shards if s.stage == number and not s.is_own]:
                stage["attention"] = [{"group": s.group, "num_pages": s.num_pages} for s in others]
            stages.append(stage)
        return stages

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
        if self.shards:
            shards = [shard.new(size) for shard in self.shards]
        kv = KVShards(shards, caching)
        options = instance_options(self.config, len(self.config.places))
        grouped = groups_decodes and not caching
        policies = make_policies(self.config.policies)
        role = self.config.role
        instance = Instance(name, kv, options, policies, role, fit, grouped, num_output)
        instance.halves_pay = choice(self.config.half_batches, self._is_shorter)
        return instance

    def _is_shorter(self, whole: Work, halves: Sequence[Work]) -> bool:
        """Whether a step takes less time as halves."""
        as_halves = self.cost.stages(replace(whole, halves=halves))
        return sum(as_halves) < sum(self.cost.stages(whole))


@dataclass(frozen=True)
class ModelledCluster:
    """Instances by name, and what lies between them.

    Attributes:
        gpus: of each group, its kind and how many.
        slice_lanes: by instance that has attention groups, from shard to shard.
    """

    instances: Mapping[str, ModelledInstance]
    lanes: Mapping[tuple[str, str], Sequence[StagePair]]
    capacities: Mapping[Link, float]
    model: ModelShape | None = None
    gpus: Sequence[tuple[Gpu, int]] = ()
    placement: Placement | None = None
    slice_lanes: Mapping[str, Mapping[tuple[int, int], StagePair]] = field(default_factory=dict)

    @property
    def yardstick(self) -> Yardstick:
        """What the figures are measured by; nothing where the model is not known."""
        if self.model is None:
            return Yardstick()
        return make_yardstick(self.model, self.gpus, self.placement)

    def fit(self, name: str, relative: bool) -> StepFit:
        """What profiling an instance would find, with all KV heads on the stages' own groups.

        See ``fit_costs``.
        """
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
                "stages": modelled.describe_stages(),
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
        if not (instances[source].shards or instances[dest].shards)
    }
    slices = {
        name: slice_lanes(instance.shards, instance.token_bytes, path)
        for name, instance in instances.items()
        if instance.shards
    }
    counted = [(gpus[name], group.devices) for name, group in site.groups.items()]
    return ModelledCluster(instances, lanes, capacities, model, counted, site.placement, slices)


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
    stages: list[StageCost] = []
    first = 0
    for place, part, of_group in zip(instance.places, parts, costs, strict=True):
        spread = bool(place.attention)
        stage = spread_stage(site, place, part, first) if spread else stage_cost(part, of_group)
        stages.append(stage)
        first += 1 + len(place.attention)
    shards = spread_shards(site, instance, parts, pages, stages) if instance.is_spread else ()
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
        instance, groups, layers, pages, token_bytes, cost, instance.segments, where, read, shards
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
