"""Workers that listen: tokens, clocks, ways of slabs, what is refused, what is left behind."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import shifted_worker
from cluster_cases import Case, Pair, Side, Way, load, set_system
from cluster_checks import Done, Ran, check_case, serve
from host_cases import KEY, elsewhere, jobs, listening
from process_cases import SYSTEMS, serve_until
from shifted_worker import AHEAD_S
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.commands.worker import worker as worker_command
from jaxinfer.report.records import read_run
from jaxinfer.runtime.kv import sockets
from jaxinfer.runtime.kv.channel import Channel
from jaxinfer.runtime.kv.kv_messages import Offered
from jaxinfer.runtime.processes import peers
from jaxinfer.runtime.processes import process as process_module
from jaxinfer.runtime.processes.messages import Hello
from jaxinfer.runtime.processes.peers import RemotePeer, clock_offset
from jaxinfer.runtime.processes.process import Process

PAIR = Pair("two", Side(1, 8, segments=3), Side(2, 16))
SHIFTED = (sys.executable, shifted_worker.__file__)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXINFER_KEY", KEY)


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[str, psutil.Popen]]:
    with listening() as found:
        yield found


@pytest.mark.slow
def test_tokens_are_those_of_one_instance(
    worker: tuple[str, psutil.Popen],
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
) -> None:
    """A worker's process and this one give the tokens, and the worker waits for the next job."""
    address, server = worker
    sections = elsewhere(PAIR, {"b": address})
    llm = load(models["two"], tmp_path, **sections, verify_transfers=True)
    assert len(jobs(server)) == 1
    way = Way("cronus_a_b", 31, "per_chunk", "b", "twice")
    check_case(Case(PAIR, way), llm, expected["two"], tmp_path / "runs")
    del llm
    gc.collect()
    wait_until(lambda: not jobs(server))


@pytest.mark.slow
def test_a_worker_on_a_clock_of_its_own(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Times of the run are all by the loop's clock: what they are wrong by is far less."""
    with listening(command=SHIFTED) as (address, _):
        llm = load(models["two"], tmp_path, **elsewhere(PAIR, {"a": address}))
        assert llm.cluster.engines["a"].worker.process.peer.clock_offset == pytest.approx(
            AHEAD_S, abs=1
        )
        way = Way("cronus_a_b", 0.98, "per_chunk", "", "off")
        check_case(Case(PAIR, way), llm, expected["two"], tmp_path / "runs")
        way = Way("cronus_b_a", 0.98, "per_chunk", "", "off")
        check_case(Case(PAIR, way), llm, expected["two"], tmp_path / "runs")
    for folder in (tmp_path / "runs").iterdir():
        ran = Ran(read_run(folder))
        wall_s = ran.metrics["wall_s"]
        times = [part for step in ran.record.steps for part in step.stages]
        for start, end in [*times, *((t.start, t.end) for t in ran.record.transfers)]:
            assert -1 < start < end < wall_s + 1
        assert ran.instances == {"a", "b"}


@pytest.mark.parametrize(
    ("ahead", "delays"), [(0.0, (0.1, 0.1)), (50.0, (0.3, 0.0)), (-7.0, (0.0, 0.2))]
)
def test_an_offset_is_right_within_half_the_shortest_round_trip(
    ahead: float, delays: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, trips = 10.0, 0

    def ask() -> float:
        nonlocal now, trips
        trips += 1
        # Others take longer, and are worse.
        there, back = (d * (1 if trips == 7 else 5) for d in delays)
        now += there
        said = now + ahead
        now += back
        return said

    monkeypatch.setattr(peers.time, "perf_counter", lambda: now)
    assert abs(clock_offset(ask) - ahead) <= sum(delays) / 2 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["host", "transfer_server"])
def test_slabs_go_from_host_to_host(
    transport: str,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes offer slabs where they are reached themselves: two workers, or this one and one."""
    monkeypatch.setattr(peers, "is_loopback", lambda host: False)
    offered: set[tuple[str, str]] = set()
    hear = Channel._hear

    def note(channel: Channel, answer: Any) -> None:
        if isinstance(answer, Offered):
            address = answer.address
            host = address.partition(":")[0] if isinstance(address, str) else address.host
            offered.add((channel._ends[0], host))
        hear(channel, answer)

    monkeypatch.setattr(Channel, "_hear", note)
    with listening("127.0.0.2") as (a, _), listening("127.0.0.3") as (b, _):
        hosts = {"a": a, "b": b} if transport == "host" else {"b": b}
        llm = load(models["two"], tmp_path, **elsewhere(PAIR, hosts), transport=transport)
        set_system(llm, SYSTEMS["cronus"])
        assert serve(llm) == expected["two"]
    here = "127.0.0.2" if "a" in hosts else "127.0.0.1"
    assert offered == {("a", here), ("b", "127.0.0.3")}


@pytest.mark.slow
def test_a_process_of_a_worker_that_is_killed(
    worker: tuple[str, psutil.Popen],
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
) -> None:
    """Requests of the lost process go on elsewhere; the worker says how it ended."""
    address, server = worker
    sections = elsewhere(PAIR, {"a": address})
    llm = load(models["two"], tmp_path, system=SYSTEMS["cronus"], **sections)
    (job,) = jobs(server)
    found, run = serve_until(llm, 9, job.kill, tmp_path / "runs")
    assert found == expected["two"]
    why = f"ProcessLost: process of group a (at {address}) was ended by signal 9"
    assert run["lost"] == {"a": why}


@pytest.mark.slow
def test_a_worker_that_ends_with_its_processes(
    models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    with listening() as (address, server):
        sections = elsewhere(PAIR, {"b": address})
        llm = load(models["two"], tmp_path, system=SYSTEMS["least_loaded"], **sections)
        (job,) = jobs(server)
        found, run = serve_until(llm, 9, server.terminate, tmp_path / "runs")
        assert found == expected["two"]
        assert run["lost"]["b"].startswith(f"ProcessLost: process of group b (at {address}) ")
        assert server.wait(HANG_S) == 128 + signal.SIGTERM
        wait_until(lambda: not job.is_running())


@pytest.mark.slow
def test_a_process_that_is_stopped_ends_when_its_caller_has_given_up(
    worker: tuple[str, psutil.Popen],
) -> None:
    """The process cannot end itself; the worker's patience is that with a process of one's own."""
    address, server = worker
    peer = RemotePeer(address, KEY, {})
    wait_until(lambda: bool(jobs(server)))
    (job,) = jobs(server)
    job.suspend()
    assert peer.end(0) == "has ended"
    wait_until(lambda: not jobs(server))


JOB = """
import sys, time
from jaxinfer.runtime.processes.peers import RemotePeer
peer = RemotePeer(sys.argv[1], sys.argv[2], {})
print("there", flush=True)
time.sleep(600)
"""


def test_nothing_is_left_of_a_job_that_is_killed(worker: tuple[str, psutil.Popen]) -> None:
    address, server = worker
    job = subprocess.Popen([sys.executable, "-c", JOB, address, KEY], stdout=subprocess.PIPE)
    assert job.stdout
    assert job.stdout.readline() == b"there\n"
    wait_until(lambda: len(jobs(server)) == 1)
    job.kill()
    job.wait()
    wait_until(lambda: not jobs(server))


def test_variables_of_a_group_are_set_there(worker: tuple[str, psutil.Popen]) -> None:
    address, server = worker
    peer = RemotePeer(address, KEY, {"JAX_PLATFORMS": "one"})

    def platforms() -> list[str | None]:
        with suppress(psutil.Error):  # Where it goes from one program to the next, it has none.
            return [job.environ().get("JAX_PLATFORMS") for job in jobs(server)]
        return []

    # Until it has begun its own program, a process has the worker's.
    wait_until(lambda: platforms() == ["one"])
    peer.end(0)
    wait_until(lambda: not jobs(server))


def refusal(address: str, models: dict[str, Path], folder: Path) -> str:
    """Return the error that a load raises, before it waits for what a process imports."""
    with pytest.raises(JaxinferError) as raised:
        load(models["two"], folder, **elsewhere(PAIR, {"b": address}))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_who_has_another_key_is_refused(
    worker: tuple[str, psutil.Popen],
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, server = worker
    monkeypatch.setenv("JAXINFER_KEY", "another")
    why = refusal(address, models, tmp_path)
    assert why == f"groups.b.host: {address}: has another key: JAXINFER_KEY differs there"
    monkeypatch.delenv("JAXINFER_KEY")
    why = refusal(address, models, tmp_path)
    assert why.startswith("groups.b.host: JAXINFER_KEY is not set")
    assert not jobs(server)


def test_nobody_listens(models: dict[str, Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = sockets.join_address(*there.getsockname())
    why = refusal(address, models, tmp_path)
    assert why == f"groups.b.host: {address}: Connection refused: no jaxinfer worker listens there"


def test_somebody_else_listens(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = sockets.join_address(*there.getsockname())
        why = refusal(address, models, tmp_path)
        assert f"{address}: said nothing for 0.3 s" in why
        greet = threading.Thread(target=lambda: there.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n"))
        there.accept()[0].close()
        greet.start()
        assert f"groups.b.host: {address}: " in refusal(address, models, tmp_path)
        greet.join()


# Waits for what a caller says for longer than any test takes.
PATIENT = """
from jaxinfer.runtime.kv import sockets
sockets.CONNECT_S = 1e6
from jaxinfer.__main__ import main
main()
"""


def test_callers_that_say_nothing_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sockets, peers):
        monkeypatch.setattr(module, "CONNECT_S", HANG_S)
    with listening(command=(sys.executable, "-c", PATIENT, "worker")) as (address, server):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):
            RemotePeer(address, KEY, {}).end(0)
        wait_until(lambda: not jobs(server))


def test_another_version_is_refused(
    worker: tuple[str, psutil.Popen], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Hello.here()
    monkeypatch.setattr(Hello, "here", lambda: there._replace(jaxinfer="0.0.1"))
    process = Process("b", RemotePeer(worker[0], KEY, {}))
    message = rf"^groups\.b: jaxinfer is {there.jaxinfer} in its process, 0\.0\.1 in this one$"
    with pytest.raises(JaxinferError, match=message):
        next(process.answers())
    process.close()


def test_a_connection_is_broken_off_when_its_host_has_gone(
    worker: tuple[str, psutil.Popen],
) -> None:
    """The system breaks a connection in ten seconds, whether this side waits or has sent."""
    peer = RemotePeer(worker[0], KEY, {})
    options = [
        peer.socket.getsockopt(socket.IPPROTO_TCP, name)
        for name in (
            socket.TCP_KEEPIDLE,
            socket.TCP_KEEPINTVL,
            socket.TCP_KEEPCNT,
            socket.TCP_USER_TIMEOUT,
        )
    ]
    assert peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, interval, count, unanswered_ms = options
    assert idle + interval * count == unanswered_ms / 1000 == 10
    peer.end(0)


def test_a_host_that_has_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        """A connection that the system has ended."""

        def __init__(self, number: int) -> None:
            self.close = lambda: os.close(number)

        def poll(self, seconds: float) -> bool:
            return True

        def recv(self) -> None:
            raise TimeoutError

    monkeypatch.setattr(process_module, "Connection", Gone)
    ours, theirs = socket.socketpair()
    given_up: list[float] = []
    peer: Any = SimpleNamespace(socket=ours, where="at there:9", end=given_up.append)
    with theirs:
        process = Process("b", peer)
        why = "process of group b (at there:9) cannot be reached any more"
        assert process.why_lost(5) == why
    assert given_up == [0]


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("IN USE", "--listen IN USE: Address already in use"),
        ("192.0.2.77:0", "--listen 192.0.2.77:0: Cannot assign requested address"),
        ("127.0.0.1", "--listen must be HOST:PORT, not '127.0.0.1'"),
    ],
)
def test_where_a_worker_cannot_listen(
    listen: str, why: str, worker: tuple[str, psutil.Popen]
) -> None:
    with pytest.raises(JaxinferError) as raised:
        worker_command.main(
            ["--listen", listen.replace("IN USE", worker[0])], standalone_mode=False
        )
    assert str(raised.value).replace(worker[0], "IN USE") == why


def test_a_worker_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXINFER_KEY")
    with pytest.raises(JaxinferError, match=r"^JAXINFER_KEY is not set: a secret that workers"):
        worker_command.main(["--listen", "127.0.0.1:0"], standalone_mode=False)


def test_a_worker_that_listens_loads_no_devices() -> None:
    code = "import jaxinfer.commands.worker, sys; print(*{'jax', 'numpy'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "\n"
