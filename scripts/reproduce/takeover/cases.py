"""Clusters of unlike GPUs under several systems, by lengths of prompts and answers."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.bound import bound_of
from jaxinfer.lab.plan.worth import WorthDone
from jaxinfer.options.validation import read_yaml
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest
from scripts.reproduce.reproduction import Work
from scripts.tables import CONFIGS

PROMPTS, ANSWERS = (256, 1024, 4096, 16384), (32, 128, 512, 2048)
# Short names of kinds.
KINDS = {
    "A100": "A100-80G-SXM",
    "H100": "H100-SXM",
    "V100": "V100-SXM2",
    "A6000": "RTX-A6000",
    "3090": "RTX-3090",
    "4090": "RTX-4090",
    "PRO6000": "RTX-PRO-6000",
}
# About how many KV entries a pool holds.
POOLS = {"A100": 466_000, "H100": 466_000, "L40S": 190_000, "A10": 22_000, "A30": 22_000,
         "L4": 22_000}  # fmt: skip
# Names list the GPUs, the best kind first.
PAIRS = ("A100+A10", "A100+A30", "H100+L4")
WIDE = ("A100+4 A10", "H100+A100+L40S+L4")
# Further clusters of two kinds. Ten were run once all rules existed; three of them were then used
# to choose two rules. Ten more followed. A6000+3090 and L40S+A10G have been used to choose a rule
# since. Of twelve more, which were run at the end, ten spoke against a stricter rule for takes.
OTHERS = ("A100+L4", "B200+H100", "A100+L40S", "H100+A10", "A6000+3090", "A100+V100", "MI300X+A40",
          "2 A100+3 L4", "4090+4 A10G", "H200+8 L4",
          "H100+A40", "L40S+A10G", "L40S+3090", "A6000+4090", "H200+A6000", "B200+A100",
          "MI300X+L40S", "A40+2 3090", "H100+4 4090", "A100+3 V100",
          "A100+A40", "H200+H100", "MI300X+A100", "B200+L4", "A100+3090", "4090+L4", "2 H100+2 A10",
          "H100+4 A10", "PRO6000+L40S", "B200+4 L40S", "A40+A10G", "V100+3090")  # fmt: skip
OTHER_CELLS = ((512, 64), (1024, 1024), (2048, 256), (8192, 128), (8192, 1024))
WIDE_CELLS = ((256, 128), (256, 512), (1024, 32), (1024, 128), (1024, 512), (4096, 32),
              (4096, 128), (4096, 512))  # fmt: skip
# The model whose efficiencies were calibrated for Cronus' tables; other GPUs have those of the
# A100.
MODEL = "LLaMA3-8B"
MODELS = {"A100+L40S": "llama-2-7b", "H100+A10": "qwen2-7b"}  # Others run Llama 3 8B.
# For each variant's name, its run file and the changes to it.
Variants = Mapping[str, tuple[str, tuple[str, ...]]]
SAME, CHUNKS = "takeover's narrow budgets", "1,024 tokens"
# GPUs that compute 256 tokens in the time in which they read their weights. Steps of 512 suit
# others. With ample room, takeover's steps are twice as wide.
SMALL, LONGER = ("A10", "A10G", "A30"), "instances.low.max_num_batched_tokens=512"
WIDER = "instances.low.max_num_batched_tokens=1024"
# The best variant of a system counts.
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
        """The lengths as text."""
        return f"{_short(self.prompt)}/{_short(self.answer)}"

    def work(self, seed: int, count: int) -> list[BenchRequest]:
        """Return the requests, which all arrive at the start."""
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
        """Return about four times the number of requests that run at once.

        It is at least 200, and at most 1,000 on pairs and 4,000 on others.
        """
        entries = self.prompt + self.answer / 2
        at_once = sum(min(pool / entries, 256) for pool in pools(self.cluster))
        return round(min(max(4 * at_once, 200), 1000 if is_pair(self.cluster) else 4000))


@dataclass(frozen=True)
class TakeoverRun:
    """A cell under one variant of a system."""

    cell: Cell
    file: str
    changes: tuple[str, ...]
    seed: int

    def config(self) -> RunFile:
        """Return the run file with the cluster's GPUs and costs."""
        kinds = list(dict.fromkeys(gpus(self.cell.cluster)))
        groups = ["high", "low"] if len(kinds) == 2 else [kind.lower() for kind in kinds]
        return load_run_file(
            CONFIGS / f"{self.file}.yaml",
            [
                *(
                    f"groups.{group}.kind={KINDS.get(k, k)}"
                    for group, k in zip(groups, kinds, strict=True)
                ),
                f"model={MODELS.get(self.cell.cluster, 'llama-3-8b')}",
                "engine.max_model_len=32768",
                *costs(dict(zip(groups, kinds, strict=True))),
                *self.changes,
            ],
        )


def gpus(cluster: str) -> tuple[str, ...]:
    """Return the kind of each GPU of a cluster."""
    return tuple(kind for kind, count in _counted(cluster) for _ in range(count))


def _counted(cluster: str) -> list[tuple[str, int]]:
    each = [part.split() for part in cluster.split("+")]
    return [(kind, int(*count or ["1"])) for *count, kind in each]


def is_pair(cluster: str) -> bool:
    """Tell whether there are two GPUs."""
    return len(gpus(cluster)) == 2


@cache
def pools(cluster: str) -> list[int]:
    """Return about how many KV entries each GPU's pool holds."""
    if cluster not in OTHERS:
        return [POOLS[kind] for kind in gpus(cluster)]
    run = TakeoverRun(Cell(cluster, 1, 1), *systems(cluster)[OURS][""], 0)
    return [instance.num_tokens for instance in prepare(run.config()).instances.values()]


def systems(cluster: str) -> Mapping[str, Variants]:
    """Return the systems that run on a cluster, with their variants.

    Cronus runs on pairs. L-H computes prompts on all weaker GPUs, or, with four kinds, on one or
    two. DP's shares are by peak FLOPS if the published shares of 3 to 1 do not apply.
    """
    if cluster in PAIRS:
        longer: tuple[str, ...] = () if gpus(cluster)[1] in SMALL else (LONGER,)
        return {
            **SYSTEMS,
            "DP": {**SYSTEMS["DP"], SAME: ("cronus/data_parallel", longer)},
            OURS: {"": ("takeover/pair", (WIDER,) if longer else ())},
        }
    if len(_counted(cluster)) == 2:
        found = _two_kinds(cluster)
        return {"Cronus": SYSTEMS["Cronus"], **found} if is_pair(cluster) else found
    file, names = "takeover/four_kinds", ["h100", "a100", "l40s", "l4"]
    weights = dict(zip(names, (6, 3, 2, 1), strict=True))
    narrow = [f"instances.{name}.max_num_batched_tokens=512" for name in names]
    return {
        "DP": _parallel(file, narrow, weights, names),
        "L-H": {
            f"prompts on {len(names) - count}": (
                file,
                (
                    *narrow[:count],
                    *(f"instances.{name}.max_num_batched_tokens=8192" for name in names[count:]),
                    *(f"instances.{name}.max_num_seqs=1" for name in names[count:]),
                    _split(names[count:], names[:count]),
                ),
            )
            for count in (1, 2)
        },
        OURS: {"": (file, ())},
    }


def _two_kinds(cluster: str) -> Mapping[str, Variants]:
    (high, num_high), (low, num_low) = _counted(cluster)
    sizes = {"high": num_high, "low": num_low}
    many = [
        setting
        for group, count in sizes.items()
        if count > 1
        for setting in (f"groups.{group}.devices={count}", f"groups.{group}.tensor_parallel_size=1")
    ]

    def instances(high: str, low: str) -> tuple[list[str], list[list[str]]]:
        """Return the settings for the number of instances, and the names of each kind."""
        each = {high: num_high, low: num_low}
        settings = [f"instances.{name}.replicas={n}" for name, n in each.items() if n > 1]
        names = [[f"{name}{i}" for i in range(n)] if n > 1 else [name] for name, n in each.items()]
        return [*many, *settings], names

    settings, (strong, weak) = instances("high", "low")
    split, (decode, prefill) = instances("decode", "prefill")
    ours, wider = ((*settings, *([] if low in SMALL else [more])) for more in (LONGER, WIDER))
    flops = read_yaml(CONFIGS / "gpus.yaml")
    ratio = flops[KINDS.get(high, high)]["bf16_tflops"] / flops[KINDS.get(low, low)]["bf16_tflops"]
    turns = max(round(ratio), 1) if cluster in OTHERS else 3
    weights = dict.fromkeys(strong, turns) | dict.fromkeys(weak, 1)
    return {
        "DP": _parallel("cronus/data_parallel", ours, weights, sizes),
        "L-H": {"": ("cronus/disaggregated_low_high", (*split, _split(prefill, decode)))},
        OURS: {"": ("takeover/pair", wider)},
    }


def _parallel(
    file: str, changes: Sequence[str], weights: Mapping[str, int], instances: Iterable[str]
) -> Variants:
    """Return data parallelism with takeover's budgets, and with longer chunks."""
    shares = ", ".join(
        f"{name}: {{weight: {weight}, max_waiting: {weight}}}" for name, weight in weights.items()
    )
    turns = (*changes, f"system={{name: data_parallel, shares: {{{shares}}}}}")
    longer = (f"instances.{name}.max_num_batched_tokens=1024" for name in instances)
    return {SAME: (file, turns), CHUNKS: (file, (*turns, *longer))}


def _split(prefill: Sequence[str], decode: Sequence[str]) -> str:
    """Return the setting of disaggregation on these instances."""
    first, second = ", ".join(prefill), ", ".join(decode)
    return f"system={{name: disaggregated, prefill: [{first}], decode: [{second}]}}"


def costs(kinds: Mapping[str, str]) -> list[str]:
    """Return the calibrated costs of groups of these kinds, as settings."""
    found = read_yaml(CONFIGS / "cronus_calibration.yaml")
    own = found["high"][MODEL]
    settings = [f"simulate.{name}={value}" for name, value in found["engine"].items()]
    for group, kind in kinds.items():
        mine = found["low"].get(kind, {}).get(MODEL, own)
        settings += [f"simulate.groups.{group}.{name}={value}" for name, value in mine.items()]
    return [*settings, f"simulate.hop_s={found['hop_s']}"]


def shares(run: TakeoverRun) -> tuple[float, float] | None:
    """Return the shares of the bound that the steady part of a run and the whole run reach.

    The bound uses takeover's settings for all systems. Weak GPUs of other systems may have one
    seat, which limits these systems, but not the cluster. Returns None if the system gives an
    instance a request that does not fit there.
    """
    ours = next(iter(systems(run.cell.cluster)[OURS].values()))
    work = run.cell.work(run.seed, run.cell.count)
    try:
        share, rate, most = beside_bound(
            run.config(), TakeoverRun(run.cell, *ours, run.seed).config(), work
        )
    except JaxinferError as error:
        if "pages of" not in str(error):
            raise
        return None
    return share, rate / most


def beside_bound(config: RunFile, ours: RunFile, work: Work) -> tuple[float, float, float]:
    """Run; return the steady part's share of the bound of ``ours``, and both rates.

    The rates are the run's requests per second, and the bound's.
    """
    bound = bound_of(prepare(ours), work)
    done = WorthDone(bound)
    made = serve(prepare(config), work, None, done.add_request, on_step=done.add_step)
    return done.share(), len(work) / made.wall_s, bound.rate


def cells(cluster: str) -> Sequence[Cell]:
    """Return all cells of a cluster: sixteen of a pair, eight of a wide one, five of others."""
    if cluster in PAIRS:
        return [Cell(cluster, prompt, answer) for prompt in PROMPTS for answer in ANSWERS]
    return [Cell(cluster, *each) for each in (OTHER_CELLS if cluster in OTHERS else WIDE_CELLS)]


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
