"""Vidur-Search's claims: 450 configurations of LLaMA2-70B on A100s and H100s."""

from scripts.reproduce.reproduction import Reproduction
from scripts.reproduce.vidur_search import searches
from scripts.reproduce.vidur_search.runs import OWN, TRACE, VIDUR

REPRODUCTION = Reproduction(
    paper="Vidur-Search",
    inputs={
        VIDUR: "folder with compute/ and network/ (microsoft/vidur's profiles)",
        OWN: "folder with *_{context,generation}_attention_perf.csv.gz (NVIDIA's aiconfigurator)",
        TRACE: "Vidur's trace of Arxiv summaries, packed CSV",
    },
    parts={
        "chat": searches.chat,
        "longer": searches.longer,
        "cliff": searches.cliff,
        "workloads": searches.workloads,
        "costs": searches.costs,
        "own_best": searches.own_best,
    },
    timed=("chat", "costs"),
    by_name=("own_best",),
)
