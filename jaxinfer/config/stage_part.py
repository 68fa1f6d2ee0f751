"""A pipeline stage of a modelled cluster: its part of the model, and its GPUs."""

from dataclasses import dataclass

from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.options.validation import OptionError
from jaxinfer.sharding.costs import LayoutFlow
from jaxinfer.steps.shapes import StepLimits

# Bytes of a stored number, by the value of its option.
_SIZES = {"auto": 2, "int8": 1, "fp8": 1}
# Bytes of experts' numbers in the formats of published tables: with a scale of 8 bits for each 32
# numbers, and of 16 bits for each 128.
EXPERT_SIZES = {"w4a16_mxfp4": 17 / 32, "int4_wo": 33 / 64}
# Bytes of the embedding's and the head's numbers.
TABLE_SIZE = 2


def stored_sizes(model: ModelShape, weight_dtype: str, kv_cache_dtype: str) -> tuple[int, int]:
    """Return the bytes of a number in layer weights (those that may have 8 bits) and in KV.

    Raises:
        JaxinferError: the model is stored in another 8-bit format.
    """
    there = model.stored_bits
    if there is not None and weight_dtype not in ("auto", there):
        raise OptionError(f"weight_dtype is {weight_dtype}, the model has {there}: leave it auto")
    return _SIZES[there or weight_dtype], _SIZES[kv_cache_dtype]


@dataclass(frozen=True)
class StagePart:
    """A pipeline stage's part of a model, and its devices.

    Attributes:
        kind: name of the GPU.
        devices: number of devices that share each layer.
        layers: number of layers.
        share: share of the model's layers.
        first: whether it has the embedding.
        last: whether it has the head.
        weight_size: see ``stored_sizes``.
        kv_size: see ``stored_sizes``.
        limits: sizes to which an engine pads the instance's steps; None if unknown.
        flow: work of each layer under the stage's layout; None if the devices have equal parts of
            all weights and of KV.
        expert_size: bytes of an expert's weight, if it is not ``weight_size``.
        sharers: number of instances that share the experts of each layer, including this one.
        has_ffn: whether the FFN of its layers is on these devices.
    """

    gpu: Gpu
    kind: str
    model: ModelShape
    layers: int
    share: float
    first: bool
    last: bool
    devices: int
    weight_size: int
    kv_size: int
    limits: StepLimits | None = None
    flow: LayoutFlow | None = None
    sharers: int = 1
    expert_size: float | None = None
    has_ffn: bool = True

    @property
    def mean_weight_size(self) -> float:
        """Mean bytes of a number in the linear weights of a layer, over all layers of the model."""
        return self.model.weight_size(self.weight_size)

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one of the devices."""
        of: LayoutFlow | ModelShape = self.flow or self.model
        layers = of.parameters(self.layers, False, False)
        tables = of.parameters(self.layers, self.first, self.last) - layers
        held = layers * self.mean_weight_size + tables * TABLE_SIZE
        if self.sharers > 1 or self.expert_size:
            experts = self.model.num_experts * self.model.expert_parameters * self.layers
            size = self.model.weight_size(self.weight_size, ("gate", "up", "down"))
            held += experts * ((self.expert_size or size) / self.sharers - size)
        if not self.has_ffn:
            held -= self.ffn_bytes
        return held if self.flow else held / self.devices

    @property
    def ffn_bytes(self) -> float:
        """Bytes of the weights of its layers' FFN, or of all experts and their router."""
        each = self.model.layer_parameters - self.model.attention_parameters
        return self.layers * each * self.model.weight_size(self.weight_size, ("gate", "up", "down"))

    @property
    def kv_ways(self) -> float:
        """Ratio of the stage's KV heads to those on one device, which may be copies."""
        if not self.flow:
            return self.devices
        heads = self.flow.model.num_key_value_heads
        return self.flow.kv_ways * self.model.num_key_value_heads / heads
