"""Convert Vidur's profiles to the tables that ``simulate.tables`` reads.

    python -m scripts.validate.vidur_tables --mlp mlp.csv.gz --attention attention.csv.gz \
        --all-reduce all_reduce.csv.gz --tensor-parallel 2 --out FOLDER

The tables add up times in the same way as Vidur's execution time predictor. They have no embedding
and no head. Decodes of more than one sequence take a tenth longer (its
``attention_decode_batching_overhead_fraction``). Each all-reduce includes 0.02 ms for its launch
(``nccl_cpu_launch_overhead_ms``).
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import yaml

from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from jaxinfer.simulate.costs.table_files import FIRST, LAST, PER_SEQUENCE

DENSE = {
    "layernorm": "input_layernorm",
    "qkv_proj": "attn_pre_proj",
    "rotary_emb": "attn_rope",
    "o_proj": "attn_post_proj",
    "gate_up_proj": "mlp_up_proj",
    "act_fn": "mlp_act",
    "down_proj": "mlp_down_proj",
    "add": "add",
}
BATCHING, LAUNCH_MS = 1.1, 0.02


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a packed table."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def medians(path: Path, where: Mapping[str, str], at: str, operator: str) -> dict[float, float]:
    """Return milliseconds of an operator; points that were measured twice are averaged."""
    found: dict[float, list[float]] = defaultdict(list)
    for row in rows(path):
        if all(row[name] == value for name, value in where.items()):
            found[float(row[at])].append(float(row[f"time_stats.{operator}.median"]))
    return {x: sum(times) / len(times) for x, times in found.items()}


def attention(path: Path, tp: int, prefill: bool) -> dict[tuple[float, float], float]:
    """Return milliseconds by chunk or batch, and by context; missing contexts are on a line."""
    count, operator = (
        ("prefill_chunk_size", "attn_prefill") if prefill else ("batch_size", "attn_decode")
    )
    found: dict[float, dict[float, float]] = defaultdict(dict)
    for row in rows(path):
        if row["num_tensor_parallel_workers"] == str(tp) and row["is_prefill"] == str(prefill):
            time = float(row[f"time_stats.{operator}.median"])
            found[float(row[count])][float(row["kv_cache_size"])] = time
    contexts = sorted({context for times in found.values() for context in times})
    return {
        (n, context): times.get(context, PiecewiseLinear(times)(context))
        for n, times in found.items()
        for context in contexts
    }


def write_tables(
    folder: Path,
    mlp: Path,
    network: Path,
    tp: int,
    prefill: Mapping[tuple[float, float], float],
    decode: Mapping[tuple[float, float], float],
) -> None:
    """Write meta.yaml and tpN.

    Args:
        mlp, network: Vidur's files.
        prefill, decode: milliseconds by chunk or batch, and by context.
    """
    out = folder / f"tp{tp}"
    out.mkdir(parents=True)
    sizes = next(rows(mlp))
    names = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_expanded_embd",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
    }
    overrides = {ours: int(sizes[theirs]) for ours, theirs in names.items()}
    meta = {"source": mlp.name, "engine_effective": {"hf_overrides": overrides}}
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta), encoding="utf-8")
    where = {"num_tensor_parallel_workers": str(tp)}
    lines = ["layer,tokens,time_us"]
    for ours, theirs in DENSE.items():
        times = medians(mlp, where, "num_tokens", theirs)
        lines += [f"{ours},{n:g},{1000 * ms:.3f}" for n, ms in sorted(times.items())]
    if tp > 1:
        ring = {"num_workers": str(tp), "devices_per_node": str(tp)}
        sent = medians(network, ring, "size", "all_reduce")
        each = 2 * overrides["hidden_size"]
        lines += [
            f"all_reduce,{size / each:g},{1000 * (ms + LAUNCH_MS):.3f}"
            for size, ms in sorted(sent.items())
        ]
    lines += [f"{name},1,0" for name in (*FIRST, *LAST)]
    (out / "dense.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    heads = [f"{name},1,0" for name in PER_SEQUENCE]
    (out / "per_sequence.csv").write_text(
        "\n".join(["layer,sequences,time_us", *heads]) + "\n", encoding="utf-8"
    )
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    for (n, context), ms in sorted(prefill.items()):
        lines.append(f"{n:g},{context:g},0,0,{1000 * ms:.3f}")
    for (n, context), ms in sorted(decode.items()):
        lines.append(f"0,0,{n:g},{context:g},{1000 * ms * (BATCHING if n > 1 else 1):.3f}")
    (out / "attention.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@click.command()
@click.option("--mlp", required=True, type=click.Path(path_type=Path))
@click.option("--attention", "attention_path", required=True, type=click.Path(path_type=Path))
@click.option("--all-reduce", "network", required=True, type=click.Path(path_type=Path))
@click.option("--tensor-parallel", "tp", required=True, type=int)
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(mlp: Path, attention_path: Path, network: Path, tp: int, out: Path) -> None:
    """Write meta.yaml and tpN."""
    prefill, decode = (attention(attention_path, tp, phase) for phase in (True, False))
    write_tables(out, mlp, network, tp, prefill, decode)


if __name__ == "__main__":
    main()
