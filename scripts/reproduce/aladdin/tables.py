"""Tables of operators of Llama 2 7B on A100s.

Products and all-reduces are Vidur's. Attention is aiconfigurator's, for the same GPU. Tables of
prompts have as many KV heads as heads. Tables of decodes have 8 heads, at the batch with the same
total number of heads, because each head reads its own entries.
"""

import shutil
from pathlib import Path

from scripts.reproduce.vidur_search.tables import decode, prefill
from scripts.validate.vidur_tables import write_tables

NAME, HEADS, MEASURED = "meta-llama/Llama-2-7b-hf", 32, 8
DEGREES = (1, 2, 4)


def make_tables(vidur: Path, own: Path, out: Path) -> Path:
    """Write a new folder of tables for 1, 2 and 4 GPUs.

    Args:
        vidur, own: profiles of microsoft/vidur and of aiconfigurator.
    """
    folder = out / "llama-2-7b_a100"
    shutil.rmtree(folder, ignore_errors=True)
    mlp = vidur / "compute" / "a100" / NAME / "mlp.csv.gz"
    network = vidur / "network" / "a100_pairwise_nvlink" / "all_reduce.csv.gz"
    eight, _ = decode(own / "a100_sxm_generation_attention_perf.csv.gz", MEASURED, MEASURED)
    for tp in DEGREES:
        each = HEADS // tp
        chunks, _ = prefill(own / "a100_sxm_context_attention_perf.csv.gz", each, each)
        share = MEASURED / each
        decodes = {(n * share, k): ms for (n, k), ms in eight.items() if n * share >= 1}
        write_tables(folder, mlp, network, tp, chunks, decodes)
    return folder
