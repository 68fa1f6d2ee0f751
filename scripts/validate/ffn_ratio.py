"""Measure the best ratio of attention to FFN devices on CPU devices of emulated speeds.

python -m scripts.validate.ffn_ratio

Compares it with the closed form of arXiv 2601.21351, from the measured times of both parts. The
devices share the machine's cores, so each piece of work is held back until an emulated device of
its own would have ended it. Attention of ``REQUESTS`` requests takes an attention device
``PIECE_S`` seconds. The FFN device is slowed down so that the FFN takes as long for the requests
of ``EQUAL`` attention devices: its time for other numbers is measured.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.runtime.ffn.emulated_ffn import EmulatedFfn, EmulatedGroup, PartSeconds
from jaxinfer.runtime.ffn.ffn_stage import FfnStage
from jaxinfer.runtime.ffn.ffn_step import compile_ffn
from jaxinfer.serving.world import StepDone
from jaxinfer.steps.times import StepTimes

HEADS, LAYERS, PARTS, REQUESTS, STEPS = 60, 6, 3, 4, 7
PIECE_S, EQUAL, PASSES = 0.2, 4, 60
RATIOS = (4, 2, 3, 5, 6)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 120,
    "hidden_size": 480,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 119,
}


class Measured(NamedTuple):
    """Figures of one number of attention devices.

    Attributes:
        ratio: number of attention devices, for one FFN device.
        attention: seconds of a layer's attention of a micro-batch.
        ffn: seconds of its FFN.
        rate: tokens per second and device.
        late: share of the pieces of work that ended later than the emulated device's.
    """

    ratio: int
    attention: float
    ffn: float
    rate: float
    late: float


@dataclass
class LoggedGroup(EmulatedGroup):
    """A group that keeps the seconds of its pieces."""

    def __post_init__(self) -> None:
        """Begin without pieces."""
        self.seconds: list[float] = []
        self.num_late = 0

    def end_of(self, ready: float, seconds: float) -> float:
        """See EmulatedGroup."""
        start, late = max(ready, self.free), len(self.late)
        end = super().end_of(ready, seconds)
        self.seconds.append(end - start)
        self.num_late += len(self.late) > late
        return end


def run_file(model: Path, ratio: int) -> dict[str, Any]:
    """Return a run file with ``ratio`` attention devices."""
    rows = PARTS * REQUESTS * ratio
    return {
        "model": str(model),
        "groups": {"attention": {"devices": ratio}, "ffn": {}},
        "instances": {
            "x": {
                "stages": [{"group": "attention", "ffn": "ffn"}],
                "micro_batches": PARTS,
                "max_num_seqs": rows,
                "max_num_batched_tokens": rows,
                "token_buckets": [rows],
                "max_model_len": 32,
                "page_size": 32,
                "num_pages": 2 * rows,
                "enable_prefix_caching": False,
                "load_format": "dummy",
                "dtype": "float32",
            }
        },
        "system": "single",
    }


def measure(model: Path, folder: Path) -> Iterator[Measured]:
    """Measure each number of attention devices."""
    ffn: dict[int, float] = {}
    for ratio in RATIOS:
        llm = LLM.from_config(as_run_file(run_file(model, ratio)), progress=False)
        (stage,) = llm.cluster.engines["x"].stages
        assert isinstance(stage, FfnStage)
        ffn = ffn or ffn_seconds(stage)
        rows = REQUESTS * ratio
        shape = stage.step.limits.smallest(rows, rows, rows)
        assert shape.tokens == rows, "no padding"
        times = StepTimes(stage.step.limits, {shape: (LAYERS * PIECE_S, 0.0, 0.0)})
        slowdown = PIECE_S / ffn[REQUESTS * EQUAL]
        stage.emulated = EmulatedFfn(PartSeconds(times, ffn, LAYERS, (1.0, slowdown)))
        stage.emulated.own, stage.emulated.ffn = groups = LoggedGroup(), LoggedGroup()
        yield serve(llm, ratio, groups, folder)
        del llm, stage
        gc.collect()
        jax.clear_caches()


def ffn_seconds(stage: FfnStage) -> dict[int, float]:
    """Return the seconds of a layer's FFN here, by tokens: the fastest of many, in turns."""
    plan = stage.plan.ffn
    assert plan
    tokens = [REQUESTS * ratio for ratio in RATIOS]
    runs = {count: compile_ffn(plan, count) for count in tokens}
    width = plan.config.hidden_size
    inputs = {
        count: jax.device_put(np.zeros((count, width), np.float32), plan.whole) for count in tokens
    }
    found = dict.fromkeys(tokens, inf)
    for _ in range(PASSES):
        for count in tokens:
            for leaves in stage.ffn:
                start = time.perf_counter()
                jax.block_until_ready(runs[count](leaves, inputs[count]))
                found[count] = min(found[count], time.perf_counter() - start)
    return found


def serve(llm: LLM, ratio: int, groups: tuple[LoggedGroup, LoggedGroup], folder: Path) -> Measured:
    """Decode as many requests as a step has rows, from prompts of one token."""
    rows = PARTS * REQUESTS * ratio
    params = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True)
    made = [each for n in range(rows) for each in llm.make_requests(str(n), [n % 100], params)]
    steps: list[StepDone] = []
    llm.run(made, lambda output: None, progress=False, run_dir=folder, on_step=steps.append)
    counts = [len(step.batch.rows) for step in steps]
    assert counts == [rows] * STEPS, counts
    assert all(len(step.batch.halves) == PARTS for step in steps)
    took = statistics.median(b.end - a.end for a, b in pairwise(steps))
    attention, ffn = (statistics.median(group.seconds) for group in groups)
    late = sum(group.num_late for group in groups) / sum(len(group.seconds) for group in groups)
    return Measured(ratio, attention, ffn, rows / took / (ratio + 1), late)


def closed_form(found: list[Measured]) -> tuple[float, str]:
    """Return the best ratio by the closed form, and its regime."""
    attention = statistics.mean(each.attention for each in found)
    tokens = [REQUESTS * each.ratio for each in found]
    alpha, beta = np.polyfit(tokens, [each.ffn for each in found], 1)
    click.echo(
        f"attention {attention * 1e3:.1f} ms; FFN {alpha * 1e3:.3f} ms for each token and "
        f"{beta * 1e3:.1f} ms"
    )
    limits = {
        "attention": (attention - beta) / (alpha * REQUESTS),
        "peak": sqrt(max(beta, 0.0) / (alpha * REQUESTS)),
    }
    regime = max(limits, key=limits.__getitem__)
    return float(limits[regime]), regime


@click.command()
def main() -> None:
    """Print a table; the program fails if the best ratio is none next to the closed form's."""
    jax.config.update("jax_num_cpu_devices", max(RATIOS) + 1)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        found = []
        for each in measure(model, Path(temporary, "runs")):
            click.echo(
                f"{each.ratio} attention devices: attention {each.attention * 1e3:.1f} ms, FFN "
                f"{each.ffn * 1e3:.1f} ms, {each.rate:.2f} tokens/s and device; "
                f"{each.late:.1%} of pieces late"
            )
            found.append(each)
    best = max(found, key=lambda each: each.rate).ratio
    expected, regime = closed_form(found)
    click.echo(f"best: {best}; closed form: {expected:.2f}, by the regime {regime}")
    sys.exit(not (abs(best - expected) < 1 or abs(best / expected - 1) <= 0.05))


if __name__ == "__main__":
    main()
