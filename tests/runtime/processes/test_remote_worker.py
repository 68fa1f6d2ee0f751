"""Answers that come late, in part, or not at all, to the loop's process and a worker's."""

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.runtime import worker_process
from jaxinfer.runtime.kv.kv_messages import Pulled
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes import peers
from jaxinfer.runtime.processes import process as process_module
from jaxinfer.runtime.processes.messages import (
    Heartbeat,
    Hello,
    Left,
    Prepare,
    Refused,
    StepEnded,
    WorkerFailed,
)
from jaxinfer.runtime.processes.peers import Child
from jaxinfer.runtime.processes.process import Process
from jaxinfer.runtime.processes.remote_worker import CompileCounts, RemoteWorker
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState

COMMAND = [sys.executable, "-m", "jaxinfer.runtime.worker_process"]

# A peer whose clock is this process's.
HERE = SimpleNamespace(clock_offset=0.0)


def test_a_step_that_ends_after_its_worker_has_failed() -> None:
    """The other instances of its process are still heard."""
    sent: list[Any] = []
    process: Any = SimpleNamespace(send=sent.append, workers={}, peer=HERE)
    worker = RemoteWorker(process, "a", [], [])
    posted: list[Any] = []
    worker.launch(Batch("profile", [], 0, 0, 0), 0.0, posted.append)
    assert sent[0].instance == "a"
    worker.on_loss(ProcessLost("gone"))
    worker.on_step(StepEnded("a", 0, ([], 0.0, 0.0), [], []))
    assert [(type(p), str(p.error)) for p in posted] == [(Failed, "gone")]
    with pytest.raises(ProcessLost, match="gone"):
        worker.launch(Batch("a", [], 0, 0, 0), 0.0, posted.append)
    assert len(sent) == 1


def test_a_worker_goes_on_in_a_process_that_has_heard_of_nothing() -> None:
    """Requests are introduced anew; what was compiled before counts beside what is now."""
    sent: list[Any] = []
    before, after = (SimpleNamespace(send=sent.append, workers={}, peer=HERE) for _ in "ab")
    plan: Any = None
    worker = RemoteWorker(before, "a", [plan], [])  # type: ignore[arg-type]
    request = RequestState("r", 4, 3, prompt_token_ids=[1, 2, 3, 4])
    hold = KVShards([Shard(PagePool(9, 2))]).reserve(4)
    assert hold
    batch = Batch("a", [Row(request, 0, 4, True, False, 0, hold)], 0, 0, 0)

    def run(*counts: Any) -> CompileCounts:
        worker.launch(batch, 0.0, lambda posted: None)
        step = sent[-1].step
        worker.on_step(StepEnded("a", step, ([7], 0.0, 0.0), [[]], [counts]))
        return worker.stages[0].step

    assert run(3, 1.5, 1) == CompileCounts(3, 1.5, 1)
    assert run(4, 2.0, 2) == CompileCounts(4, 2.0, 2)
    worker.on_loss(ProcessLost("gone"))
    worker.move_to(after)  # type: ignore[arg-type]
    assert run(5, 2.0, 0) == CompileCounts(9, 4.0, 2)
    assert run(6, 2.5, 1) == CompileCounts(10, 4.5, 3)
    assert (after.workers, worker.stages[0].process) == ({"a": worker}, after)
    first, second, again, last = (told._replace(step=0) for told in sent)
    assert (again, last) == (first, second)
    assert len(first.new) == 1
    assert not second.new


def test_the_only_instance_s_process_is_lost_in_one_line() -> None:
    process: Any = SimpleNamespace(send=lambda message: None, workers={}, peer=HERE)
    worker = RemoteWorker(process, "a", [], [])
    world = RealWorld({"a": worker}, [])
    world.launch(Batch("a", [], 0, 0, 0))
    worker.on_loss(ProcessLost("process of group a was ended by signal 9"))
    with pytest.raises(JaxinferError, match=r"^process of group a was ended by signal 9$"):
        world.due_events()


def test_when_a_slab_was_pulled_is_told_by_the_clock_here() -> None:
    """The peer's clock is 5 s ahead."""
    heard: list[Any] = []
    process: Any = SimpleNamespace(peer=SimpleNamespace(clock_offset=5.0), ends={3: heard.append})
    Process._hear(process, Pulled(3, 7, 105.0, 106.5))
    assert heard == [Pulled(3, 7, 100.0, 101.5)]


@pytest.mark.parametrize("name", ["jax", "jaxinfer"])
def test_another_version_in_the_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    there = Hello.here()
    monkeypatch.setattr(Hello, "here", lambda: there._replace(**{name: "0.0.1"}))
    process = Process("b", Child({}))
    message = rf"^groups\.b: {name} is {getattr(there, name)} in its process, 0\.0\.1 in this one$"
    with pytest.raises(JaxinferError, match=message):
        next(process.answers())
    process.close()


def test_a_loss_is_told_to_all_whoever_comes_or_fails_meanwhile() -> None:
    """The loop's thread moves another worker there, and one of those that are told raises."""
    told: list[str] = []
    process = object.__new__(Process)
    workers: dict[str, Any] = {}

    def worker(name: str) -> Any:
        def hear(error: Exception) -> None:
            told.append(name)
            workers["new"] = worker("new")
            raise ValueError(name)

        return SimpleNamespace(on_loss=hear)

    workers |= {name: worker(name) for name in "ab"}
    nothing: Any = SimpleNamespace(close=lambda: told.append("closed"))
    vars(process).update(
        name="g", lost=None, workers=workers, on_loss=[told.append], _closing=False,
        _given_up="killed", _answers=queue.SimpleQueue(), _ended=threading.Event(),
        peer=SimpleNamespace(where="pid 1"), _lock=threading.Lock(), _hear_all=lambda: "has ended",
        _connection=nothing, _socket=nothing,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^b$"):
        process._read()
    assert told == ["a", "b", "killed", "closed", "closed"]


def test_a_worker_process_imports_what_lies_where_it_runs_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda args, **more: started.append(args))
    here, there = socket.socketpair()
    with here, there:
        peers.start_worker(there, {})
    assert started[0][:3] == [sys.executable, "-P", "-m"]
    ran: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["first"])
    monkeypatch.setattr(sys, "argv", ["", "0", "0"])
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(worker_process, "Connection", lambda number: None)
    served: Any = SimpleNamespace(run=lambda: ran.extend(sys.path))
    monkeypatch.setattr(worker_process, "WorkerProcess", lambda *args: served)
    worker_process.main()
    assert ran == ["first", str(tmp_path)]


class Unreadable:
    """An object of a module that the other process does not have."""

    def __reduce__(self) -> Any:
        return pickle.loads, (b"nonsense",)


def test_a_message_that_cannot_be_read_ends_the_process() -> None:
    ours, theirs = socket.socketpair()
    worker = subprocess.Popen(
        [*COMMAND, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    connection: Connection[Any, Any] = Connection(ours.detach())
    connection.send(Unreadable())
    assert worker.wait(HANG_S) == 1
    connection.close()


class Said(Exception):
    """Ends whoever says something."""


def test_a_process_with_nothing_to_do_says_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def send_bytes(answer: bytes) -> None:
        raise Said(pickle.loads(answer))

    monkeypatch.setattr(worker_process, "ALIVE_S", 0.0)
    end: Any = SimpleNamespace(send_bytes=send_bytes)
    with pytest.raises(Said) as said:
        worker_process.WorkerProcess(end, os.getppid())._say_alive()
    assert said.value.args == (Heartbeat(),)


@pytest.mark.parametrize("wait", [True, False])
def test_a_sampler_is_told_of_to_whoever_waits(monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    """If nobody does, nobody would take an answer; that it fails is the loss of the instance."""
    said: list[Any] = []
    nowhere: Any = None
    process = worker_process.WorkerProcess(nowhere, 0)
    monkeypatch.setattr(process, "_say", said.append)
    worker = SimpleNamespace(prepare=lambda sampler: iter([2, 1, 0]))
    monkeypatch.setattr(process, "_worker", lambda instance: worker)
    message = Prepare("x", PLAIN_SAMPLER, wait)
    process._attempt(message)
    assert said == ([Left("samplers", left) for left in (2, 1, 0)] if wait else [])
    said.clear()
    worker.prepare = lambda sampler: {}[sampler.top]  # type: ignore[attr-defined]
    process._attempt(message)
    why = "KeyError: 0"
    assert said == [Refused(why) if wait else WorkerFailed("x", False, why)]


@pytest.mark.parametrize("more", ["", "c._write(c._handle, bytes([0, 0, 0, 99, 1]));"])
def test_silence_after_the_first_word(monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    """A process that is stopped in the middle of a message counts as silent, too."""
    script = (
        "import sys, time; from multiprocessing.connection import Connection;"
        f"c = Connection(int(sys.argv[-1])); c.send(None); {more} time.sleep(600)"
    )
    lost = lost_one(monkeypatch, script, 0.5)
    assert lost.lost
    assert lost.lost.endswith("has said nothing for 0.5 s")
    assert not psutil.pid_exists(lost.peer.pid)


def test_an_answer_that_cannot_be_read_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, time; from multiprocessing.connection import Connection;"
        "Connection(int(sys.argv[-1])).send_bytes(b'nonsense'); time.sleep(600)"
    )
    lost = lost_one(monkeypatch, script, 30)
    assert lost.lost
    assert "has said what is not understood: UnpicklingError" in lost.lost
    with pytest.raises(JaxinferError, match="not understood"):
        lost.ask(None)


def test_a_process_that_starts_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may say nothing for longer before its first word than after it."""
    script = (
        "import sys, time; from multiprocessing.connection import Connection;"
        "time.sleep(0.8); Connection(int(sys.argv[-1])); sys.exit(3)"
    )
    lost = lost_one(monkeypatch, script, 0.2)
    assert lost.lost
    assert lost.lost.endswith("has ended (3)")


def test_who_sends_is_told_how_the_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks before it is known why."""
    script = (
        "import os, sys, time; os.close(int(sys.argv[-1])); time.sleep(0.5);os.kill(os.getpid(), 9)"
    )
    process = started(monkeypatch, script, 30)

    def send_on() -> None:
        while True:
            process.send(None)

    with pytest.raises(ProcessLost, match=r"\(pid \d+\) was ended by signal 9$"):
        send_on()


def test_whoever_waits_for_all_to_be_told_waits_for_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = started(monkeypatch, "", 30)
    go = threading.Event()
    told: list[str] = []

    def tell(why: str) -> None:
        assert go.wait(HANG_S)
        told.append(why)

    process.on_loss.append(tell)
    assert process.why_lost(HANG_S)
    waiting = threading.Thread(target=process.wait_until_told, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert (waiting.is_alive(), told) == (True, [])
    go.set()
    waiting.join(HANG_S)
    assert told == [process.lost]


def lost_one(monkeypatch: pytest.MonkeyPatch, script: str, silence_s: float) -> Process:
    """Return the lost process that ran a script in place of a worker."""
    process = started(monkeypatch, script, silence_s)
    assert process.why_lost(HANG_S)
    return process


def started(monkeypatch: pytest.MonkeyPatch, script: str, silence_s: float) -> Process:
    """Return a process that runs a script in place of a worker."""
    monkeypatch.setattr(process_module, "SILENCE_S", silence_s)
    start = subprocess.Popen

    def run(command: list[str], **options: Any) -> Any:
        return start([sys.executable, "-c", script, command[4]], **options)

    monkeypatch.setattr(peers.subprocess, "Popen", run)
    return Process("a", Child({}))


FORKING = """
import os, sys, time
from jaxinfer.runtime.processes.peers import Child
from jaxinfer.runtime.processes.process import Process
process = Process("a", Child({}))
if not (child := os.fork()):
    time.sleep(600)
print(process.peer.pid, child, flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_its_parent_whoever_else_has_the_connection() -> None:
    job = subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True)
    assert job.stdout
    pid, child = map(int, job.stdout.readline().split())
    time.sleep(0.1)
    job.kill()
    job.wait()
    try:
        wait_until(lambda: not psutil.pid_exists(pid))
        assert psutil.pid_exists(child)
    finally:
        psutil.Process(child).send_signal(signal.SIGKILL)
