"""Seconds and bytes of a step in one layout, by closed forms: no compiler, and no JAX.

Each product takes the time of its FLOPs or of its bytes, whichever is longer (Williams et al.,
2009). Collectives are rings and are not hidden. In a mixture of experts, tokens use only the
experts that they are sent to, as in a grouped product: of E experts, T tokens that are sent to k
each use E (1 - (1 - k / E)^T). If tokens are exchanged, one round is assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from jaxinfer.hardware.catalogue import ITEMSIZE, Gpu, ModelShape
from jaxinfer.models.layout_checks import check_apart, check_divides, check_names, check_on_mesh
from jaxinfer.models.layouts import Layout, letters_of, most_ways, table_of, ways
from jaxinfer.sharding.dataflow import LayerFlow, head_flow, layer_flow
from jaxinfer.sharding.links import Link, links_of, ring_seconds
from jaxinfer.sharding.shapes import Sizes, layer_parameters, padded, up


@dataclass(frozen=True)
class Seconds:
    """Seconds spent on compute, memory and links."""

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
        """Sum of all parts."""
        return self.compute + self.memory + self.links

    @property
    def binds(self) -> str:
        """The part that takes the most time: compute, memory or links."""
        return max(("compute", "memory", "links"), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class LayoutStepCost:
    """The cost of a step in one layout.

    Attributes:
        layer: seconds of one layer.
        head: seconds of the head.
        step: seconds of all layers and the head.
        weight_bytes: bytes of weights on one device, including embeddings and head.
        kv_bytes: bytes of one token's keys and values in all layers, on a device that keeps them.
    """

    layer: Seconds
    head: Seconds
    step: Seconds
    weight_bytes: float
    kv_bytes: float


class _Coefficients(NamedTuple):
    """Kernels, and seconds of links by what they depend on.

    Attributes:
        kernels: for each kernel, FLOPs per token, bytes of its weights, other bytes per token, and
            rows per token that choose among its experts (or 0).
        token_s: seconds per token.
        slot_s: seconds per slot of an exchange.
        step_s: seconds per step.
    """

    kernels: list[tuple[float, float, float, float]]
    token_s: float
    slot_s: float
    step_s: float


class LayoutFlow:
    """The flow of a model's layers and head on each device of a mesh, per token.

    Attributes:
        model: model whose heads and columns divide; see ``shapes.padded``.
        layer: flow of one token through a layer.
        head: flow of one token through the head.
        rows: number of pieces of a step's tokens.
        head_rows: number of pieces of the head's tokens.
        kv_ways: number of pieces of KV heads.
        sequence_ways: number of pieces of KV's sequences.
        entry_ways: number of pieces of each sequence's tokens in KV.

    Raises:
        JaxinferError: the layout does not fit the mesh or the model.
    """

    def __init__(self, model: ModelShape, layout: Layout, mesh: Sizes) -> None:
        check_names(layout, mesh)
        self.model, self.layout, self.mesh = padded(model, layout, mesh), layout, mesh
        check_on_mesh(layout, mesh, self.model)
        self._layer_numbers = sum(
            self._local(*each) for each in layer_parameters(self.model).items()
        )
        D, V = self.model.hidden_size, self.model.vocab_size
        names = ["embed_VD"] + ["head_VD"] * (not self.model.tie_word_embeddings)
        self._tables = {name: self._local(name, (V, D)) for name in names}
        self.layer = layer_flow(self.model, layout, mesh, 1)
        self.head = head_flow(self.model, layout, mesh, 1)
        self.rows, self.head_rows = (most_ways(each, layout, mesh) for each in ("T", "TS"))
        self.kv_ways, self.sequence_ways, self.entry_ways = (
            ways(layout.kv.get(each, ()), mesh) for each in "KSC"
        )

    def parameters(self, layers: int, first: bool, last: bool) -> float:
        """Return the parameters of a stage on one device, without norms and biases.

        Args:
            first: whether the stage has the embedding.
            last: whether it has the head.
        """
        tied = self.model.tie_word_embeddings
        names = ["embed_VD"] if first or (last and tied) else []
        names += ["head_VD"] if last and not tied else []
        return layers * self._layer_numbers + sum(self._tables[name] for name in names)

    @property
    def gathered_weights(self) -> float:
        """Return the number of other devices' layer weights that a device holds temporarily."""
        return sum(each.moved for each in self.layer.collectives if "T" not in each.letters)

    def kv_bytes(self, layers: int, kv_size: float) -> float:
        """Return the bytes of one token's keys and values on a device that keeps them."""
        numbers = 2 * self.model.num_key_value_heads * self.model.head_size
        return layers * numbers / self.kv_ways * kv_size

    def _local(self, path: str, shape: tuple[int, ...]) -> float:
        letters, places = letters_of(path), table_of(path, self.layout)
        table = {letter: places[letter] for letter in letters if letter in places}
        check_apart(path, table, self.mesh)
        numbers = 1.0
        for letter, size in zip(letters, shape, strict=True):
            pieces = ways(table.get(letter, ()), self.mesh)
            check_divides(letter, path, size, pieces)
            numbers *= size / pieces
        return numbers


class LayoutCosts:
    """Costs of steps of any size in one layout.

    Args:
        links: link of each axis of the mesh.
        flops: fraction of the card's peak FLOPs that kernels reach.
        bandwidth: fraction of the card's memory bandwidth that kernels reach.
        weight_size: bytes per number of a weight.
        kv_size: bytes per number of a KV entry.
        table_size: bytes per number of the embedding and the head; by default that of other
            weights.
    """

    def __init__(
        self,
        flow: LayoutFlow,
        gpu: Gpu,
        links: Mapping[str, Link],
        flops: float = 1.0,
        bandwidth: float = 1.0,
        itemsize: int = ITEMSIZE,
        weight_size: float = ITEMSIZE,
        kv_size: float = ITEMSIZE,
        table_size: float | None = None,
    ) -> None:
        self.flow, self._links = flow, links
        self._table_size = table_size or weight_size
        self._per_flop = 1 / (gpu.bf16_tflops * 1e12 * flops)
        self._per_byte = 1 / (gpu.memory_gb_s * 1e9 * bandwidth)
        self._itemsize, self._weight_size, self._kv_size = itemsize, weight_size, kv_size
        E, k = flow.model.num_experts, flow.model.num_experts_per_tok
        self._share = k / E if E else 1.0
        self._layer = self._coefficients(flow.layer, weight_size)
        self._head = self._coefficients(flow.head, self._table_size)

    def _coefficients(self, flow: LayerFlow, size: float) -> _Coefficients:
        kernels = []
        for _, fused in groupby(flow.products, key=lambda each: (each.operand, each.experts)):
            parts = list(fused)
            share = self._share if parts[0].experts else 1.0
            activations = max(each.reads for each in parts) + sum(each.writes for each in parts)
            kernels.append(
                (
                    sum(each.flops for each in parts) * share * self._per_flop,
                    sum(each.weights for each in parts) * size * self._per_byte,
                    activations * share * self._itemsize * self._per_byte,
                    parts[0].rows if parts[0].experts else 0.0,
                )
            )
        token_s = slot_s = step_s = 0.0
        for each in flow.collectives:
            sent_s, fixed_s = ring_seconds(each, self._links)
            step_s += fixed_s
            if flow.exchange and "J" in each.letters:
                slot_s += sent_s * self._itemsize / flow.exchange.slots(1)
            elif "T" in each.letters:
                token_s += sent_s * self._itemsize
            else:
                step_s += sent_s * size
        return _Coefficients(kernels, token_s, slot_s, step_s)

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one device, without norms and biases, which are few."""
        layers = self.flow.model.num_hidden_layers
        held = self.flow.parameters(layers, False, False)
        tables = self.flow.parameters(layers, True, True) - held
        return held * self._weight_size + tables * self._table_size

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values in all layers, on a device that keeps them."""
        return self.flow.kv_bytes(self.flow.model.num_hidden_layers, self._kv_size)

    def kept_bytes(self, sequences: int, entries: int) -> float:
        """Return the bytes of KV on the device that keeps the most, for equal sequences."""
        by_sequences, by_entries = self.flow.sequence_ways, self.flow.entry_ways
        each = up(entries / sequences, by_entries) / by_entries
        return self.kv_bytes * each * up(sequences, by_sequences) / by_sequences

    def dense(self, tokens: float) -> Seconds:
        """Return the seconds of one layer without its attention."""
        return self._kernels(self._layer, up(tokens, self.flow.rows))

    def attention(self, pairs: float, entries: float, longest: float = 0.0) -> Seconds:
        """Return the seconds of one layer's attention, as one kernel.

        Args:
            pairs: number of pairs of a token and a KV entry that it sees.
            entries: number of KV entries that are read, of all sequences.
            longest: number of KV entries of the longest sequence, which is read whole even if its
                tokens are cut.
        """
        part, H = self.flow.layer.attention, self.flow.model.head_size
        assert part
        compute = 4 * pairs * part.tokens * part.entries * part.heads * H * self._per_flop
        seen = max(entries * part.tokens, longest) * part.entries
        read = 2 * seen * part.kv_heads * H * self._kv_size
        memory = read * self._per_byte
        return Seconds(compute=compute) if compute > memory else Seconds(memory=memory)

    def head(self, rows: float) -> Seconds:
        """Return the seconds of the head for the sampled rows."""
        return self._kernels(self._head, up(rows, self.flow.head_rows))

    def step(self, tokens: int, sequences: int, context: int = 0) -> LayoutStepCost:
        """Return the cost of a step of equal sequences that are all sampled.

        Args:
            tokens: number of new tokens of all sequences together.
            context: number of earlier KV entries of each sequence.
        """
        new = tokens / sequences
        entries = sequences * (context + new)
        pairs = tokens * context + sequences * new * (new + 1) / 2
        layer = self.dense(tokens) + self.attention(pairs, entries, context + new)
        head = self.head(sequences)
        step = layer * self.flow.model.num_hidden_layers + head
        return LayoutStepCost(layer, head, step, self.weight_bytes, self.kv_bytes)

    def _kernels(self, found: _Coefficients, T: int) -> Seconds:
        kernels, token_s, slot_s, step_s = found
        sums = [0.0, 0.0]
        for flops_s, weights_s, moved_s, choosing in kernels:
            touched = 1 - (1 - self._share) ** (choosing * T) if choosing else 1.0
            compute, memory = T * flops_s, weights_s * touched + T * moved_s
            sums[compute <= memory] += max(compute, memory)
        exchange = self.flow.layer.exchange
        slots_s = exchange.slots(T) * slot_s if exchange else 0.0
        return Seconds(sums[0], sums[1], T * token_s + slots_s + step_s)


def at_peaks(
    model: ModelShape,
    layout: Layout,
    mesh: Sizes,
    gpu: Gpu,
    links: Mapping[str, Link] | None = None,
    itemsize: int = ITEMSIZE,
) -> LayoutCosts:
    """Return costs at the card's peaks, with numbers of one size; by default with its node's links.

    Raises:
        JaxinferError: the layout does not fit the mesh or the model.
    """
    flow, links = LayoutFlow(model, layout, mesh), links or links_of(gpu, mesh)
    sizes = {"itemsize": itemsize, "weight_size": itemsize, "kv_size": itemsize}
    return LayoutCosts(flow, gpu, links, **sizes)
