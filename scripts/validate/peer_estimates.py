"""Write another program's figures for measured points, in that program's own environment.

    pip install aiconfigurator==0.12.0                    # in its own environment
    python scripts/validate/peer_estimates.py aiconfigurator POINTS.csv OUT.csv

    pip install --only-binary :all: aisimulate==0.13.*    # in its own environment
    python scripts/validate/peer_estimates.py aisimulate POINTS.csv OUT.csv

OUT.csv has ``id``, ``ttft_ms`` and ``tpot_ms``, or ``refused``. Both programs take their newest
tables for the row's backend. aisimulate serves as many requests as those who measured did, with the
mean lengths and the token budgets of our ``configs/campaigns.yaml``.
``python -m scripts.validate.silicon --peer NAME OUT.csv`` compares the figures with ours. This
program does not read the measured points of the peers' own distributions.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Names of model shapes that both peers ship.
DENSE = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
}
EXPERTS = {name: name for name in ("Qwen/Qwen3-235B-A22B-FP8", "openai/gpt-oss-120b")}
# Formats of products and of experts, for rows whose formats differ from the checkpoint's.
FORMATS = {
    "Qwen/Qwen3-235B-A22B-FP8": ("fp8_block", "fp8_block"),
    "openai/gpt-oss-120b": ("bfloat16", "w4a16_mxfp4"),
}


def by_aiconfigurator(row: Mapping[str, str]) -> dict[str, object]:
    """Return milliseconds by aiconfigurator's closed form."""
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
    found = cli_estimate(
        model_path=(DENSE | EXPERTS)[row["model_path"]],
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
    return {"ttft_ms": found.ttft, "tpot_ms": found.tpot}


def by_aisimulate(row: Mapping[str, str]) -> dict[str, object]:
    """Return milliseconds by aisimulate's simulation."""
    from aisimulate.config import CorePredictionConfig
    from aisimulate.predict import run_prediction
    from aisimulate.stack import resolve_runner_factory

    given = row["gemm_quant_mode"] or "bfloat16"
    isl, osl, batch = (int(float(row[name])) for name in ("isl", "osl", "batch_size"))
    # InferenceX draws lengths from 0.8 of the nominal ones on; its rows begin with a date.
    public, requests = row["id"].startswith("20"), 20 * batch
    if public:
        isl, osl, requests = round(0.9 * isl), round(0.9 * osl), 10 * batch
    kv = "fp8" if given == "fp8" or public else "bfloat16"
    budget = (16384 if row["backend"] == "trtllm" else 8192) if public else batch + isl + 1500
    config = {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": isl, "output_tokens": osl},
            "load": {"type": "concurrency", "concurrency": batch},
            "stop": {"requests": requests},
        },
        "engine": {
            "mode": "aggregated",
            "model": DENSE[row["model_path"]],
            "hardware": row["system"],
            "backend": row["backend"],
            "context_length": isl + osl + 32,
            "workers": {
                "aggregated": {
                    "parallelism": {"tensor": int(float(row["tp_size"]))},
                    "scheduler": {"max_batched_tokens": budget, "max_sequences": batch},
                    "timing": {
                        "type": "default",
                        "gemm_quant_mode": given,
                        "kvcache_quant_mode": kv,
                        "fmha_quant_mode": "bfloat16",
                    },
                }
            },
        },
    }
    factory = resolve_runner_factory("engine")
    asked = CorePredictionConfig.model_validate(config)
    found = run_prediction(asked, stack="engine", runner_factory=factory).summary
    return {"ttft_ms": found["mean_ttft_ms"], "tpot_ms": found["mean_tpot_ms"]}


Peer = tuple[Callable[[Mapping[str, str]], dict[str, object]], Mapping[str, str]]
PEERS: Mapping[str, Peer] = {
    "aiconfigurator": (by_aiconfigurator, DENSE | EXPERTS),
    "aisimulate": (by_aisimulate, DENSE),
}


def main(peer: str, points: str, out: str) -> None:
    """Estimate all aggregated points of the models that the peer has."""
    estimate, models = PEERS[peer]
    with Path(points).open(newline="", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["mode"] == "agg" and row["model_path"] in models
        ]
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", "ttft_ms", "tpot_ms", "refused"])
        writer.writeheader()
        for number, row in enumerate(rows, 1):
            try:
                found = estimate(row)
            except Exception as error:
                found = {"refused": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
            writer.writerow({"id": row["id"]} | found)
            file.flush()
            print(f"{number} of {len(rows)}", end="\r", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("points")
    parser.add_argument("out")
    given = parser.parse_args()
    main(given.peer, given.points, given.out)
