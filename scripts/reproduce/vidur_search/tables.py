"""Tables of operators for Vidur's search: its own products and all-reduces, others' attention.

Of Vidur's attention profiles of its four models, only one is left. The tables of NVIDIA's
aiconfigurator replace the others (vLLM's kernels on the same GPUs). These have prompts without a
prefix. A chunk of c tokens after s entries therefore takes the time of s + c tokens minus the time
of s tokens, but at least the time of c tokens alone.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from scripts.validate.vidur_tables import rows, write_tables

# For each GPU of configs/gpus.yaml, Vidur's name of it and aiconfigurator's.
GPUS = {"A100-80G-SXM": ("a100", "a100_sxm"), "H100-SXM": ("h100", "h100_sxm")}
# Vidur's folder of LLaMA2-70B, and its heads.
NAME, HEADS, KV_HEADS = "meta-llama/Llama-2-70b-hf", 64, 8
DEGREES = (1, 2, 4)
# Contexts in Vidur's space are at most this long.
LONGEST = 4096
Times = dict[tuple[float, float], float]


def healed(times: Times) -> tuple[Times, int]:
    """Limit times to those of points with as many rows and entries or more; count changes."""
    found = {(n, k): min(ms for (m, j), ms in times.items() if m >= n and j >= k) for n, k in times}
    return found, sum(found[at] < 0.9 * times[at] for at in times)


def measured(path: Path, heads: int, kv_heads: int) -> Iterable[Mapping[str, str]]:
    """Yield an operator's rows of 16 bits with these heads."""
    for row in rows(path):
        same = row["num_heads"] == str(heads) and row["num_key_value_heads"] == str(kv_heads)
        if same and row["kv_cache_dtype"] == row["attn_dtype"] == "bfloat16":
            yield row


def prefill(path: Path, heads: int, kv_heads: int) -> tuple[Times, int]:
    """Return milliseconds by chunk and context."""
    alone, bad = healed(
        {
            (float(row["isl"]), 0.0): float(row["latency"])
            for row in measured(path, heads, kv_heads)
            if row["batch_size"] == "1"
        }
    )
    curve = PiecewiseLinear({n: ms for (n, _), ms in alone.items()})
    sizes = [n for n in curve.x if 16 <= n <= LONGEST]
    return {
        (n, s): max(curve(s + n) - curve(s), curve(n))
        for n in sizes
        for s in (0.0, *sizes)
        if s + n <= curve.x[-1]
    }, bad


def decode(path: Path, heads: int, kv_heads: int) -> tuple[Times, int]:
    """Return milliseconds by batch and context."""
    found = {
        (float(row["batch_size"]), float(row["isl"]) + float(row["step"])): float(row["latency"])
        for row in measured(path, heads, kv_heads)
    }
    return healed({(n, k): ms for (n, k), ms in found.items() if k <= 2 * LONGEST})


def make_tables(vidur: Path, own: Path, gpu: str, out: Path) -> Path:
    """Write a new folder of tables for all degrees of LLaMA2-70B on one GPU.

    Args:
        vidur, own: profiles of microsoft/vidur and of aiconfigurator.
    """
    folder = out / f"llama-2-70b_{gpu}"
    shutil.rmtree(folder, ignore_errors=True)
    theirs, nvidia = GPUS[gpu]
    mlp = vidur / "compute" / theirs / NAME / "mlp.csv.gz"
    network = vidur / "network" / f"{theirs}_pairwise_nvlink" / "all_reduce.csv.gz"
    for tp in DEGREES:
        each = HEADS // tp, KV_HEADS // tp
        chunks, bad = prefill(own / f"{nvidia}_context_attention_perf.csv.gz", *each)
        decodes, worse = decode(own / f"{nvidia}_generation_attention_perf.csv.gz", *each)
        write_tables(folder, mlp, network, tp, chunks, decodes)
        print(f"{folder.name} tp{tp}: {bad + worse} points taken from larger batches")
    return folder
