"""Small clusters of unlike GPUs, and all plans that they allow."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.nodes import Hardware
from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.papers.hexgen2.capacity import ROLES, Modelled
from jaxinfer.papers.hexgen2.flow import KVNetwork, PlacedGroup, split
from jaxinfer.papers.hexgen2.full_steps import LengthStats
from jaxinfer.papers.hexgen2.gpus import Site
from jaxinfer.papers.hexgen2.moves import MemberPlan, as_plan
from jaxinfer.workload.lengths import BenchRequest

H100, A100, L40 = "H100-SXM", "A100-80G-SXM", "L40"
# HexGen-2's classes: heavy or light prefill, heavy or light decode (means of section 1.7).
CLASSES = {"HPLD": (2606, 72), "HPHD": (1210, 387), "LPHD": (229, 178), "LPLD": (356, 85)}
ENGINE: dict[str, Any] = {
    "page_size": 16,
    "enable_prefix_caching": False,
    "launch_ahead": False,
    "group": "g",
    "memory_fraction": 0.95,
}


def site_of(nodes: dict[str, tuple[str, int]], nic_gb_s: float = 12.5, **more: Any) -> Site:
    """Nodes by name, with a GPU and how many."""
    made = {
        name: {"gpu": gpu, "gpus": count, "nic_gb_s": nic_gb_s, "usd_per_hour": float(count)}
        for name, (gpu, count) in nodes.items()
    }
    data = {"source": "a test", "latency_s": 5e-5, "nodes": made} | more
    return Site(Hardware.model_validate(data), Catalogue())


def requests(prompt: int, output: int, count: int = 4) -> list[BenchRequest]:
    return [BenchRequest(None, prompt, output, 0.0) for _ in range(count)]


def modelled(
    site: Site, model: str = "opt-30b", work: str = "HPHD", **costs: Any
) -> tuple[Modelled, KVNetwork, float]:
    """Capacities, the network, and bytes of a request's KV."""
    shape = Catalogue().model(model)
    lengths = LengthStats.of(requests(*CLASSES[work]))
    options = SimulateOptions(**({"reserve_gb": 1.0, "step_s": 0.02} | costs))
    prefill = InstanceConfig(**ENGINE, max_num_batched_tokens=4096)
    engines = {"prefill": prefill, "decode": InstanceConfig(**ENGINE, max_num_seqs=32)}
    capacity = Modelled(site, shape, engines, options, lengths, (1, 2, 4, 8))  # type: ignore[arg-type]
    layer = lengths.prompt * shape.kv_bytes(1, 2)
    return capacity, KVNetwork(site, layer), layer * shape.num_hidden_layers


def every_plan(gpus: tuple[int, ...], able: Any) -> Iterator[MemberPlan]:
    """Multisets of groups with roles on nodes of so many GPUs, some of which may be idle.

    Args:
        able: whether a group, by its GPUs of each node, carries anything in a role.
    """
    kinds = [
        (counts, role)
        for counts in product(*(range(count + 1) for count in gpus))
        for role in ROLES
        if any(counts) and able(counts, role)
    ]

    def fill(left: tuple[int, ...], first: int) -> Iterator[list[Any]]:
        yield []
        for number in range(first, len(kinds)):
            counts, _ = kinds[number]
            if all(a <= b for a, b in zip(counts, left, strict=True)):
                rest = tuple(b - a for a, b in zip(counts, left, strict=True))
                for more in fill(rest, number):
                    yield [kinds[number], *more]

    for groups in fill(gpus, 0):
        yield as_plan(
            (tuple((node, count) for node, count in enumerate(counts) if count), role)
            for counts, role in groups
        )


def least_side(groups: Sequence[PlacedGroup]) -> float:
    """The most that any flow carries: all of one role together."""
    return min(sum(groups[i].carried.rate for i in side) for side in split(groups))
