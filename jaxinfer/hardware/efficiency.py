"""Data for efficiency figures: the model's FLOPs, the GPUs' peak, prices and power."""

from dataclasses import dataclass

from jaxinfer.hardware.catalogue import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one forward pass; a multiplication and an addition count as two.

    Attributes:
        token: FLOPs of one token through all layers, without attention over the context.
        pair: FLOPs of one token's attention to one KV entry, in all layers.
        sampled: FLOPs of the logits of one token.
    """

    token: float
    pair: float
    sampled: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Data for efficiency figures of a run, each None if unknown.

    Attributes:
        peak_flops: peak FLOPs per second of all GPUs together.
        usd_per_hour: price of all machines together.
        watts: power limits of all their GPUs together.
    """

    model: ModelFlops | None = None
    peak_flops: float | None = None
    usd_per_hour: float | None = None
    watts: float | None = None

    def mfu(self, tokens: int, pairs: float, sampled: int, seconds: float) -> float | None:
        """Return the model FLOPs utilisation if this work takes ``seconds`` seconds."""
        if self.model is None or self.peak_flops is None:
            return None
        model = self.model
        flops = model.token * tokens + model.pair * pairs + model.sampled * sampled
        return flops / (self.peak_flops * seconds)

    def usd(self, seconds: float) -> float | None:
        """Return the dollars that the machines cost for ``seconds`` seconds."""
        return None if self.usd_per_hour is None else self.usd_per_hour * seconds / 3600

    def watt_hours(self, seconds: float) -> float | None:
        """Return the most watt-hours that the GPUs can use in ``seconds`` seconds."""
        return None if self.watts is None else self.watts * seconds / 3600


def model_flops(model: ModelShape) -> ModelFlops:
    """Return the FLOPs of a model's matrix products and attention.

    A token costs 2 FLOPs per parameter that it uses and, for each KV entry that it sees, 4 per head
    and dimension.
    """
    layers, experts = model.num_hidden_layers, model.num_experts_per_tok or 1
    parameters = model.attention_parameters + experts * model.expert_parameters
    return ModelFlops(
        token=2.0 * layers * parameters,
        pair=4.0 * layers * model.num_attention_heads * model.head_size,
        sampled=2.0 * model.hidden_size * model.vocab_size,
    )
