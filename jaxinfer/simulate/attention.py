"""Instances with attention groups: where the KV heads of their stages may lie, what attention takes
there, and what lies between.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.costs import GroupCosts, SimulateOptions, measured_kind
from jaxinfer.config.resolve import Resolved
from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.network import Link
from jaxinfer.options.validation import OptionError
from jaxinfer.serving.page_pool import CountedPages, Shard
from jaxinfer.simulate.costs.model import ITEMSIZE, StageCost, StagePart
from jaxinfer.simulate.kv_capacity import AttentionGroup, count_attention_pages
from jaxinfer.simulate.spread import ShardCost, SpreadStage, Visit
from jaxinfer.simulate.world import StagePair


@dataclass(frozen=True)
class ModelledShard:
    """Where KV heads of a stage may lie.

    Attributes:
        layers: of the stage; ``heads``: of the model. A page of the pool is of one of them.
        is_own: whether it is the stage's own group, where all heads lie by default.
        num_pages: as if all heads lay here, the padding page included.
        cost: of its attention; None where the stage has no other shard.
        dense: see ``Shard``.
    """

    stage: int
    group: str
    layers: int
    heads: int
    is_own: bool
    num_pages: int
    cost: ShardCost | None
    dense: Callable[[float], float] | None = None

    @property
    def num_head_pages(self) -> int:
        """Pages of the pool, the padding page included."""
        return (self.num_pages - 1) * self.heads + 1

    def new(self, page_size: int) -> Shard:
        """The scheduling side, empty."""
        first = self.stage * self.heads
        slices = tuple(range(first, first + self.heads)) if self.is_own else ()
        pool = CountedPages(self.num_head_pages, page_size)
        fit = self.cost.fit if self.cost else None
        return Shard(pool, slices, self.stage, self.group, fit, self.layers, self.dense)


def spread_stage(site: Resolved, place: StageConfig, part: StagePart, first: int) -> SpreadStage:
    """How long the steps of a stage with attention groups take.

    Args:
        first: number of the own group's shard.

    Raises:
        JaxinferError: costs are measured, an option has no use, or a link is missing.
    """
    options = site.run_file.simulate
    stage = SpreadStage.of(part, _roofline(options, place.group))
    stage.first = first
    queries = 2 * part.model.num_attention_heads // part.model.num_key_value_heads
    exchanged = (queries + 2) * part.model.head_size * ITEMSIZE
    for group in place.attention_groups:
        own = options.groups.get(group, GroupCosts())
        for name in ("step_s", "sequence_s"):
            if getattr(own, name) is not None:
                raise OptionError(
                    f"simulate.groups.{group}.{name}: leave it out, steps are those of the stages "
                    "that the group works for"
                )
        devices = site.groups[group].devices
        there = replace(part, gpu=site.gpus[group], devices=devices)
        (cost,) = SpreadStage.of(there, _roofline(options, group)).shards
        path = site.path(place.group, group, "KV")
        cost = replace(cost, per_query=exchanged / path.rate, round_trip=2 * path.latency_s)
        stage.shards += (cost,)
    return stage


def _roofline(options: SimulateOptions, group: str) -> SimulateOptions:
    """What holds for a group.

    Raises:
        JaxinferError: that is no roofline's.
    """
    costs = options.of(group)
    if kind := measured_kind(costs):
        raise JaxinferError(
            f"{costs.where}the attention of {group} cannot be told from {kind}: stages with "
            "attention groups, and those groups, go by flops and bandwidth"
        )
    return costs


def spread_shards(
    site: Resolved,
    instance: InstanceConfig,
    parts: Sequence[StagePart],
    pages: Sequence[int],
    stages: Sequence[StageCost],
) -> tuple[ModelledShard, ...]:
    """Where the KV heads of each stage may lie: its own group, then its attention groups.

    Args:
        pages: of the stages' own groups.

    Raises:
        JaxinferError: the memory of an attention group is too small.
    """
    others = count_attention_pages(instance, parts, pages, _attention_groups(site, instance))
    found, halves = [], instance.half_batches != "never"
    for number, (place, part, stage) in enumerate(zip(instance.places, parts, stages, strict=True)):
        costs = stage.shards if isinstance(stage, SpreadStage) else (None,)
        for group, cost in zip((place.group, *place.attention_groups), costs, strict=True):
            is_own = group == place.group
            count = pages[number] if is_own else others[number, group]
            heads = part.model.num_key_value_heads
            dense = stage.dense if is_own and halves and isinstance(stage, SpreadStage) else None
            shard = ModelledShard(number, group, part.layers, heads, is_own, count, cost, dense)
            found.append(shard)
    return tuple(found)


def _attention_groups(site: Resolved, instance: InstanceConfig) -> list[AttentionGroup]:
    """Those of an instance, in the order of its stages."""
    given: dict[str, dict[int, int | None]] = {}
    for number, place in enumerate(instance.places):
        for each in place.attention:
            given.setdefault(each.group, {})[number] = each.num_pages
    options = site.run_file.simulate
    return [
        AttentionGroup(
            group, site.gpus[group], site.groups[group].devices, pages, options.of(group).reserve_gb
        )
        for group, pages in given.items()
    ]


def slice_lanes(
    shards: Sequence[ModelledShard],
    token_bytes: int,
    link: Callable[[str, str], tuple[Sequence[Link], float]],
) -> dict[tuple[int, int], StagePair]:
    """From shard to shard of one stage, what goes there of one token and one KV head.

    Args:
        token_bytes: of the KV of one layer of one token, all heads.
        link: path and latency between two groups.
    """
    found = {}
    for (i, source), (j, dest) in permutations(enumerate(shards), 2):
        if source.stage == dest.stage:
            num_bytes = token_bytes // source.heads * source.layers
            path = link(source.group, dest.group)
            found[i, j] = StagePair(source.stage, num_bytes, *path)
    return found


def shared_visits(shards: Sequence[ModelledShard], num_stages: int) -> list[list[Visit]]:
    """Of each stage, what it has done by groups that work for several stages."""
    counts = Counter(shard.group for shard in shards)
    found: list[list[Visit]] = [[] for _ in range(num_stages)]
    for number, shard in enumerate(shards):
        if shard.cost and not shard.is_own and counts[shard.group] > 1:
            visit = Visit(shard.group, number, shard.cost, shard.layers)
            found[shard.stage].append(visit)
    return found
