"""Peak FLOPs and power of a real run's GPUs, if they are known."""

from collections.abc import Sequence

from jaxinfer.checkpoints.modelled import shape_of_config
from jaxinfer.hardware.catalogue import gpu_of_device, sum_known
from jaxinfer.hardware.efficiency import Efficiency, model_flops
from jaxinfer.runtime.stage.stage_plan import StageFacts


def real_efficiency(plans: Sequence[StageFacts]) -> Efficiency:
    """Return peak FLOPs and power of all stages' GPUs, if ``configs/gpus.yaml`` has all of them.

    The peak is that of 16-bit floats: there is no MFU for other formats. There is no MFU either for
    models with windows, whose tokens see fewer entries than are counted, or with padded heads.
    """
    ffns = [plan.ffn for plan in plans if plan.ffn]
    every = [device for plan in (*plans, *ffns) for device in plan.devices]
    devices = {(device.platform, device.id): device for device in every}
    gpus = [gpu for device in devices.values() if (gpu := gpu_of_device(device.device_kind))]
    if len(gpus) < len(devices):
        return Efficiency()
    counted = all(
        plan.dtype.itemsize == 2
        and not any(plan.config.windows)
        and plan.config.num_key_value_heads == plan.num_kv_heads
        for plan in plans
    )
    return Efficiency(
        model=model_flops(shape_of_config(plans[0].config)) if counted else None,
        peak_flops=sum(gpu.bf16_tflops for gpu in gpus) * 1e12,
        watts=sum_known(gpu.watts for gpu in gpus),
    )
