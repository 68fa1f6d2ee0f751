"""The processes of a stage and its FFN group die at any moment: no request is lost, none hangs."""

import gc
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_cases import load
from cluster_checks import REQUESTS, Done
from ffn_cases import apart
from process_cases import check_nothing_left, children, serve_once
from waiting import wait_until

from jaxinfer import LLM
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.serving.world import StepDone

# Half of the steps that a run takes at least: each request's output tokens, four at a time.
LAST = sum(request.params.max_tokens or 0 for request in REQUESTS) // 8


@dataclass
class Blow:
    """A group's process is killed when this many more steps have ended."""

    llm: LLM
    group: str
    left: int

    def __call__(self, done: StepDone) -> None:
        self.left -= 1
        if self.left:
            return
        worker = self.llm.cluster.engines["x"].worker
        assert isinstance(worker, PipelineWorker)
        (process,) = (each for each in worker.processes if each.name == self.group)
        os.kill(process.peer.pid, signal.SIGKILL)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 14))]
)
def test_killed_processes_are_back_and_requests_end(
    seed: int, models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The cluster is one, and loses the FFN's process, or now and then the stage's, in each run."""
    before, rng = children(), random.Random(seed)
    llm = load(models["two"], tmp_path, **apart(restart=999, micro_batches=2))
    for number in range(3):
        group = "p" if number % 3 == 1 else "f"
        blow = Blow(llm, group, rng.randint(1, LAST))
        found, run = serve_once(llm, tmp_path / "runs", blow)
        assert blow.left <= 0
        assert (found, run["lost"]) == (expected["two"], {}), (number, group)
        ((why, error),) = ((each["why"], each["error"]) for each in run["restarts"])
        assert error is None
        assert f"process of group {group} (pid " in why
        check_nothing_left(llm)
    del llm, blow
    gc.collect()
    wait_until(lambda: children() <= before)


def test_without_restart_the_run_says_which_process_is_gone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    before = children()
    llm = load(models["two"], tmp_path, **apart(micro_batches=2))
    made = [
        request
        for number, each in enumerate(REQUESTS)
        for request in llm.make_requests(str(number), list(each.prompt), each.params)
    ]
    message = r"process of group f \(pid \d+\) was ended by signal 9"
    with pytest.raises(JaxinferError, match=message):
        llm.run(made, lambda output: None, progress=False, on_step=Blow(llm, "f", 5))
    del llm
    gc.collect()
    wait_until(lambda: children() <= before)
