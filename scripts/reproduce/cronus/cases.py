"""Cronus' setups: pairs of GPUs under five approaches, with the paper's Tables 2 and 3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.simulate.run import simulate
from scripts.reproduce.reproduction import Work
from scripts.tables import CONFIGS

FOLDER = CONFIGS / "cronus"
MODELS = {"LLaMA3-8B": "llama-3-8b", "Qwen2-7B": "qwen2-7b"}
SETUPS = {f"A100+{low} {model}": (low, model) for low in ("A10", "A30") for model in MODELS}
APPROACHES = {
    "DP+Chunked": "data_parallel",
    "PP+Chunked": "pipeline_parallel",
    "Disagg. H-L": "disaggregated_high_low",
    "Disagg. L-H": "disaggregated_low_high",
    "Cronus": "cronus",
}
# Table 2, requests per second, in the order of SETUPS.
TABLE_2 = {
    "DP+Chunked": (7.28, 8.70, 8.54, 10.85),
    "PP+Chunked": (3.86, 4.08, 3.96, 3.97),
    "Disagg. H-L": (1.31, 3.45, 2.93, 6.74),
    "Disagg. L-H": (4.11, 4.35, 6.14, 6.59),
    "Cronus": (7.39, 8.29, 8.7, 10.27),
}
# Table 3, percent: prefill and decode of High-Low, then of Low-High.
TABLE_3 = {
    "A100+A10 LLaMA3-8B": (11, 97, 99, 32),
    "A100+A10 Qwen2-7B": (28, 101, 104, 25),
    "A100+A30 LLaMA3-8B": (25, 96, 98, 47),
    "A100+A30 Qwen2-7B": (54, 100, 99, 38),
}


def paper(approach: str, setup: str) -> float:
    """Return a cell of Table 2."""
    return TABLE_2[approach][list(SETUPS).index(setup)]


@dataclass(frozen=True)
class CronusCase:
    """A cell: a setup under a system, with costs."""

    setup: str
    system: str
    costs: tuple[tuple[str, float], ...] = ()
    changes: tuple[str, ...] = ()

    def config(self) -> RunFile:
        """Return the system's run file with the changes."""
        low, model = SETUPS[self.setup]
        return load_run_file(
            FOLDER / f"{self.system}.yaml",
            [
                f"model={MODELS[model]}",
                f"groups.low.kind={low}",
                *(f"simulate.{name}={value}" for name, value in self.costs),
                *self.changes,
            ],
        )


def throughput(case: CronusCase, work: Work) -> float:
    """Return requests per second."""
    metrics = simulate(case.config(), work)
    return metrics.requests / metrics.wall_s


def numbers(costs: Mapping[str, Any], setup: str) -> tuple[tuple[str, float], ...]:
    """Return a setup's costs as settings."""
    low, model = SETUPS[setup]
    found = list(costs["engine"].items())
    found += [(f"groups.high.{name}", v) for name, v in costs["high"][model].items()]
    found += [(f"groups.low.{name}", v) for name, v in costs["low"][low][model].items()]
    if "hop_s" in costs:
        found.append(("hop_s", costs["hop_s"]))
    return tuple(found)
