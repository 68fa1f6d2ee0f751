"""Layouts: Pope et al. (2022) on 64 TPUs, and Llama 3 70B on eight and sixteen GPUs."""

from scripts.reproduce.reproduction import Reproduction
from scripts.reproduce.sharding import crossings, llama, palm

REPRODUCTION = Reproduction(
    paper="Efficiently Scaling Transformer Inference",
    inputs={},
    parts={
        "volumes": crossings.volumes,
        "palm": palm.phases,
        "crossings": crossings.crossings,
        "llama": llama.rankings,
    },
)
