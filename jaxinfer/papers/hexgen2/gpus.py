"""The available GPUs: nodes of a hardware file, and the links between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from jaxinfer.config.nodes import Hardware, NodeOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, Gpu
from jaxinfer.papers.hexgen2.stages import Signature

# GPUs of one instance: the number of GPUs by number of the node.
Group = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Site:
    """The nodes of a hardware file, by number, in the file's order.

    Attributes:
        known: shipped GPUs and models and those of both files, by name.
        prices: dollars per hour by the GPU's name, replacing the file's.
        rented: number of rented GPUs of each node; by default all.
    """

    hardware: Hardware
    known: Catalogue
    prices: Mapping[str, float] = field(default_factory=dict)
    rented: tuple[int, ...] | None = None

    @cached_property
    def names(self) -> list[str]:
        """Names of the nodes."""
        return list(self.hardware.nodes)

    @cached_property
    def nodes(self) -> list[NodeOptions]:
        """Nodes by number."""
        return list(self.hardware.nodes.values())

    @property
    def gpus(self) -> list[int]:
        """Number of GPUs of each node."""
        return [node.gpus for node in self.nodes] if self.rented is None else list(self.rented)

    @cached_property
    def type_of(self) -> list[int]:
        """Type of each node; equal nodes share a type, and a node with its own link has its own."""
        own = {name for link in self.hardware.links for name in link.between}
        numbers: dict[object, int] = {}
        found = []
        for name, node in zip(self.names, self.nodes, strict=True):
            what = node.model_dump(exclude={"gpus", "usd_per_hour", "watts"})
            key = (name if name in own else "", *what.values())
            found.append(numbers.setdefault(key, len(numbers)))
        return found

    @cached_property
    def types(self) -> list[int]:
        """Number of each type's first node."""
        return [self.type_of.index(number) for number in range(max(self.type_of) + 1)]

    @cached_property
    def gpu_of_type(self) -> list[Gpu]:
        """GPU of each type."""
        return [self.nodes[node].as_gpu(self.known) for node in self.types]

    @cached_property
    def kind_of_type(self) -> list[int]:
        """Kind of GPU of each type; types that differ only in the network have one kind."""
        numbers: dict[tuple[str, str], int] = {}
        keys = [
            (self.nodes[node].gpu, repr(gpu))
            for node, gpu in zip(self.types, self.gpu_of_type, strict=True)
        ]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @cached_property
    def usd_per_gpu(self) -> list[float] | None:
        """Dollars per hour of a GPU of each node; None if a price is missing."""
        if self.prices:
            listed = [self.prices.get(node.gpu) for node in self.nodes]
            return None if None in listed else [usd for usd in listed if usd is not None]
        prices = [node.usd_per_hour for node in self.nodes]
        known = [price for price in prices if price is not None]
        if len(known) < len(prices):
            return None
        return [usd / node.gpus for usd, node in zip(known, self.nodes, strict=True)]

    @cached_property
    def usd_by_kind(self) -> list[float]:
        """The lowest dollars per hour of a GPU of each kind.

        Raises:
            JaxinferError: a node has no price.
        """
        if self.usd_per_gpu is None:
            if self.prices:
                gpu = next(node.gpu for node in self.nodes if node.gpu not in self.prices)
                raise JaxinferError(f"prices: none of {gpu}, the list has others")
            name = next(n for n, node in self.hardware.nodes.items() if node.usd_per_hour is None)
            raise JaxinferError(f"node {name} of the hardware file has no usd_per_hour")
        found = [inf] * (max(self.kind_of_type) + 1)
        for usd, type_ in zip(self.usd_per_gpu, self.type_of, strict=True):
            found[self.kind_of_type[type_]] = min(found[self.kind_of_type[type_]], usd)
        return found

    def renting(self, gpus: Sequence[int]) -> "Site":
        """Return the site with only these numbers of GPUs of each kind, on the cheapest nodes."""
        usd, left = self.usd_per_gpu, list(gpus)
        assert usd is not None
        taken = [0] * len(self.nodes)
        for node in sorted(range(len(taken)), key=lambda n: (usd[n], n)):
            kind = self.kind_of_type[self.type_of[node]]
            taken[node] = min(left[kind], self.nodes[node].gpus)
            left[kind] -= taken[node]
        return Site(self.hardware, self.known, self.prices, tuple(taken))

    def hop(self, here: int, there: int) -> tuple[float, float]:
        """Return latency and seconds per byte between stages on two nodes, or within one."""
        if here == there:
            gpu = self.gpu_of_type[self.type_of[here]]
            return 0.0, 1 / (gpu.link_gb_s * 1e9)
        common = self.hardware.latency_s
        if link := self.hardware.link(self.names[here], self.names[there]):
            return common if link.latency_s is None else link.latency_s, 1 / (link.gb_s * 1e9)
        return common, 1 / (min(self.nodes[here].nic_gb_s, self.nodes[there].nic_gb_s) * 1e9)

    def hop_in(self, signature: Signature, here: int, there: int) -> tuple[float, float]:
        """Return latency and seconds per byte between two places of a signature; see ``hop``."""
        a, b = (self.types[signature[place][0]] for place in (here, there))
        if here != there and a == b:
            # These are two nodes of one type, which has only one number here.
            b = next(
                n for n, type_ in enumerate(self.type_of) if type_ == self.type_of[a] and n != a
            )
        return self.hop(a, b)

    def most_gb_s(self, node: int) -> float:
        """Return the largest GB/s that a node sends or receives: its card and its own links."""
        name = self.names[node]
        own = sum(link.gb_s for link in self.hardware.links if name in link.between)
        return self.nodes[node].nic_gb_s + own

    def network(self, here: int, there: int) -> Mapping[tuple[object, ...], float]:
        """Return the links that KV uses from one node to another, with their bytes per second."""
        a, b = self.names[here], self.names[there]
        if link := self.hardware.link(a, b):
            return {("link", a, b): link.gb_s * 1e9}
        return {
            ("nic", a, "out"): self.nodes[here].nic_gb_s * 1e9,
            ("nic", b, "in"): self.nodes[there].nic_gb_s * 1e9,
        }
