"""Vidur-Search's claims: 450 configurations of LLaMA2-70B on A100s and H100s."""

from scripts.reproduce.reproduction import AICONFIGURATOR, VIDUR_PROFILES, Reproduction
from scripts.reproduce.vidur_search import searches
from scripts.reproduce.vidur_search.runs import OWN, TRACE, VIDUR

REPRODUCTION = Reproduction(
    paper="Vidur-Search",
    inputs={
        VIDUR: VIDUR_PROFILES,
        OWN: f"{AICONFIGURATOR}: {{context,generation}}_attention_perf of a100_sxm, h100_sxm",
        TRACE: "Vidur's trace of Arxiv summaries, packed by gzip: data/processed_traces/"
        "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv of its repository",
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
