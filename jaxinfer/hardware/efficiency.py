"""Yardsticks of a run's figures: the model's FLOPs, the GPUs' peak, prices and power."""

from dataclasses import dataclass

from jaxinfer.hardware.catalogue import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one forward pass, a multiplication and an addition being two.

    Attributes:
        token: of one token through all layers, without attention over the context.
        pair: of one token's attention to one KV entry, in all layers.
        sampled: of the logits of one token.
    """

    token: float
    pair: float
    sampled: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Yardsticks of a run, each None where it is not known.

    Attributes:
        peak_flops: of all GPUs together, per second.
        usd_per_hour: of all machines; ``watts``: of their GPUs, at most.
    """

    model: ModelFlops | None = None
    peak_flops: float | None = None
    usd_per_hour: float | None = None
    watts: float | None = None

    def mfu(self, tokens: int, pairs: float, sampled: int, seconds: float) -> float | None:
        """Model FLOPs utilisation of a number of tokens in a number of seconds."""
        if self.model is None or self.peak_flops is None:
            return None
        model = self.model
        flops = model.token * tokens + model.pair * pairs + model.sampled * sampled
        return flops / (self.peak_flops * seconds)

    def usd(self, seconds: float) -> float | None:
        """Dollars that the machines cost for ``seconds`` seconds."""
        return None if self.usd_per_hour is None else self.usd_per_hour * seconds / 3600

    def watt_hours(self, seconds: float) -> float | None:
        """Largest number of watt-hours that their GPUs use in ``seconds`` seconds."""
        return None if self.watts is None else self.watts * seconds / 3600


def model_flops(model: ModelShape) -> ModelFlops:
    """Return the FLOPs of the matrix products and attention.

    They are 2 per parameter that a token meets, and 4 per head and its dimension for each KV entry
    that it sees.
    """
    layers, experts = model.num_hidden_layers, model.num_experts_per_tok or 1
    parameters = model.attention_parameters + experts * model.expert_parameters
    return ModelFlops(
        token=2.0 * layers * parameters,
        pair=4.0 * layers * model.num_attention_heads * model.head_size,
        sampled=2.0 * model.hidden_size * model.vocab_size,
    )
