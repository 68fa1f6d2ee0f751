"""Computes the final values of a modelled cluster from a run file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, permutations
from math import inf

from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.costs import GroupCosts, SimulateOptions
from jaxinfer.config.layer_split import count_layers, shared_layers
from jaxinfer.config.nodes import NetworkPath, Placement, place_groups
from jaxinfer.config.published import PublishedTables
from jaxinfer.config.resolve import Resolved
from jaxinfer.config.site_checks import check_played, check_sharing
from jaxinfer.config.site_values import (
    ModelledSite,
    SiteAttention,
    SiteFfn,
    SiteGroup,
    SiteStage,
)
from jaxinfer.config.stage_part import EXPERT_SIZES, StagePart, stored_sizes
from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, ModelShape
from jaxinfer.models.layout_checks import check_pages
from jaxinfer.models.layout_files import load_layout
from jaxinfer.models.layouts import DEFAULT_AXIS
from jaxinfer.options.validation import OptionError, within
from jaxinfer.sharding.costs import LayoutFlow
from jaxinfer.sharding.shapes import check_layout
from jaxinfer.steps.shapes import StepLimits

# The path from group to group, by the name of what it carries, such as "KV".
_PathOf = Callable[[SiteGroup, SiteGroup, str], NetworkPath]


def model_groups(resolved: Resolved) -> tuple[Placement | None, dict[str, SiteGroup]]:
    """Find the groups' nodes, if there is a hardware file, and their GPUs.

    Raises:
        JaxinferError: a group names an unknown GPU, or has another platform; see ``place_groups``.
    """
    cluster, own = resolved.cluster, resolved.run_file.own
    placement = place_groups(cluster, resolved.run_file.simulate, own)
    for_attention = {g for each in cluster.instances.values() for g in each.attention_groups}
    groups = {}
    for name, group in (placement.cluster if placement else cluster).groups.items():
        try:
            home = cluster.groups[cluster.home(name)]
            if home.platform == "cpu":
                raise JaxinferError("a modelled group is a GPU: platform cpu does not apply")
            kind = group.kind or home.kind
            if kind is None:
                raise OptionError("kind is missing, must name the GPU that is modelled")
            gpu = placement.gpu(name) if placement else own.gpu(kind)
        except JaxinferError as error:
            raise within(f"groups.{name}", error) from None
        stage_devices = 1 if name in for_attention else group.stage_devices
        groups[name] = SiteGroup(
            name, gpu, kind, group.devices, stage_devices, group.mesh, group.slowdown, group.shares
        )
    return placement, groups


def model_site(resolved: Resolved) -> ModelledSite:
    """Compute the values of a cluster whose groups name GPUs, or nodes of a hardware file.

    Raises:
        JaxinferError: a GPU, a model or a link is missing, or the instances cannot divide the model
            in this way; see ``model_groups``.
    """
    run_file = resolved.run_file
    placement, groups = model_groups(resolved)
    known: Catalogue = placement.known if placement else run_file.own
    model = model_shape(run_file.require_model(), known)
    longest = {name: each.max_model_len or 0 for name, each in resolved.cluster.instances.items()}
    for name, length in longest.items():
        if length > (model.max_position_embeddings or inf):
            raise OptionError(
                f"instances.{name}.max_model_len is {length}, the model was made for "
                f"{model.max_position_embeddings}"
            )
    if max(length or inf for length in longest.values()) <= model.sliding_window:
        # No sequence is longer than the window.
        model = model.model_copy(update={"sliding_window": 0, "windowed_layers": 0})
    path = partial(_path, resolved.cluster, placement)
    stages = {}
    sharing = run_file.simulate.shared_experts
    check_sharing(sharing, resolved.cluster, model)
    check_played(resolved.cluster)
    for name, instance in resolved.cluster.instances.items():
        sharers = len(sharing) if name in sharing else 1
        try:
            stages[name] = _stages(instance, model, groups, run_file.simulate, path, sharers)
        except JaxinferError as error:
            raise within(f"instances.{name}", error) from None
    paths = {
        (source, dest): path(groups[source], groups[dest], "KV")
        for source, dest in _ends(stages, resolved.pairs)
    }
    relative = run_file.simulate.fit == "relative"
    return ModelledSite(resolved, placement, groups, model, stages, paths, sharing, relative)


def _stages(
    instance: InstanceConfig,
    model: ModelShape,
    groups: Mapping[str, SiteGroup],
    options: SimulateOptions,
    path: _PathOf,
    sharers: int,
) -> list[SiteStage]:
    if instance.dtype == "float32":
        raise OptionError("dtype is float32, must be auto or bfloat16: others are not modelled")
    own = [groups[place.group] for place in instance.places]
    parts, last = _parts(instance, model, own, options), len(own) - 1
    parts = [
        replace(part, sharers=sharers, expert_size=_expert_size(options.of(group.name)))
        for part, group in zip(parts, own, strict=True)
    ]
    found = []
    for i, (place, group, part) in enumerate(zip(instance.places, own, parts, strict=True)):
        by_parts = place.attention or place.ffn
        costs = (_roofline if by_parts else SimulateOptions.of)(options, place.group)
        attention = _attention(place, groups, options, path)
        ffn = _ffn(place, groups, options, path)
        hop = path(group, own[i + 1], "hidden states") if i < last else None
        part = replace(part, has_ffn=ffn is None)
        found.append(SiteStage(group, part, costs, attention, hop, ffn))
    return found


def _expert_size(costs: SimulateOptions) -> float | None:
    """Return the bytes of an expert's weight if the tables have another format for experts."""
    tables = costs.tables
    published = tables if isinstance(tables, PublishedTables) else None
    return EXPERT_SIZES[published.experts] if published and published.experts else None


def _parts(
    instance: InstanceConfig,
    model: ModelShape,
    groups: Sequence[SiteGroup],
    options: SimulateOptions,
) -> list[StagePart]:
    """Return each stage's part of the model, by stated layers or the groups' peak FLOPs.

    Args:
        groups: group of each stage.
    """
    flows = [
        _flow(
            instance,
            model,
            group,
            not (place.attention or place.ffn or _is_measured(options, group)),
        )
        for group, place in zip(groups, instance.places, strict=True)
    ]
    for group, place, flow in zip(groups, instance.places, flows, strict=True):
        if flow and place.attention:
            raise JaxinferError(
                f"groups.{group.name}: a stage with attention groups has neither layout nor mesh: "
                "leave them out"
            )
        if flow:
            continue
        for heads in (model.num_attention_heads, model.num_key_value_heads):
            if heads % (count := group.stage_devices):
                raise JaxinferError(
                    f"groups.{group.name}: {count} devices do not divide the model's {heads} heads"
                )
    speeds = [group.gpu.bf16_tflops * group.stage_devices for group in groups]
    total, last = model.num_hidden_layers, len(groups) - 1
    layers = count_layers(total, instance.places, lambda number: speeds[number])
    if instance.segments > min(layers):
        raise OptionError(f"segments is {instance.segments}, a stage has {min(layers)} layers")
    sizes = stored_sizes(model, instance.weight_dtype, instance.kv_cache_dtype)
    limits = StepLimits(
        max_num_seqs=instance.max_num_seqs,
        max_num_batched_tokens=instance.max_num_batched_tokens,
        max_pages=-(-(instance.max_model_len or 1) // instance.page_size),
        page_size=instance.page_size,
        given_buckets=instance.token_buckets,
    )
    return [
        StagePart(
            group.gpu, group.kind, model, layers[i], layers[i] / total, i == 0, i == last,
            group.stage_devices, *sizes, limits, flows[i],
        )
        for i, group in enumerate(groups)
    ]  # fmt: skip


def _is_measured(options: SimulateOptions, group: SiteGroup) -> bool:
    """Tell whether a group's steps use measured times, or share experts."""
    return bool(options.shared_experts or options.of(group.name).measured)


def _flow(
    instance: InstanceConfig, model: ModelShape, group: SiteGroup, is_free: bool
) -> LayoutFlow | None:
    """Return the flow of a layer on a group's mesh; None if neither layout nor mesh is given.

    Args:
        is_free: whether there may be more devices than KV heads, so that several have the same
            head, as in a real run.
    """
    kv_heads, devices = model.num_key_value_heads, group.stage_devices
    has_copies = (
        devices > kv_heads and devices % kv_heads == model.num_attention_heads % devices == 0
    )
    if instance.layout is None and group.mesh is None and not (is_free and has_copies):
        return None
    mesh = group.mesh or {DEFAULT_AXIS: group.stage_devices}
    try:
        layout = load_layout(instance.layout)
        check_pages(layout)
        check_layout(layout, model)
        return LayoutFlow(model, layout, mesh)
    except JaxinferError as error:
        raise within("layout", error) from None


def _attention(
    place: StageConfig, groups: Mapping[str, SiteGroup], options: SimulateOptions, path: _PathOf
) -> list[SiteAttention]:
    """Return the groups for a stage's KV heads other than its own."""
    found = []
    for each in place.attention:
        _check_no_steps(options, each.group)
        group, costs = groups[each.group], _roofline(options, each.group)
        way = path(groups[place.group], group, "KV")
        found.append(SiteAttention(group, costs, each.num_pages, way))
    return found


def _ffn(
    place: StageConfig, groups: Mapping[str, SiteGroup], options: SimulateOptions, path: _PathOf
) -> SiteFfn | None:
    """Return the group for a stage's FFN, if it is another one."""
    if place.ffn is None:
        return None
    _check_no_steps(options, place.ffn)
    group, costs = groups[place.ffn], _roofline(options, place.ffn)
    return SiteFfn(group, costs, path(groups[place.group], group, "FFN inputs"))


def _check_no_steps(options: SimulateOptions, group: str) -> None:
    """Refuse times of steps for a group that computes parts of others' steps."""
    own = options.groups.get(group, GroupCosts())
    for name in ("step_s", "sequence_s"):
        if getattr(own, name) is not None:
            raise JaxinferError(
                f"simulate.groups.{group}.{name}: leave it out, steps are those of the "
                "stages that the group works for"
            )


def _roofline(options: SimulateOptions, group: str) -> SimulateOptions:
    """Return the costs of a group that computes parts of layers; only the roofline is allowed."""
    costs = options.of(group)
    if kind := costs.measured:
        raise JaxinferError(
            f"{costs.where}the attention of {group} cannot be told from {kind}: stages with "
            "attention or FFN groups, and those groups, go by flops and bandwidth"
        )
    return costs


def _path(
    cluster: ClusterConfig,
    placement: Placement | None,
    here: SiteGroup,
    there: SiteGroup,
    what: str,
) -> NetworkPath:
    """Return the path between two groups, or between the GPUs of one.

    If both groups are on one node, KV, and what goes to an FFN group, use as many pairs of GPUs as
    the smaller group has devices.
    Within a group, it uses as many as one of its stages has, since the other end is another stage.
    """
    source, dest, pairs = here.name, there.name, 1
    if what != "hidden states":
        pairs = here.stage_devices if source == dest else min(here.devices, there.devices)
    if placement:
        return placement.path(source, dest, pairs)
    if source == dest:
        return NetworkPath({(source, dest): pairs * here.gpu.link_gb_s * 1e9}, 0.0)
    link = cluster.link(source, dest)
    if link is None and cluster.home(source) == cluster.home(dest):
        # From pages to a slab, and from the slab to pages: read twice and written twice.
        return NetworkPath({(source, dest): pairs * here.gpu.memory_gb_s * 1e9 / 4}, 0.0)
    if link is None:
        raise JaxinferError(
            f"links: none between {source} and {dest}, where {what} must go: add "
            f"{{between: [{source}, {dest}], gb_s: ...}}"
        )
    return NetworkPath({(source, dest): link.gb_s * 1e9}, link.latency_s)


def _ends(
    stages: Mapping[str, Sequence[SiteStage]], pairs: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], None]:
    """Return pairs of groups between which KV may be sent, each once, in a fixed order.

    Between instances, each stage sends to those that share layers with it. Within an instance, KV
    heads of a stage move between all groups where they may lie. Such an instance hands nothing over
    to others.
    """
    found: dict[tuple[str, str], None] = {}
    spread = [name for name, own in stages.items() if any(stage.attention for stage in own)]
    layers = {name: tuple(stage.part.layers for stage in own) for name, own in stages.items()}
    for source, dest in pairs:
        if source not in spread and dest not in spread:
            for i, j, _ in shared_layers(layers[source], layers[dest]):
                found[stages[source][i].group.name, stages[dest][j].group.name] = None
    for stage in chain.from_iterable(stages[name] for name in spread):
        found |= dict.fromkeys(permutations([group.name for group in stage.groups], 2))
    return found
