"""Messages that two threads read and do by turns: all of them, in order, and read meanwhile."""

import queue
import threading
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from jaxinfer.runtime import worker_process
from jaxinfer.runtime.processes.messages import Forget
from jaxinfer.runtime.processes.turns import Turns


def turns(given: "queue.SimpleQueue[Any]", do: Any) -> None:
    threading.Thread(target=Turns(given.get, do).run, daemon=True).start()


def test_messages_are_read_while_one_is_done_and_done_after_it() -> None:
    given: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: list[int] = []
    go_on = threading.Event()

    def do(number: int) -> None:
        assert go_on.wait(HANG_S)
        done.append(number)

    turns(given, do)
    for number in range(5):
        given.put(number)
    wait_until(given.empty)
    assert done == []
    go_on.set()
    wait_until(lambda: len(done) == 5)
    assert done == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("pause", [0, 3, 100])
def test_none_is_left_or_done_out_of_order(pause: int) -> None:
    """Each ``pause`` messages, all are waited for: the next is read by a thread that sleeps."""
    given: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: list[int] = []
    at_once: list[int] = []
    now = threading.Lock()

    def do(number: int) -> None:
        at_once.append(int(now.acquire(blocking=False)))
        done.append(number)
        now.release()

    turns(given, do)
    for number in range(3000):
        given.put(number)
        if pause and number % pause == 0:
            wait_until(lambda number=number: len(done) > number)
    wait_until(lambda: len(done) == 3000)
    assert done == [*range(3000)]
    assert all(at_once)


def test_a_worker_that_can_neither_do_nor_say_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, its other thread would go on, and nobody would hear of the message that is lost."""
    ends: list[int] = []

    def end(code: int) -> None:
        ends.append(code)
        raise SystemExit

    def say(answer: Any) -> None:
        raise TypeError("cannot be pickled")

    connection: Any = None
    worker = worker_process.WorkerProcess(connection, 0)
    monkeypatch.setattr(worker, "_say", say)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(SystemExit):
        worker._attempt(Forget("x", [], 0))
    assert ends == [1]
