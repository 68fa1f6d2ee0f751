"""Stages with pools that other processes lend: moves of heads, and going on after a loss."""

import queue
import threading
import time
from collections import UserDict
from collections.abc import KeysView, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from fake_pipelines import FakeProcess, batch

from jaxinfer import JaxinferError
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.processes.messages import (
    Borrow,
    BreakOff,
    Forget,
    Launch,
    Left,
    Loaded,
    Move,
    Moved,
    Prepare,
)
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.runtime.processes.process_group import OtherProcesses
from jaxinfer.runtime.processes.restart_groups import DegradedInstance, PoolRestart
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.world import TransferDone


def spread_worker(*processes: Any, lenders: tuple[str, ...] = ()) -> PipelineWorker:
    """A stage in each process, with pools of the lenders besides its own."""
    places = [SimpleNamespace(group=name) for name in lenders]
    facts: Any = SimpleNamespace(
        limits=SimpleNamespace(token_buckets=(8,)),
        pool_pages=[9] * 3,
        attention=places,
        ffn_group=None,
    )
    loaded = [(each, Loaded({"x": [facts]}, {"x": [[0]]}, {"x": None})) for each in processes]
    lend: Any = [FakeProcess(name=name) for name in lenders]
    return PipelineWorker("x", loaded, [None] * (len(processes) - 1), lend)


def lose(process: FakeProcess, why: str) -> None:
    """Have a process be lost, and its worker told."""
    process.lost = why
    process.workers["x"].on_loss(ProcessLost(why))


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
    assert process.sent[-2:] == [BreakOff("x", [(0, 0)]), Forget("x", [(0, 0)], 0)]
    assert (worker.without, worker.lost_lenders, worker.processes) == ([1], [], [process, b])
    assert process.given_up == b.given_up == []  # type: ignore[attr-defined]
    worker.launch(given, 0.0, posted.append)
    first, again = (m for m in process.sent if isinstance(m, Launch))
    assert again == first._replace(step=2)  # No number is used again.
    b.lost = lose(process, "killed")
    assert worker.lost_lenders == []
    assert process.given_up == ["instance x: killed"]


def test_who_goes_on_at_once_is_not_given_up_meanwhile() -> None:
    """Whoever hears of the failure may have gone on before all have been told of it."""
    process = FakeProcess()
    worker = spread_worker(process, lenders=("a",))
    a = worker.processes[1]
    worker.launch(batch(), 0.0, lambda failed: worker.go_on())
    lose(a, "killed")
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
    lose(a, "killed")
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
    lose(a, "killed")

    def ask(message: Any) -> Any:
        lose(b, "vanished")
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
    lose(a, "killed")

    def ask(message: Any) -> Any:
        lose(process, "killed, too")
        return iter([Left("pools", 0)])

    process.ask = ask  # type: ignore[method-assign]
    with pytest.raises(JaxinferError, match=r"^killed, too$"):
        worker.go_on()


WHERE = Address("127.0.0.1", 7, b"key")


def test_what_a_new_process_lends_is_in_use_from_then_on() -> None:
    """The stages' process is told, and waited for by nobody; the new one may be lost, too."""
    process: Any = FakeProcess()
    worker = spread_worker(process, lenders=("a", "b"))
    _, a, b = worker.processes
    lose(a, "killed")  # type: ignore[arg-type]
    worker.go_on()
    new: Any = FakeProcess(name="a")
    worker.coming = {"a": new}
    worker.take_back(new, {(0, 0): WHERE})
    assert process.sent[-1] == Borrow("x", 0, 0, WHERE, wait=False)
    assert (worker.without, worker.coming, worker.processes) == ([], {}, [process, b, new])
    worker.launch(batch(), 0.0, print)
    lose(new, "killed again")
    assert worker.lost_lenders == ["a"]
    worker.go_on()
    assert (worker.without, worker.processes, process.given_up) == ([1], [process, b], [])


def test_a_new_process_that_is_lost_before_it_is_in_use_is_not_overlooked() -> None:
    """Its own thread has told of it when nobody here was to hear."""
    process: Any = FakeProcess()
    worker = spread_worker(process, lenders=("a",))
    lose(worker.processes[1], "killed")  # type: ignore[arg-type]
    worker.go_on()
    new: Any = FakeProcess(name="a")
    new.lost = "killed again"
    worker.take_back(new, {(0, 0): WHERE})
    with pytest.raises(ProcessLost, match=r"^killed again$"):
        worker.launch(batch(), 0.0, print)
    assert worker.lost_lenders == ["a"]


def test_a_process_that_is_to_lend_is_ended_with_the_instance() -> None:
    process: Any = FakeProcess()
    worker = spread_worker(process, lenders=("a",))
    lose(worker.processes[1], "killed")  # type: ignore[arg-type]
    worker.go_on()
    new: Any = FakeProcess(name="a")
    worker.coming = {"a": new}
    assert not worker.given_up
    lose(process, "killed, too")
    assert (worker.given_up, new.given_up) == (True, ["instance x: killed, too"])


def test_two_processes_that_are_to_lend_at_once_are_both_ended_with_the_instance() -> None:
    """The second one begins in the midst of what the first one's thread writes down."""
    worker = spread_worker(FakeProcess(), lenders=("a", "b"))
    new: dict[str, Any] = {name: FakeProcess(name=name) for name in "ab"}
    worker.given_up = True  # There is no more to get ready.

    def begin(processes: Mapping[str, Any]) -> None:
        home = PoolRestart(
            "", {}, 1, {}, DegradedInstance(worker), OtherProcesses.__new__(OtherProcesses)
        )
        with pytest.raises(JaxinferError, match=r"^its instance is lost$"):
            home.get_ready(processes)

    class Meanwhile(UserDict[str, Any]):
        def keys(self) -> KeysView[str]:
            begin({"b": new["b"]})
            return super().keys()

    begin(Meanwhile(a=new["a"]))
    worker.give_up(ProcessLost("killed"))
    assert [each.given_up for each in new.values()] == [["instance x: killed"]] * 2
