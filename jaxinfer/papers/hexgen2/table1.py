"""Rates of a group from HexGen-2's own costs (Table 1) at the GPUs' peaks: one over a latency.

The model's own KV width is used, where the table assumes as many KV heads as heads.
"""

from collections.abc import Sequence
from itertools import pairwise

from jaxinfer.hardware.catalogue import ITEMSIZE, ModelShape
from jaxinfer.lab.plan.layers import least_sum
from jaxinfer.papers.hexgen2.capacity import Carried, GroupRole, PlannedStage
from jaxinfer.papers.hexgen2.full_steps import LengthStats
from jaxinfer.papers.hexgen2.gpus import Site
from jaxinfer.papers.hexgen2.stages import Shape, Signature, shapes


class Table1:
    """The paper's rates of groups: from prefill of one prompt, and decode of the largest batch.

    Args:
        most_sequences: largest number of sequences of that batch.
    """

    def __init__(
        self,
        site: Site,
        model: ModelShape,
        lengths: LengthStats,
        degrees: Sequence[int],
        most_sequences: int,
    ) -> None:
        self.site, self._model, self._lengths = site, model, lengths
        self._degrees, self._most = degrees, most_sequences
        self._found: dict[tuple[Signature, GroupRole], Carried] = {}

    def carried(self, signature: Signature, role: GroupRole) -> Carried:
        """Return the number of requests in a batch, divided by the batch's smallest latency."""
        key = signature, role
        if key not in self._found:
            best = Carried()
            for shape in shapes(signature, self.site.kind_of_type, self._degrees):
                found = self._of(signature, shape, role)
                if found.rate > best.rate:
                    best = found
            self._found[key] = best
        return self._found[key]

    def _of(self, signature: Signature, shape: Shape, role: GroupRole) -> Carried:
        total = self._model.num_hidden_layers
        batch = 1
        if role == "decode":
            fits = (
                b
                for b in range(self._most, 0, -1)
                if sum(self._limits(signature, shape, b)) >= total
            )
            batch = next(fits, 1)
        each = [self.layer_seconds(signature[p][0], tp, role, batch) for p, tp in shape]
        layers = least_sum(total, each, self._limits(signature, shape, batch))
        if layers is None:
            return Carried()
        latency = sum(n * seconds for n, seconds in zip(layers, each, strict=True))
        latency += self._hops(signature, shape, role, batch)
        stages = tuple(PlannedStage(p, tp, n) for (p, tp), n in zip(shape, layers, strict=True))
        return Carried(batch / latency, stages)

    def layer_seconds(self, type_: int, tp: int, role: GroupRole, batch: int) -> float:
        """Return a layer's seconds, with tensor parallelism, for a whole prompt or output."""
        gpu, H, B = self.site.gpu_of_type[type_], self._model.hidden_size, ITEMSIZE
        flops, bandwidth = gpu.bf16_tflops * 1e12, gpu.memory_gb_s * 1e9
        beta, s_out = gpu.link_gb_s * 1e9, self._lengths.decodes
        if role == "prefill":
            s_in = self._lengths.prompt
            compute = 24 * batch * s_in * H**2 / (tp * flops)
            return compute + (tp - 1) * batch * s_in * H * B / (tp * beta) * 4
        compute = 12 * H**2 * B * s_out / (tp * bandwidth) + 24 * batch * s_out * H**2 / (
            tp * flops
        )
        return compute + (tp - 1) * batch * H * B / (tp * beta) * 4 * s_out

    def _hops(self, signature: Signature, shape: Shape, role: GroupRole, batch: int) -> float:
        """Return the time of hidden states between stages, for each sampled token."""
        lengths, total = self._lengths, 0.0
        for (here, _), (there, _) in pairwise(shape):
            alpha, byte_s = self.site.hop_in(signature, here, there)
            once = batch * self._model.hidden_size * ITEMSIZE * byte_s
            if role == "prefill":
                total += alpha + lengths.prompt * once
            else:
                total += lengths.decodes * (alpha + once)
        return total

    def _limits(self, signature: Signature, shape: Shape, batch: int) -> list[int]:
        """Return the layers that fit on each stage's GPUs, with the KV of ``batch`` requests."""
        H, B = self._model.hidden_size, ITEMSIZE
        tokens = batch * (self._lengths.prompt + self._lengths.decodes)
        layer = 12 * H**2 * B + tokens * self._model.kv_bytes(1, B)
        found = []
        for place, tp in shape:
            memory = self.site.gpu_of_type[signature[place][0]].memory_gb * 1e9
            found.append(max(int((memory - 4 * tokens * H * B) * tp / layer), 0))
        return found
