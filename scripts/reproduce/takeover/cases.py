"""Clusters of unlike GPUs under several systems, over lengths of prompts and answers."""

import random
from collections.abc import Mapping, Sequence
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
KINDS = {
    "A100": "A100-80G-SXM",
    "H100": "H100-SXM",
    "L40S": "L40S",
    "A10": "A10",
    "A30": "A30",
    "L4": "L4",
}
# KV entries that a pool holds, about.
POOLS = {"A100": 466_000, "H100": 466_000, "L40S": 190_000, "A10": 22_000, "A30": 22_000,
         "L4": 22_000}  # fmt: skip
PAIRS = {"A100+A10": ("A100", "A10"), "A100+A30": ("A100", "A30"), "H100+L4": ("H100", "L4")}
WIDE = {
    "A100+4 A10": ("A100", "A10", "A10", "A10", "A10"),
    "H100+A100+L40S+L4": ("H100", "A100", "L40S", "L4"),
}
WIDE_CELLS = ((256, 128), (256, 512), (1024, 32), (1024, 128), (1024, 512), (4096, 32),
              (4096, 128), (4096, 512))  # fmt: skip
# The model whose efficiencies were calibrated for Cronus' tables; other GPUs have the A100's.
MODEL = "LLaMA3-8B"
# By the variant's name: its run file, and what is changed in it.
Variants = Mapping[str, tuple[str, tuple[str, ...]]]
SAME, CHUNKS = "takeover's budgets", "1,024 tokens"
# Where a GPU computes 400 tokens in the time for which it reads its weights, steps of 256 waste it.
LONGER = "instances.low.max_num_batched_tokens=512"
# A system counts with the best of its variants.
SYSTEMS: dict[str, Variants] = {
    "Cronus": {"relative fits": ("cronus/cronus", ("simulate.fit=relative",))},
    "DP": {
        SAME: ("cronus/data_parallel", ()),
        CHUNKS: (
            "cronus/data_parallel",
            (
                "instances.high.max_num_batched_tokens=1024",
                "instances.low.max_num_batched_tokens=1024",
            ),
        ),
    },
    "L-H": {"": ("cronus/disaggregated_low_high", ())},
    "takeover": {"": ("takeover/pair", ())},
}
OURS = "takeover"


@dataclass(frozen=True)
class Cell:
    """Mean lengths on a cluster; lengths are uniform around them."""

    cluster: str
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
        """Four times the requests that run at once, about; 200 to 1,000, on wide ones 4,000."""
        entries = self.prompt + self.answer / 2
        at_once = sum(min(POOLS[kind] / entries, 256) for kind in gpus(self.cluster))
        return round(min(max(4 * at_once, 200), 1000 if self.cluster in PAIRS else 4000))


@dataclass(frozen=True)
class Run:
    """A cell under one variant of a system."""

    cell: Cell
    file: str
    changes: tuple[str, ...]
    seed: int

    def config(self) -> RunFile:
        """The run file, with the cluster's GPUs and costs."""
        kinds = list(dict.fromkeys(gpus(self.cell.cluster)))
        groups = ["high", "low"] if len(kinds) == 2 else [kind.lower() for kind in kinds]
        return load_run_file(
            CONFIGS / f"{self.file}.yaml",
            [
                *(
                    f"groups.{group}.kind={KINDS[k]}"
                    for group, k in zip(groups, kinds, strict=True)
                ),
                "engine.max_model_len=32768",
                *costs(dict(zip(groups, kinds, strict=True))),
                *self.changes,
            ],
        )


def gpus(cluster: str) -> tuple[str, ...]:
    """The kind of each GPU of a cluster, the best first."""
    return (PAIRS | WIDE)[cluster]


def systems(cluster: str) -> Mapping[str, Variants]:
    """The systems that run on a cluster, with their variants.

    On wide ones there is no Cronus, and L-H computes prompts on all that are weaker: than the A100
    or the H100, or, of four kinds, on the weaker half, too.
    """
    if cluster == "H100+L4":
        dp, (file, changes) = SYSTEMS["DP"], SYSTEMS[OURS][""]
        mine = {SAME: (dp[SAME][0], (*dp[SAME][1], LONGER)), CHUNKS: dp[CHUNKS]}
        return SYSTEMS | {"DP": mine, OURS: {"": (file, (*changes, LONGER))}}
    if cluster in PAIRS:
        return SYSTEMS
    if cluster == "A100+4 A10":
        many = ("groups.low.devices=4", "groups.low.tensor_parallel_size=1")
        four = (*many, "instances.low.replicas=4")
        prefill = [f"prefill{number}" for number in range(4)]
        split = (*many, "instances.prefill.replicas=4", _split(prefill, ["decode"]))
        weights = {"high": 3, "low0": 1, "low1": 1, "low2": 1, "low3": 1}
        return {
            "DP": _parallel("cronus/data_parallel", four, weights, ("high", "low")),
            "L-H": {"all A10s": ("cronus/disaggregated_low_high", split)},
            OURS: {"": ("takeover/pair", four)},
        }
    file, names = "takeover/four_kinds", ["h100", "a100", "l40s", "l4"]
    weights = dict(zip(names, (6, 3, 2, 1), strict=True))
    return {
        "DP": _parallel(file, (), weights, names),
        "L-H": {
            f"prompts on {len(names) - count}": (
                file,
                (
                    *(f"instances.{name}.max_num_batched_tokens=8192" for name in names[count:]),
                    *(f"instances.{name}.max_num_seqs=1" for name in names[count:]),
                    _split(names[count:], names[:count]),
                ),
            )
            for count in (1, 2)
        },
        OURS: {"": (file, ())},
    }


def _parallel(
    file: str, changes: Sequence[str], weights: Mapping[str, int], instances: Sequence[str]
) -> Variants:
    """Data parallelism with the budgets that takeover has, and with longer chunks."""
    shares = ", ".join(
        f"{name}: {{weight: {weight}, max_waiting: {weight}}}" for name, weight in weights.items()
    )
    turns = (*changes, f"system={{name: data_parallel, shares: {{{shares}}}}}")
    longer = (f"instances.{name}.max_num_batched_tokens=1024" for name in instances)
    return {SAME: (file, turns), CHUNKS: (file, (*turns, *longer))}


def _split(prefill: Sequence[str], decode: Sequence[str]) -> str:
    """The setting of disaggregation over these instances."""
    first, second = ", ".join(prefill), ", ".join(decode)
    return f"system={{name: disaggregated, prefill: [{first}], decode: [{second}]}}"


def costs(kinds: Mapping[str, str]) -> list[str]:
    """The calibrated costs of groups of these kinds, as settings."""
    found = read_yaml(CONFIGS / "cronus_calibration.yaml")
    own = found["high"][MODEL]
    settings = [f"simulate.{name}={value}" for name, value in found["engine"].items()]
    for group, kind in kinds.items():
        mine = found["low"].get(kind, {}).get(MODEL, own)
        settings += [f"simulate.groups.{group}.{name}={value}" for name, value in mine.items()]
    return [*settings, f"simulate.hop_s={found['hop_s']}"]


def shares(run: Run) -> tuple[float, float] | None:
    """The shares of the bound: of the steady part of a run, and of all of it.

    The bound is that of takeover's settings for all systems: others' weak GPUs may have one seat,
    which bounds what they can do and not what the cluster can.

    None where the system gives an instance a request which that could never hold.
    """
    work = run.cell.work(run.seed, run.cell.count)
    ours = next(iter(systems(run.cell.cluster)[OURS].values()))
    bound = bound_of(prepare(Run(run.cell, *ours, run.seed).config())[1], work)
    site, cluster, fits = prepare(run.config())
    done = WorthDone(bound)
    try:
        made = serve(site, cluster, fits, work, None, done.add_request, on_step=done.add_step)
    except JaxinferError as error:
        if "pages of" not in str(error):
            raise
        return None
    return done.share(), len(work) / made.wall_s / bound.rate


def cells(cluster: str) -> Sequence[Cell]:
    """All cells of a cluster: sixteen of a pair, eight of a wide one."""
    every = [(prompt, answer) for prompt in PROMPTS for answer in ANSWERS]
    return [Cell(cluster, *lengths) for lengths in (every if cluster in PAIRS else WIDE_CELLS)]


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
