"""Clusters as in Splitwise's public simulator: measured steps, pools, links and targets.

The rules are those of splitwise-sim at 8f99e7d.
"""

import csv
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.hardware.catalogue import find_gpu
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from jaxinfer.simulate.targets import PercentileTargets, Reference
from jaxinfer.workload.lengths import BenchRequest
from scripts.tables import CONFIGS

SPLITWISE = CONFIGS / "splitwise"
HARDWARE = CONFIGS / "clusters" / "splitwise_dgx.yaml"
TARGETS = CONFIGS / "targets" / "splitwise.yaml"
# Machines by their names in perf_model.csv, with Table I's dollars per hour, and provisioned power
# in units of a DGX-A100's.
MACHINES = {"a100": "a100-80gb", "h100": "h100-80gb", "h100_capped": "h100-80gb-pcap"}
USD_PER_HOUR = {"a100": 17.6, "h100": 38.0, "h100_capped": 38.0}
POWER = {"a100": 1.0, "h100": 1.75, "h100_capped": 1.225}
# Tokens of a machine's pool: 8 x 80 GiB minus 329e9 B of weights; Llama 2 70B counts as if it had
# no GQA.
POOL = {"bloom-176b": 89_234, "llama2-70b": 210_645}
GB_S = 200 * 2**30 / 1e9
# Bandwidth of the network cards in all clusters here; a tenth of it, and Table I's value of a
# DGX-A100, are used, too.
SPEEDS = (GB_S, GB_S / 10, 200.0)


@dataclass(frozen=True)
class Model:
    """A model of the public simulator, by its name in perf_model.csv."""

    name: str
    shape: Mapping[str, Any] = field(compare=False)


BLOOM = Model("bloom-176b", {
    "hidden_size": 14336, "intermediate_size": 57344, "num_hidden_layers": 70,
    "num_attention_heads": 112, "num_key_value_heads": 112, "vocab_size": 250880,
    "tie_word_embeddings": True, "gated": False,
})  # fmt: skip
LLAMA = Model(
    "llama2-70b",
    {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 32000,
    },
)


@dataclass(frozen=True)
class PublicDesign:
    """A cluster with machines for prompts and, with two pools, machines for tokens.

    Attributes:
        prompts: number of machines for prompts.
        prompt_kind: kind of these machines.
        tokens: number of machines for tokens; 0 with one pool.
        token_kind: kind of these machines.
        model: model of the public simulator.
        measured: whether decode times are by batch and context, and prompts and decodes share the
            weights, instead of the public simulator's reading.
        page_size: page size of the pools; the public simulator counts single tokens.
        gb_s: bandwidth of KV transfers.
        layerwise_from: number of prompt tokens from which KV is sent layer by layer.
        mixed_factor: factor by which decodes lengthen a step of prompts.
        step_tokens: largest number of prompt tokens of a step.
    """

    prompts: int
    prompt_kind: str
    tokens: int = 0
    token_kind: str = ""
    model: Model = BLOOM
    measured: bool = False
    page_size: int = 16
    gb_s: float = GB_S
    layerwise_from: int | None = None
    mixed_factor: float = 1.1
    step_tokens: int = 2048

    @property
    def machines(self) -> list[tuple[str, int]]:
        """Return the kinds of machines and their numbers."""
        pools = [(self.prompt_kind, self.prompts), (self.token_kind, self.tokens)]
        return [(kind, count) for kind, count in pools if count]

    @property
    def usd_per_hour(self) -> float:
        """Return dollars per hour of all machines."""
        return sum(USD_PER_HOUR[kind] * count for kind, count in self.machines)

    @property
    def power(self) -> float:
        """Return the power of all machines, in units of a DGX-A100."""
        return sum(POWER[kind] * count for kind, count in self.machines)


@dataclass
class Public:
    """Files that runs need, made from the authors' measurements.

    Args:
        perf_model: the CSV file.
        folder: folder for the curves and the hardware files.
    """

    perf_model: Path
    folder: Path
    _rows: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.perf_model.open(newline="", encoding="utf-8") as file:
            self._rows = [row for row in csv.DictReader(file) if row["tensor_parallel"] == "8"]
        for model in (BLOOM, LLAMA):
            for kind in MACHINES:
                self._write_curves(model, kind)
        for gb_s in SPEEDS:
            self._write_hardware(gb_s)

    def points(self, model: Model, kind: str, time: str) -> dict[float, float]:
        """Return seconds by prompt and batch tokens: medians, as in the public simulator."""
        found: defaultdict[float, list[float]] = defaultdict(list)
        for row in self._of(model, kind):
            found[int(row["prompt_size"]) * int(row["batch_size"])].append(float(row[time]) / 1e3)
        return {tokens: median(seconds) for tokens, seconds in sorted(found.items())}

    def _of(self, model: Model, kind: str) -> Iterable[dict[str, str]]:
        wanted = model.name, MACHINES[kind]
        return (row for row in self._rows if (row["model"], row["hardware"]) == wanted)

    def decodes(self, model: Model, kind: str) -> dict[tuple[int, float], float]:
        """Return the measured seconds of a step by batch and mean context."""
        found: defaultdict[tuple[int, float], list[float]] = defaultdict(list)
        for row in self._of(model, kind):
            context = int(row["prompt_size"]) + int(row["token_size"]) / 2
            found[int(row["batch_size"]), context].append(float(row["token_time"]) / 1e3)
        return {at: median(seconds) for at, seconds in sorted(found.items())}

    def _write_curves(self, model: Model, kind: str) -> None:
        prompts = self.points(model, kind, "prompt_time").items()
        public = self.points(model, kind, "token_time").items()
        measured = self.decodes(model, kind).items()
        rows: dict[str, list[tuple[Any, ...]]] = {
            "public": [("decode", tokens, "", "", y) for tokens, y in public],
            "measured": [("decode", "", batch, context, y) for (batch, context), y in measured],
        }
        for name, decodes in rows.items():
            with self._curves(model, kind, name).open("w", newline="", encoding="utf-8") as file:
                table = csv.writer(file)
                table.writerow(["phase", "tokens", "batch", "context", "seconds"])
                table.writerows(("prompt", tokens, "", "", y) for tokens, y in prompts)
                table.writerows(decodes)

    def _curves(self, model: Model, kind: str, name: str) -> Path:
        return self.folder / f"{model.name}_{kind}_{name}.csv"

    def _hardware(self, gb_s: float) -> Path:
        return self.folder / f"hardware_{gb_s:.4g}.yaml"

    def _write_hardware(self, gb_s: float) -> None:
        """Write the DGX machines with memory for the public pools; all network cards are equal."""
        data = yaml.safe_load(HARDWARE.read_text(encoding="utf-8"))
        gpus = {}
        for node in data["nodes"].values():
            node.pop("flops_scale", None)  # The curves include it.
            name = f"public-{node['gpu'].lower()}"
            gpus[name] = {
                "bf16_tflops": 1000,
                "memory_gb": 99,
                "memory_gb_s": 3000,
                "link": "NVLink",
                "link_gb_s": 300,
                "watts": find_gpu(node["gpu"]).watts,
            }
            node |= {"gpu": name, "nic_gb_s": gb_s}
        text = yaml.safe_dump(data | {"gpus": gpus})
        self._hardware(gb_s).write_text(text, encoding="utf-8")

    def run_file(self, design: PublicDesign) -> RunFile:
        """Return the run file; see ``data``."""
        return as_run_file(self.data(design))

    def data(self, design: PublicDesign) -> dict[str, Any]:
        """Return a shipped run file with the public simulator's numbers."""
        base = "hh" if design.tokens else "baseline_h100"
        data = yaml.safe_load((SPLITWISE / f"{base}.yaml").read_text(encoding="utf-8"))
        data |= {"model": "public", "models": {"public": dict(design.model.shape)}}
        data["engine"]["page_size"] = design.page_size
        prompts = {"name": "whole_prompts", "step_tokens": design.step_tokens}
        data["engine"]["policies"]["batching"] = prompts
        data["system"] |= {"return_when": "idle", "layerwise_from": design.layerwise_from}
        data["simulate"] = {
            "hardware": str(self._hardware(design.gb_s)),
            "reserve_gb": 0.0,
            "groups": {},
        }
        pools = [("prompt", design.prompt_kind, design.prompts)]
        if design.tokens:
            pools.append(("token", design.token_kind, design.tokens))
        for pool, kind, count in pools:
            pages = POOL[design.model.name] // design.page_size + 1
            data["groups"][pool]["replicas"] = count
            data["instances"][pool] |= {"replicas": count, "num_pages": pages}
            data["simulate"]["groups"][pool] = {
                "node": f"{pool}_{kind}*",
                "curves": self._costs(design, kind),
            }
        return data

    def _costs(self, design: PublicDesign, kind: str) -> dict[str, Any]:
        if design.measured:
            file = self._curves(design.model, kind, "measured")
            return {"file": str(file), "share_weights": True}
        file = self._curves(design.model, kind, "public")
        return {"file": str(file), "decode": "by_tokens", "mixed_factor": design.mixed_factor}

    def reference(self, model: Model, work: Sequence[BenchRequest]) -> Reference:
        """Return latencies of a DGX-A100 without contention, as in the authors' notebook.

        The notebook takes the time between tokens at the prompt's length, on the axis of prompt and
        batch tokens. A request's own time per token is its time divided by all of its tokens,
        rather than by the number of gaps between them.
        """
        prompt, token = (
            PiecewiseLinear(self.points(model, "a100", time))
            for time in ("prompt_time", "token_time")
        )
        seconds = {}
        for p, n in {(item.prompt_len, item.max_tokens) for item in work}:
            ttft, tbt = prompt(p), token(p)
            seconds[p, n] = {"ttft": ttft, "e2e": ttft + tbt * (n - 1)}
            if n > 1:
                seconds[p, n]["tpot"] = tbt * n / (n - 1)
        return Reference(seconds)

    def targets(self, model: Model, work: Sequence[BenchRequest]) -> PercentileTargets:
        """Return Table VI's nine targets with this reference."""
        table = yaml.safe_load(TARGETS.read_text(encoding="utf-8"))["percentiles"]
        limits = [(m, float(p), most) for m, of in table.items() for p, most in of.items()]
        return PercentileTargets(limits, self.reference(model, work))


def drawn(
    trace: Sequence[BenchRequest], rate: float, seconds: float, seed: int, joint: bool = False
) -> list[BenchRequest]:
    """Draw lengths of prompts and of outputs independently, as the public generator does.

    Args:
        joint: whether to draw whole requests instead, so that long prompts keep their outputs.
    """
    rng = random.Random(seed)
    count = round(rate * seconds)
    if joint:
        return [replace(item, arrival=0.0) for item in rng.choices(trace, k=count)]
    prompts = rng.choices([item.prompt_len for item in trace], k=count)
    outputs = rng.choices([item.max_tokens for item in trace], k=count)
    return [BenchRequest(None, p, n, 0.0) for p, n in zip(prompts, outputs, strict=True)]
