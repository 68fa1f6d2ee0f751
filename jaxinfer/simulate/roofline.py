"""Step times from a GPU's numbers: each operator by its FLOPs or its bytes, whichever take longer
(Williams et al., 2009), at stated efficiencies.
"""

from dataclasses import dataclass

from jaxinfer.serving.work import Work
from jaxinfer.simulate.hardware import Gpu, ModelShape


@dataclass(frozen=True)
class Efficiency:
    """What of a GPU's peak a kernel reaches, and what an engine adds to each step.

    Attributes:
        flops, bandwidth: fractions of the peaks.
        step_s: seconds per step.
        sequence_s: seconds per sequence of a step.
    """

    flops: float
    bandwidth: float
    step_s: float = 0.0
    sequence_s: float = 0.0


class RooflineStage:
    """One pipeline stage on ``devices`` GPUs that share each layer.

    Args:
        layers: how many; ``last``: with the head.
        itemsize: bytes of a weight and of a KV entry's number.
        link_gb_s: of the all-reduces, each way.
    """

    def __init__(
        self,
        gpu: Gpu,
        model: ModelShape,
        layers: int,
        last: bool,
        devices: int,
        itemsize: int,
        efficiency: Efficiency,
        link_gb_s: float,
    ) -> None:
        flops = gpu.bf16_tflops * 1e12 * efficiency.flops * devices
        bandwidth = gpu.memory_gb_s * 1e9 * efficiency.bandwidth * devices
        self._layers, self._model, self._efficiency = layers, model, efficiency
        self._per_flop, self._per_byte = 1 / flops, 1 / bandwidth
        self._itemsize = itemsize
        D, H = model.hidden_size, model.head_size
        N, K, F = model.num_attention_heads, model.num_key_value_heads, model.intermediate_size
        # Of each product: parameters, and numbers read and written per token.
        self._dense = [(D * (N + 2 * K) * H, D + (N + 2 * K) * H), (N * H * D, N * H + D)]
        ups = 1 + model.gated
        self._mlp = [(ups * D * F, D + ups * F), (F * D, F + D)]
        self._head = (D * model.vocab_size, D + model.vocab_size) if last else None
        self._kv_bytes = model.kv_bytes(1, itemsize)
        self._attention_flops = 4 * N * H
        # Two all-reduces of the hidden states in each layer, as rings.
        reduced = 2 * 2 * (devices - 1) / devices * D * itemsize
        self._reduce = reduced / (link_gb_s * 1e9) if devices > 1 else 0.0

    def seconds(self, work: Work) -> float:
        """Of one step."""
        T, E = work.tokens, self._efficiency
        layer = sum(self._product(T, *size) for size in self._dense) + T * self._reduce
        if experts := self._model.num_experts:
            routed = T * self._model.num_experts_per_tok
            read = min(experts, routed)
            layer += sum(read * self._product(routed / read, *size) for size in self._mlp)
        else:
            layer += sum(self._product(T, *size) for size in self._mlp)
        layer += self._attention(work)
        head = self._product(work.sampled, *self._head) if self._head and work.sampled else 0.0
        return self._layers * layer + head + E.step_s + E.sequence_s * work.sequences

    def _product(self, tokens: float, parameters: int, numbers: int) -> float:
        compute = 2 * tokens * parameters * self._per_flop
        return max(compute, (parameters + tokens * numbers) * self._itemsize * self._per_byte)

    def _attention(self, work: Work) -> float:
        """Prefill chunks and decodes are kernels of their own."""
        decodes = work.single_context * self._kv_bytes * self._per_byte
        seen = sum(start + count for start, count in work.chunks)
        chunks = work.pairs * self._attention_flops * self._per_flop
        return decodes + max(chunks, seen * self._kv_bytes * self._per_byte)
