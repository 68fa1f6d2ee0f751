"""What the loop's process and a worker's do with answers that come late, in part, or not at all."""

import gc
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from process_cases import wait_until

from jaxinfer import JaxinferError
from jaxinfer.runtime import worker_process
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.kv.channel import Landed
from jaxinfer.runtime.kv.outcome import Failed
from jaxinfer.runtime.processes import kv_endpoint as port
from jaxinfer.runtime.processes import peers, remote_worker
from jaxinfer.runtime.processes.messages import (
    Drop,
    Hello,
    Offer,
    Offered,
    OpenLane,
    Place,
    Pull,
    Pulled,
    SlabFailed,
    StepEnded,
)
from jaxinfer.runtime.processes.peers import Child
from jaxinfer.runtime.processes.remote_channel import RemoteChannel
from jaxinfer.runtime.processes.remote_worker import (
    CompileCounts,
    Process,
    ProcessLost,
    RemoteWorker,
)
from jaxinfer.runtime.processes.transports import HostCarrier
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
    worker.launch(Batch("a", [], 0, 0, 0), 0.0, posted.append)
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


@pytest.mark.parametrize("sends", [True, False])
def test_what_does_not_come_is_the_sender_s_fault(sends: bool) -> None:
    end: Any = SimpleNamespace(source=object() if sends else None)
    for error in (OSError("a"), EOFError("a"), TimeoutError("a"), JaxinferError("changed")):
        assert port._failed(3, 7, end, error).by_source
    found = port._failed(3, 7, end, RuntimeError("out of memory"))
    assert found == SlabFailed(3, 7, sends, "RuntimeError: out of memory")


def test_the_only_instance_s_process_is_lost_in_one_line() -> None:
    process: Any = SimpleNamespace(send=lambda message: None, workers={}, peer=HERE)
    worker = RemoteWorker(process, "a", [], [])
    world = RealWorld({"a": worker}, [])
    world.launch(Batch("a", [], 0, 0, 0))
    worker.on_loss(ProcessLost("process of group a was ended by signal 9"))
    with pytest.raises(JaxinferError, match=r"^process of group a was ended by signal 9$"):
        world.due_events()


class FakeSide:
    """Notes what it is to do."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.lost: str | None = None
        self.hear: Any = None

    def open(self, message: OpenLane, hear: Any) -> None:
        self.hear = hear

    def do(self, message: Any, after: Any = None) -> None:
        if self.lost:
            raise ProcessLost(self.lost)
        self.done.append(message)

    def on_loss(self, hear: Any) -> None:
        self.lose = hear

    def why_lost(self, seconds: float) -> str | None:
        return self.lost

    def kinds(self) -> list[type]:
        return [type(message) for message in self.done]


@pytest.fixture
def channel() -> tuple[RemoteChannel, FakeSide, FakeSide]:
    source, dest = FakeSide(), FakeSide()
    lane: Any = SimpleNamespace(
        form=SimpleNamespace(),
        source_shard=0,
        dest_shard=0,
        source_end=0,
        dest_end=1,
        token_bytes=1,
        link=None,
    )
    return RemoteChannel(("a", "b"), (source, dest), [lane], False, ["host"]), source, dest


def transfer() -> Any:
    hold = SimpleNamespace(tables=[{0: [1, 2, 3]}])
    return SimpleNamespace(start=0, stop=9, source="a", dest="b", source_hold=hold, dest_hold=hold)


def test_a_slab_whose_source_has_gone_is_not_kept(channel: Any) -> None:
    channel, source, _ = channel
    source.lost = "ended"
    with pytest.raises(ProcessLost, match="ended"):
        channel.send(transfer(), [].append)
    assert not channel._slabs


def test_slabs_of_a_run_that_was_broken_off(channel: Any) -> None:
    """The next one forgets them, on both sides; what comes of them late is nobody's failure."""
    channel, source, dest = channel
    old: list[Any] = []
    new: list[Any] = []
    for _ in range(2):
        channel.send(transfer(), old.append)
    first, second = (offer.slab for offer in source.done)
    channel._hear(Offered(0, first, "there", None))
    channel._hear(Pulled(1, first, 0.0, 1.0))
    assert [type(landed) for landed in old] == [Landed]
    channel.send(transfer(), new.append)
    assert source.kinds() == [Offer, Offer, Drop, Drop, Offer]
    assert dest.kinds() == [Pull, Drop, Drop]
    assert len(channel._slabs) == 1
    channel._hear(Offered(0, second, "there", None))
    channel._hear(Pulled(1, second, 0.0, 1.0))
    assert dest.done[3:] == [Drop(1, second, "host")]
    channel._hear(SlabFailed(1, first, True, "not offered"))
    assert (len(old), new) == (1, [])


def test_all_slabs_are_dropped_when_their_destination_is_lost(channel: Any) -> None:
    """Also those that it has pulled; when the source is lost, these are still to be placed."""
    channel, source, dest = channel
    posted: list[Any] = []
    for _ in range(3):
        channel.send(transfer(), posted.append)
    first, second, third = (offer.slab for offer in source.done)
    for slab in (first, second):
        channel._hear(Offered(0, slab, "there", None))
    channel._hear(Pulled(1, first, 0.0, 1.0))
    source.lose("ended")
    assert list(channel._slabs) == [first]
    assert dest.done[2:] == [Drop(1, slab, "host") for slab in (second, third)]
    dest.lose("ended, too")
    assert not channel._slabs
    assert source.done[-1] == Drop(0, first, "host")
    assert dest.done[-1] == Drop(1, first, "host")
    assert [p.instance for p in posted if isinstance(p, Failed)] == ["a", "b"]


def test_when_a_slab_was_pulled_is_told_by_the_clock_here() -> None:
    """The peer's clock is 5 s ahead."""
    heard: list[Any] = []
    process: Any = SimpleNamespace(peer=SimpleNamespace(clock_offset=5.0), lanes={3: heard.append})
    Process._hear(process, Pulled(3, 7, 105.0, 106.5))
    assert heard == [Pulled(3, 7, 100.0, 101.5)]


def test_a_port_keeps_no_slab_that_was_placed_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "SlabDest", lambda *args: SimpleNamespace(place=lambda *a: None))
    posted: SimpleQueue[Any] = SimpleQueue()
    carrier = SimpleNamespace(
        dropped=[], pull=lambda *args: np.zeros(2).view(Slab), close=lambda: None
    )
    carrier.drop = carrier.dropped.append
    stage: Any = SimpleNamespace(plan=None)
    dest = port.Port({"b": [stage]}, posted.put, "127.0.0.1")
    dest._carriers["host"] = carrier  # type: ignore[assignment]
    form: Any = SimpleNamespace(sharding=lambda plan: None, shape=(2,), dtype=np.dtype("float32"))
    dest.do(OpenLane(1, "b", 0, form, False, False))
    for slab in (4, 5):
        dest.do(Pull(1, slab, "host", "there"))
        assert posted.get(timeout=20)[:2] == (1, slab)
    assert list(dest._ends[1].arrived) == [4, 5]
    dest.do(Place(1, 4, [1], 0, 1))
    dest.do(Drop(1, 5, "host"))
    wait_until(lambda: carrier.dropped == [5])
    assert dest._ends[1].arrived == {}
    dest.close()


class Slab(np.ndarray):
    """The slab of a carrier without devices."""

    def block_until_ready(self) -> "Slab":
        return self


def test_what_fails_to_be_placed_is_the_destinations_failure(channel: Any) -> None:
    channel, source, dest = channel
    posted: list[Any] = []
    channel.send(transfer(), posted.append)
    number = source.done[0].slab
    channel._hear(Offered(0, number, "there", None))
    channel._hear(Pulled(1, number, 0.0, 1.0))
    channel.place(posted.pop(), posted.append)
    assert dest.kinds() == [Pull, Place]
    assert not channel._slabs
    channel._hear(SlabFailed(1, number, False, "no room"))
    assert [(p.instance, str(p.error)) for p in posted] == [("b", "no room")]


def test_a_slab_that_breaks_off_with_its_source_names_the_signal(channel: Any) -> None:
    channel, source, _ = channel
    posted: list[Any] = []
    channel.send(transfer(), posted.append)
    source.lost = "process of group a was ended by signal 9"
    channel._hear(SlabFailed(1, source.done[0].slab, True, "EOFError: "))
    assert [(p.instance, str(p.error)) for p in posted] == [("a", source.lost)]
    assert not channel._slabs


def test_a_source_that_is_lost_before_the_probe_is_a_mistake_of_the_load(channel: Any) -> None:
    channel, source, _ = channel
    source.lost = "ended"
    with pytest.raises(JaxinferError, match="a -> b: ended"):
        channel.probe("a -> b")
    assert not channel._probing


@pytest.mark.parametrize(
    ("rates", "by", "failed"),
    [
        ({"host": 2.0, "transfer_server": 3.0}, "transfer_server", {}),
        ({"host": 3.0, "transfer_server": 2.0}, "host", {}),
        ({"host": 2.0}, "host", {"transfer_server": "a -> b: changed"}),
        ({"transfer_server": 2.0}, "transfer_server", {"host": "a -> b: changed"}),
    ],
)
def test_the_quickest_carrier_is_taken_and_what_fails_is_told(
    channel: Any, monkeypatch: pytest.MonkeyPatch, rates: Any, by: str, failed: Any
) -> None:
    channel, *_ = channel
    channel._carriers = ["host", "transfer_server"]

    def probe(lane: Any, names: str) -> float:
        if channel.by not in rates:
            raise JaxinferError(f"{names}: changed")
        return rates[channel.by]

    monkeypatch.setattr(channel, "_probe", probe)
    assert channel.probe("a -> b") == rates[by]
    assert (channel.by, channel.failed) == (by, failed)
    cluster = Cluster(None, {}, {("a", "b"): channel}, {})  # type: ignore[arg-type]
    told = "".join(f"; not {name}: {why}" for name, why in failed.items())
    assert cluster.transports == {"a -> b": by + told}
    rates.clear()
    with pytest.raises(JaxinferError, match="a -> b: changed; a -> b: changed"):
        channel.probe("a -> b")


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


def test_a_carrier_that_is_closed_leaves_no_thread_and_no_port() -> None:
    before = threading.active_count()
    carrier = HostCarrier("127.0.0.1")
    host, port, key = carrier.address
    # Whoever is no part of the job, or goes away while it introduces itself, stops nobody else.
    socket.create_connection((host, port)).close()
    form: Any = SimpleNamespace()
    carrier.offer(7, jax.numpy.arange(6.0), form)
    with Client((host, port), authkey=key) as client:
        client.send(7)
        assert np.frombuffer(client.recv_bytes(), np.float32).tolist() == [0, 1, 2, 3, 4, 5]
        client.send(7)
        assert client.recv_bytes() == b""  # Each is there once.
    carrier.close()
    wait_until(lambda: threading.active_count() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
    kept = weakref.ref(carrier)
    del carrier

    def is_gone() -> bool:
        gc.collect()
        return kept() is None

    wait_until(is_gone)  # Threads of other tests may have ended in place of its own.


def test_a_connection_that_is_broken_is_not_kept() -> None:
    """The next slab comes by a new one; and a carrier that is closed has none."""
    form: Any = SimpleNamespace(dtype=np.dtype("float32"), shape=(2,))
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    here, there = HostCarrier("127.0.0.1"), HostCarrier("127.0.0.1")
    for number in range(3):
        there.offer(number, jax.numpy.full(2, number, "float32"), form)
    assert here.pull(0, there.address, form, on, 9)[0] == 0
    (broken,) = here._sources.values()
    server = socket.socket(fileno=os.dup(broken.fileno()))
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    with pytest.raises((EOFError, OSError)):
        here.pull(1, there.address, form, on, 9)
    assert broken.closed
    assert here._sources == {}
    assert here.pull(2, there.address, form, on, 9)[0] == 2
    (left,) = here._sources.values()
    here.close()
    there.close()
    assert left.closed


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
    assert worker.wait(60) == 1
    connection.close()


def test_half_a_message_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped in the middle of a message counts as silent."""
    script = (
        "import sys, time; from multiprocessing.connection import Connection;"
        "c = Connection(int(sys.argv[-1])); c.send(None);"
        "c._write(c._handle, bytes([0, 0, 0, 99, 1])); time.sleep(99)"
    )
    lost = lost_one(monkeypatch, script, 0.5)
    assert lost.lost
    assert lost.lost.endswith("has said nothing for 0.5 s")
    assert not psutil.pid_exists(lost.peer.pid)


def test_an_answer_that_cannot_be_read_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, time; from multiprocessing.connection import Connection;"
        "Connection(int(sys.argv[-1])).send_bytes(b'nonsense'); time.sleep(99)"
    )
    lost = lost_one(monkeypatch, script, 30)
    assert lost.lost
    assert "has said what is not understood: UnpicklingError" in lost.lost
    with pytest.raises(JaxinferError, match="not understood"):
        lost.ask(None)


def test_a_process_that_starts_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, time; from multiprocessing.connection import Connection;"
        "time.sleep(0.8); Connection(int(sys.argv[-1])).send(None); sys.exit(3)"
    )
    lost = lost_one(monkeypatch, script, 0.2)
    assert lost.lost
    assert lost.lost.endswith("has ended (3)")


def lost_one(monkeypatch: pytest.MonkeyPatch, script: str, silence_s: float) -> Process:
    """Return the lost process that ran a script in place of a worker."""
    monkeypatch.setattr(remote_worker, "SILENCE_S", silence_s)
    start = subprocess.Popen

    def run(command: list[str], **options: Any) -> Any:
        return start([sys.executable, "-c", script, command[4]], **options)

    monkeypatch.setattr(peers.subprocess, "Popen", run)
    process = Process("a", Child({}))
    assert process.why_lost(20)
    return process


FORKING = """
import os, sys, time
from jaxinfer.runtime.processes.peers import Child
from jaxinfer.runtime.processes.remote_worker import Process
process = Process("a", Child({}))
if not (child := os.fork()):
    time.sleep(99)
print(process.peer.pid, child, flush=True)
time.sleep(99)
"""


def test_a_process_ends_with_its_parent_whoever_else_has_the_connection() -> None:
    job = subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True)
    assert job.stdout
    pid, child = map(int, job.stdout.readline().split())
    time.sleep(0.1)
    job.kill()
    job.wait()
    try:
        wait_until(lambda: not psutil.pid_exists(pid), 40)
        assert psutil.pid_exists(child)
    finally:
        psutil.Process(child).send_signal(signal.SIGKILL)
