"""Pages of KV that the memory of modelled groups holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.engine import GPU_SHARE
from jaxinfer.config.site_values import SiteGroup
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZE, Gpu

# Entries of 8 bits have a float32 for each page and head, of keys and of values.
_SCALES = 2 * 4


def count_pages(
    instance: InstanceConfig, reserve_gb: float | None, part: StagePart, group: str
) -> int:
    """Pages of a stage's pool, the padding page included.

    Raises:
        JaxinferError: the GPU's memory holds fewer than are asked for, or than two.
    """
    gpu, weights = part.gpu, part.weight_bytes
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


def reserved_bytes(instance: InstanceConfig, reserve_gb: float | None, part: StagePart) -> float:
    """Return the bytes of a GPU that are neither for weights nor for KV."""
    if reserve_gb is not None:
        return reserve_gb * 1e9
    model = part.model
    numbers = 2 * model.hidden_size + 3 * model.intermediate_size
    reserve: float = instance.max_num_batched_tokens * numbers * ITEMSIZE
    reserve += 4 * instance.max_num_seqs * model.vocab_size
    if part.flow:
        reserve += part.flow.gathered_weights * part.mean_weight_size
    return reserve


def page_bytes(instance: InstanceConfig, part: StagePart) -> int:
    """Return the bytes of a page, of all KV heads and layers of a stage."""
    model = part.model
    scales = _SCALES * part.layers * model.num_key_value_heads if part.kv_size == 1 else 0
    return model.kv_bytes(part.layers, part.kv_size) * instance.page_size + scales


def _memory(instance: InstanceConfig, gpu: Gpu, is_given: bool) -> float:
    """Bytes of one GPU for weights, KV and all else.

    The fraction is for a pool that takes what there is; one that is given may take all.
    """
    return gpu.memory_gb * 1e9 * (1.0 if is_given else instance.memory_fraction or GPU_SHARE)


@dataclass(frozen=True)
class AttentionGroup:
    """A device group that has KV heads of some stages, and no weights.

    Attributes:
        group: whose devices share them evenly.
        given: stage -> pages, or None for those that its memory has room for.
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
    """Pages of the pools of attention groups, by stage and group, as if all KV heads lay there.

    A request needs room in all stages. So a group's memory, as far as it is not given away, goes to
    the stages that have the fewest pages with their own group and the groups before, until they
    have equally many; each stage that it serves has one page at least. Beside KV there is room for
    the queries, keys, values and outputs of one layer of the largest step.

    Args:
        own: pages of the stages' own groups.

    Raises:
        JaxinferError: a group's memory holds fewer than are given, or than one for each stage.
    """
    bytes_of = [page_bytes(instance, part) for part in parts]
    counted = list(own)
    for asked in groups:
        for stage, pages in asked.given.items():
            counted[stage] += pages - 1 if pages else 0
    found: dict[tuple[int, str], int] = {}
    for asked in groups:
        group, room = asked.group, _room(instance, parts, asked)
        # The pools' padding pages are of one head, and one on each device.
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
    """Bytes for KV, on all devices of the group."""
    group = asked.group
    memory = _memory(instance, group.gpu, None not in asked.given.values())
    if asked.reserve_gb is not None:
        return group.devices * (memory - asked.reserve_gb * 1e9)
    model = parts[0].model
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads)
    reserve = instance.max_num_batched_tokens * heads * model.head_size * ITEMSIZE
    return group.devices * memory - reserve


def level(counts: Sequence[int], each: Sequence[float], room: float) -> list[int] | None:
    """Return how many more of each there are to be, so that the fewest are as many as possible.

    Args:
        counts: numbers that are there; ``each``: how much of the ``room`` one more takes.

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
