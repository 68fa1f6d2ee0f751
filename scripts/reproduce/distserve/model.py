"""DistServe's clusters and conversations.

Costs come from the profiles of its artefact, and pools from its table. Requests are the authors'
own, or are joined from turns of a trace.
"""

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.workload.lengths import BenchRequest, read_workload
from scripts.tables import CONFIGS

PROFILES, TRACE = "distserve", "sharegpt.csv"
LAYERS = {"opt-13b": 40, "opt-66b": 64}
CLUSTER = CONFIGS / "clusters" / "distserve.yaml"
Kernels = Literal["distserve", "vllm"]
# Tensor and pipeline parallelism.
Shape = tuple[int, int]


@dataclass(frozen=True)
class Data:
    """Measurements of the authors' artefact.

    Attributes:
        profiles: coefficients in milliseconds, by kernels, model and tensor parallelism.
        pools: tokens that KV pools hold, by model, tensor and pipeline parallelism.
    """

    profiles: dict[Kernels, dict[str, Any]]
    pools: dict[tuple[str, int, int], int]

    @classmethod
    def read(cls, folder: Path) -> "Data":
        """Read the artefact's files."""
        names: dict[Kernels, str] = {
            kernels: f"profiler-a100-80g.{kernels}.json" for kernels in ("distserve", "vllm")
        }
        profiles = {
            kernels: json.loads((folder / name).read_text()) for kernels, name in names.items()
        }
        with (folder / "max_num_tokens.csv").open() as file:
            rows = list(csv.DictReader(file))
        pools = {
            (_model(row["model"]), int(row["tp"]), int(row["pp"])): int(row["max_num_tokens"])
            for row in rows
        }
        return cls(
            {k: {_model(m): costs for m, costs in each.items()} for k, each in profiles.items()},
            pools,
        )

    def phases(self, kernels: Kernels, model: str, shape: Shape) -> dict[str, Any]:
        """Return step times in seconds, as in its simulator."""
        tp, pp = shape
        fits = self.profiles[kernels][model][str(tp)]

        def decode(name: str) -> dict[str, float]:
            step, context, sequence = (x / 1e3 for x in fits[name])
            return {"step_s": step, "context_s": context, "sequence_s": sequence}

        step, token, pair = (x / 1e3 for x in fits["prefill"])
        below = fits["decoding_large_small_bs_threshold"]
        return {
            "prefill": {"step_s": step, "token_s": token, "pair_s": pair},
            "decode": [{"below": below} | decode("decoding_smallbs"), decode("decoding_largebs")],
            "share_step": True,
            "extra": {"step_s": 2e-3, "context_s": 1e-7, "prefill_stage_s": 1e-3 * pp},
        }


def _model(name: str) -> str:
    return name.rpartition("/")[2]


@dataclass(frozen=True)
class DistServeCluster:
    """Instances of one model on one node.

    Attributes:
        model: name of the model.
        instances: shapes by role: ``prefill`` and ``decode``, or ``both``.
        kernels: whose step times apply.
        batching: the policy of an instance that does both.
        prefill_tokens: largest number of prompt tokens in a step: the paper's L_m.
    """

    model: str
    instances: tuple[tuple[str, Shape], ...]
    kernels: Kernels = "distserve"
    batching: str = "prefill_first"
    prefill_tokens: int = 8192

    @property
    def gpus(self) -> int:
        """Number of used GPUs."""
        return sum(tp * pp for _, (tp, pp) in self.instances)

    def run_file(self, data: Data) -> RunFile:
        """Return the run file of a modelled cluster; each pair is its own unit."""
        groups, costs, instances = {}, {}, {}
        names: dict[str, list[str]] = {}
        for number, (role, (tp, pp)) in enumerate(self.instances):
            name = f"{role}{number}"
            names.setdefault(role, []).append(name)
            stages = [f"{name}s{stage}" for stage in range(pp)]
            for group in stages:
                groups[group] = {"devices": tp}
                phases = data.phases(self.kernels, self.model, (tp, pp))
                costs[group] = {"node": "node1", "phases": phases}
            batches: dict[str, Any] = {"name": self.batching}
            if self.batching == "prefill_first":
                batches["prefill_tokens"] = self.prefill_tokens
            instances[name] = {
                "stages": [{"group": g, "layers": LAYERS[self.model] // pp} for g in stages],
                "num_pages": data.pools[self.model, tp, pp] // 16 + 1,
                "policies": {"batching": batches},
            }
        system: dict[str, Any] = {"name": "least_loaded"}
        if "prefill" in names:
            pairs = zip(names["prefill"], names["decode"], strict=True)
            system = {"name": "distserve", "units": [{"prefill": p, "decode": d} for p, d in pairs]}
        return as_run_file(
            {
                "model": self.model,
                "engine": {
                    "page_size": 16,
                    "max_num_seqs": 1024,
                    "max_num_batched_tokens": 8192,
                    "max_model_len": 2048,
                    "launch_ahead": False,
                    "enable_prefix_caching": False,
                    "memory_fraction": 1.0,
                },
                "groups": groups,
                "instances": instances,
                "system": system,
                "simulate": {"hardware": str(CLUSTER), "reserve_gb": 0.0, "groups": costs},
            }
        )


def pair(
    model: str, prefill: Shape, decode: Shape, units: int = 1, **more: Any
) -> DistServeCluster:
    """Return DistServe's units of one prefill and one decode instance."""
    return DistServeCluster(model, (("prefill", prefill), ("decode", decode)) * units, **more)


def colocated(model: str, shape: Shape, **more: Any) -> DistServeCluster:
    """Return an instance that does both."""
    return DistServeCluster(model, (("both", shape),), **more)


def table_2_requests(path: Path, count: int, rate: float) -> list[BenchRequest]:
    """Return the first of the authors' requests, spread so that all arrive in count / rate."""
    work = read_workload(path)[:count]
    stretch = count / rate / work[-1].arrival
    return [replace(item, arrival=item.arrival * stretch) for item in work]


def turns(trace: Sequence[BenchRequest], q: float, count: int, seed: int = 0) -> list[BenchRequest]:
    """Return requests as the artefact makes them of conversations: prompts include earlier turns.

    The messages of a conversation are alternately the prompts and the outputs of drawn rows. There
    are 3 + Geometric(q) messages. The conversation is cut at one of them, which is drawn. That
    message is the answer, even if it is the user's.
    """
    rng = random.Random(seed)
    found: list[BenchRequest] = []
    while len(found) < count:
        messages = 3
        while rng.random() >= q:
            messages += 1
        answer = rng.randint(1, messages - 1)
        lengths = []
        for number in range(answer + 1):
            row = rng.choice(trace)
            lengths.append(row.max_tokens if number % 2 else row.prompt_len)
        if sum(lengths) < 2048:
            found.append(BenchRequest(None, sum(lengths[:-1]), lengths[-1], 0.0))
    return found


def fixed(prompt: int, output: int, count: int) -> list[BenchRequest]:
    """Return equal requests."""
    return [BenchRequest(None, prompt, output, 0.0)] * count
