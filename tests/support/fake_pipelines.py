"""Pipelines whose processes are stood in for."""

import threading
from types import SimpleNamespace
from typing import Any

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv.outcome import ProcessLost
from jaxinfer.runtime.processes.messages import (
    Forget,
    Left,
    Loaded,
    Prepare,
    StepEnded,
)
from jaxinfer.runtime.processes.pipeline_worker import (
    PipelineWorker,
)
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState

LINK = LinkConfig(between=("a", "b"), gb_s=1)


class FakeProcess:
    """Notes what it is sent; its clock is ``ahead``."""

    def __init__(self, ahead: float = 0.0, name: str = "") -> None:
        self.name = name
        self.peer = SimpleNamespace(clock_offset=ahead)
        self.workers: dict[str, Any] = {}
        self.sent: list[Any] = []
        self.given_up: list[str] = []
        self.lost: str | None = None
        self.asking = threading.Lock()
        self.told = threading.Event()
        self.told.set()

    def wait_until_told(self) -> None:
        assert self.told.wait(20)

    def send(self, message: Any) -> None:
        if self.lost:
            raise ProcessLost(self.lost)
        self.sent.append(message)

    def ask(self, message: Any) -> Any:
        self.send(message)
        if isinstance(message, Prepare):
            return iter([Left("samplers", 2), Left("samplers", 0)])
        return iter([Left("stages", 0)])

    def forget(self, instance: str, pools: Any = (), patience: float | None = None) -> None:
        with self.asking:
            next(self.ask(Forget(instance, pools, 0)))

    def why_lost(self, seconds: float) -> str | None:
        return self.lost

    def give_up(self, why: str) -> None:
        self.given_up.append(why)


def plan(*token_buckets: int) -> Any:
    return SimpleNamespace(limits=SimpleNamespace(token_buckets=token_buckets), pool_pages=[9])


def pipeline(*processes: Any, counts: tuple[int, ...] = (1, 2)) -> PipelineWorker:
    loaded = [
        Loaded({"x": [plan(8)] * count}, {"x": [[*range(count)]]}, {"x": f"address {number}"})
        for number, count in enumerate(counts)
    ]
    return PipelineWorker("x", [*zip(processes, loaded, strict=True)], [LINK])


def batch() -> Batch:
    """A request with a prompt of four tokens, whose pages differ from shard to shard."""
    shards = [Shard(PagePool(9, 2), stage=number) for number in range(3)]
    for number, shard in enumerate(shards):
        shard.pool.take(number)
    hold = KVShards(shards).reserve(4)
    assert hold
    request = RequestState("r", 4, 3, prompt_token_ids=[1, 2, 3, 4])
    return Batch("x", [Row(request, 0, 4, True, False, 0, hold)], 0, 0, 0)


def answer(step: int, tokens: list[int], *stages: tuple[float, float]) -> StepEnded:
    results = (tokens, stages[0][0], stages[-1][1], [-0.5] * len(tokens), (), {}, stages)
    return StepEnded("x", step, results, [[]] * len(stages), [(0, 0.0, 0)] * len(stages))
