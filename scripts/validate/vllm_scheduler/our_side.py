"""Our loop with ``engine: {like: vllm-0.32}`` on a workload: its decisions as vLLM's side says."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.config.cluster import instance_options
from jaxinfer.config.engine import EngineOptions
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.loop import ServingLoop, Stop
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.policies import make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import Arrival, Event, StepDone
from jaxinfer.systems.single import Single
from scripts.validate.vllm_scheduler.rules import (
    ABORT,
    ARRIVAL,
    END_TOKEN,
    STEP_END,
    output_token,
    prompt_tokens,
    shown_rows,
    step_us,
)

Decision = list[Any]
Workload = Mapping[str, Any]


def engine_options(workload: Workload, changes: Mapping[str, Any]) -> EngineOptions:
    """Return the engine of a workload.

    Args:
        changes: options that differ from those of ``like``.
    """
    usable = workload["blocks"] - 1
    given: dict[str, Any] = {
        "like": "vllm-0.32",
        "max_num_seqs": workload["seqs"],
        "max_num_batched_tokens": workload["budget"],
        "page_size": workload["block"],
        "num_pages": workload["blocks"],
        "enable_prefix_caching": workload["caching"],
        # vLLM rounds its share of all blocks down, we round ours of the usable ones up.
        "watermark": int(workload["watermark"] * workload["blocks"]) / usable * (1 - 1e-9),
    }
    if not workload["ahead"]:
        given |= {"max_in_flight": 1, "launch_ahead": False}
    return EngineOptions(**(given | dict(changes)))


class NotingInstance(Instance):
    """An instance that notes what each batch admits and preempts."""

    def __init__(self, options: EngineOptions, counts_only: bool) -> None:
        caching = options.enable_prefix_caching
        assert options.num_pages
        pool = PagePool(options.num_pages, options.page_size)
        kv = KVShards([Shard(pool)], caching, options.paging)
        grouped = counts_only and not caching
        super().__init__(
            "engine",
            kv,
            instance_options(options, 1),
            make_policies(options.policies),
            groups_decodes=grouped,
        )
        self.admitted: list[list[Any]] = []
        self.victims: list[str] = []

    def admit(self, request: RequestState) -> bool:
        """See Instance."""
        if admits := super().admit(request):
            self.admitted.append([request.id, request.computed])
        return admits

    def preempt(self, request: RequestState) -> None:
        """See Instance."""
        self.victims.append(request.id)
        super().preempt(request)


class ArenaWorld:
    """A world of one instance whose steps take as long as the rules say; times are microseconds."""

    def __init__(self, workload: Workload, instance: NotingInstance) -> None:
        self._counts_only = workload["counts_only"]
        self._instance = instance
        self._now = self._free_at = self._launched = 0
        self._events: list[tuple[int, int, int, Any]] = []
        self._to_come = len(workload["requests"])
        self.loop: ServingLoop | None = None
        self.decisions: list[Decision] = []
        for number, each in enumerate(workload["requests"]):
            heapq.heappush(self._events, (each["at"], ARRIVAL, number, each))
            if each["abort"]:
                heapq.heappush(self._events, (each["abort"], ABORT, number, each))

    def now(self) -> float:
        """See World."""
        return self._now

    def arrivals_left(self) -> bool:
        """See World."""
        return self._to_come > 0

    def due_events(self) -> Sequence[Event]:
        """See World; requests that are aborted now end before that."""
        found: list[Event] = []
        if self._events:
            self._now = self._events[0][0]
        while self._events and self._events[0][0] == self._now:
            _, kind, _, what = heapq.heappop(self._events)
            if kind == ARRIVAL:
                self._to_come -= 1
                found.append(Arrival(_request(what)))
            elif kind == STEP_END:
                found.append(what)
            else:
                assert self.loop
                if request := self.loop.assignments.live.get(what["id"]):
                    self.loop.assignments.finish(request, "stop", "abort")
        return found

    def launch(self, batch: Batch) -> None:
        """See World; this notes the decision."""
        instance, rows, tokens = self._instance, batch.rows, [0] * batch.work.sampled
        if not batch.grouped:
            tokens = [_sampled(row.request, row.start + row.count) for row in rows if row.samples]
        shown: list[object] = [batch.work.sequences, batch.work.tokens]
        if not self._counts_only:
            shown = shown_rows([(row.request.id, row.count) for row in rows], False)
        duration = step_us(self._launched, batch.work.tokens, batch.work.sequences)
        start = max(self._now, self._free_at)
        self._free_at = start + duration
        self._launched += 1
        done = StepDone(batch, tokens, start, self._free_at)
        heapq.heappush(self._events, (self._free_at, STEP_END, self._launched, done))
        free = instance.kv.num_free
        self.decisions.append([self._now, shown, instance.admitted, instance.victims, free])
        instance.admitted, instance.victims = [], []

    def start_transfer(self, transfer: Transfer) -> None:
        """See World."""
        raise AssertionError("one instance sends nothing")

    def wake_at(self, time: float) -> None:
        """See World."""
        raise AssertionError("the system asks for no tick")

    def kv_token_s(self, source: str, dest: str) -> float:
        """See World."""
        return 0.0


def decide(
    workload: Workload,
    changes: Mapping[str, Any] | None = None,
    ended: dict[str, RequestState] | None = None,
) -> Iterator[Decision]:
    """Yield our decisions, until the requests or the batches that were asked for are over.

    Args:
        changes: options that differ from those of ``like``.
        ended: comes to hold the requests that have ended, by id.
    """
    instance = NotingInstance(engine_options(workload, changes or {}), workload["counts_only"])
    world = ArenaWorld(workload, instance)
    ends: dict[str, RequestState] = {} if ended is None else ended

    def on_finish(request: RequestState) -> None:
        ends[request.id] = request

    world.loop = ServingLoop(world, [instance], Single(), _check_stop, on_finish)
    count = 0
    for _ in world.loop.rounds():
        for decision in world.decisions:
            yield decision
            count += 1
            if count == workload["batches"]:
                return
        world.decisions.clear()
    yield from world.decisions


def _request(what: Mapping[str, Any]) -> RequestState:
    tokens = prompt_tokens(*what["prompt"])
    return RequestState(what["id"], len(tokens), what["max"], what["at"], tokens, what)


def _sampled(request: RequestState, stop: int) -> int:
    what: Any = request.payload
    return output_token(what["out"], request.prompt_len, stop - request.prompt_len, what["stop"])


def _check_stop(request: RequestState, token: int) -> Stop | None:
    return ("stop", token) if token == END_TOKEN else None
