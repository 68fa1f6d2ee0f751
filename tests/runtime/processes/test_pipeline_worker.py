"""Stages of one instance in several processes: steps put together, and whose failure it is."""

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig, LinkConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.runtime.kv.hidden_states import HiddenStates
from jaxinfer.runtime.kv.kv_messages import Drop, OpenEnd
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost, StepEnd
from jaxinfer.runtime.processes.messages import (
    BreakOff,
    FollowOn,
    Forget,
    Launch,
    Left,
    Loaded,
    Move,
    Moved,
    Prepare,
    StepEnded,
)
from jaxinfer.runtime.processes.pipeline_worker import (
    PipelineSide,
    PipelineWorker,
    divided_layers,
)
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.world import StepDone, TransferDone

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


def test_a_step_is_what_all_of_them_tell_of_it() -> None:
    """Stages are told of their own pages alone, by their own clocks; ends as they count them."""
    one, two = FakeProcess(), FakeProcess(ahead=5.0)
    worker = pipeline(one, two)
    assert worker.parts == [[0], [1, 2]]
    assert [stage.number for stage in worker.stages] == [0, 0, 1]
    assert one.sent == []
    assert two.sent == [FollowOn("x", "address 0", LINK)]
    posted: list[Any] = []
    ends: list[Any] = []
    given = batch()
    for _ in range(2):
        worker.launch(given, 1.0, posted.append, lambda *end: ends.append(end))
    (told, _), (other, _) = ([m for m in p.sent if isinstance(m, Launch)] for p in (one, two))
    tables = given.rows[0].hold.tables
    assert told.rows[0][-1] == [tables[0][0]]
    assert other.rows[0][-1] == [tables[1][0], tables[2][0]]
    assert (told.origin, other.origin) == (1.0, 6.0)
    first = [(0, StepEnd("x", 0, 0)), (1, StepEnd("x", 0, 0)), (2, StepEnd("x", 0, 1))]
    assert ends[:3] == first
    two.workers["x"].on_step(answer(0, [7], (0.3, 0.4), (0.4, 0.6)))
    one.workers["x"].on_step(answer(1, [], (0.2, 0.5)))
    assert posted == []
    one.workers["x"].on_step(answer(0, [], (0.0, 0.2)))
    stages = ((0.0, 0.2), (0.3, 0.4), (0.4, 0.6))
    assert posted == [StepDone(given, [7], 0.0, 0.6, [-0.5], stages=[*stages])]
    assert [*worker.prepare()] == [2, 2, 0]


def test_a_sampler_that_is_waited_for_by_nobody() -> None:
    """Processes that say nothing, as when they are stopped, or what they wait for is."""
    wanted = PLAIN_SAMPLER._replace(top=3)

    def silent(message: Any) -> Any:
        one.sent.append(message)
        return iter(lambda: pytest.fail("is waited for"), None)

    one, two = FakeProcess(), FakeProcess()
    worker = pipeline(one, two)
    one.ask = silent  # type: ignore[method-assign]
    with one.asking, two.asking:
        assert next(worker.prepare(wanted, wait=False)) == 0
    message = Prepare("x", wanted, wait=False)
    assert worker.sampler == wanted
    assert [one.sent[-1], two.sent[-1]] == [message] * 2


@pytest.mark.parametrize("ended", [True, False])
def test_who_misses_another_s_process_is_not_to_blame(ended: bool) -> None:
    """Steps fail once each, the next cannot be launched, and no process is left with its KV."""
    one, two = FakeProcess(), FakeProcess()
    worker = pipeline(one, two)
    two.workers["other"] = SimpleNamespace()
    posted: list[Any] = []
    for _ in range(2):
        worker.launch(batch(), 0.0, posted.append)
    one.workers["x"].on_step(answer(0, [], (0.0, 0.2)))
    if ended:
        one.lost = "process of group a was ended by signal 9"
    two.workers["x"].on_loss(ProcessLost("EOFError: "))
    one.workers["x"].on_loss(ProcessLost("later"))
    why = one.lost or "EOFError: "
    assert {(type(p), p.instance, str(p.error)) for p in posted} == {(Failed, "x", why)}
    assert one.given_up == [f"instance x: {why}"]
    assert two.given_up == []  # It has another instance.
    with pytest.raises(ProcessLost, match=f"^{why}$"):
        worker.launch(batch(), 0.0, posted.append)


def test_stages_must_pad_steps_alike() -> None:
    one, two = FakeProcess(), FakeProcess()
    loaded = [
        Loaded({"x": [plan(*buckets)]}, {"x": [[0]]}, {"x": None}) for buckets in ((7, 8), (8,))
    ]
    with pytest.raises(JaxinferError, match=r"^instances\.x: its stages have steps of unlike"):
        PipelineWorker("x", [*zip((one, two), loaded, strict=True)], [None])  # type: ignore


def test_an_end_is_on_the_side_that_has_its_stage() -> None:
    done: list[list[Any]] = [[], []]
    told: list[list[Callable[[str], None]]] = [[], []]

    def side(number: int) -> Any:
        return SimpleNamespace(
            open=lambda message, hear: done[number].append(message),
            do=done[number].append,
            on_loss=told[number].append,
            why_lost=lambda seconds: "gone" if number else None,
        )

    whole = PipelineSide([side(0), side(1)], [0, 2])
    form: Any = None
    for end, stage in enumerate((0, 1, 2, 3)):
        whole.open(OpenEnd(end, "x", stage, form, True, False), lambda said: None)
    for end in range(4):
        whole.do(Drop(end, 10 + end, "host"))
    for number in range(2):
        opened, dropped = done[number][:2], done[number][2:]
        assert [message.stage for message in opened] == [0, 1]
        assert [message.slab for message in dropped] == [10 + 2 * number, 11 + 2 * number]
    whole.on_loss(print)
    assert told == [[print], [print]]
    assert whole.why_lost(0) == "gone"


def cluster(**stage: Any) -> ClusterConfig:
    stages = tuple(StageConfig(group=name, **stage) for name in "ab")
    return ClusterConfig(
        groups={name: GroupConfig(process="own") for name in "abc"},
        instances={"x": InstanceConfig(stages=stages), "y": InstanceConfig(group="c")},
    )


def test_layers_of_stages_in_several_processes_are_stated() -> None:
    found = divided_layers(cluster(share=2.0), 7)
    assert {name: [(x.start, x.stop) for x in each] for name, each in found.items()} == {
        "x": [(0, 4), (4, 7)]
    }
    with pytest.raises(JaxinferError, match=r"^instances\.x\.stages: give layers or share: "):
        divided_layers(cluster(), 7)


def test_hidden_states_come_in_the_order_of_the_steps() -> None:
    """A side that asks before they are offered waits; one left alone by the other hears of it."""
    one, two = HiddenStates("127.0.0.1"), HiddenStates("127.0.0.1")
    two.before = one.address
    given = [np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * n for n in range(3)]
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct((3, 2), np.float32, sharding=on)
    found: list[np.ndarray] = []
    failed: list[Exception] = []

    def take() -> None:
        try:
            while True:
                found.append(np.asarray(two.take(like)))
        except (OSError, EOFError) as error:
            failed.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    for each in given:
        one.give(jax.device_put(each, on))
    wait_until(lambda: len(found) == 3)
    assert all(np.array_equal(*pair) for pair in zip(found, given, strict=True))
    assert not one._transport._offers
    one._transport.close()
    thread.join(HANG_S)
    assert len(failed) == 1


def spread_worker(*processes: Any, lenders: tuple[str, ...] = ()) -> PipelineWorker:
    """A stage in each process, with pools of the lenders besides its own."""
    places = [SimpleNamespace(group=name) for name in lenders]
    facts: Any = SimpleNamespace(
        limits=SimpleNamespace(token_buckets=(8,)), pool_pages=[9] * 3, attention=places
    )
    loaded = [(each, Loaded({"x": [facts]}, {"x": [[0]]}, {"x": None})) for each in processes]
    lend: Any = [FakeProcess(name=name) for name in lenders]
    return PipelineWorker("x", loaded, [None] * (len(processes) - 1), lend)


def test_heads_move_in_the_process_of_their_stage() -> None:
    """Numbers of shards are those of that process, times those of the loop's clock."""
    one, two = FakeProcess(), FakeProcess(ahead=5.0)
    worker = spread_worker(one, two)
    slices = ((0, 1), (), (), (2, 3), (), ())
    kv = KVShards([Shard(PagePool(9, 2), each, n // 3) for n, each in enumerate(slices)])
    hold = kv.reserve(4)
    assert hold
    moves = ((0, 2, (0,)), (3, 4, (2, 3)))
    assert hold.copy_slices(moves)
    request: Any = None
    transfer = Transfer(request, 0, "x", "x", hold, hold, 0, 3, 0.0, MoveSlices("r", moves))
    posted: list[Any] = []
    worker.move(transfer, 1.0, posted.append)
    (told,), (other,) = ([m for m in p.sent if isinstance(m, Move)] for p in (one, two))
    tables, copies = hold.tables, hold.copies
    assert told.copies == (3, [(0, 2, tables[0][0], copies[2][0])])
    assert other.copies == (3, [(0, 1, tables[3][n], copies[4][n]) for n in (2, 3)])
    two.workers["x"].on_move(Moved("x", other.move, 8.0, 9.5, 20))
    assert posted == []
    one.workers["x"].on_move(Moved("x", told.move, 2.5, 3.0, 10))
    assert posted == [TransferDone(transfer, 1.5, 3.5, 30)]
    # One that is under way fails with the instance, and is not heard of again.
    worker.move(transfer, 1.0, posted.append)
    one.workers["x"].on_loss(ProcessLost("gone"))
    assert {(type(p), str(p.error)) for p in posted[1:]} == {(Failed, "gone")}
    two.workers["x"].on_move(Moved("x", other.move + 1, 8.0, 9.5, 20))
    assert len(posted) == 3


def test_stages_go_on_without_what_is_lent_by_a_process_that_is_lost() -> None:
    """The process of the stages forgets all, and is told anew; its own loss is the end."""
    process = FakeProcess()
    worker = spread_worker(process, lenders=("a", "b"))
    _, a, b = worker.processes
    posted: list[Any] = []
    given = batch()
    worker.launch(given, 0.0, posted.append)
    assert worker.lost_lenders == []
    a.lost = "killed"
    process.workers["x"].on_loss(ProcessLost("EOFError: "))  # It misses the other first.
    a.workers["x"].on_loss(ProcessLost("killed"))
    assert [str(failed.error) for failed in posted] == ["killed"]
    assert worker.lost_lenders == ["a"]
    with pytest.raises(ProcessLost, match=r"^killed$"):
        worker.launch(given, 0.0, posted.append)
    worker.go_on()
    assert process.sent[-2:] == [BreakOff("x", [(0, 0)]), Forget("x", [(0, 0)])]
    assert (worker.without, worker.lost_lenders, worker.processes) == ([1], [], [process, b])
    assert process.given_up == b.given_up == []  # type: ignore[attr-defined]
    worker.launch(given, 0.0, posted.append)
    first, again = (m for m in process.sent if isinstance(m, Launch))
    assert again == first._replace(step=1)
    b.lost = process.lost = "killed"
    process.workers["x"].on_loss(ProcessLost("killed"))
    assert worker.lost_lenders == []
    assert process.given_up == ["instance x: killed"]


def test_who_goes_on_at_once_is_not_given_up_meanwhile() -> None:
    """Whoever hears of the failure may have gone on before all have been told of it."""
    process = FakeProcess()
    worker = spread_worker(process, lenders=("a",))
    a = worker.processes[1]
    worker.launch(batch(), 0.0, lambda failed: worker.go_on())
    a.lost = "killed"
    a.workers["x"].on_loss(ProcessLost("killed"))
    assert worker.processes == [process]
    assert process.given_up == []


def test_what_is_launched_once_stages_go_on_is_not_failed_by_the_loss_before() -> None:
    """The loop has it go on, and launches, while the lost one's thread is still telling of it."""
    process = FakeProcess()
    worker = spread_worker(process, lenders=("a",))
    a: Any = worker.processes[1]
    old: list[Any] = []
    new: list[Any] = []

    def go_on() -> None:
        worker.go_on()
        worker.launch(batch(), 0.0, new.append)

    thread = threading.Thread(target=go_on, daemon=True)

    def hear(failed: Any) -> None:
        old.append(failed)
        if len(old) == 1:
            thread.start()
            thread.join(0.2)

    for _ in range(2):
        worker.launch(batch(), 0.0, hear)
    a.lost = "killed"
    a.told.clear()
    a.workers["x"].on_loss(ProcessLost("killed"))
    a.told.set()
    thread.join(20)
    assert (len(old), new) == (2, [])
    assert [m.step for m in process.sent if isinstance(m, Launch)] == [0, 1, 2]


def test_a_sampler_asked_for_while_stages_are_to_forget_gets_its_own_answers() -> None:
    process = FakeProcess()
    worker = spread_worker(process, lenders=("a",))
    a = worker.processes[1]
    a.lost = "killed"
    a.workers["x"].on_loss(ProcessLost("killed"))
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    got: list[tuple[type, str]] = []

    def ask(message: Any) -> Any:
        process.send(message)
        while True:
            answer = answers.get(timeout=5)
            got.append((type(message), answer.what))
            yield answer

    process.ask = ask  # type: ignore[method-assign]
    answers.put(Left("samplers", 1))
    left = worker.prepare()
    assert next(left) == 1
    thread = threading.Thread(target=worker.go_on, daemon=True)
    thread.start()
    time.sleep(0.05)
    answers.put(Left("samplers", 0))
    time.sleep(0.05)
    answers.put(Left("pools", 0))
    assert [*left] == [0]
    thread.join(20)
    assert set(got) == {(Prepare, "samplers"), (Forget, "pools")}


def test_a_lender_that_is_lost_while_stages_forget_another_is_not_overlooked() -> None:
    process = FakeProcess()
    worker = spread_worker(process, lenders=("a", "b"))
    _, a, b = worker.processes
    a.lost = "killed"
    a.workers["x"].on_loss(ProcessLost("killed"))

    def ask(message: Any) -> Any:
        b.lost = "vanished"
        b.workers["x"].on_loss(ProcessLost("vanished"))
        return iter([Left("pools", 0)])

    process.ask = ask  # type: ignore[method-assign]
    worker.go_on()
    assert process.sent[-1] == BreakOff("x", [(0, 1)])
    with pytest.raises(ProcessLost, match=r"^vanished$"):
        worker.launch(batch(), 0.0, lambda failed: None)
    worker.go_on()
    assert (worker.without, worker.processes) == ([1, 2], [process])


def test_a_process_that_is_lost_while_it_forgets_is_not_overlooked() -> None:
    """The loss is taken for part of the failure that came before."""
    process = FakeProcess()
    worker = spread_worker(process, lenders=("a",))
    a = worker.processes[1]
    a.lost = "killed"
    a.workers["x"].on_loss(ProcessLost("killed"))

    def ask(message: Any) -> Any:
        process.lost = "killed, too"
        process.workers["x"].on_loss(ProcessLost("killed, too"))
        return iter([Left("pools", 0)])

    process.ask = ask  # type: ignore[method-assign]
    with pytest.raises(JaxinferError, match=r"^killed, too$"):
        worker.go_on()
