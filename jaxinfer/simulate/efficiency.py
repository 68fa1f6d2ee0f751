"""What a modelled cluster's figures are measured by."""

from collections.abc import Iterable

from jaxinfer.config.nodes import Placement
from jaxinfer.hardware.catalogue import Gpu, ModelShape, sum_known
from jaxinfer.hardware.efficiency import Yardstick, model_flops


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
