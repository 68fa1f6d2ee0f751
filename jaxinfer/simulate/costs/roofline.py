"""Step times from a GPU's data sheet, by a roofline model.

Each operator takes the time of its FLOPs or of its bytes, whichever is longer (Williams et al.,
2009), at given efficiencies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.hardware.catalogue import ITEMSIZE, Gpu, ModelShape
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.step_floor import ProductFloor, StepFloor


@dataclass(frozen=True)
class KernelEfficiency:
    """The fractions of a GPU's peaks that kernels reach, and the time that an engine adds to each
    step.

    Attributes:
        flops, bandwidth: fractions of the peaks.
        step_s: seconds per step.
        sequence_s: seconds per sequence of a step.
    """

    flops: float
    bandwidth: float
    step_s: float = 0.0
    sequence_s: float = 0.0


_Product = tuple[float, float, float]


class RooflineStage:
    """Step times of a pipeline stage on ``devices`` GPUs that share each layer.

    Args:
        layers: number of layers.
        last: whether the stage has the head.
        itemsize: bytes per number of hidden states and of the head.
        weight_size: bytes per number of a layer's weights (see also ``ModelShape.weight_size``); by
            default ``itemsize``.
        kv_size: bytes per number of a KV entry; by default ``itemsize``.
        link_gb_s: bandwidth of the all-reduces in each direction.
        all_reduce_s: fixed seconds of each all-reduce.
    """

    def __init__(
        self,
        gpu: Gpu,
        model: ModelShape,
        layers: int,
        last: bool,
        devices: int,
        itemsize: int,
        efficiency: KernelEfficiency,
        link_gb_s: float,
        all_reduce_s: float = 0.0,
        weight_size: int | None = None,
        kv_size: int | None = None,
    ) -> None:
        flops = gpu.bf16_tflops * 1e12 * efficiency.flops * devices
        bandwidth = gpu.memory_gb_s * 1e9 * efficiency.bandwidth * devices
        self.layers, self._efficiency = layers, efficiency
        self._per_flop, self._per_byte = 1 / flops, 1 / bandwidth
        D, H = model.hidden_size, model.head_size
        N, K, F = model.num_attention_heads, model.num_key_value_heads, model.intermediate_size

        def product(parameters: int, numbers: int, *kinds: str) -> _Product:
            """Return a matrix product: compute time per token, and read times per step and per
            token.
            """
            size = model.weight_size(weight_size or itemsize, kinds) if kinds else itemsize
            return (
                2 * parameters * self._per_flop,
                parameters * size * self._per_byte,
                numbers * itemsize * self._per_byte,
            )

        ups = 1 + model.gated
        self._products = [product(D * (N + 2 * K) * H, D + (N + 2 * K) * H, "q", "k", "v")]
        self._products.append(product(N * H * D, N * H + D, "o"))
        mlp = [product(ups * D * F, D + ups * F, "gate", "up"), product(F * D, F + D, "down")]
        self._model, self._expert = model, mlp if model.num_experts else []
        if not model.num_experts:
            self._products += mlp
        V = model.vocab_size
        self._head = product(D * V, D + V) if last else None
        self._kv_bytes = model.kv_bytes(1, kv_size or itemsize)
        self._attention_flops = 4 * N * H
        # Each layer has two all-reduces of the hidden states, as rings.
        reduced = 2 * 2 * (devices - 1) / devices * D * itemsize
        self._reduce = reduced / (link_gb_s * 1e9) if devices > 1 else 0.0
        self._reduce_each = 2 * all_reduce_s if devices > 1 else 0.0

    @classmethod
    def of(cls, part: StagePart, costs: SimulateOptions) -> Self:
        """Make the stage from a run file's options, which must have no measured costs."""
        efficiency = KernelEfficiency(costs.flops, costs.bandwidth, costs.step_s, costs.sequence_s)
        return cls(
            part.gpu, part.model, part.layers, part.last, part.devices, ITEMSIZE, efficiency,
            *part.gpu.stated_collective, part.weight_size, part.kv_size,
        )  # fmt: skip

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        E = self._efficiency
        layer = self.dense(work.tokens) + self._attention(work)
        seconds = self.layers * layer + E.step_s + E.sequence_s * work.sequences
        if self._head and work.sampled:
            compute, weights, moved = self._head
            seconds += max(work.sampled * compute, weights + work.sampled * moved)
        return seconds

    def decode_seconds(self, rows: int) -> Callable[[int], float]:
        """Return the seconds of a step of ``rows`` decodes, as a function of their KV entries."""
        L, E, dense = self.layers, self._efficiency, self.dense(rows)
        kv_bytes, per_byte = self._kv_bytes, self._per_byte
        step_s, rows_s = E.step_s, E.sequence_s * rows
        compute, weights, moved = self._head or (0.0, 0.0, 0.0)
        head = max(rows * compute, weights + rows * moved)
        return lambda seen: L * (dense + seen * kv_bytes * per_byte) + step_s + rows_s + head

    def floor(self) -> StepFloor:
        """Return the parts of a lower bound on step times; steps read the experts of one token."""
        L, E = self.layers, self._efficiency
        each = self._model.num_experts_per_tok if self._expert else 0
        products = [ProductFloor(*(L * x for x in parts)) for parts in self._products]
        products += [ProductFloor(*(L * each * x for x in parts)) for parts in self._expert]
        context_s = L * self._kv_bytes * self._per_byte
        return StepFloor(
            tuple(products),
            ProductFloor(*self._head) if self._head else None,
            step_s=E.step_s + L * self._reduce_each,
            token_s=L * self._reduce,
            sequence_s=E.sequence_s,
            context_s=context_s,
            # A chunk of one token has the cost of a decode.
            pair_s=min(L * self._attention_flops * self._per_flop, context_s),
        )

    def dense(self, T: float) -> float:
        """Return the seconds of a layer without its attention, for ``T`` tokens."""
        layer = T * self._reduce + self._reduce_each
        for compute, weights, moved in self._products:
            layer += max(T * compute, weights + T * moved)
        if self._expert and T:
            read = self._model.experts_read(T)
            each = T * self._model.num_experts_per_tok / read
            layer += read * sum(max(each * c, w + each * m) for c, w, m in self._expert)
        return layer

    def _attention(self, work: Work) -> float:
        """Return the seconds of attention; prefill chunks and decodes are separate kernels."""
        decodes = work.single_context * self._kv_bytes * self._per_byte
        seen = sum(start + count for start, count in work.chunks)
        chunks = work.pairs * self._attention_flops * self._per_flop
        return decodes + max(chunks, seen * self._kv_bytes * self._per_byte)
