"""Step times of a stage under a sharding layout: the roofline's products, cut as the layout cuts
them, and its collectives (``models/layer_flow.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.hardware.catalogue import Gpu
from jaxinfer.models.layer_flow import LayerFlow
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.model import ITEMSIZE
from jaxinfer.simulate.costs.roofline import KernelEfficiency


@dataclass(frozen=True)
class Rates:
    """Rates of one device, in units per second.

    Attributes:
        flops: operations; ``memory``: bytes; ``link``: bytes that it sends in a collective.
        all_reduce_s: seconds that each all-reduce takes besides; other collectives take half.
        axes_apart: each axis of the mesh has links of its own, as on a torus: a collective over
            several has as many times ``link``.
    """

    flops: float
    memory: float
    link: float
    all_reduce_s: float = 0.0
    axes_apart: bool = False

    @classmethod
    def of(cls, gpu: Gpu, efficiency: KernelEfficiency) -> "Rates":
        """Rates of a GPU's kernels."""
        gb_s, each_s = gpu.stated_collective
        return cls(
            gpu.bf16_tflops * 1e12 * efficiency.flops,
            gpu.memory_gb_s * 1e9 * efficiency.bandwidth,
            gb_s * 1e9,
            each_s,
            gpu.link.startswith("ICI"),
        )


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step by what they go to.

    Attributes:
        compute, memory: of products and attention that have more of it to do.
        links: of collectives, by axes of the mesh; ``host``: what an engine adds.
    """

    compute: float
    memory: float
    links: Mapping[tuple[str, ...], float]
    host: float

    @property
    def total(self) -> float:
        """All together."""
        return self.compute + self.memory + sum(self.links.values()) + self.host


class LayoutStage:
    """One pipeline stage whose devices share each layer as a layout says.

    Args:
        layers: how many; ``last``: with the head, which each device has as the layout puts it.
        weight_size, kv_size: bytes of a weight, and of a KV entry's number.
    """

    def __init__(
        self,
        flow: LayerFlow,
        layers: int,
        last: bool,
        efficiency: KernelEfficiency,
        rates: Rates,
        weight_size: int = ITEMSIZE,
        kv_size: int = ITEMSIZE,
    ) -> None:
        model = flow.model
        self._model, self._layers, self._efficiency = model, layers, efficiency
        self._rates = rates
        per_flop, per_byte = 1 / rates.flops, 1 / rates.memory
        products = [
            (
                2 * each.token_parameters * per_flop,
                each.weights * weight_size * per_byte,
                each.token_numbers * ITEMSIZE * per_byte,
                each.is_expert,
            )
            for each in flow.products
        ]
        self._dense = [each[:3] for each in products if not each[3]]
        self._experts = [each[:3] for each in products if each[3]]
        self._experts_ways = flow.experts_ways
        # By axes: seconds per token, and of each step.
        self._links: dict[tuple[str, ...], tuple[float, float]] = {}
        for each in flow.collectives:
            rate = rates.link * (len(each.axes) if rates.axes_apart else 1)
            token_s, step_s = self._links.get(each.axes, (0.0, 0.0))
            fixed = rates.all_reduce_s * (1 if each.kind == "all-reduce" else 0.5)
            token_s += each.token_numbers * ITEMSIZE / rate
            step_s += each.weights * weight_size / rate + fixed
            self._links[each.axes] = token_s, step_s
        self._head = None
        if last:
            table = "embed_VD" if model.tie_word_embeddings else "head_VD"
            numbers = flow.numbers("VD", flow.parameter(table))
            vocabulary = numbers / model.hidden_size
            self._head = (
                2 * numbers * per_flop,
                numbers * weight_size * per_byte,
                (model.hidden_size + vocabulary) * ITEMSIZE * per_byte,
            )
        heads = max(model.num_key_value_heads / flow.kv_ways, 1)
        self._entry_s = 2 * heads * model.head_size * kv_size * per_byte
        self._rows_ways = flow.rows_ways
        queries = model.num_attention_heads / flow.heads_ways
        self._pair_s = 4 * queries * model.head_size * per_flop / flow.rows_ways

    @classmethod
    def of(cls, part: StagePart, costs: SimulateOptions) -> Self:
        """Make the stage from a run file's options, where they have no other costs."""
        assert part.flow
        efficiency = KernelEfficiency(costs.flops, costs.bandwidth, costs.step_s, costs.sequence_s)
        rates = Rates.of(part.gpu, efficiency)
        return cls(
            part.flow, part.layers, part.last, efficiency, rates, part.weight_size, part.kv_size
        )

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        return self.step(work).total

    def step(self, work: Work) -> StepSeconds:
        """Return the seconds of one step by what they go to."""
        E, T = self._efficiency, work.tokens
        layer = [0.0, 0.0]
        for compute, weights, moved in self._dense:
            _add(layer, T * compute, weights + T * moved)
        if self._experts:
            read = min(self._model.num_experts, T * self._model.num_experts_per_tok)
            each, here = T * self._model.num_experts_per_tok / read, read / self._experts_ways
            for compute, weights, moved in self._experts:
                _add(layer, each * compute, weights + each * moved, here)
        # Prefill chunks and decodes are kernels of their own; where rows are cut, each device has
        # those of its sequences, or of its part of a chunk, which sees all entries before it.
        layer[1] += work.single_context * self._entry_s / self._rows_ways
        if work.chunks:
            seen = sum(start + count for start, count in work.chunks)
            _add(layer, work.pairs * self._pair_s, seen * self._entry_s)
        compute, memory = (self._layers * seconds for seconds in layer)
        if self._head and work.sampled:
            flops_s, weights, moved = self._head
            head = [0.0, 0.0]
            _add(head, work.sampled * flops_s, weights + work.sampled * moved)
            compute, memory = compute + head[0], memory + head[1]
        links = {axes: self._layers * (T * t + s) for axes, (t, s) in self._links.items()}
        return StepSeconds(compute, memory, links, E.step_s + E.sequence_s * work.sequences)


def _add(parts: list[float], compute: float, memory: float, times: float = 1.0) -> None:
    """Add a kernel's seconds to those of compute or of memory, whichever take longer."""
    parts[compute < memory] += times * max(compute, memory)
