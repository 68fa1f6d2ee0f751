"""Write the shipped tables of operators, from those that aiconfigurator publishes.

    python -m scripts.validate.shipped_tables --operators FOLDER --profiles FOLDER --out DIR

FOLDERs have H100 and H200 as Parquet (as `check points` reads them), and A100 and L40S as CSV.
DIR gets, for each card, its numbers and a file of arrays per operator: heads of 128, prompts and
decodes without windows, products in bfloat16 and fp8 at some numbers of rows, experts of models in
`configs/models.yaml`; times to four digits. Otherwise, two tables change: where a card's peak FLOPs
forbid its prompts' attention, that of the card with the same peak takes its place; and A100's
all-reduces are NCCL's of 16 bits, under the name of bfloat16.
"""

import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

from jaxinfer.hardware.catalogue import find_gpu

Columns = dict[str, np.ndarray]
VERSIONS = {"h100_sxm": "0.19.0", "h200_sxm": "0.19.0", "a100_sxm": "0.14.0", "l40s": "0.14.0"}
COLLECTIVES = "0.14.0"
KINDS = {"h100_sxm": "H100-SXM", "h200_sxm": "H200", "a100_sxm": "A100-80G-SXM", "l40s": "L40S"}
NAMES = {"h100_sxm": "h100", "h200_sxm": "h200", "a100_sxm": "a100", "l40s": "l40s"}
# Cards whose own table has times that their peak forbids, with the card whose table replaces it.
INSTEAD = {("h200_sxm", "context_attention_perf"): "h100_sxm"}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FORMATS = ("bfloat16", "fp8", "fp8_block")
# Hidden size, width and number of experts.
EXPERTS = ((4096, 14336, 8), (2048, 768, 128), (4096, 1536, 128))
KEYS: Mapping[str, Sequence[str]] = {
    "gemm_perf": ("gemm_dtype", "n", "k", "m"),
    "context_attention_perf": (
        "attn_dtype", "kv_cache_dtype", "num_heads", "num_key_value_heads", "head_dim",
        "beam_width", "batch_size", "isl", "step",
    ),
    "custom_allreduce_perf": ("backend", "allreduce_dtype", "num_gpus", "message_size"),
    "moe_perf": (
        "moe_dtype", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
        "moe_ep_size", "distribution", "num_tokens",
    ),
}  # fmt: skip
KEYS = {**KEYS, "generation_attention_perf": KEYS["context_attention_perf"]}


@click.command()
@click.option("--operators", required=True, type=click.Path(path_type=Path))
@click.option("--profiles", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(operators: Path, profiles: Path, out: Path) -> None:
    """Write all cards, and print the size of each."""
    for card, version in VERSIONS.items():
        for name in KEYS:
            source = INSTEAD.get((card, name), card)
            of = COLLECTIVES if name == "custom_allreduce_perf" else version
            if (found := _read(operators, profiles, source, name, of)) is not None:
                path = out / card / "vllm" / of / f"{name}.npz"
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, chosen(name, found), KEYS[name])
        source = "as NVIDIA's aiconfigurator has them (Apache-2.0)"
        about = f"# vLLM's operators on {KINDS[card]}, {source}.\n"
        numbers = yaml.safe_dump(_numbers(card), sort_keys=False)
        (out / f"{card}.yaml").write_text(about + numbers)
        size = sum(path.stat().st_size for path in (out / card).rglob("*.npz"))
        print(f"{card}: {size / 1e3:.0f} kB")


def _read(operators: Path, profiles: Path, card: str, name: str, version: str) -> Columns | None:
    """Return a table's columns; None if the card has no such table."""
    for path in operators.glob(f"{card}/*/vllm/{version}/{name}.parquet"):
        from pyarrow import parquet

        table = parquet.read_table(path)
        return {column: table[column].to_numpy() for column in table.column_names}
    plain = name.replace("custom_allreduce", "nccl")
    path = profiles / f"{card}_{plain}.csv.gz"
    if not path.is_file() or version != COLLECTIVES:
        return None
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {column: np.array([row[column] for row in rows]) for column in rows[0]}
    if name == "custom_allreduce_perf":
        found = _of(found, (found["op_name"] == "all_reduce") & (found["nccl_dtype"] == "half"))
        # Times of 16 bits, under whatever name.
        found["allreduce_dtype"] = np.full(len(found["latency"]), "bfloat16")
    return found


def _of(columns: Columns, which: np.ndarray) -> Columns:
    return {name: values[which] for name, values in columns.items()}


def chosen(name: str, columns: Columns) -> Columns:
    """Return the rows to ship."""
    which = np.ones(len(columns["latency"]), bool)
    words = {"gemm_perf": "gemm_dtype", "moe_perf": "moe_dtype"}
    if name in words:
        which &= np.isin(columns[words[name]].astype(str), FORMATS)
    if name == "gemm_perf":
        which &= np.isin(columns["m"].astype(int), ROWS)
    if name == "moe_perf":
        sizes = zip(
            *(columns[key].astype(int) for key in ("hidden_size", "inter_size", "num_experts")),
            strict=True,
        )
        which &= np.array([size in EXPERTS for size in sizes])
        which &= columns["distribution"].astype(str) == "power_law_1.01"
    if "attention" in name:
        which &= columns["head_dim"].astype(int) == 128
        which &= np.isin(columns["batch_size"].astype(int), BATCHES)
        which &= columns["attn_dtype"].astype(str) == "bfloat16"
        if "window_size" in columns:
            which &= columns["window_size"].astype(int) == 0
    return _of(columns, which)


def write(path: Path, columns: Columns, keys: Sequence[str]) -> None:
    """Write each point once, with the median of its times to four digits, in the keys' order."""
    times: dict[tuple[Any, ...], list[float]] = {}
    own = [key for key in keys if key in columns]
    points = zip(*(columns[key].astype(str).tolist() for key in own), strict=True)
    for at, ms in zip(points, columns["latency"].astype(float).tolist(), strict=True):
        times.setdefault(tuple(int(part) if part.isdecimal() else part for part in at), []).append(
            ms
        )
    ordered = sorted(times)
    arrays: dict[str, Any] = {
        key: np.array(values) if isinstance(values[0], str) else np.array(values, np.int32)
        for key, values in zip(own, zip(*ordered, strict=True), strict=True)
    }
    rounded = [float(f"{np.median(times[at]):.4g}") for at in ordered]
    np.savez_compressed(path, **arrays, latency=np.array(rounded, np.float32))


def _numbers(card: str) -> dict[str, Any]:
    """Return the numbers of a card, with aiconfigurator's shares of its bandwidth."""
    gpu = find_gpu(KINDS[card])
    found: dict[str, Any] = {
        "ships_as": {"name": NAMES[card], "backend": "vllm", "version": VERSIONS[card]},
        "kinds": [KINDS[card]],
        "gpu": {
            "mem_bw": gpu.memory_gb_s * 1e9,
            "mem_bw_empirical_scaling_factor": 0.8,
            "mem_empirical_constant_latency": 3e-6,
            "bfloat16_tc_flops": gpu.bf16_tflops * 1e12,
        },
        "node": {"intra_node_bw": gpu.link_gb_s * 1e9},
    }
    return found | ({"all_reduces": "modelled"} if card == "l40s" else {})


if __name__ == "__main__":
    main()
