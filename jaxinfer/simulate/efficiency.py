"""Yardsticks of a modelled cluster's figures."""

from jaxinfer.config.site import ModelledSite, total_watts
from jaxinfer.hardware.efficiency import Efficiency, model_flops


def modelled_efficiency(site: ModelledSite) -> Efficiency:
    """Prices, and watts of whole nodes, are those of a hardware file; no MFU with windows."""
    groups, placement = site.groups.values(), site.placement
    return Efficiency(
        model=None if site.model.windowed_layers else model_flops(site.model),
        peak_flops=sum(group.gpu.bf16_tflops * 1e12 * group.own_devices for group in groups),
        usd_per_hour=placement.usd_per_hour if placement else None,
        watts=total_watts(placement, groups),
    )
