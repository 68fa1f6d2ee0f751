"""A stage and attention groups that may come back: what tests of their losses share."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster_cases import roomy
from cluster_checks import Done
from process_cases import serve_once, wait_until
from scatter import spread
from waiting import HANG_S

from jaxinfer import LLM
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.runtime.processes.process import Process
from jaxinfer.runtime.processes.restart_groups import RestartGroup
from jaxinfer.serving.world import StepDone


def restartable(times: int, *groups: str) -> dict[str, Any]:
    """A stage and two attention groups in a process each; the named ones may come back."""
    found = spread([None, None], 1, **roomy(16)) | {"ledger": True}
    for group in found["groups"].values():
        group["process"] = "own"
    for name in groups or ("a0",):
        found["groups"][name]["restart"] = times
    return found


def worker_of(llm: LLM) -> PipelineWorker:
    worker = llm.cluster.engines["x"].worker
    assert isinstance(worker, PipelineWorker)
    return worker


def pid_of(llm: LLM, group: str) -> int:
    (process,) = [each for each in worker_of(llm).processes if each.name == group]
    pid: int = process.peer.pid  # type: ignore[attr-defined]
    return pid


def home_of(llm: LLM, group: str = "a0") -> RestartGroup:
    restarts = llm.cluster.restarts
    assert restarts
    return restarts._homes[group]


def wait_for_news(home: RestartGroup) -> None:
    wait_until(lambda: home.news is not None)


class Return:
    """Has a group's new process be ready when this is called, and not before.

    Else the loop may have heard of it by then, and have taken it back.
    """

    def __init__(self, home: RestartGroup) -> None:
        self._home, self._wanted, get_ready = home, threading.Event(), home.get_ready

        def when_wanted(processes: Mapping[str, Process]) -> None:
            assert self._wanted.wait(HANG_S)
            get_ready(processes)

        home.get_ready = when_wanted  # type: ignore[method-assign]

    def __call__(self) -> None:
        self._wanted.set()
        wait_for_news(self._home)
        self._wanted.clear()


def serve_with(
    llm: LLM, folder: Path, acts: dict[int, Callable[[], object]]
) -> tuple[list[Done], dict[str, Any], list[list[int]]]:
    """Serve the requests, run ``acts`` by the steps that ended, and return each step's slices."""
    slices: list[list[int]] = []

    def on_step(done: StepDone) -> None:
        tables = [row.hold.tables for row in done.batch.rows]
        slices.append([sum(len(each[n]) for each in tables) for n in range(len(tables[0]))])
        acts.get(len(slices), lambda: None)()

    found, run = serve_once(llm, folder, on_step)
    assert len(slices) > max(acts, default=0)
    return found, run, slices
