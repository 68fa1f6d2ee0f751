"""Messages between which a run is interrupted: what the processes know, and what is asked next."""

import os
import pickle
import queue
import signal
import socket
import subprocess
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from fake_pipelines import FakeProcess, pipeline
from fake_restarts import Cluster, FakeWorker
from hypothesis import given
from hypothesis import strategies as st
from interrupts import Interrupt
from properties import examples
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.runtime import worker_process
from jaxinfer.runtime.kv import sockets
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes import peers
from jaxinfer.runtime.processes.batch_delta import BatchDecoder
from jaxinfer.runtime.processes.messages import (
    Forget,
    Forgot,
    Launch,
    Left,
    Refused,
    WorkerFailed,
)
from jaxinfer.runtime.processes.process import Process, ProcessGone
from jaxinfer.runtime.processes.remote_worker import RemoteWorker
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState


class Told(FakeProcess):
    """Knows what it is told, and is interrupted as ``strikes`` says: before a message, or after.

    A process with the stages before gives hidden states, here all that it knows of the step; the
    other one takes those of its own step, and has to know the same.
    """

    def __init__(self, strikes: list[str], before: "Told | None" = None) -> None:
        super().__init__()
        self.strikes, self.before = strikes, before
        self.given: dict[int, Any] = {}
        self.forget("x")

    def forget(self, instance: str, pools: Any = (), patience: float | None = None) -> None:
        self.decoder = BatchDecoder(1)
        assert not (self.before and self.given)
        self.given = {}

    def send(self, message: Any) -> None:
        strike = self.strikes.pop() if isinstance(message, Launch) and self.strikes else ""
        if strike == "before":
            raise Interrupt
        if isinstance(message, Launch):
            self.take(pickle.loads(pickle.dumps(message)))
        if strike == "after":
            raise Interrupt

    def take(self, told: Launch) -> None:
        rows = self.decoder.decode(told).rows
        known = [(row.request.id, row.start, [*row.request.output_token_ids]) for row in rows]
        if self.before:
            assert self.before.given.pop(told.step) == known
            self.last = known
        else:
            self.given[told.step] = known


@examples(60)
@given(st.lists(st.sampled_from(["", "", "", "before", "after"]), max_size=30))
def test_an_interrupt_at_any_message_leaves_no_process_with_another_step_s_states(
    strikes: list[str],
) -> None:
    one = Told(strikes)
    two = Told(strikes, before=one)
    worker = pipeline(one, two, counts=(1, 1))
    kv = KVShards([Shard(PagePool(300, 2), stage=number) for number in range(2)])
    number, requests = 0, list[RequestState]()
    while strikes:
        if len(requests) < 3:
            number += 1
            request = RequestState(f"r{number}", 2, 40, prompt_token_ids=[number, 2])
            request.hold = kv.reserve(2)
            requests.append(request)
        rows = []
        for request in requests:
            assert request.hold
            assert request.hold.grow(request.num_known)
            start = request.num_known - (1 if request.output_token_ids else 2)
            count = request.num_known - start
            rows.append(Row(request, start, count, True, False, 0, request.hold))
        try:
            worker.launch(Batch("x", rows, 0, 0, 0), 0.0, lambda posted: None)
        except Interrupt:
            worker.recover()
            for request in requests:
                assert request.hold
                request.hold.release()
            requests = []
            continue
        assert two.last == [(r.request.id, r.start, r.request.output_token_ids) for r in rows]
        for request in requests:
            request.output_token_ids.append(number)


def process(*answers: Any, **more: Any) -> Any:
    """A process that is there, and has said this."""
    made = object.__new__(Process)
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for answer in answers:
        said.put(answer)
    sent: list[Any] = []
    vars(made).update(
        _answers=said, _numbers=iter(range(3, 9)), asking=threading.Lock(), send=sent.append,
        sent=sent, name="g", lost=None, workers={}, peer=SimpleNamespace(clock_offset=0.0),
    )  # fmt: skip
    vars(made).update(more)
    return made


def test_answers_to_who_was_interrupted_are_not_those_to_who_asks_next() -> None:
    left = [Left("samplers", 2), Refused("another's"), Forgot(2, "another's"), Left("samplers", 0)]
    made = process(*left, Forgot(3), Left("samplers", 7))
    made.forget("x")
    assert made.sent == [Forget("x", (), 3)]
    assert next(made.answers()) == Left("samplers", 7)
    with pytest.raises(JaxinferError, match=r"^KeyError: 1$"):
        process(Forgot(3, "KeyError: 1")).forget("x")
    with pytest.raises(JaxinferError, match=r"^its steps have not ended within 0\.01 s$"):
        process(Left("samplers", 0)).forget("x", patience=0.01)
    with pytest.raises(ProcessGone, match=r"^killed$"):
        process(ProcessLost("killed")).forget("x")


def test_a_failure_while_it_recovers_is_not_forgotten() -> None:
    made = process()
    worker = RemoteWorker(made, "a", [], [])

    def forget(*args: Any, **more: Any) -> None:
        worker.on_loss(ProcessLost("RuntimeError: a step of before"))
        worker.on_loss(ProcessLost("KeyError: what follows"))

    made.forget = forget
    for _ in range(2):
        with pytest.raises(ProcessLost, match=r"^RuntimeError: a step of before$"):
            worker.recover()
    with pytest.raises(ProcessLost, match=r"^RuntimeError: a step of before$"):
        worker.launch(Batch("a", [], 0, 0, 0), 0.0, lambda posted: None)


def test_of_two_steps_that_fail_in_a_process_the_first_says_why() -> None:
    """The loop launches a third before it has heard of them."""
    made = process()
    workers: Any = {"a": RemoteWorker(made, "a", [], []), "b": FakeWorker(made)}
    world = RealWorld(workers, [])
    world.launch(Batch("a", [], 0, 0, 0))
    world.launch(Batch("a", [], 0, 0, 0))
    for line in ("RuntimeError: out of memory", "KeyError: '0'"):
        Process._hear(made, WorkerFailed("a", False, line))
    for _ in range(2):
        world.launch(Batch("a", [], 0, 0, 0))
    (lost,) = world.due_events()
    assert getattr(lost, "reason", "") == "ProcessLost: RuntimeError: out of memory"
    assert len(made.sent) == 2


@pytest.mark.parametrize("lost", ["as it is asked", "as it is heard"])
def test_a_sampler_that_one_process_cannot_prepare_leaves_no_answers_of_the_others(
    lost: str,
) -> None:
    """They would be taken for those to the next question."""
    one, two = FakeProcess(), FakeProcess()
    worker = pipeline(one, two)
    answers = [Left("samplers", n) for n in (2, 1, 0)]
    one.ask = lambda message: iter(answers.pop, None)  # type: ignore[method-assign]
    answers.reverse()

    def ask(message: Any) -> Any:
        if lost == "as it is asked":
            raise ProcessGone("gone")
        return hear()

    def hear() -> Any:
        yield Left("samplers", 1)
        raise ProcessGone("gone")

    two.ask = ask  # type: ignore[method-assign]
    with pytest.raises(ProcessGone, match=r"^gone$"):
        list(worker.prepare(PLAIN_SAMPLER))
    assert answers == []
    assert not one.asking.locked()


@pytest.mark.parametrize("at", ["unsent", "torn", "sent"])
@pytest.mark.parametrize("size", [3, 10**5])
def test_a_message_is_sent_or_unsent_or_the_last_one(
    monkeypatch: pytest.MonkeyPatch, at: str, size: int
) -> None:
    """The interrupt comes before a write, after it, or between two."""
    ours, theirs = socket.socketpair()
    here: Connection[Any, Any] = Connection(ours.detach())
    there: Connection[Any, Any] = Connection(theirs.detach())
    heard: list[Any] = []

    def hear() -> None:
        try:
            while True:
                heard.append(there.recv())
        except (EOFError, OSError):
            pass

    thread = threading.Thread(target=hear, daemon=True)
    thread.start()
    sender = sockets.Sender(here)
    sender.send("first")
    with monkeypatch.context() as patch:
        if at == "sent":
            patch.setattr(sockets, "_rest", interrupt)
        else:
            writes = iter([] if at == "unsent" else [5])

            def write(handle: int, parts: list[memoryview]) -> int:
                for some in writes:
                    return os.write(handle, b"".join(parts)[:some])
                raise Interrupt

            patch.setattr(sockets.os, "writev", write)
        with pytest.raises(Interrupt):
            sender.send("x" * size)
    if at == "torn":
        for _ in range(2):
            with pytest.raises(sockets.Torn, match="interrupted in its middle"):
                sender.send("last")
        here.close()
        thread.join(HANG_S)
        assert heard == ["first"]
        return
    sender.send("last")
    wait_until(lambda: heard[-1:] == ["last"])
    assert heard == ["first"] + ["x" * size] * (at == "sent") + ["last"]
    here.close()


def interrupt(*args: Any) -> None:
    raise Interrupt


def test_a_process_that_was_told_half_of_a_message_is_given_up() -> None:
    given_up: list[str] = []

    def send(message: Any) -> None:
        raise sockets.Torn("half")

    made = process(
        _lock=threading.Lock(), _sender=SimpleNamespace(send=send), _reader=None,
        give_up=given_up.append, why_lost=lambda seconds: "it was given up",
    )  # fmt: skip
    del made.send
    with pytest.raises(ProcessLost, match=r"^it was given up$"):
        made.send("message")
    assert given_up == ["process of group g: half"]


def test_ends_of_steps_are_known_for_a_while_whatever_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers are left out where a launch was interrupted."""
    nowhere: Any = None
    there = worker_process.WorkerProcess(nowhere, 0)
    decoder: Any = SimpleNamespace(decode=lambda message: message)
    there._decoders = {"x": decoder}
    launched: list[int] = []

    def launch(batch: Any, origin: Any, post: Any, launch: Any, step: int) -> None:
        launched.append(step)

    monkeypatch.setattr(there, "_worker", lambda instance: SimpleNamespace(launch=launch))
    numbers = [n for n in range(100) if n % 3]
    for number in numbers:
        there._launch(Launch("x", number, 0.0, [], [], [], b"", []))
    assert launched == numbers
    assert [*there._ends["x"]] == numbers[-worker_process.STEPS_KEPT :]


def test_a_process_is_not_interrupted_with_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it imports JAX, it has not come to ignore the signal."""
    masks: list[set[Any]] = []

    def start(*args: Any, **more: Any) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    here, there = socket.socketpair()
    with here, there:
        peers.start_worker(there, {})
    assert masks == [before | {signal.SIGINT}]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_start_that_was_interrupted_is_begun_by_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, 1, [None])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        cluster.process.lost = "killed"
        with pytest.raises(Interrupt):
            cluster.restarts.expect("x", "a step failed")
    assert cluster.restarts.expect("x", "a step failed")
    heard: list[Any] = []
    cluster.restarts.listen(heard.append)
    wait_until(lambda: len(heard) == 3)
    assert [type(each) for each in heard[:2]] == [Failed, Failed]
    assert cluster.restarts.take("g")
    assert cluster.workers["x"].process is cluster.started[0]


def test_a_process_that_was_in_use_in_part_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance is there, and the other one is not."""
    cluster = Cluster(monkeypatch, 2, [None, None])
    cluster.process.die("killed")
    cluster.wait_for_news()
    with monkeypatch.context() as patch:
        patch.setattr(cluster.workers["y"], "move_to", interrupt)
        with pytest.raises(Interrupt):
            cluster.restarts.take("g")
    (given_up,) = cluster.started[0].given_up
    assert given_up == "killed; interrupted as it came to be in use again"
    cluster.started[0].die(given_up)
    cluster.wait_for_news(2)
    assert cluster.restarts.take("g")
    assert {worker.process for worker in cluster.workers.values()} == {cluster.started[1]}
