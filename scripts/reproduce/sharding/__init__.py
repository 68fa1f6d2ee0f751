"""Layouts: Pope et al. (2022) on 64 TPUs, and Llama 3 70B on GPUs and on measured TPUs."""

from scripts.reproduce.reproduction import Reproduction
from scripts.reproduce.sharding import crossings, llama, palm, tpu

REPRODUCTION = Reproduction(
    paper="Efficiently Scaling Transformer Inference",
    inputs={},
    parts={
        "volumes": crossings.volumes,
        "palm": palm.phases,
        "crossings": crossings.crossings,
        "llama": llama.rankings,
        "tpu": tpu.rates,
    },
)
