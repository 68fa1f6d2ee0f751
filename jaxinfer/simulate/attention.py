"""Models instances with attention groups: where KV heads may lie, their costs and their links."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.nodes import NetworkPath
from jaxinfer.config.site_values import SiteStage
from jaxinfer.config.stages import head_pages
from jaxinfer.hardware.catalogue import ITEMSIZE
from jaxinfer.serving.page_pool import CountedPages, PagePool, Shard
from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.simulate.costs.model import StageCost
from jaxinfer.simulate.kv_capacity import AttentionGroup, count_attention_pages
from jaxinfer.simulate.spread import ModelledSpreadStage, ShardCost, Visit
from jaxinfer.simulate.stage_path import StagePath


@dataclass(frozen=True)
class ModelledShard:
    """A device on which KV heads of a stage can lie.

    Attributes:
        layers: number of layers in the stage.
        heads: number of KV heads that can lie here, if each page of the pool holds one head; 0 if
            the stage has no other shard, so that its heads lie together.
        is_own: whether it is the stage's own group, where all heads lie by default.
        num_pages: number of pages of the group, counted as if all heads lay there, including the
            padding page.
        fit: see ``Shard``.
        dense: see ``Shard``.
        cost: cost of its attention, if modelled.
        devices: number of the group's devices; each is a shard with an equal pool.
        device: number of this device.
    """

    stage: int
    group: str
    layers: int
    heads: int
    is_own: bool
    num_pages: int
    fit: AttentionFit | None
    dense: Callable[[float], float] | None = None
    cost: ShardCost | None = None
    devices: int = 1
    device: int = 0

    @property
    def num_head_pages(self) -> int:
        """Number of pages of the pool, including the padding page."""
        return head_pages(self.group, self.num_pages, max(self.heads, 1), self.devices)

    def new(self, page_size: int, pool: type[PagePool] = CountedPages) -> Shard:
        """Return an empty shard, with its pool of pages, for the scheduler."""
        first = self.stage * self.heads
        slices = tuple(range(first, first + max(self.heads, 1))) if self.is_own else ()
        pages = pool(self.num_head_pages, page_size)
        return Shard(
            pages, slices, self.stage, self.group, self.fit, self.layers, self.dense, self.device
        )


def spread_stage(place: SiteStage, first: int) -> ModelledSpreadStage:
    """Make the cost model of a stage with attention groups.

    Args:
        first: number of the own group's shard.
    """
    part = place.part
    stage = ModelledSpreadStage.of(part, place.costs)
    stage.first = first
    queries = 2 * part.model.num_attention_heads // part.model.num_key_value_heads
    exchanged = (queries + 2) * part.model.head_size * ITEMSIZE
    for each in place.attention:
        there = replace(part, gpu=each.group.gpu, devices=1)
        (cost,) = ModelledSpreadStage.of(there, each.costs).shards
        path, devices = each.path, each.group.devices
        # All of them exchange at once, over the group's links.
        per_query = devices * exchanged / path.rate
        cost = replace(cost, per_query=per_query, round_trip=2 * path.latency_s)
        stage.shards += (cost,) * devices
    return stage


def spread_shards(
    instance: InstanceConfig,
    places: Sequence[SiteStage],
    pages: Sequence[int],
    stages: Sequence[StageCost],
) -> tuple[ModelledShard, ...]:
    """Return the shards of each stage: its own group first, then each attention device.

    Args:
        pages: numbers of pages on the stages' own groups.

    Raises:
        JaxinferError: the memory of an attention group is too small.
    """
    parts = [place.part for place in places]
    others = count_attention_pages(instance, parts, pages, _attention_groups(places))
    found, halves = [], instance.half_batches != "never"
    for number, (place, part, stage) in enumerate(zip(places, parts, stages, strict=True)):
        costs = stage.shards if isinstance(stage, ModelledSpreadStage) else (None,)
        seen = Counter[str]()
        for group, cost in zip(place.groups, costs, strict=True):
            is_own, name = group is place.group, group.name
            count = pages[number] if is_own else others[number, name]
            heads = part.model.num_key_value_heads if place.attention else 0
            dense = (
                stage.dense
                if is_own and halves and isinstance(stage, ModelledSpreadStage)
                else None
            )
            # As in a profile: a stage without another shard has no time that its placement could
            # change.
            fit = cost.fit if cost else AttentionFit(0.0, 0.0, 0.0)
            found.append(
                ModelledShard(
                    number, name, part.layers, heads, is_own, count, fit, dense, cost,
                    1 if is_own else group.devices, seen[name],
                )
            )  # fmt: skip
            seen[name] += 1
    return tuple(found)


def _attention_groups(places: Sequence[SiteStage]) -> list[AttentionGroup]:
    """Return the attention groups of an instance, in the order of its stages."""
    found: dict[str, AttentionGroup] = {}
    for number, place in enumerate(places):
        for each in place.attention:
            new = AttentionGroup(each.group, {}, each.costs.reserve_gb)
            found.setdefault(each.group.name, new).given[number] = each.num_pages
    return list(found.values())


def slice_lanes(
    shards: Sequence[ModelledShard],
    token_bytes: int,
    paths: Mapping[tuple[str, str], NetworkPath],
) -> dict[tuple[int, int], StagePath]:
    """Return the lane between any two shards of a stage, for one token and one KV head.

    Args:
        token_bytes: bytes of one token's KV in one layer, over all heads.
    """
    found = {}
    for (i, source), (j, dest) in permutations(enumerate(shards), 2):
        if source.stage == dest.stage:
            num_bytes = token_bytes // source.heads * source.layers
            path = paths[source.group, dest.group]
            pair = StagePath(source.stage, num_bytes, tuple(path.links), path.latency_s)
            found[i, j] = pair
    return found


def shared_visits(shards: Sequence[ModelledShard], num_stages: int) -> list[list[Visit]]:
    """Return, for each stage, its attention work on devices that work for several stages."""
    counts = Counter((shard.group, shard.device) for shard in shards)
    found: list[list[Visit]] = [[] for _ in range(num_stages)]
    for number, shard in enumerate(shards):
        device = shard.group, shard.device
        if shard.cost and not shard.is_own and counts[device] > 1:
            visit = Visit(device, number, shard.cost, shard.layers)
            found[shard.stage].append(visit)
    return found
