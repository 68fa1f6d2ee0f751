"""A pipeline stage of a modelled cluster: its part of the model, and the GPUs that have it."""

from dataclasses import dataclass

from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.sharding.costs import LayoutFlow
from jaxinfer.steps.shapes import StepLimits

# Bytes of a number that is stored, by its option's value: those of layers' weights, and of KV.
WEIGHT_SIZES = {"auto": 2, "int8": 1, "fp8": 1}
KV_SIZES = {"auto": 2, "int8": 1, "fp8": 1}
# Of the embedding's and the head's numbers.
TABLE_SIZE = 2


@dataclass(frozen=True)
class StagePart:
    """The part of a model that a pipeline stage has, and where it lies.

    Attributes:
        kind: the GPU's name; ``devices``: how many share each layer.
        layers: number of layers; ``share``: their share of the model's.
        first, last: with the embedding, with the head.
        weight_size, kv_size: bytes of a layer's weight, and of a KV entry's number.
        limits: sizes to which an engine pads the instance's steps; None where not known.
        flow: what each layer does under its layout; without one, the devices have equal parts of
            all weights and of KV.
        sharers: how many instances share the experts of each layer, this one included.
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

    @property
    def weight_bytes(self) -> float:
        """Weights on one of the devices."""
        of: LayoutFlow | ModelShape = self.flow or self.model
        layers = of.parameters(self.layers, False, False)
        tables = of.parameters(self.layers, self.first, self.last) - layers
        elsewhere = self.model.num_experts * self.model.expert_parameters * self.layers
        layers -= elsewhere * (1 - 1 / self.sharers)
        held = layers * self.weight_size + tables * TABLE_SIZE
        return held if self.flow else held / self.devices

    @property
    def kv_ways(self) -> float:
        """Number of times that a device's KV heads go into the stage's; some may be there twice."""
        if not self.flow:
            return self.devices
        heads = self.flow.model.num_key_value_heads
        return self.flow.kv_ways * self.model.num_key_value_heads / heads
