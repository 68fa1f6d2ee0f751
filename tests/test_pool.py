"""Processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.files.process_pool import process_pool
from jaxinfer.lab.plan.choose import find

# Says who its workers are, which then have nothing to do for a while.
BUSY = """
import os, sys, time
from jaxinfer.commands import signals
from jaxinfer.files.process_pool import process_pool

if __name__ == "__main__":
    signals.end_on_signals()
    try:
        with process_pool(2) as pool:
            held = [pool.submit(time.sleep, 0.2) for _ in range(2)]
            [each.result() for each in held]
            print(*pool._processes, flush=True)
            list(pool.map(time.sleep, [600] * 4))
    except signals.Interrupted as ended:
        signals.leave(str(ended), ended.code)
"""


def is_there(process: int) -> bool:
    """Not for one that has ended and that nobody has waited for."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(number: signal.Signals) -> None:
    """However it ends; and nothing is said of semaphores, which Python would clear away."""
    parent = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    assert all(map(is_there, workers))
    os.kill(parent.pid, number)
    wait_until(lambda: not any(map(is_there, workers)))
    _, said = parent.communicate(timeout=HANG_S)
    if number == signal.SIGTERM:
        assert said == "jaxinfer: terminated\n"
        # Nobody was waited for, as after the seconds in which a command may clear away.
        assert parent.returncode == 128 + number


def test_a_killed_worker_is_an_error_that_names_what_to_do() -> None:
    """And it is not taken for a planner's own mistake."""

    def plan_in_a_pool() -> None:
        with process_pool(1) as pool:
            planner = SimpleNamespace(plan=lambda *given: list(pool.map(os._exit, [1])))
            find(planner, SimpleNamespace(problem=None))  # type: ignore[arg-type]

    with pytest.raises(JaxinferError, match=r"^one of 1 processes that simulate was killed, "):
        plan_in_a_pool()


def test_what_fails_inside_ends_workers_in_the_midst_of_work() -> None:
    """Ctrl-C is the parent's alone, which then ends them like this; who waited would do so long."""
    workers: list[int] = []

    def fail() -> None:
        with process_pool(1) as pool:
            assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
            workers.extend(pool._processes)
            busy = pool.submit(time.sleep, 3600)
            wait_until(busy.running)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [is_there(worker) for worker in workers] == [False]
