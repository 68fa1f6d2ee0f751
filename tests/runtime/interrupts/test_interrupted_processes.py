"""Runs over several processes that are interrupted between any two messages to these."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from interrupts import Interrupt
from test_interrupted_runs import ask, check, load

from jaxinfer import JaxinferError
from jaxinfer.runtime.processes.process import Process

OWN = {"process": "own"}
LENT = [{"group": "v", "num_pages": 40}]
CLUSTERS: dict[str, dict[str, Any]] = {
    "pipeline": {
        "groups": {"a": OWN, "b": OWN},
        "instances": {"p": {"stages": [{"group": g, "layers": 1} for g in "ab"]}},
        "system": "pipeline_parallel",
    },
    "hand-offs": {
        "groups": {"p": OWN, "d": OWN},
        "instances": {name: {"group": name} for name in "pd"},
        "system": {
            "name": "disaggregated", "prefill": "p", "decode": "d", "hand_off": "per_chunk",
        },
    },
    "attention": {
        "groups": {"s": OWN, "v": OWN},
        "instances": {"x": {"num_pages": 9, "stages": [{"group": "s", "attention": LENT}]}},
        "system": "hetis",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_the_next_run_is_right(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before each message and after it; now and then once more as the next run begins."""
    one = load(
        tiny_folder, {"groups": {"a": {}}, "instances": {"a": {"group": "a"}}, "system": "single"}
    )
    expected = ask(one)
    llm = load(tiny_folder, CLUSTERS[name])
    check(llm, expected)
    left: list[int] = []
    send = Process.send

    def send_or_not(process: Process, message: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            send(process, message)  # Python interrupts no other thread.
            return
        if left:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupt
        send(process, message)
        if left:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupt

    monkeypatch.setattr(Process, "send", send_or_not)
    left[:] = [0]
    ask(llm)
    moments = -left[0]
    assert moments >= 16  # Each message, before and after it is sent.
    rng, struck = random.Random(0), 0
    for moment in range(1, moments + 1):
        for at in (moment, rng.randrange(1, 5))[: rng.randrange(1, 3)]:
            left[:] = [at]
            try:
                ask(llm)
            except Interrupt:
                struck += 1
            else:  # A run may take fewer messages than the one that was counted.
                assert at > 8
        left.clear()
        check(llm, expected)
    assert struck >= moments
    # A message to one that is cut in two: it is given up, and the LLM says so.
    process: Any = next(iter(llm.cluster.engines.values())).worker.pieces[0].process
    process._sender._sent, process._sender._size = [3], 7
    llm._runs._is_whole = False
    for _ in range(2):
        with pytest.raises(JaxinferError, match=r"was lost, load the model again: .* interrupted"):
            ask(llm)
