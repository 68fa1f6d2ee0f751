"""What a modelled cluster's figures are measured by."""

from collections.abc import Iterable

from jaxinfer.config.nodes import Placement
from jaxinfer.hardware.catalogue import Gpu, ModelShape, sum_known
from jaxinfer.hardware.efficiency import ModelFlops, Yardstick


def model_flops(model: ModelShape) -> ModelFlops:
    """Of the matrix products and attention: 2 per parameter that a token meets, and 4 per head and
    its dimension for each KV entry that it sees.
    """
    layers, experts = model.num_hidden_layers, model.num_experts_per_tok or 1
    parameters = model.attention_parameters + experts * model.expert_parameters
    return ModelFlops(
        token=2.0 * layers * parameters,
        pair=4.0 * layers * model.num_attention_heads * model.head_size,
        sampled=2.0 * model.hidden_size * model.vocab_size,
    )


def make_yardstick(
    model: ModelShape, gpus: Iterable[tuple[Gpu, int]], placement: Placement | None
) -> Yardstick:
    """Prices, and watts of whole nodes, are those of a hardware file.

    Args:
        gpus: of each group, its kind and how many.
    """
    counted = list(gpus)
    watts = sum_known(gpu.watts for gpu, count in counted for _ in range(count))
    return Yardstick(
        model=model_flops(model),
        peak_flops=sum(gpu.bf16_tflops * 1e12 * count for gpu, count in counted),
        usd_per_hour=placement.usd_per_hour if placement else None,
        watts=placement.watts if placement else watts,
    )
