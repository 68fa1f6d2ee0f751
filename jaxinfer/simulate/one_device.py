"""Memory of modelled devices that several stages share."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.site_values import ModelledSite, SiteStage
from jaxinfer.errors import JaxinferError
from jaxinfer.simulate.kv_capacity import held_weights, page_bytes, reserved_bytes

# The group of a device, and the device's number in it.
Device = tuple[str, int]


def _standing(site: ModelledSite) -> Iterator[tuple[str, int, SiteStage, Device]]:
    """Yield each stage of each instance, with its number and each of its devices."""
    used: Counter[str] = Counter()
    for name, stages in site.stages.items():
        for number, stage in enumerate(stages):
            group = stage.group
            for _ in range(group.stage_devices):
                yield name, number, stage, (group.shares or group.name, used[group.name])
                used[group.name] += 1


def with_shares(site: ModelledSite) -> dict[str, InstanceConfig]:
    """Return the instances' options; by default, users of a device share its memory equally."""
    users = Counter(device for *_, device in _standing(site))
    most: dict[str, int] = defaultdict(int)
    for name, _, _, device in _standing(site):
        most[name] = max(most[name], users[device])
    return {name: each.sharing_gpu(most[name]) for name, each in site.resolved.instances.items()}


def check_together(site: ModelledSite, pages: Mapping[str, Sequence[int]]) -> None:
    """Refuse stages that each fit on a shared device alone, but not together.

    Each stage counts its own weights here; within one process they would be loaded only once.

    Args:
        pages: numbers of pages of each instance's stages.
    """
    standing: dict[Device, dict[str, float]] = defaultdict(dict)
    memory: dict[Device, float] = {}
    for name, number, stage, device in _standing(site):
        options, part = site.resolved.instances[name], stage.part
        size = held_weights(options, part) + reserved_bytes(options, stage.costs.reserve_gb, part)
        size += pages[name][number] * page_bytes(options, part) / part.kv_ways
        standing[device][name] = standing[device].get(name, 0.0) + size
        memory[device] = part.gpu.memory_gb * 1e9
    for device, sizes in standing.items():
        total = sum(sizes.values())
        if len(sizes) > 1 and total > memory[device]:
            each = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sizes.items())
            raise JaxinferError(
                f"groups.{device[0]}: instances take {total / 1e9:.1f} GB of a device's "
                f"{memory[device] / 1e9:.1f} ({each}): give them fewer num_pages or less "
                "memory_fraction"
            )
