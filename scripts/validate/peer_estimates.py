"""Write aiconfigurator's figures for measured points, in its own environment.

    pip install aiconfigurator==0.12.0        # in its own environment
    python scripts/validate/peer_estimates.py POINTS.csv OUT.csv

OUT.csv has ``id``, ``aiconfigurator_ttft_ms`` and ``aiconfigurator_tpot_ms``, or ``refused``. The
figures come from the newest tables for the row's backend.
``python -m scripts.validate.silicon --peer OUT.csv`` compares them with ours. This program does not
read the measured points of aiconfigurator's own distribution.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

# Names of model shapes that it ships.
MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B-FP8",
    "openai/gpt-oss-120b": "openai/gpt-oss-120b",
}
# Formats of products and of experts, for rows whose formats differ from the checkpoint's.
FORMATS = {
    "Qwen/Qwen3-235B-A22B-FP8": ("fp8_block", "fp8_block"),
    "openai/gpt-oss-120b": ("bfloat16", "w4a16_mxfp4"),
}


def estimate(row: dict[str, str]) -> dict[str, object]:
    """Return a point's figures in milliseconds, or the reason why there are none."""
    from aiconfigurator.cli.api import cli_estimate

    given = row["gemm_quant_mode"] or "bfloat16"
    quant, experts = FORMATS.get(row["model_path"], (given, None))
    kv = "fp8" if given == "fp8" else "bfloat16"
    tp, batch = int(float(row["tp_size"])), int(float(row["batch_size"]))
    parts: dict[str, Any] = {}
    if experts:
        moe_tp, moe_ep = (int(float(row[f"moe_{name}_size"])) for name in ("tp", "ep"))
        replicas = moe_tp * moe_ep // tp
        batch = -(-batch // replicas)
        parts = {"attention_dp_size": replicas, "moe_tp_size": moe_tp, "moe_ep_size": moe_ep}
    try:
        found = cli_estimate(
            model_path=MODELS[row["model_path"]],
            system_name=row["system"],
            backend_name=row["backend"],
            isl=int(float(row["isl"])),
            osl=int(float(row["osl"])),
            batch_size=batch,
            tp_size=tp,
            gemm_quant_mode=quant,
            kvcache_quant_mode=kv,
            fmha_quant_mode="bfloat16",
            moe_quant_mode=experts,
            **parts,
        )
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
    return {"aiconfigurator_ttft_ms": found.ttft, "aiconfigurator_tpot_ms": found.tpot}


def main(points: str, out: str) -> None:
    """Estimate all aggregated points of known models."""
    with Path(points).open(newline="", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["mode"] == "agg" and row["model_path"] in MODELS
        ]
    names = ["id", "aiconfigurator_ttft_ms", "aiconfigurator_tpot_ms", "refused"]
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            writer.writerow({"id": row["id"]} | estimate(row))
            file.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("points")
    parser.add_argument("out")
    given = parser.parse_args()
    main(given.points, given.out)
