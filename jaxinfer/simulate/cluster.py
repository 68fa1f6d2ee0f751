"""From a run file to a modelled cluster: instances, their costs and pools, and links."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jaxinfer.cluster import ClusterConfig, InstanceConfig, StageConfig, instance_options
from jaxinfer.config import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.layer_split import count_layers
from jaxinfer.network import Link
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.page_pool import CountedPages, KVShards, PagePool, Shard
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.simulate.costs import CostModel, Pipeline, StageCost
from jaxinfer.simulate.fit import fit_costs
from jaxinfer.simulate.hardware import Catalogue, Gpu, ModelShape
from jaxinfer.simulate.linear import LinearStage
from jaxinfer.simulate.nodes import Placement, Route, place_groups
from jaxinfer.simulate.options import SimulateOptions
from jaxinfer.simulate.roofline import Efficiency, RooflineStage
from jaxinfer.simulate.world import Lane
from jaxinfer.validation import OptionError, did_you_mean, within

ITEMSIZES = {"auto": 2, "bfloat16": 2}


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
        self, name: str, fit: StepFit | None, groups_decodes: bool, has_tokens: bool
    ) -> Instance:
        """The scheduling side, with empty pools; without tokens, a prefix cache has no use."""
        size = self.config.page_size
        caching = self.config.enable_prefix_caching and has_tokens
        pool = PagePool if caching else CountedPages
        kv = KVShards([Shard(pool(count, size)) for count in self.num_pages], caching)
        options = instance_options(self.config, len(self.config.places))
        grouped = groups_decodes and not caching
        return Instance(name, kv, options, fit=fit, groups_decodes=grouped)


@dataclass(frozen=True)
class ModelledCluster:
    """Instances by name, and what lies between them."""

    instances: Mapping[str, ModelledInstance]
    lanes: Mapping[tuple[str, str], Sequence[Lane]]
    capacities: Mapping[Link, float]

    def fit(self, name: str, relative: bool) -> StepFit:
        """What profiling an instance would find; see ``fit_costs``."""
        modelled = self.instances[name]
        options = modelled.config
        pool = (min(modelled.num_pages) - 1) * options.page_size
        longest = min(options.max_model_len or 4096, pool)
        return fit_costs(
            modelled.cost, options.max_num_batched_tokens, options.max_num_seqs, longest, relative
        )

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


@dataclass(frozen=True)
class _Site:
    """Groups with their GPUs and what lies between: of a hardware file, or as the run file says."""

    cluster: ClusterConfig
    placement: Placement | None
    known: Catalogue

    def gpu(self, group: str) -> Gpu:
        """The one that a group has."""
        config = self.cluster.groups[group]
        try:
            if config.emulate or config.platform == "cpu":
                raise JaxinferError(
                    "a modelled group is a GPU: platform cpu and emulate do not apply"
                )
            if self.placement:
                return self.placement.gpu(group)
            if config.kind is None:
                raise OptionError("kind is missing, must name the GPU that is modelled")
            return self.known.gpu(config.kind)
        except JaxinferError as error:
            raise within(f"groups.{group}", error) from None

    def route(self, source: str, dest: str, what: str) -> Route:
        """From group to group; within one, over what connects its GPUs."""
        if self.placement:
            return self.placement.route(source, dest)
        if source == dest:
            return Route({(source, dest): self.gpu(source).link_gb_s * 1e9}, 0.0)
        link = self.cluster.link(source, dest)
        if link is None:
            raise JaxinferError(f"links: none between {source} and {dest}, where {what} must go")
        return Route({(source, dest): link.gb_s * 1e9}, link.latency_s)


def model_cluster(config: RunFile, pairs: Collection[tuple[str, str]]) -> ModelledCluster:
    """From a run file whose groups name GPUs, or nodes of a hardware file.

    Args:
        pairs: instances from the first of which KV goes to the second.

    Raises:
        JaxinferError: a GPU, a model or a link is missing, or the model does not fit.
    """
    cluster = config.cluster()
    for group in config.simulate.groups:
        if group not in cluster.groups:
            known = did_you_mean(group, cluster.groups)
            raise JaxinferError(f"simulate.groups.{group}: no such group: {known}")
    placement = place_groups(cluster, config.simulate, config.own)
    catalogue = placement.known if placement else config.own
    model = catalogue.model(config.require_model())
    site = _Site(placement.cluster if placement else cluster, placement, catalogue)
    for group in cluster.groups:
        site.gpu(group)  # A mistake there is not an instance's.
    instances = {}
    for name, instance in cluster.instances.items():
        try:
            instances[name] = _model_instance(site, config.simulate, model, instance)
        except JaxinferError as error:
            raise within(f"instances.{name}", error) from None

    capacities: dict[Link, float] = {}

    def path(here: str, there: str) -> tuple[Sequence[Link], float]:
        route = site.route(here, there, "KV")
        capacities.update(route.links)
        return tuple(route.links), route.latency_s

    lanes = {
        (source, dest): lanes_between(instances[source], instances[dest], path)
        for source, dest in pairs
    }
    return ModelledCluster(instances, lanes, capacities)


def _model_instance(
    site: _Site, options: SimulateOptions, model: ModelShape, instance: InstanceConfig
) -> ModelledInstance:
    if instance.dtype not in ITEMSIZES:
        raise OptionError(f"dtype is {instance.dtype}, GPUs are modelled with 16-bit floats")
    if instance.kv_cache_dtype != "auto":
        raise OptionError(
            f"kv_cache_dtype is {instance.kv_cache_dtype}, modelled KV is in dtype: auto"
        )
    itemsize = ITEMSIZES[instance.dtype]
    places = instance.places
    cluster = site.cluster
    layers = _layers(model, site, places)
    gpus = [site.gpu(place.group) for place in places]
    devices = [cluster.groups[place.group].stage_devices for place in places]
    for place, count in zip(places, devices, strict=True):
        for heads in (model.num_attention_heads, model.num_key_value_heads):
            if heads % count:
                raise JaxinferError(
                    f"groups.{place.group}: {count} devices do not divide the model's {heads} heads"
                )
    if instance.segments > min(layers):
        raise OptionError(f"segments is {instance.segments}, a stage has {min(layers)} layers")
    parts, pages = [], []
    for number, (gpu, place) in enumerate(zip(gpus, places, strict=True)):
        last = number == len(places) - 1
        costs = options.of(place.group)
        kind = str(cluster.groups[place.group].kind)
        parts.append(_stage(costs, kind, gpu, model, devices[number], itemsize, layers, number))
        weights = model.parameters(layers[number], number == 0, last) * itemsize / devices[number]
        each = model.kv_bytes(layers[number], itemsize) * instance.page_size / devices[number]
        pages.append(_num_pages(instance, costs.reserve_gb, model, gpu, place.group, weights, each))
    hops = [
        site.route(before.group, after.group, "hidden states") for before, after in pairwise(places)
    ]
    cost = Pipeline(
        tuple(parts),
        options.hop_s,
        tuple(hop.latency_s for hop in hops),
        tuple(1 / hop.rate for hop in hops),
        model.hidden_size * itemsize,
    )
    groups = [place.group for place in places]
    token_bytes = model.kv_bytes(1, itemsize)
    read = tuple(getattr(part, "read", None) for part in parts)
    where = range(len(places))
    return ModelledInstance(
        instance, groups, layers, pages, token_bytes, cost, instance.segments, where, read
    )


def _stage(
    costs: SimulateOptions,
    kind: str,
    gpu: Gpu,
    model: ModelShape,
    devices: int,
    itemsize: int,
    layers: Sequence[int],
    number: int,
) -> StageCost:
    first, last = number == 0, number == len(layers) - 1
    if costs.linear:
        return LinearStage(costs.linear, layers[number] / sum(layers))
    if costs.tables:
        # Loads scipy, which takes as long as a small simulation.
        from jaxinfer.simulate.tables import TableStage

        here = devices, itemsize, layers[number], first, last
        return TableStage(
            Path(costs.tables), model, gpu, kind, *here, costs.step_s, costs.sequence_s
        )
    efficiency = Efficiency(costs.flops, costs.bandwidth, costs.step_s, costs.sequence_s)
    return RooflineStage(
        gpu, model, layers[number], last, devices, itemsize, efficiency, *gpu.stated_collective
    )


def _layers(model: ModelShape, site: _Site, places: Sequence[StageConfig]) -> list[int]:
    """As stated, or by shares, which are by default the groups' peak FLOPs."""

    def speed(number: int) -> float:
        group = places[number].group
        return site.gpu(group).bf16_tflops * site.cluster.groups[group].stage_devices

    return count_layers(model.num_hidden_layers, places, speed)


def _num_pages(
    instance: InstanceConfig,
    reserve_gb: float | None,
    model: ModelShape,
    gpu: Gpu,
    group: str,
    weights: float,
    each: float,
) -> int:
    # The fraction is for a pool that takes what there is; one that is given may take all.
    memory = gpu.memory_gb * 1e9 * (1.0 if instance.num_pages else instance.memory_fraction or 0.9)
    reserve = (reserve_gb or 0.0) * 1e9
    if reserve_gb is None:
        itemsize = ITEMSIZES[instance.dtype]
        numbers = 2 * model.hidden_size + 3 * model.intermediate_size
        reserve = instance.max_num_batched_tokens * numbers * itemsize
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
) -> list[Lane]:
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
                lanes.append(Lane(i, shared * token_bytes, path, latency))
    return lanes


def _ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    stops = [sum(layers[: i + 1]) for i in range(len(layers))]
    return [(stop - count, stop) for stop, count in zip(stops, layers, strict=True)]
