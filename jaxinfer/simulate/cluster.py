"""A modelled cluster: instances, their costs and pools, and the links between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxinfer.caches.eviction import idle_pages
from jaxinfer.caches.later_uses import LaterUses
from jaxinfer.config.cluster import InstanceConfig, instance_options
from jaxinfer.config.layer_split import shared_layers
from jaxinfer.config.nodes import NetworkPath
from jaxinfer.config.resolve import Resolved
from jaxinfer.config.site_values import ModelledSite, SiteStage, total_watts
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZE
from jaxinfer.hardware.efficiency import Efficiency, model_flops
from jaxinfer.hardware.network import Link
from jaxinfer.options.validation import within
from jaxinfer.serving.batch import Work
from jaxinfer.serving.features.half_batches import choice
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
from jaxinfer.simulate.costs.joint import GRAPH_TOKENS, JointExperts, JointSteps
from jaxinfer.simulate.costs.model import (
    CostModel,
    Padded,
    Pipeline,
    SlowedStage,
    StageCost,
    make_stage,
)
from jaxinfer.simulate.ffn import ffn_stage
from jaxinfer.simulate.kv_capacity import check_ffn_memory, count_pages
from jaxinfer.simulate.one_device import check_together, with_shares
from jaxinfer.simulate.spread import Visit
from jaxinfer.simulate.stage_path import StagePath


@dataclass(frozen=True)
class ModelledInstance:
    """An instance of a modelled cluster.

    Attributes:
        groups: name of each stage's device group.
        layers: number of layers of each stage.
        num_pages: number of pages of each stage's pool, including the padding page.
        token_bytes: bytes of one token's KV in one layer.
        segments: number of pieces in which each stage is computed.
        devices: for each stage, a number that identifies its devices; stages with the same number
            take turns.
        tables: for each stage, the contents of its tables, if it has any.
        shards: shards where KV heads may lie, if some stages have attention groups.
        asks_spans: whether step times depend on the spread of a step's contexts.
        experts: times of experts that it shares with other instances; ``cost`` does not include
            them.
        measured: the largest measured value of each quantity of a step, by name (see
            ``beyond.py``); empty if times come from formulas.
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
    asks_spans: bool = False
    experts: JointExperts | None = None
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of KV entries that fit at once, wherever the KV heads lie."""
        pages = [count - 1 for count in self.num_pages]
        for stage in range(len(pages)) if self.shards else ():
            here = [shard for shard in self.shards if shard.stage == stage]
            pages[stage] = sum(s.num_head_pages - 1 for s in here) // max(here[0].heads, 1)
        return min(pages) * self.config.page_size

    @property
    def pool_pages(self) -> int:
        """Number of pages of all pools, without padding pages."""
        counts = [shard.num_head_pages for shard in self.shards] or self.num_pages
        return sum(counts) - len(counts)

    @property
    def visits(self) -> Sequence[Sequence[Visit]]:
        """For each stage, its attention work on devices that work for several stages."""
        return shared_visits(self.shards, len(self.layers))

    def describe_stages(self) -> list[dict[str, object]]:
        """Describe the placement of stages, as JSON values."""
        stages: list[dict[str, object]] = []
        both = zip(self.groups, self.layers, self.num_pages, strict=True)
        for number, (group, layers, pages) in enumerate(both):
            stage: dict[str, object] = {"group": group, "layers": layers, "num_pages": pages}
            if self.tables and self.tables[number]:
                stage["tables"] = self.tables[number]
            if ffns := self.config.ffn_groups:
                stage["ffn"] = {"group": ffns[number]}
            if others := [s for s in self.shards if s.stage == number and not s.is_own]:
                stage["attention"] = [
                    {"group": s.group, "num_pages": s.num_pages} for s in others if not s.device
                ]
            stages.append(stage)
        return stages

    def new_instance(
        self,
        name: str,
        fit: StepFit | None,
        groups_decodes: bool,
        has_tokens: bool,
        num_output: Callable[[RequestState], int],
        numbers_pages: bool = False,
        uses: LaterUses | None = None,
    ) -> Instance:
        """Return an instance with empty pools for the scheduler.

        It has a prefix cache only if tokens are known.

        Args:
            num_output: returns the number of output tokens that end a request.
            numbers_pages: whether pages need numbers, because the system or a ledger reads them.
            uses: uses of pages that are known beforehand, if pages are evicted by them.
        """
        size = self.config.page_size
        caching = self.config.enable_prefix_caching and has_tokens
        pool = PagePool if numbers_pages else CountedPages
        shards = [Shard(pool(count, size), stage=i) for i, count in enumerate(self.num_pages)]
        if self.shards:
            shards = [shard.new(size, pool) for shard in self.shards]
        idle = idle_pages(self.config.eviction, size, name, uses)
        kv = KVShards(shards, caching, self.config.paging, idle)
        options = instance_options(self.config, len(self.config.places))
        policies = make_policies(self.config.policies)
        role = self.config.role
        # Groups offer pages to the prefix cache when their entries are computed.
        grouped = groups_decodes and not (caching and self.config.paging.cache == "launched")
        grouped = grouped and self.config.micro_batches == 1  # Their rows have to be cut.
        instance = Instance(name, kv, options, policies, role, fit, grouped, num_output)
        instance.asks_spans = self.asks_spans
        instance.halves_pay = choice(self.config.half_batches, self._is_shorter)
        return instance

    def _is_shorter(self, whole: Work, halves: Sequence[Work]) -> bool:
        """Return whether a step is faster as two halves."""
        as_halves = self.cost.stages(replace(whole, halves=halves))
        return sum(as_halves) < sum(self.cost.stages(whole))


@dataclass(frozen=True)
class ModelledCluster:
    """Instances by name, and the links between them.

    Attributes:
        resolved: resolved run file; None if all step times are given, so that nothing is modelled.
        site: modelled site of the cluster; None for a replay, whose times do not come from a model.
        fits: step times that the system may use for predictions, by instance; may be empty.
        slice_lanes: for each instance with attention groups, the lanes from shard to shard.
        joint: times of instances that share experts, if any do.
    """

    instances: Mapping[str, ModelledInstance]
    lanes: Mapping[tuple[str, str], Sequence[StagePath]]
    capacities: Mapping[Link, float]
    resolved: Resolved | None = None
    fits: Mapping[str, StepFit] = field(default_factory=dict)
    site: ModelledSite | None = None
    slice_lanes: Mapping[str, Mapping[tuple[int, int], StagePath]] = field(default_factory=dict)
    joint: JointSteps | None = None

    @property
    def efficiency(self) -> Efficiency:
        """Data for efficiency figures; empty if the model is not known."""
        return modelled_efficiency(self.site) if self.site else Efficiency()

    def describe(self) -> dict[str, object]:
        """Describe the placement of instances, as JSON values."""
        return {
            name: {
                "engine": modelled.config.model_dump(exclude={"group", "stages"}),
                "stages": modelled.describe_stages(),
            }
            for name, modelled in self.instances.items()
        }


def model_cluster(site: ModelledSite) -> ModelledCluster:
    """Make the modelled cluster of a site: costs and pools of its stages, and links of its paths.

    Raises:
        JaxinferError: the model does not fit, or the costs do not cover a stage.
    """
    instances = {}
    options = with_shares(site)
    for name, stages in site.stages.items():
        try:
            instances[name] = _model_instance(options[name], stages)
        except JaxinferError as error:
            raise within(f"instances.{name}", error) from None
    check_together(site, {name: each.num_pages for name, each in instances.items()})
    lanes = {
        (source, dest): lanes_between(instances[source], instances[dest], site.paths)
        for source, dest in site.resolved.pairs
        if not (instances[source].shards or instances[dest].shards)
    }
    slices = {
        name: slice_lanes(instance.shards, instance.token_bytes, site.paths)
        for name, instance in instances.items()
        if instance.shards
    }
    capacities = {link: rate for path in site.paths.values() for link, rate in path.links.items()}
    sharing = {name: instances[name] for name in site.sharing}
    joint = _joint_steps(sharing) if sharing else None
    fits = {}
    if site.resolved.needs_fits:
        fits = {name: fit_instance(each, site.relative_fits) for name, each in instances.items()}
    return ModelledCluster(instances, lanes, capacities, site.resolved, fits, site, slices, joint)


def fit_instance(modelled: ModelledInstance, relative: bool) -> StepFit:
    """Fit an instance's steps as profiling would, with all KV heads on the stages' own groups.

    See ``fit_costs``.
    """
    options = modelled.config
    pool = (min(modelled.num_pages) - 1) * options.page_size
    longest = min(options.max_model_len or 4096, pool)
    limits = options.max_num_batched_tokens, options.max_num_seqs
    return fit_costs(modelled.cost, *limits, longest, pool, relative)


def _joint_steps(members: Mapping[str, ModelledInstance]) -> JointSteps:
    """Return the joint steps of instances that share experts."""
    experts = [each.experts for each in members.values() if each.experts]
    if len(experts) < len(members):
        raise JaxinferError("simulate.shared_experts needs tables with times of experts")
    seqs = max(each.config.max_num_seqs for each in members.values())
    own = {name: each.cost for name, each in members.items()}
    return JointSteps(own, experts, min(2 * seqs, GRAPH_TOKENS))


def _model_instance(config: InstanceConfig, places: Sequence[SiteStage]) -> ModelledInstance:
    parts = [place.part for place in places]
    pages = [
        count_pages(config, place.costs.reserve_gb, place.part, place.group.name)
        for place in places
    ]
    stages: list[StageCost] = []
    first = 0
    for place in places:
        stages.append(_stage(config, place, first))
        first += len(place.groups)
    model = parts[0].model
    hops = [place.hop for place in places if place.hop]
    cost: CostModel = Pipeline(
        tuple(map(_at_its_speed, stages, places)),
        places[0].costs.hop_s,
        tuple(hop.latency_s for hop in hops),
        tuple(1 / hop.rate for hop in hops),
        model.hidden_size * ITEMSIZE,
    )
    if config.token_buckets:
        cost = Padded(cost, config.token_buckets)
    return ModelledInstance(
        config,
        [place.group.name for place in places],
        [part.layers for part in parts],
        pages,
        model.kv_bytes(1, parts[0].kv_size),
        cost,
        config.segments,
        range(len(parts)),
        tuple(getattr(stage, "read", None) for stage in stages),
        spread_shards(config, places, pages, stages) if config.is_spread else (),
        any(getattr(stage, "asks_spans", False) for stage in stages),
        getattr(stages[0], "joint", None),
        getattr(stages[0], "measured", {}),
    )


def _stage(config: InstanceConfig, place: SiteStage, first: int) -> StageCost:
    if place.ffn:
        check_ffn_memory(config, place.part, place.ffn)
        return ffn_stage(place)
    if place.attention:
        return spread_stage(place, first)
    return make_stage(place.part, place.costs)


def _at_its_speed(stage: StageCost, place: SiteStage) -> StageCost:
    slowdown = 1.0 if place.ffn else place.group.slowdown  # That of each part is its own.
    return SlowedStage(stage, slowdown) if slowdown != 1 else stage


def lanes_between(
    source: ModelledInstance,
    dest: ModelledInstance,
    paths: Mapping[tuple[str, str], NetworkPath],
) -> list[StagePath]:
    """Return lanes between all pairs of source and destination stages that share layers."""
    lanes = []
    token_bytes = min(source.token_bytes, dest.token_bytes)
    for i, j, shared in shared_layers(tuple(source.layers), tuple(dest.layers)):
        path = paths[source.groups[i], dest.groups[j]]
        lanes.append(StagePath(i, shared * token_bytes, tuple(path.links), path.latency_s))
    return lanes


def modelled_efficiency(site: ModelledSite) -> Efficiency:
    """Return the data for efficiency figures.

    The price is known only with a hardware file, and the MFU only for models without windows.
    """
    groups, placement = site.groups.values(), site.placement
    return Efficiency(
        model=None if site.model.windowed_layers else model_flops(site.model),
        peak_flops=sum(group.gpu.bf16_tflops * 1e12 * group.own_devices for group in groups),
        usd_per_hour=placement.usd_per_hour if placement else None,
        watts=total_watts(placement, groups),
    )
