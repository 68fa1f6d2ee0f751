"""Pairs of unlike GPUs under several systems, over lengths of prompts and answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import read_yaml
from jaxinfer.plan.bound import bound_of
from jaxinfer.plan.worth import WorthDone
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest
from scripts.tables import CONFIGS

PROMPTS, ANSWERS = (256, 1024, 4096, 16384), (32, 128, 512, 2048)
KINDS = {"A100": "A100-80G-SXM", "H100": "H100-SXM", "A10": "A10", "A30": "A30", "L4": "L4"}
PAIRS = {"A100+A10": ("A100", "A10"), "A100+A30": ("A100", "A30"), "H100+L4": ("H100", "L4")}
# The model whose efficiencies were calibrated for Cronus' tables; other GPUs have the A100's.
MODEL = "LLaMA3-8B"
# Run files, and what is changed in each: a system counts with the best of its variants.
SYSTEMS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "Cronus": (("cronus/cronus", ("simulate.fit=relative",)),),
    "DP": (
        ("cronus/data_parallel", ()),
        (
            "cronus/data_parallel",
            (
                "instances.high.max_num_batched_tokens=1024",
                "instances.low.max_num_batched_tokens=1024",
            ),
        ),
    ),
    "L-H": (("cronus/disaggregated_low_high", ()),),
    "takeover": (("takeover/pair", ()),),
}
OURS = "takeover"


@dataclass(frozen=True)
class Cell:
    """Mean lengths on a pair; lengths are uniform around them."""

    pair: str
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        """The lengths in words."""
        return f"{_short(self.prompt)}/{_short(self.answer)}"

    def work(self, seed: int, count: int) -> list[BenchRequest]:
        """Requests that are all there at the beginning."""
        rng = random.Random(seed)
        # The longest prompts still fit into the model's context, and into an A10.
        width = 0.25 if self.prompt > 8192 else 0.5
        lengths = [
            (
                round(self.prompt * rng.uniform(1 - width, 1 + width)),
                max(round(self.answer * rng.uniform(0.5, 1.5)), 1),
            )
            for _ in range(count)
        ]
        return [BenchRequest(None, prompt, answer, 0.0) for prompt, answer in lengths]

    @property
    def count(self) -> int:
        """Four times the requests that run at once, about; 200 to 1,000."""
        entries = self.prompt + self.answer / 2
        at_once = sum(min(pool / entries, 256) for pool in (466_000, 22_000))
        return round(min(max(4 * at_once, 200), 1000))


@dataclass(frozen=True)
class Run:
    """A cell under one variant of a system."""

    cell: Cell
    file: str
    changes: tuple[str, ...]
    seed: int

    def config(self) -> RunFile:
        """The run file, with the pair's GPUs and costs."""
        high, low = PAIRS[self.cell.pair]
        return load_run_file(
            CONFIGS / f"{self.file}.yaml",
            [
                f"groups.high.kind={KINDS[high]}",
                f"groups.low.kind={KINDS[low]}",
                "engine.max_model_len=32768",
                *costs(high, low),
                *self.changes,
            ],
        )


def costs(high: str, low: str) -> list[str]:
    """The calibrated costs of a pair, as settings."""
    found = read_yaml(CONFIGS / "cronus_calibration.yaml")
    own = found["high"][MODEL]
    lows = found["low"].get(low, {}).get(MODEL, own)
    return [
        *(f"simulate.{name}={value}" for name, value in found["engine"].items()),
        *(f"simulate.groups.high.{name}={value}" for name, value in own.items()),
        *(f"simulate.groups.low.{name}={value}" for name, value in lows.items()),
        f"simulate.hop_s={found['hop_s']}",
    ]


def shares(run: Run) -> tuple[float, float]:
    """The shares of the bound: of the steady part of a run, and of all of it.

    0 for a system that gives an instance requests which it could never hold.
    """
    work = run.cell.work(run.seed, run.cell.count)
    site, cluster, fits = prepare(run.config())
    bound = bound_of(cluster, work)
    done = WorthDone(bound)
    try:
        made = serve(site, cluster, fits, work, None, done.add_request, on_step=done.add_step)
    except JaxinferError as error:
        if "pages of" not in str(error):
            raise
        return 0.0, 0.0
    return done.share(), len(work) / made.wall_s / bound.rate


def cells(pair: str) -> Sequence[Cell]:
    """All cells of a pair."""
    return [Cell(pair, prompt, answer) for prompt in PROMPTS for answer in ANSWERS]


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
