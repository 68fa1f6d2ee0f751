"""Small models, clusters of two unlike instances, requests, and cases that cover all pairs."""

import gc
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import yaml
from safetensors.numpy import save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.resolve import resolve
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.system import System

LAYERS, HEAD_DIM, VOCABULARY = 4, 8, 260
# Query and KV heads: four devices pad both, two devices the second.
HEADS = {"two": (4, 2), "three": (6, 3)}


def make_model(folder: Path, like: Path, heads: str) -> Path:
    """A Llama of four layers with the tokenizer of ``like``; weights as those of ``tiny_folder``.

    They are scaled such that attention is neither flat nor hard, and a likeliest token stands out.
    """
    shutil.copytree(like, folder)
    N, K = HEADS[heads]
    D, F, H, V = 32, 64, HEAD_DIM, VOCABULARY
    config = json.loads((like / "config.json").read_text()) | {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(K)
    shapes = {
        "self_attn.q_proj": (N * H, D, 3),
        "self_attn.k_proj": (K * H, D, 3),
        "self_attn.v_proj": (K * H, D, 2),
        "self_attn.o_proj": (D, N * H, 2),
        "mlp.gate_proj": (F, D, 2),
        "mlp.up_proj": (F, D, 2),
        "mlp.down_proj": (D, F, 2),
    }

    def draw(rows: int, columns: int, scale: float) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    ones = np.ones(D, np.float32)
    tensors = {"model.embed_tokens.weight": draw(V, D, 5), "lm_head.weight": draw(V, D, 4)}
    tensors["model.norm.weight"] = ones
    for i in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = draw(*shape)
        for name in ("input", "post_attention"):
            tensors[f"model.layers.{i}.{name}_layernorm.weight"] = ones
    save_file(tensors, folder / "model.safetensors")
    return folder


# Requests.

# Prompt and output tokens. 32 is an edge of pages of 8, 16 and 32. The first ones take few
# pages to begin with, and grow.
LENGTHS = [
    (16, 48), (9, 48), (31, 48), (17, 48), (33, 48), (8, 48), (1, 40), (7, 1), (32, 1),
    (40, 30), (41, 48), (64, 30), (65, 12), (100, 20),
]  # fmt: skip
PEAK = max(prompt + output - 1 for prompt, output in LENGTHS)


@dataclass(frozen=True)
class Request:
    """A prompt with its options."""

    prompt: tuple[int, ...]
    params: SamplingParams


def make_requests(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[Request]:
    """Return requests, by turns greedy and drawn. From 40 tokens on, the prompts begin alike."""
    rng = np.random.default_rng(7)
    shared = rng.integers(0, 250, 600).tolist()
    requests = []
    for number, (length, output) in enumerate(lengths):
        own = rng.integers(0, 250, length).tolist()
        options: dict[str, Any] = {"temperature": 0}
        if number % 2:
            options = {"temperature": 0.8, "top_p": 0.9, "seed": 100 + number}
        params = SamplingParams(max_tokens=output, ignore_eos=True, **options)
        prompt = [*shared[: length - 4], *own[:4]] if length >= 40 else own
        requests.append(Request(tuple(prompt), params))
    return requests


def cut_of(cut: float | int | None, prompt_len: int) -> int:
    """KV entries that the first instance computes: so many, or a share of the prompt."""
    if cut is None:
        return prompt_len
    return min(cut if isinstance(cut, int) else round(cut * prompt_len), prompt_len)


def cut_option(cut: float | int) -> dict[str, float]:
    """The same as Cronus' option."""
    return {"cut_tokens" if isinstance(cut, int) else "cut_share": cut}


# Clusters.

# Devices of each group; stages of an instance take what they need of them.
GROUP_DEVICES = 4
# Two groups whose stages have unequal numbers of devices.
G, H = {"devices": 4, "tensor_parallel_size": 2}, {"devices": 2, "tensor_parallel_size": 1}


@dataclass(frozen=True)
class Side:
    """An instance: devices of each stage, tokens per page, layers and segments of each stage."""

    devices: int
    page_size: int
    stages: tuple[int, ...] = (LAYERS,)
    segments: int = 1

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def __str__(self) -> str:
        stages = "+".join(map(str, self.stages))
        segments = f"-s{self.segments}" if self.segments > 1 else ""
        return f"tp{self.devices}-p{self.page_size}-l{stages}{segments}"


@dataclass(frozen=True)
class Pair:
    """Two instances of one model, ``a`` and ``b``, each on a group of its own.

    ``apart`` names those whose group has a process of its own.
    """

    heads: str
    a: Side
    b: Side
    apart: str = ""

    def __str__(self) -> str:
        return f"{self.heads}-{self.a}-{self.b}" + f"-apart_{self.apart}" * bool(self.apart)

    @property
    def sections(self) -> dict[str, Any]:
        """Groups and instances of a run file."""
        groups, instances = {}, {}
        for name, side in (("a", self.a), ("b", self.b)):
            groups[name] = {"devices": GROUP_DEVICES, "tensor_parallel_size": side.devices}
            if name in self.apart:
                groups[name]["process"] = "own"
            place: dict[str, Any] = {"group": name}
            if len(side.stages) > 1:
                place = {"stages": [{"group": name, "layers": n} for n in side.stages]}
            instances[name] = place | roomy(side.page_size) | {"segments": side.segments}
        return {"groups": groups, "instances": instances}


def roomy(page_size: int) -> dict[str, int]:
    """Options of an instance that has room for all requests at once."""
    tokens = sum(prompt + output + page_size for prompt, output in LENGTHS)
    return {"page_size": page_size, "num_pages": -(-tokens // page_size) + 1}


class AnyWay(System):
    """Stands in while a cluster is loaded: it asks for transfers between all instances."""

    def route(self, waiting: Any, cluster: Any) -> Any:
        return ()


def load(model: Path, folder: Path, **sections: Any) -> LLM:
    """Load a model by way of a run file; ``set_system`` says how its instances are used."""
    run_file = {
        "model": str(model),
        # Chunks of 27 tokens do not end where pages do.
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 27, "strict_shapes": True},
        "system": "cluster_cases:AnyWay",
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run_file | sections))
    return LLM.from_config(path, progress=False)


def free_executables() -> None:
    """Free the executables of unused models, which JAX's own caches keep.

    Each takes hundreds of memory maps, of which Linux gives a process 65530.
    """
    gc.collect()
    jax.clear_caches()


class Loader:
    """Loads one cluster at a time."""

    def __init__(self, models: Mapping[str, Path], folder: Path) -> None:
        self._models, self._folder = models, folder
        self._pair: Pair | None = None
        self._llm: LLM | None = None

    def pair(self, pair: Pair) -> LLM:
        """Anew only where it is not the one that was asked for last."""
        if pair != self._pair or not self._llm:
            self._llm = self.load(pair.heads, **pair.sections)
            self._pair = pair
        return self._llm

    def load(self, heads: str, **sections: Any) -> LLM:
        self.close()
        self._llm = load(self._models[heads], self._folder, **sections)
        return self._llm

    def close(self) -> None:
        self._llm = self._pair = None
        free_executables()


def set_system(llm: LLM, system: Mapping[str, Any]) -> None:
    """Set the system of the runs from here on."""
    llm.config = llm.config.model_copy(update={"system": dict(system)})
    llm._runs.site = resolve(llm.config)


def set_pools(llm: LLM, num_pages: Mapping[str, int], caching: bool) -> None:
    """Empty pools with so many free pages, or with as many as there are, for the next run."""
    llm._runs.kv = {
        name: KVShards(
            [
                Shard(
                    _pool(plan.limits.page_size, plan.num_pages, num_pages.get(name), number),
                    stage=number,
                )
                for number, plan in enumerate(engine.plans)
            ],
            caching,
        )
        for name, engine in llm.cluster.engines.items()
    }


def _pool(page_size: int, there: int, wanted: int | None, number: int) -> PagePool:
    """Return a pool of stage ``number`` whose pages have other numbers than earlier stages'."""
    pool = PagePool(there if wanted is None else 1 + wanted + number, page_size)
    assert pool.num_usable < there
    pool.take(number)
    return pool


# Cases.


@dataclass(frozen=True)
class Way:
    """A way of serving on a pair.

    Attributes:
        system: ``data_parallel``, or ``cronus`` or ``disaggregated`` and from where to where.
        cut: of Cronus: tokens, or a share of the prompt.
        rule: when KV is handed off; "" for ``data_parallel``.
        small: the instance whose pool is small; "" for none.
        caching: ``off``, ``on``, or ``twice``: the second run finds the first one's pages.
    """

    system: str
    cut: float | int | None
    rule: str
    small: str
    caching: str

    def __str__(self) -> str:
        cut = "" if self.cut is None else f"-cut{self.cut}"
        rule = f"-{self.rule}" if self.rule else ""
        small = f"-small_{self.small}" if self.small else ""
        return f"{self.system}{cut}{rule}{small}-cache_{self.caching}"

    @property
    def ends(self) -> tuple[str, str]:
        """Return the instance where a request begins, and the one where it ends up."""
        source, _, dest = self.system.partition("_")[2].partition("_")
        return source, dest

    @property
    def options(self) -> dict[str, Any]:
        """The section ``system`` of a run file."""
        if self.system == "data_parallel":
            shares = {"a": {"weight": 2, "max_waiting": 3}, "b": {"weight": 1, "max_waiting": 1}}
            return {"name": "data_parallel", "shares": shares}
        name = self.system.partition("_")[0]
        source, dest = self.ends
        if name == "disaggregated":
            return {"name": name, "prefill": source, "decode": dest, "hand_off": self.rule}
        assert self.cut is not None
        ends = {"partial": source, "chunked": dest}
        return {"name": name, **ends, **cut_option(self.cut), "hand_off": self.rule}


# Three kinds of instance on either side, so that nine pairs have all pairs of page sizes, of
# tensor parallelism and of pipeline cuts; each kind comes with both models.
KINDS_A = (Side(1, 8, segments=3), Side(2, 16, (1, 3)), Side(4, 32))
KINDS_B = (Side(1, 32, (3, 1)), Side(2, 8, (2, 2), segments=2), Side(4, 16))
PAIRS = [
    Pair(("two", "three")[(i + j) % 2], a, b)
    for i, a in enumerate(KINDS_A)
    for j, b in enumerate(KINDS_B)
]
# Two that have all of it but the third kind of ``a``, and the first of ``b``.
FEW_PAIRS = [Pair("two", KINDS_A[0], KINDS_B[2]), Pair("three", KINDS_A[1], KINDS_B[1])]
# All that a group has the devices for.
SIDES = [
    Side(devices, page_size, stages)
    for devices, page_size, stages in product(
        (1, 2, 4), (8, 16, 32), ((4,), (1, 3), (2, 2), (3, 1), (1, 2, 1))
    )
    if devices * len(stages) <= GROUP_DEVICES
] + [Side(1, 16, segments=4), Side(4, 8, segments=2), Side(2, 32, (2, 2), segments=2)]
# 0.98 is one token less than all, from 26 to 74 tokens; 1.0 is all.
CUTS = (0, 1, 31, 32, 33, 0.98, 1.0)
RULES = ("on_demand", "at_end", "per_chunk", "per_segment")
WAYS = [
    Way(system, cut, rule, small, caching)
    for system, cuts, rules in (
        ("data_parallel", (None,), ("",)),
        ("disaggregated_a_b", (None,), RULES),
        ("disaggregated_b_a", (None,), RULES),
        ("cronus_a_b", CUTS, RULES),
        ("cronus_b_a", CUTS, RULES),
    )
    for cut, rule, small, caching in product(cuts, rules, ("", "a", "b"), ("off", "on", "twice"))
]

Row = TypeVar("Row")
Pairing = tuple[Any, Any]


@dataclass(frozen=True)
class Case:
    """A way of serving on a pair of instances."""

    pair: Pair
    way: Way

    def __str__(self) -> str:
        return f"{self.pair}-{self.way}"

    @property
    def pairings(self) -> Iterator[Pairing]:
        """Yield all that the cases are to cover: pairs of values, and how a way's KV goes."""
        values = [
            (field.name, getattr(part, field.name))
            for part in (self.pair, self.way)
            for field in fields(part)
        ]
        yield from combinations(values, 2)
        way = self.way
        yield "hand-off", (way.system, way.cut, way.rule)
        yield "shortage", (way.system, way.small, way.rule)

    @property
    def few_pairings(self) -> Iterator[Pairing]:
        """Yield what few cases are to cover: a way's values on each pair, its system and rule."""
        values = vars(self.way).items()
        yield from ((str(self.pair), value) for value in values)
        for one, other in combinations(values, 2):
            names = {one[0], other[0]}
            if names & {"system", "rule"} and "cut" not in names:
                yield one, other


def cover(rows: Sequence[Row], wanted: Callable[[Row], Iterable[Pairing]]) -> list[Row]:
    """Few of the rows that have all that is wanted of any of them: the best one first."""
    numbers: dict[Pairing, int] = {}
    masks = []
    for row in rows:
        mask = 0
        for pairing in wanted(row):
            mask |= 1 << numbers.setdefault(pairing, len(numbers))
        masks.append(mask)
    left, chosen = (1 << len(numbers)) - 1, []
    while left:
        best = max(range(len(rows)), key=lambda i: (masks[i] & left).bit_count())
        chosen.append(rows[best])
        left &= ~masks[best]
    return chosen


def few_cases() -> list[Case]:
    """Return cases of two pairs, with cuts that the other tests of hand-offs do not have."""
    ways = [way for way in WAYS if way.cut not in (1, 33)]
    return _cover(FEW_PAIRS, ways, lambda case: case.few_pairings)


def covering_cases() -> list[Case]:
    """Return cases of all pairs."""
    return _cover(PAIRS, WAYS, lambda case: case.pairings)


def _cover(
    pairs: Sequence[Pair], ways: Sequence[Way], wanted: Callable[[Case], Iterable[Pairing]]
) -> list[Case]:
    """Return the cases in the order of their pairs of instances, which take seconds to load."""
    every = [Case(pair, way) for pair in pairs for way in ways]
    random.Random(0).shuffle(every)  # Else the first pair would get half of them.
    return sorted(cover(every, wanted), key=lambda case: pairs.index(case.pair))
