"""Seconds and bytes of a step in one layout, by closed forms: no compiler, and no JAX.

Each product takes as long as its FLOPs or its bytes, whichever take longer (Williams et al., 2009),
at the card's peaks. Collectives are rings and hide behind nothing. Of a mixture's experts, tokens
meet those that they are sent to, as in a grouped product: of E experts, T tokens that are sent to k
each meet E (1 - (1 - k / E)^T).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.models.layout_checks import check_apart, check_divides, check_names, check_on_mesh
from jaxinfer.models.layouts import Layout, most_ways, ways
from jaxinfer.sharding.collectives import Collective, moved
from jaxinfer.sharding.dataflow import Flow, Product, head_flow, layer_flow
from jaxinfer.sharding.shapes import Sizes, layer_parameters, letters_of, padded, table_of


@dataclass(frozen=True)
class Link:
    """What one axis of a mesh is connected by.

    Attributes:
        gb_s: 10^9 bytes per second that a device sends in a ring.
        each_s: seconds of each collective besides; ``hop_s``: of each step of its ring.
    """

    gb_s: float
    each_s: float = 0.0
    hop_s: float = 0.0


def links_of(gpu: Gpu, mesh: Sizes) -> dict[str, Link]:
    """The links within a node on all axes, at the rates that collectives get of them."""
    return {axis: Link(*gpu.collective) for axis in mesh}


@dataclass(frozen=True)
class Seconds:
    """Seconds by what they are spent on."""

    compute: float = 0.0
    memory: float = 0.0
    links: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.compute + other.compute, self.memory + other.memory, self.links + other.links
        )

    def __mul__(self, count: float) -> "Seconds":
        return Seconds(self.compute * count, self.memory * count, self.links * count)

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.memory + self.links

    @property
    def binds(self) -> str:
        """What most are spent on: compute, memory or links."""
        return max(("compute", "memory", "links"), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class StepCost:
    """What a step costs in one layout.

    Attributes:
        layer, head: seconds of one layer, and of the head.
        step: of all layers and the head.
        weight_bytes: of one device, embeddings and head included.
        kv_bytes: of one token's keys and values in all layers, on one device.
    """

    layer: Seconds
    head: Seconds
    step: Seconds
    weight_bytes: float
    kv_bytes: float


class LayoutCosts:
    """Costs of steps of any size in one layout.

    Args:
        model: as its checkpoint has it; heads and columns that do not divide are padded.
        mesh: axis -> devices, the first one the outermost.
        links: of each axis; by default those within the card's node.
        itemsize: bytes of an activation's number; ``weight_size`` and ``kv_size``, of a weight's
            and of a KV entry's, are by default the same.

    Attributes:
        model: with what is padded.

    Raises:
        JaxinferError: the layout cannot be on this mesh, or not for this model.
    """

    def __init__(
        self,
        model: ModelShape,
        layout: Layout,
        mesh: Sizes,
        gpu: Gpu,
        links: Mapping[str, Link] | None = None,
        itemsize: int = 2,
        weight_size: float | None = None,
        kv_size: float | None = None,
    ) -> None:
        check_names(layout, mesh)
        self.model, self.layout, self.mesh = padded(model, layout, mesh), layout, mesh
        check_on_mesh(layout, mesh, self.model)
        self._links = links or links_of(gpu, mesh)
        self._flops, self._bytes_s = gpu.bf16_tflops * 1e12, gpu.memory_gb_s * 1e9
        self._itemsize, self._weight_size = itemsize, weight_size or itemsize
        self._kv_size = kv_size or itemsize
        self._rows = most_ways("T", layout, mesh)
        self._layer_numbers = sum(
            self._local(*each) for each in layer_parameters(self.model).items()
        )
        # What grows with tokens does so in proportion: flows of 1 and 2 tokens have all.
        self._layer = [layer_flow(self.model, layout, mesh, tokens) for tokens in (1, 2)]
        self._head = [head_flow(self.model, layout, mesh, rows) for rows in (1, 2)]

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one device; of norms and biases there are few."""
        D, V = self.model.hidden_size, self.model.vocab_size
        names = ["embed_VD"] if self.model.tie_word_embeddings else ["embed_VD", "head_VD"]
        tables = sum(self._local(name, (V, D)) for name in names)
        return (self.model.num_hidden_layers * self._layer_numbers + tables) * self._weight_size

    def _local(self, path: str, shape: tuple[int, ...]) -> float:
        table, numbers = table_of(path, self.layout), 1.0
        check_apart(path, {k: table[k] for k in letters_of(path) if k in table}, self.mesh)
        for letter, size in zip(letters_of(path), shape, strict=True):
            pieces = ways(table.get(letter, ()), self.mesh)
            check_divides(letter, path, size, pieces)
            numbers *= size / pieces
        return numbers

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values in all layers on one device."""
        model, pieces = self.model, ways(self.layout.kv.get("K", ()), self.mesh)
        numbers = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_size
        return numbers / pieces * self._kv_size

    def layer(self, tokens: float, pairs: float, entries: float, longest: float = 0.0) -> Seconds:
        """Seconds of one layer.

        Args:
            tokens: of the step.
            pairs: of a token and a KV entry that it sees.
            entries: KV entries that are read, of all sequences; ``longest``: of the longest one,
                which is read whole even where its tokens are cut.
        """
        rows = math.ceil(tokens / self._rows) * self._rows
        seconds = self._flow(self._layer, rows)
        attention = self._layer[0].attention
        assert attention
        share, H = attention.tokens, self.model.head_size
        flops = 4 * pairs * share * attention.heads * H
        read = 2 * max(entries * share, longest) * attention.kv_heads * H * self._kv_size
        return seconds + self._longer(flops, read)

    def head(self, rows: float) -> Seconds:
        """Seconds of the head for the rows that are sampled."""
        return self._flow(self._head, math.ceil(rows / self._rows) * self._rows)

    def step(self, tokens: int, sequences: int, context: int = 0) -> StepCost:
        """A step of sequences alike, each of which is sampled.

        Args:
            tokens: new ones of all sequences together.
            context: KV entries that each sequence has before.
        """
        new = tokens / sequences
        entries = sequences * (context + new)
        pairs = tokens * context + sequences * new * (new + 1) / 2
        layer = self.layer(tokens, pairs, entries, context + new)
        head = self.head(sequences)
        step = layer * self.model.num_hidden_layers + head
        return StepCost(layer, head, step, self.weight_bytes, self.kv_bytes)

    def _flow(self, flows: list[Flow], rows: float) -> Seconds:
        one, two = flows
        found = Seconds()
        for product, double in zip(one.products, two.products, strict=True):
            found += self._product(product, double.flops > product.flops, rows)
        for each, more in zip(one.collectives, two.collectives, strict=True):
            found += self._collective(each, rows if more.numbers > each.numbers else 1)
        return found

    def _product(self, product: Product, grows: bool, rows: float) -> Seconds:
        share, touched = 1.0, 1.0
        times = rows if grows else 1
        if product.experts:
            share = self.model.num_experts_per_tok / self.model.num_experts
            # Tokens that this device's experts choose from.
            touched = 1 - (1 - share) ** (product.rows * times)
        weights = product.weights * touched * self._weight_size
        moved_bytes = times * product.activations * share * self._itemsize
        return self._longer(times * product.flops * share, weights + moved_bytes)

    def _longer(self, flops: float, num_bytes: float) -> Seconds:
        compute, memory = flops / self._flops, num_bytes / self._bytes_s
        return Seconds(compute=compute) if compute > memory else Seconds(memory=memory)

    def _collective(self, each: Collective, times: float) -> Seconds:
        if {*"TEF"} <= {*each.letters}:
            times *= self.model.num_experts_per_tok / self.model.num_experts
        itemsize = self._itemsize if "T" in each.letters else self._weight_size
        return Seconds(links=ring_seconds(each, self._links, times * each.numbers * itemsize))


def ring_seconds(each: Collective, links: Mapping[str, Link], num_bytes: float) -> float:
    """Seconds of a ring through all axes of a collective, as slow as the slowest of their links.

    Args:
        num_bytes: of the array; see ``Collective.numbers``.
    """
    used = [links[axis] for axis in each.axes]
    hops = (each.devices - 1) * (2 if each.kind == "all-reduce" else 1)
    sent = moved(each.kind, each.devices) * num_bytes
    return (
        sent / (min(link.gb_s for link in used) * 1e9)
        + max(link.each_s for link in used)
        + hops * max(link.hop_s for link in used)
    )


def step_cost(
    model: ModelShape,
    layout: Layout,
    mesh: Sizes,
    tokens: int,
    sequences: int,
    context: int,
    gpu: Gpu,
    links: Mapping[str, Link] | None = None,
    itemsize: int = 2,
) -> StepCost:
    """One step's cost; for many steps in one layout, keep its ``LayoutCosts``.

    Args:
        tokens, sequences, context: see ``LayoutCosts.step``.

    Raises:
        JaxinferError: the layout cannot be on this mesh, or not for this model.
    """
    costs = LayoutCosts(model, layout, mesh, gpu, links, itemsize)
    return costs.step(tokens, sequences, context)
