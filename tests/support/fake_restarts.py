"""A cluster whose processes are stood in for, and started again."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes.messages import Left
from jaxinfer.runtime.processes.process import ProcessGone
from jaxinfer.runtime.processes.restart_groups import Restarted, WorkerRestart
from jaxinfer.runtime.processes.restarts import Restarts
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER


class FakeProcess:
    def __init__(self, lost: str | None = None, name: str = "g") -> None:
        self.lost, self.given_up, self.closed = lost, [], False
        self.name, self.asking = name, threading.Lock()
        self.peer = SimpleNamespace(clock_offset=0.0)
        self.workers: dict[str, Any] = {}
        self.ends: dict[int, Any] = {}
        self.sent: list[Any] = []
        self.on_loss: list[Callable[[str], None]] = []
        self.told = threading.Event()
        self.told.set()

    def die(self, why: str) -> None:
        self.lost = why
        for worker in self.workers.values():
            worker.on_loss(ProcessLost(why))
        for hear in list(self.on_loss):
            hear(why)

    def send(self, message: Any) -> None:
        if self.lost:
            raise ProcessLost(self.lost)
        self.sent.append(message)

    def give_up(self, why: str) -> None:
        self.given_up.append(why)

    def wait_until_told(self) -> None:
        assert self.told.wait(HANG_S)

    def ask(self, message: Any) -> Any:
        self.send(message)
        return iter([Left("", 0)])

    def close(self) -> None:
        self.closed = True


class FakeWorker:
    """Notes what it is asked for."""

    def __init__(self, process: FakeProcess) -> None:
        self.process, self.sampler = process, PLAIN_SAMPLER
        self.prepared: list[Any] = []
        self.stages: list[Any] = []
        self.pieces = [self]

    def begin_again(self) -> None:
        pass

    def prepare(self, sampler: Any, wait: bool) -> Any:
        self.prepared.append((sampler, wait))
        raise ProcessGone("gone again")
        yield

    def move_to(self, process: FakeProcess) -> None:
        self.process = process


class Cluster:
    """Group g, with instances x and y, in a process that may be started again so often.

    ``attempts`` says what becomes of each start: it is ready, or fails with a line; ``go`` has it
    wait before.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        restart: int,
        attempts: Sequence[str | None] = (),
        lost: str | None = None,
    ) -> None:
        self.started: list[FakeProcess] = []
        self.heard: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self._attempts = iter(attempts)
        group = GroupConfig(devices=2, tensor_parallel_size=1, process="own", restart=restart)
        instances = {name: InstanceConfig(group="g", num_pages=9) for name in "xy"}
        config = ClusterConfig(groups={"g": group}, instances=instances)
        self.process = FakeProcess(lost)
        self.workers = {name: FakeWorker(self.process) for name in "xy"}
        monkeypatch.setattr(WorkerRestart, "get_ready", self._get_ready)
        others: Any = SimpleNamespace(
            begin_again=self._begin,
            side_of=lambda name: SimpleNamespace(pieces=()),
        )
        workers: Any = self.workers
        self.restarts = Restarts(config, others, workers)
        self.restarts.listen(self._hear)

    def _hear(self, news: Restarted | Failed) -> None:
        if isinstance(news, Restarted):
            self.heard.append(news.group)

    def _begin(self, group: str, part: Any) -> FakeProcess:
        self.started.append(FakeProcess())
        return self.started[-1]

    def _get_ready(self, process: Any) -> None:
        assert self.go.wait(HANG_S)
        if line := next(self._attempts):
            raise JaxinferError(line)
        home: Any = self.restarts._homes["g"]
        home.prepared = dict.fromkeys(self.workers, PLAIN_SAMPLER)

    def wait_for_news(self, count: int = 1) -> None:
        wait_until(lambda: len(self.heard) >= count)
