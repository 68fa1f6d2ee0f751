"""Run files with attention groups, systems that place KV heads, and steps counted by shards."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.options.validation import Options
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.serving.batch import ShardWork, Work
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment, MoveSlices, System
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView, StepView
from jaxinfer.simulate.cluster import ModelledInstance, model_cluster
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

# Two KV heads, of four numbers each, with two query heads: an entry of a head has 16 bytes, and a
# token's queries of one exchange (2 + 2 queries and outputs, a key, a value) 48 bytes.
MODEL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CARD = {
    "bf16_tflops": 1e-3,
    "memory_gb": 1e-3,
    "memory_gb_s": 1e-3,
    "link": "none",
    "link_gb_s": 2.0,
}
PEAK = {"flops": 1.0, "bandwidth": 1.0}
LINK = {"gb_s": 1e-3, "latency_s": 0.5}


class Placed(System):
    """Has the second KV head of each spread stage on the stage's last shard."""

    def routes(self, instances: Any) -> Any:
        return ()

    def route(self, waiting: Any, cluster: ClusterView) -> Sequence[Assignment]:
        return [Assignment(request.id, (Leg("x"),)) for request in waiting]

    def place(self, request: RequestView, instance: InstanceView) -> list[list[int]]:
        last = {shard.stage: number for number, shard in enumerate(instance.shards)}
        second = {shard.stage: shard.slices[1:] for shard in instance.shards if shard.slices}
        return [
            [*shard.slices[:1], *(second[shard.stage] if last[shard.stage] == number else ())]
            for number, shard in enumerate(instance.shards)
        ]


class Moving(Placed):
    """Moves the second KV head after the first step, twice at once."""

    place = System.place  # type: ignore[assignment]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[MoveSlices]:
        moves = [MoveSlices(row.request.id, ((0, 1, (1,)),)) for row in step.rows]
        return moves * 2 if not step.start else ()


class Seed(Options):
    seed: int


class Random(Placed):
    """Places heads at random, where there is room; has some move after steps, and for room."""

    Options = Seed

    def __init__(self, options: Seed) -> None:
        super().__init__(options)
        self._draw = random.Random(options.seed)

    def place(self, request: RequestView, instance: InstanceView) -> Any:
        if self._draw.random() < 0.5:
            return None
        found: list[list[int]] = [[] for _ in instance.shards]
        pages = -(-request.num_known // instance.page_size)
        for stage in {shard.stage for shard in instance.shards}:
            numbers = [n for n, shard in enumerate(instance.shards) if shard.stage == stage]
            for head in (2 * stage, 2 * stage + 1):
                found[self._draw.choice(numbers)].append(head)
        fits = [
            shard.num_free_pages >= pages * len(heads)
            for shard, heads in zip(instance.shards, found, strict=True)
        ]
        return found if all(fits) else None

    def make_room(
        self, request: RequestView, shard: int, instance: InstanceView
    ) -> list[MoveSlices]:
        return self._moves(request, instance) if self._draw.random() < 0.5 else []

    def on_step(self, step: StepView, cluster: ClusterView) -> list[MoveSlices]:
        instance = cluster.instances["x"]
        running = list(instance.running.values())
        if not running or self._draw.random() < 0.5:
            return []
        return self._moves(self._draw.choice(running), instance)

    def _moves(self, request: RequestView, instance: InstanceView) -> list[MoveSlices]:
        moves = []
        for source, heads in enumerate(request.slices):
            stage = instance.shards[source].stage
            for head in heads:
                dest = self._draw.randrange(len(instance.shards))
                if dest != source and instance.shards[dest].stage == stage:
                    moves.append((source, dest, (head,)))
        return [MoveSlices(request.id, tuple(moves))] if moves else []


def run_file(
    stages: Sequence[dict[str, Any]] = ({"group": "a", "attention": ["w"]},),
    system: str = "Placed",
    engine: dict[str, Any] = {},  # noqa: B006
    **sections: Any,
) -> dict[str, Any]:
    """An instance ``x``; all groups are a card each, and linked."""
    one = {"page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, "launch_ahead": False}
    one |= {"enable_prefix_caching": False, "num_pages": 50}
    names = dict.fromkeys(
        at if isinstance(at, str) else at["group"]
        for stage in stages
        for at in [stage["group"], *stage.get("attention", ())]
    )
    pairs = [(a, b) for a in names for b in names if a < b]
    return {
        "model": "small",
        "models": {"small": MODEL},
        "gpus": {"card": CARD},
        "groups": {name: {"kind": "card"} for name in names},
        "links": [LINK | {"between": [a, b]} for a, b in pairs],
        "instances": {"x": one | {"stages": list(stages)} | engine},
        "simulate": PEAK,
        "system": {"name": f"{__name__}:{system}" if system[0].isupper() else system},
    } | sections


def modelled(data: dict[str, Any]) -> ModelledInstance:
    return model_cluster(model_site(resolve(as_run_file(data)))).instances["x"]


def served(
    data: dict[str, Any], *lengths: tuple[int, int], folder: Path | None = None
) -> tuple[RunMetrics, dict[str, list[float]]]:
    """Serve all at once; with the times of each one's tokens."""
    times: dict[str, list[float]] = {}

    def note(request: RequestState, at: Sequence[float]) -> None:
        times[request.id] = list(at)

    work = [BenchRequest(None, p, n, 0.0) for p, n in lengths]
    return simulate(as_run_file(data), work, folder, note), times


# The rows of a step: entries before each, and its tokens.
ROWS = st.lists(
    st.tuples(st.integers(0, 200_000), st.one_of(st.just(1), st.integers(2, 8192))),
    min_size=1,
    max_size=20,
)


def work_with(rows: Sequence[tuple[int, int]], *heads: int) -> Work:
    """Rows with so many KV heads in each of the shards."""
    singles = [start for start, count in rows if count == 1]
    chunks = [(start, count) for start, count in rows if count > 1]
    seen = sum(singles) + len(singles)
    shards = [
        ShardWork(n * len(singles), n * seen, [(*chunk, n) for chunk in chunks] if n else [])
        for n in heads
    ]
    tokens = sum(count for _, count in rows)
    return Work(tokens, len(singles), len(rows), len(rows), seen, chunks, shards=shards)
