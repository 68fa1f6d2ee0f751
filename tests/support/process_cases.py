"""Clusters in processes of their own, and runs of which one comes to an end."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_cases import Pair, Side
from cluster_checks import REQUESTS, Done, Ran
from waiting import wait_until

from jaxinfer import LLM
from jaxinfer.runtime.kv.kv_endpoint import KVEndpoint, ThisProcess
from jaxinfer.runtime.kv.transports import TcpTransport
from jaxinfer.runtime.processes.process import SILENCE_S, Process
from jaxinfer.runtime.processes.remote_worker import RemoteWorker
from jaxinfer.serving.world import StepDone

SMALL = Pair("two", Side(1, 8), Side(2, 16), apart="ab")


def children() -> set[int]:
    """Worker processes that this one has started."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # It has ended meanwhile.
            if (
                "jaxinfer.runtime.worker_process" in child.cmdline()
                and child.status() != psutil.STATUS_ZOMBIE
            ):
                found.add(child.pid)
    return found


def pid_of(llm: LLM, instance: str) -> int:
    worker = llm.cluster.engines[instance].worker
    assert isinstance(worker, RemoteWorker)
    return worker.process.peer.pid


SYSTEMS: dict[str, dict[str, Any]] = {
    "cronus": {"name": "cronus", "partial": "a", "chunked": "b", "cut_share": 0.5},
    "disaggregated": {"name": "disaggregated", "prefill": "a", "decode": "b"},
    "least_loaded": {"name": "least_loaded"},
}


def serve_until(
    llm: LLM, step: int, do: Callable[[], None], folder: Path
) -> tuple[list[Done], dict[str, Any]]:
    """Serve the requests, and ``do`` it when ``step`` steps have ended."""
    steps = 0

    def on_step(done: StepDone) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            do()

    found = serve_once(llm, folder, on_step)
    assert steps > step
    return found


def serve_once(
    llm: LLM, folder: Path, on_step: Callable[[StepDone], None] = lambda done: None
) -> tuple[list[Done], dict[str, Any]]:
    """The requests, each of which ends once, and what ``run.json`` says."""
    made = [
        request
        for number, r in enumerate(REQUESTS)
        for request in llm.make_requests(str(number), list(r.prompt), r.params)
    ]
    found: dict[str, Done] = {}

    def take(output: Any) -> None:
        assert output.error is None
        assert output.request_id not in found
        completion = output.outputs[0]
        found[output.request_id] = Done(completion.token_ids, completion.cumulative_logprob or 0.0)

    llm.run(made, take, progress=False, run_dir=folder, on_step=on_step)
    return [found[str(number)] for number in range(len(REQUESTS))], Ran.last(folder).record.run


def serve_struck(
    llm: LLM,
    folder: Path,
    expected: list[Done],
    kind: type,
    share: float,
    strike: Callable[[], None],
) -> dict[str, Any]:
    """Serve all requests twice, and strike in the second run; what its ``run.json`` says.

    The blow falls right after such a share of the messages of one kind that the first run took.
    """
    counts: Counter[type] = Counter()
    with told(lambda said: counts.update([said])):
        found, run = serve_once(llm, folder)
    assert (found, run["lost"]) == (expected, {})
    check_nothing_left(llm)
    left = 1 + int(share * counts[kind])

    def hear(said: type) -> None:
        nonlocal left
        left -= said is kind
        if left == 0:
            left = -1
            strike()

    for _ in range(3):
        with told(hear):
            found, run = serve_once(llm, folder)
        assert found == expected
        if left < 0:
            return run
        left = 1  # This run had fewer messages of this kind than the first: the next one's first.
    raise AssertionError(f"no {kind.__name__} was sent")


def apart(pair: Pair, system: str) -> dict[str, Any]:
    return pair.sections | {"system": SYSTEMS[system]}


def call_silent_who_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is lost at once where it is stopped, and never for the sake of a busy machine."""

    def says_something(process: Process, patience: float) -> bool:
        while not process._connection.poll(0.5):
            if psutil.Process(process.peer.pid).status() == psutil.STATUS_STOPPED:
                return False
        return True

    monkeypatch.setattr(Process, "_says_something", says_something)


SILENT = f"has said nothing for {SILENCE_S:g} s"


@contextmanager
def told(hear: Callable[[type], None]) -> Iterator[None]:
    """Messages sent to a process, or done in this one."""
    send, do = Process.send, KVEndpoint.do

    def send_and_tell(process: Process, message: Any) -> None:
        send(process, message)
        hear(type(message))

    def do_and_tell(endpoint: KVEndpoint, message: Any) -> None:
        do(endpoint, message)
        hear(type(message))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Process, "send", send_and_tell)
        patch.setattr(KVEndpoint, "do", do_and_tell)
        yield


def check_nothing_left(llm: LLM, lost: Collection[str] = ()) -> None:
    """Checks that no page is left where steps that use it may end; no slab on its way, no offer."""
    for name, kv in llm._runs.kv.items():
        for shard in kv.shards if name not in lost else ():
            assert shard.pool.num_free == shard.pool.num_usable
            assert shard.pool.num_pinned == 0
    for channel in llm.cluster.channels.values():
        wait_until(lambda channel=channel: not channel._slabs)
        assert not channel._probing
        for side in channel.sides:
            if isinstance(side, ThisProcess):
                wait_until(lambda endpoint=side.endpoint: is_empty(endpoint))


def is_empty(endpoint: KVEndpoint) -> bool:
    transports = [t for t in endpoint._transports.values() if isinstance(t, TcpTransport)]
    return not any(t._offers for t in transports) and not any(
        end.arrived for end in endpoint._ends.values()
    )
