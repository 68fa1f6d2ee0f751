"""Computes how many pages of KV fit into the memory of modelled groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.engine import GPU_SHARE
from jaxinfer.config.site_values import SiteFfn, SiteGroup
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZE, Gpu

# Entries of 8 bits have a float32 scale for each page and head, for keys and for values.
_SCALES = 2 * 4


def count_pages(
    instance: InstanceConfig, reserve_gb: float | None, part: StagePart, group: str
) -> int:
    """Return the number of pages of a stage's pool, including the padding page.

    Raises:
        JaxinferError: the GPU's memory holds fewer pages than requested, or fewer than two.
    """
    gpu, weights = part.gpu, held_weights(instance, part)
    each = page_bytes(instance, part) / part.kv_ways
    memory = _memory(instance, gpu, instance.num_pages is not None)
    reserve = reserved_bytes(instance, reserve_gb, part)
    fits = int((memory - weights - reserve) // each)
    wanted = instance.num_pages or fits
    if wanted < 2 or wanted > fits:
        kept = "for activations" if reserve_gb is None else "by reserve_gb"
        raise JaxinferError(
            f"groups.{group}: {memory / 1e9:.1f} of {gpu.memory_gb:.1f} GB hold "
            f"{weights / 1e9:.2f} GB of weights, {reserve / 1e9:.2f} GB kept {kept}, and "
            f"{max(fits, 0)} KV pages of {each / 1e6:.2f} MB, not {max(wanted, 2)}"
        )
    return wanted


def held_weights(instance: InstanceConfig, part: StagePart) -> float:
    """Return the bytes of weights on a GPU; 0 for an instance that only keeps pages for others."""
    return part.weight_bytes if instance.computes else 0.0


def reserved_bytes(instance: InstanceConfig, reserve_gb: float | None, part: StagePart) -> float:
    """Return the bytes of a GPU that hold neither weights nor KV."""
    if reserve_gb is not None or not instance.computes:
        return (reserve_gb or 0.0) * 1e9
    model = part.model
    numbers = 2 * model.hidden_size + 3 * model.intermediate_size * part.has_ffn
    reserve: float = instance.max_num_batched_tokens * numbers * ITEMSIZE
    reserve += 4 * instance.max_num_seqs * model.vocab_size
    if part.flow:
        reserve += part.flow.gathered_weights * part.mean_weight_size
    return reserve


def check_ffn_memory(instance: InstanceConfig, part: StagePart, ffn: SiteFfn) -> None:
    """Refuse an FFN group whose memory is too small for a stage's FFN.

    Raises:
        JaxinferError: it states the sizes.
    """
    gpu, model, group = ffn.group.gpu, part.model, ffn.group
    weights = part.ffn_bytes / group.stage_devices
    numbers = 2 * model.hidden_size + 3 * model.intermediate_size
    reserve = float(instance.max_num_batched_tokens * numbers * ITEMSIZE)
    if ffn.costs.reserve_gb is not None:
        reserve = ffn.costs.reserve_gb * 1e9
    if weights + reserve > gpu.memory_gb * 1e9:
        raise JaxinferError(
            f"groups.{group.name}: {group.devices} x {gpu.memory_gb:.1f} GB do not hold an FFN of "
            f"{part.ffn_bytes / 1e9:.2f} GB and {reserve / 1e9:.2f} GB of activations on each"
        )


def page_bytes(instance: InstanceConfig, part: StagePart) -> int:
    """Return the bytes of a page, for all KV heads and layers of a stage."""
    model = part.model
    scales = _SCALES * part.layers * model.num_key_value_heads if part.kv_size == 1 else 0
    return model.kv_bytes(part.layers, part.kv_size) * instance.page_size + scales


def _memory(instance: InstanceConfig, gpu: Gpu, is_given: bool) -> float:
    """Return the bytes of one GPU that can be used.

    The memory fraction limits a pool that takes all free memory; a pool of given size may use all.
    """
    return gpu.memory_gb * 1e9 * (1.0 if is_given else instance.memory_fraction or GPU_SHARE)


@dataclass(frozen=True)
class AttentionGroup:
    """A device group that has KV heads of some stages, and no weights.

    Attributes:
        group: group whose devices share the heads evenly.
        given: stage -> number of pages; None for stages that share the remaining memory.
        reserve_gb: reserved GB of each GPU.
    """

    group: SiteGroup
    given: dict[int, int | None]
    reserve_gb: float | None


def count_attention_pages(
    instance: InstanceConfig,
    parts: Sequence[StagePart],
    own: Sequence[int],
    groups: Sequence[AttentionGroup],
) -> dict[tuple[int, str], int]:
    """Return the pages of attention groups, by stage and group, as if all KV heads lay there.

    A request needs room in all stages. The memory of a group that is not given to certain stages
    therefore goes to the stages with the fewest pages so far, counting their own group and earlier
    ones, until they have equally many. Each stage gets at least one page. A group also needs memory
    for the queries, keys, values and outputs of one layer of the largest step.

    Args:
        own: numbers of pages of the stages' own groups.

    Raises:
        JaxinferError: the memory of a group does not hold the given pages, or one per stage.
    """
    bytes_of = [page_bytes(instance, part) for part in parts]
    counted = list(own)
    for asked in groups:
        for stage, pages in asked.given.items():
            counted[stage] += pages - 1 if pages else 0
    found: dict[tuple[int, str], int] = {}
    for asked in groups:
        group, room = asked.group, _room(instance, parts, asked)
        # The pools' padding pages have one head, and there is one on each device.
        room -= sum(
            group.devices * bytes_of[n] / parts[n].model.num_key_value_heads for n in asked.given
        )
        given = {n: pages for n, pages in asked.given.items() if pages}
        room -= sum((pages - 1) * bytes_of[n] for n, pages in given.items())
        open_stages = [n for n in asked.given if n not in given]
        more = level([counted[n] for n in open_stages], [bytes_of[n] for n in open_stages], room)
        if more is None:
            wanted = ", ".join(
                f"{given.get(n, 2)} for stages[{n}] of {bytes_of[n] / 1e6:.2f} MB"
                for n in asked.given
            )
            raise JaxinferError(
                f"groups.{group.name}: {group.devices} x {group.gpu.memory_gb:.1f} GB are too "
                f"little for the KV pages {wanted}"
            )
        for stage, pages in zip(open_stages, more, strict=True):
            given[stage] = pages + 1
            counted[stage] += pages
        found |= {(stage, group.name): pages for stage, pages in given.items()}
    return found


def _room(instance: InstanceConfig, parts: Sequence[StagePart], asked: AttentionGroup) -> float:
    """Return the bytes for KV on all devices of the group."""
    group = asked.group
    memory = _memory(instance, group.gpu, None not in asked.given.values())
    if asked.reserve_gb is not None:
        return group.devices * (memory - asked.reserve_gb * 1e9)
    model = parts[0].model
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads)
    reserve = instance.max_num_batched_tokens * heads * model.head_size * ITEMSIZE
    return group.devices * memory - reserve


def level(counts: Sequence[int], each: Sequence[float], room: float) -> list[int] | None:
    """Return how many items to add to each count, so that the smallest is as large as possible.

    Args:
        counts: present numbers.
        each: how much of the ``room`` one more item takes.

    Returns:
        At least one more of each; None without room for that.
    """

    def more(goal: int) -> list[int]:
        return [max(goal - count, 1) for count in counts]

    def takes(goal: int) -> float:
        return sum(n * size for n, size in zip(more(goal), each, strict=True))

    low = min(counts, default=0)
    if takes(low) > room:
        return None
    high = low + int(room // min(each)) + 1 if each else low
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(middle) <= room else (low, middle - 1)
    return more(low)
