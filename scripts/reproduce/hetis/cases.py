"""Run files of Hetis' cluster, and the figures of their simulations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.cluster import ModelledInstance, model_cluster
from jaxinfer.simulate.run import simulate
from scripts.tables import CONFIGS, Row

HARDWARE = CONFIGS / "clusters" / "hetis.yaml"
# The node of each group, and its GPUs; "bc" belongs to a cluster with all four 3090 on one node.
NODES = {
    "a": ("a100", 4),
    "b": ("rtx3090_1", 2),
    "c": ("rtx3090_2", 2),
    "p": ("p100", 4),
    "one": ("a100", 1),
    "near": ("rtx3090_1", 1),
    "far": ("rtx3090_2", 1),
    "bc": ("rtx3090", 4),
}
SEVENTY, THIRTEEN, THIRTY = "llama-2-70b", "llama-2-13b", "opt-30b"
# Stages of 70B that have all layers where Hetis has them.
PRIMARIES = (("a", 58), ("b", 11), ("c", 11))
# The two 3090 in addition to Fig. 14's A100, and the whole part of the cluster without layers of
# 13B.
TWO, OTHERS = ("near", "far"), ("b", "c", "p")
# Options of the runs of 70B, and of what fits there.
LARGE = {"max_num_seqs": 1024, "max_num_batched_tokens": 2048}
# Options of OPT-2.7b, for Fig. 1b.
MODELS = {
    "opt-2.7b": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 50272,
        "tie_word_embeddings": True,
        "gated": False,
    }
}


def hardware(folder: Path, latency_s: float | None = None) -> Path:
    """Return the cluster's file with another latency, and with an additional node of four 3090."""
    known = yaml.safe_load(HARDWARE.read_text(encoding="utf-8"))
    known["nodes"]["rtx3090"] = known["nodes"]["rtx3090_1"] | {"gpus": 4}
    if latency_s is not None:
        known["latency_s"] = latency_s
    path = folder / f"hetis_{latency_s}.yaml"
    path.write_text(yaml.safe_dump(known), encoding="utf-8")
    return path


def cluster(
    model: str,
    layers: Sequence[tuple[str, int | None]],
    attention: Sequence[str] = (),
    system: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    pages: int | None = None,
    rate: float = 1.0,
    count: int = 500,
    lengths: str = "sharegpt",
    file: Path = HARDWARE,
) -> RunFile:
    """Return a run file of one instance with attention groups for all stages."""
    stages = [
        {
            "group": group,
            **({"layers": of_stage} if of_stage else {}),
            "attention": [{"group": name, "num_pages": pages} for name in attention],
        }
        for group, of_stage in layers
    ]
    names = [*(group for group, _ in layers), *attention]
    common = {"launch_ahead": False, "enable_prefix_caching": False, "max_num_seqs": 256}
    plain = "pipeline_parallel" if len(stages) > 1 else "single"
    return as_run_file(
        {
            "model": model,
            "models": MODELS,
            "groups": {name: {"devices": NODES[name][1]} for name in names},
            "instances": {"x": {**common, "stages": stages, **(engine or {})}},
            "simulate": {
                "hardware": str(file),
                "groups": {name: {"node": NODES[name][0]} for name in names},
            },
            "system": system or {"name": plain},
            "workload": {
                "synthetic": {"lengths": lengths, "seed": 0, "count": count},
                "arrivals": {"kind": "poisson", "rate": rate, "seed": 0},
            },
        }
    )


def hetis(**options: Any) -> dict[str, Any]:
    """Return the system's section."""
    return {"name": "hetis", **options}


def modelled(run_file: RunFile) -> ModelledInstance:
    """Return the modelled instance."""
    return model_cluster(model_site(resolve(run_file))).instances["x"]


def run(config: RunFile, folder: Path | None = None) -> Row:
    """Simulate, and return figures for tables; times are in seconds.

    If a folder is given, the run is recorded there. A request's time per token is its whole time
    divided by its tokens. TPOT is the time per token after the first one.
    """
    ttft, per_token, tpot = list[float](), list[float](), list[float]()

    def keep(request: RequestState, times: Sequence[float]) -> None:
        ttft.append(times[0] - request.arrival)
        per_token.append((times[-1] - request.arrival) / len(times))
        if len(times) > 1:
            tpot.append((times[-1] - times[0]) / (len(times) - 1))

    found = simulate(config, config.requests(), folder, keep)
    moves = found.slice_moves
    times = {
        "TTFT p50": float(np.median(ttft)),
        "TTFT p95": float(np.percentile(ttft, 95)),
        "TBT p50": found.tbt_p50 or 0.0,
        "TPOT p95": float(np.percentile(tpot, 95)),
        "s/token mean": float(np.mean(per_token)),
        "s/token p95": float(np.percentile(per_token, 95)),
    }
    return {
        **{name: float(f"{seconds:.4g}") for name, seconds in times.items()},
        "requests/s": round(found.requests / found.wall_s, 3),
        "preemptions": found.preemptions,
        "moves": moves.begun if moves else 0,
    }
